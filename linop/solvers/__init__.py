"""Iterative solvers on linop vectors, for operators and plans, distributed or in one process.

SciPy's solvers hold flat arrays of one process; through ``op.to_scipy()`` they run there only.
"""

from linop.solvers.iteration import Control
from linop.solvers.krylov.bicgstab import bicgstab
from linop.solvers.krylov.cg import cg
from linop.solvers.krylov.gmres import gmres
from linop.solvers.krylov.lanczos import lanczos
from linop.solvers.krylov.least_squares import cgls
from linop.solvers.krylov.lsmr import lsmr
from linop.solvers.krylov.lsqr import lsqr
from linop.solvers.krylov.minres import minres
from linop.solvers.krylov.power import power
from linop.solvers.result import Result
from linop.solvers.saving import Checkpoints

__all__ = [
    "Checkpoints",
    "Control",
    "Result",
    "bicgstab",
    "cg",
    "cgls",
    "gmres",
    "lanczos",
    "lsmr",
    "lsqr",
    "minres",
    "power",
]
