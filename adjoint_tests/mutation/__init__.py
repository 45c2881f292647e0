"""Mistakes that somebody could make, planted in copies of the tree: does a test notice each?

`catalogue` has them, as data; `fault` finds their places, `runner` plants them and runs their
tests, and the command line is the module itself:

    PYTHONPATH=adjoint_tests python -m mutation                       all of them
    PYTHONPATH=adjoint_tests python -m mutation "add twice" --jobs 2  some, two at a time
"""
