"""Poisson's equation on cells of different widths: with the cells' volumes as weights, the adjoint
of the gradient is minus the divergence; `mpiexec -n 4 python` runs it too."""

import numpy as np

import linop


def main(backend: linop.backends.Backend) -> float:
    edges = np.linspace(0, 1, 101) ** 1.5
    centres = (edges[1:] + edges[:-1]) / 2  # of cells, and the other end of each face's volume
    volumes, distances = np.diff(edges), np.diff(centres, append=1)
    X = linop.TensorSpace((100,), linop.Partition((backend.workers,)), inner=volumes)
    Y = X.with_inner(distances)
    gradient = linop.identity(X, Y) @ linop.stencil(X, {0: -1 / distances, 1: 1 / distances})
    divergence = linop.identity(Y, X) @ linop.stencil(Y, {0: 1 / volumes, -1: -1 / volumes})
    linop.testing.assert_equal(divergence, -gradient.H, backend)
    wanted = backend.vector(X, X.scatter(np.cos(np.pi / 2 * centres)))  # u'(0) = u(1) = 0
    A = (-divergence @ gradient).compile(backend)
    u = linop.solvers.cg(A, (np.pi / 2) ** 2 * wanted, rtol=1e-10).x
    return (u - wanted).norm()  # the root of the integral of the squared error


if __name__ == "__main__":
    linop.launch(lambda b: print(f"worker {b.worker}: error:", main(b)))
