"""
Find out that an adjoint is wrong, and where
============================================

You interpolate between samples at given points, and wrote the adjoint by hand. The gradient
looks plausible, and the inversion stalls. The dot-product test, ⟨F x, y⟩ = ⟨x, F* y⟩, says
whether the adjoint is one, and Hypothesis finds the smallest points at which it is not.
"""

import matplotlib.pyplot as plt
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import linop


def forward(x, left, weight):
    """Linear interpolation between samples left and left + 1."""
    return (1 - weight) * x[left] + weight * x[left + 1]


def backward(y, left, weight, n):
    """Its author's adjoint: each number goes back to the samples that it came from."""
    x = np.zeros(n)
    x[left] += (1 - weight) * y
    x[left + 1] += weight * y
    return x


def operator(n, left, weight):
    left, weight = np.array(left), np.array(weight)
    return linop.testing.pair(
        lambda x: forward(x, left, weight),
        lambda y: backward(y, left, weight, n),
        n,
        len(left),
        name="interpolation",
    )


# %%
# Some points are no test
# -----------------------
# At three points that are far from each other, it passes. So it did in its author's tests.

assert linop.testing.check_adjoint(operator(9, [0, 3, 6], [0.5, 0.25, 0.75]))

# %%
# Let Hypothesis choose them
# --------------------------
# It draws the number of samples and the points, finds some at which the test fails, and
# shrinks them: fewer, smaller, simpler, as long as the test still fails.


@settings(database=None, derandomize=True, deadline=None)
@given(st.data())
def test(data):
    n = data.draw(st.integers(2, 20), "n")
    left = data.draw(st.lists(st.integers(0, n - 2), min_size=1, max_size=6), "left")
    smallest.append((n, left))
    linop.testing.assert_adjoint(operator(n, left, [0.25] * len(left)))


smallest = []
try:
    test()
except AssertionError as error:
    report = str(error)
n, left = smallest[-1]
print(f"n = {n}, left = {left}")
print(report)

# %%
# Two points between the same two samples: ``x[left] += …`` of NumPy adds once where an
# index occurs twice. ``np.add.at`` adds each.

assert len(left) == len(set(left)) + 1 == 2


def mended(y, left, weight, n):
    x = np.zeros(n)
    np.add.at(x, left, (1 - weight) * y)
    np.add.at(x, left + 1, weight * y)
    return x


# %%
# As matrices
# -----------
# For points this small the matrices can be looked at. The adjoint's is the transpose of the
# forward's, or it is none.

points = np.array([0, 2, 2, 5]), np.full(4, 0.25)
F = np.stack([forward(e, *points) for e in np.eye(7)], axis=1)
wrong, right = (
    np.stack([f(e, *points, 7) for e in np.eye(4)], 1) for f in (backward, mended)
)
assert (right == F.T).all() and (wrong != F.T).sum() == 2

figure, axes = plt.subplots(3, 1, figsize=(6, 8), layout="constrained")
titles = (
    "the forward F",
    "the author's adjoint, transposed",
    "the mended one, transposed",
)
for panel, matrix, title in zip(axes, (F, wrong.T, right.T), titles, strict=True):
    panel.imshow(matrix, cmap="Blues", vmin=0, vmax=1)
    for (row, column), value in np.ndenumerate(matrix):
        if value or F[row, column]:
            differs = value != F[row, column]
            ink = "white" if value > 0.5 else "black"
            panel.text(column, row, f"{value:g}", ha="center", va="center", color=ink)
            if differs:
                panel.plot(column, row, "o", markersize=24, fillstyle="none", color="C3")
    panel.set(
        title=title, xlabel="sample", ylabel="point", xticks=range(7), yticks=range(4)
    )
plt.show()

# %%
# Read on: :doc:`/testing`.
