"""The largest eigenvalues of -u'' by finite elements: symmetric in the inner product of the mass
matrix, the integral of two functions; `mpiexec -n 4 python` runs it too."""

import linop


def main(backend: linop.backends.Backend) -> list[float]:
    n, h = 60, 1 / 61
    plain = linop.TensorSpace((n,), linop.Partition((backend.workers,)))
    mass = linop.stencil(plain, {0: 4 * h / 6, 1: h / 6, -1: h / 6})
    X = plain.with_inner(linop.inner_product(mass, spectrum=(h / 3, h)))
    stiffness = linop.stencil(X, {0: 2 / h, 1: -1 / h, -1: -1 / h})
    A = linop.riesz(X, inverse=True) @ stiffness
    linop.testing.assert_self_adjoint(A, backend)
    values, _ = linop.solvers.lanczos(A.compile(backend), 3, which="LA")
    return [float(value) for value in values]


if __name__ == "__main__":
    linop.launch(lambda b: print(f"worker {b.worker}: eigenvalues:", main(b)))
