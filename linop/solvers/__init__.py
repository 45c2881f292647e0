"""Iterative solvers on linop vectors, for operators and plans, distributed or in one process.

SciPy's solvers, through ``op.to_scipy()``, run in one process only.
"""

from linop.solvers.least_squares import cgls

__all__ = ["cgls"]
