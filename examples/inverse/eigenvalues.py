"""The largest eigenvalues of a Laplacian on a cut grid, by SciPy's habits."""

import linop

X = linop.TensorSpace((20, 15), linop.Partition((2, 2)))
A = linop.stencil(X, {(0, 0): 4, (1, 0): -1, (-1, 0): -1, (0, 1): -1, (0, -1): -1})
print(values := A.eigs(3, symmetric=True))
