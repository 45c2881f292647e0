"""Blur an image that is cut over four workers, and restore it from the blurred one."""

import numpy as np

import linop
from linop.local_operators import convolution

kernel = np.outer([1, 2, 1], [1, 2, 1]) / 16
image = np.random.default_rng(0).random((64, 48))
grid = linop.Partition((2, 2))
X = linop.TensorSpace((64, 48), grid, name="x")
Y = linop.TensorSpace((62, 46), grid, name="y")
H = linop.halo_exchange(X, kernel_size=(3, 3))
local = [convolution(kernel, H.codomain.region(w), Y.region(w)) for w in grid.workers]
A = linop.direct_sum(*local, codomain=Y) @ H


def main(backend):
    """The program of each worker."""
    plan = A.compile(backend)
    block = image[X.slices(backend.worker)]  # this worker's part
    blurred = plan(block)
    data = backend.vector(Y, blurred)
    found = linop.solvers.cgls(plan, data, niter=30, tol=0).x
    misfit = (plan(found) - data).norm() / data.norm()  # over all workers
    print(f"worker {backend.worker} of {backend.workers}: block {block.shape}, {misfit:.1e}")
    return misfit < 0.01


if __name__ == "__main__":
    assert all(result in (True, None) for result in linop.launch(main, workers=4))
