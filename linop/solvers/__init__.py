"""Iterative solvers on linop vectors, for operators and plans, distributed or in one process.

SciPy's solvers hold flat arrays of one process; through ``op.to_scipy()`` they run there only.
"""

from linop.solvers.iteration import Control
from linop.solvers.least_squares import cgls
from linop.solvers.result import Result

__all__ = ["Control", "Result", "cgls"]
