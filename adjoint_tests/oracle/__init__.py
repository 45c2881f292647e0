"""An oracle for what lies at the border of linop: integers and dtypes, shared expressions, other
people's models, checkpoints and ports. It draws cases without end and compares linop with
computations that do not use it.

    PYTHONPATH=adjoint_tests python -m oracle numbers --minutes 60 --seed 7

prints each case as it is drawn, and what was wrong. A case is repeated by its number
(``--case 123``). The suite runs the first cases of each area (`test_oracle`).
"""
