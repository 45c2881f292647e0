"""Iterative solvers on linop vectors, for operators and plans, distributed or in one process.

SciPy's solvers hold flat arrays of one process; through ``op.to_scipy()`` they run there only.
"""

from linop.solvers import prox
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
from linop.solvers.nonlinear.gauss_newton import gauss_newton
from linop.solvers.nonlinear.lbfgs import lbfgs
from linop.solvers.result import Result
from linop.solvers.saving import Checkpoints
from linop.solvers.splitting.admm import admm
from linop.solvers.splitting.primal_dual import primal_dual
from linop.solvers.splitting.proximal_gradient import fista, ista

__all__ = [
    "Checkpoints",
    "Control",
    "Result",
    "admm",
    "bicgstab",
    "cg",
    "cgls",
    "fista",
    "gauss_newton",
    "gmres",
    "ista",
    "lanczos",
    "lbfgs",
    "lsmr",
    "lsqr",
    "minres",
    "power",
    "primal_dual",
    "prox",
]
