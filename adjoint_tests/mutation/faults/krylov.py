"""Faults of Krylov methods and of the driver of iterative methods."""

from __future__ import annotations

from mutation.fault import Fault

KRYLOV = (
    Fault(
        "own vote alone",
        "a worker looks at its own callback's answer, and not at the sum of all workers'",
        "agreement",
        "linop.solvers.iteration:_Driver._answers",
        "next(found) > 0",
        "votes[list(waiting).index(k)] > 0",
        ("test_krylov_workers.py::test_runs_resume_on_threads",),
    ),
    Fault(
        "checkpoint without direction",
        "a checkpoint leaves out the search direction",
        "omission",
        "linop.solvers.iteration:Method.state",
        "name[0] != '_'",
        "name[0] != '_' and name != 'p'",
        ("test_krylov_workers.py::test_checkpoint_of_one_process",),
    ),
    Fault(
        "old checkpoint is resumed",
        "a worker that has a newer checkpoint than others goes on from its own",
        "agreement",
        "linop.solvers.saving:Saving.load",
        "iteration * workers > total",
        "iteration * workers > total + workers**3",
        ("test_krylov_workers.py::test_workers_resume_together",),
    ),
    Fault(
        "foreign checkpoint",
        "a checkpoint of another right-hand side is resumed from",
        "blind",
        "linop.solvers.checkpoint:iteration_of",
        "head['version'] == VERSION and head['problem'] == problem",
        "head['version'] == VERSION",
        ("test_krylov_workers.py::test_other_problems_are_not_resumed",),
    ),
    Fault(
        "rotation forgets conjugation",
        "gmres rotates a complex column without the conjugate",
        "conjugation",
        "linop.solvers.krylov.gmres:_Gmres._rotate",
        "self.rest[k], self.rest[k + 1] = c * self.rest[k], -np.conj(s) * self.rest[k]",
        "self.rest[k], self.rest[k + 1] = c * self.rest[k], -s * self.rest[k]",
        ("test_krylov_methods.py::test_square_systems_as_scipy",),
    ),
    Fault(
        "coefficients of the second time",
        "of two orthogonalisations, the coefficients of the second alone are kept",
        "omission",
        "linop.solvers.krylov.orthogonal:orthogonalised",
        "[a + b for a, b in zip(first, second, strict=True)]",
        "second",
        ("test_krylov_methods.py::test_square_systems_as_scipy[gmres]",),
    ),
    Fault(
        "share upside down",
        "cg adds the last direction times the inverse of its share",
        "coefficient",
        "linop.solvers.krylov.cg:_Cg.step",
        "plus(z, rho / self.rho, self.p, self.p)",
        "plus(z, self.rho / rho, self.p, self.p)",
        ("test_krylov_methods.py::test_square_systems_as_scipy[cg]",),
    ),
    Fault(
        "direction is the residual",
        "cg updates the residual in place, which is the first direction, too",
        "aliasing",
        "linop.solvers.krylov.cg:_Cg.start",
        "z.copy()",
        "z",
        ("test_krylov_methods.py::test_square_systems_as_scipy[cg]",),
    ),
    Fault(
        "norm of x forgets its guess",
        "lsmr estimates the norm of x from the steps alone",
        "omission",
        "linop.solvers.krylov.lsmr:_Lsmr.start",
        "(self.xx,) = yield Ask([('initial guess x0', self.x, self.x)])",
        "(self.xx,) = yield Ask([('initial guess x0', 0 * self.x, 0 * self.x)])",
        ("test_krylov_methods.py::test_least_squares_as_scipy[lsmr]",),
    ),
)
