"""A complex system: a damped wave at one frequency, by GMRES; `mpiexec -n 4 python` runs it too."""

import linop


def main(backend: linop.backends.Backend) -> float:
    X = linop.TensorSpace((24, 20), linop.Partition((backend.workers,)), complex)
    A = linop.stencil(X, {(0, 0): 3 + 1j, (1, 0): -1, (-1, 0): -1, (0, 1): -1, (0, -1): -1})
    linop.testing.assert_adjoint(A, backend)
    plan, b = A.compile(backend), backend.vector(X, X.random(0))
    return (plan(linop.solvers.gmres(plan, b, rtol=1e-8).x) - b).norm() / b.norm()


if __name__ == "__main__":
    linop.launch(lambda b: print(f"worker {b.worker}: relative residual:", main(b)))
