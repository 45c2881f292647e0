"""Iterative solvers on linop vectors, for operators and plans, distributed or in one process.

SciPy's solvers hold flat arrays of one process; through ``op.to_scipy()`` they run there only.
"""

from linop.solvers.bicgstab import bicgstab
from linop.solvers.cg import cg
from linop.solvers.gmres import gmres
from linop.solvers.iteration import Checkpoints, Control
from linop.solvers.least_squares import cgls
from linop.solvers.lsmr import lsmr
from linop.solvers.lsqr import lsqr
from linop.solvers.minres import minres
from linop.solvers.result import Result

__all__ = [
    "Checkpoints",
    "Control",
    "Result",
    "bicgstab",
    "cg",
    "cgls",
    "gmres",
    "lsmr",
    "lsqr",
    "minres",
]
