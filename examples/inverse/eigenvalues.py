"""The largest eigenvalues of a Laplacian on a cut grid, by SciPy's habits."""

import linop

print(values := linop.laplacian(linop.TensorSpace((20, 15), (2, 2))).eigs(3, symmetric=True))
