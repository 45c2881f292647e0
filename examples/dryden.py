"""A convolution cut in space, and its two gradients, as compositions of linop's operators: the
three equations of Dryden et al. 2019 (arXiv:1903.06681), for stride 1.

    python examples/dryden.py            # proves and checks them, and finds a misprint

x is (samples k, channels c, rows i, columns j); y has filters f in place of channels; the weights w
are (filters, channels, F, F) with F odd, and O = F // 2. Everything is NumPy's; torch's convolution
between the same movements is `linop.layers.Conv2d`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import reduce
from operator import add
from typing import Any

import numpy as np

import linop
from linop import COPIES, REPLICATED, LinearOperator, Partition, Space, TensorSpace
from linop.local_operators import local, matrix

Array = Any
"""NumPy's."""
Formula = Callable[[Array, Array], Array]
"""The gradient of the input, of that of the output and the weights, both whole."""


def offsets(F: int) -> Iterator[tuple[int, int]]:
    """The pairs (a, b) of the sums: from -O to O each."""
    half = F // 2
    return itertools.product(range(-half, half + 1), repeat=2)


# Movement


def shifted(X: TensorSpace, a: int, b: int) -> LinearOperator:
    """S_ab: the tensor with x[k, c, i + a, j + b] at [k, c, i, j], and zeros beyond the edges."""
    around = linop.pad(X, ((0, 0), (0, 0), *((abs(n), abs(n)) for n in (a, b))))
    crops = ((0, 0), (0, 0), *((-abs(n) - n, -abs(n) + n) for n in (a, b)))
    cut = linop.pad(around.codomain, crops)
    return linop.repartition(cut.codomain, renamed(X, "s")) @ cut @ around


def halos(X: TensorSpace, F: int) -> LinearOperator:
    """H Z: O zeros around the tensor, and to each worker the O rows and columns around its
    block."""
    half = F // 2
    Z = linop.pad(X, ((0, 0), (0, 0), (half, half), (half, half)))
    return linop.halo_exchange(Z.codomain, (1, 1, F, F)) @ Z


def window(X: TensorSpace, F: int, a: int, b: int) -> LinearOperator:
    """T_ab: of each worker's block with its halo, the part at an offset. Nothing is sent."""
    wide, narrow = halos(X, F).codomain, renamed(X, "s")
    crops = []
    for worker in X.partition.workers:
        there, block = wide.region(worker), narrow.region(worker)
        n, m = block.shape[2:]
        # An empty block has an empty halo.
        i, j = min(F // 2 + a, there.shape[2] - n), min(F // 2 + b, there.shape[3] - m)
        part = there[:, :, i : i + n, j : j + m]
        copy = linop.copy(Space(there, X.dtype), part, block)
        crops.append(linop.deallocate(copy.codomain, there) @ copy)
    return linop.direct_sum(*crops)


def renamed(X: TensorSpace, name: str, channels: int | None = None) -> TensorSpace:
    """A space of blocks like those of X, with another number of channels."""
    N, C, *space = X.global_shape
    shape = (N, C if channels is None else channels, *space)
    return TensorSpace(shape, X.partition, X.dtype, X.axes, name)


# The three equations


def forward(X: TensorSpace, w: Array) -> LinearOperator:
    """y of x: Σ_ab M_ab T_ab H Z, where M_ab mixes channels by w[:, :, a + O, b + O]. Its adjoint
    is the gradient of the input: Z.H H.H Σ_ab T_ab.H M_ab.H."""
    F = w.shape[-1]
    terms = [mixed(X, w[:, :, a + F // 2, b + F // 2]) @ window(X, F, a, b) for a, b in offsets(F)]
    return reduce(add, terms) @ halos(X, F)


def mixed(X: TensorSpace, m: Array) -> LinearOperator:
    """M: to each pixel of a worker's block m times its channels. m is (filters, channels)."""
    s, Y = renamed(X, "s"), renamed(X, "y", len(m))
    return linop.direct_sum(
        *(
            local(
                Space(s.region(worker), X.dtype),
                Space(Y.region(worker), X.dtype),
                lambda x: np.einsum("fc,kcij->kfij", m, x),
                lambda g: np.einsum("fc,kfij->kcij", m, g),
                name="M",
            )
            for worker in X.partition.workers
        )
    )


def of_weights(X: TensorSpace, x: Array, filters: int, F: int) -> LinearOperator:
    """y of w, for a tensor x: Σ_ab N_ab E. Each worker has a copy of the replicated w, by E; N_ab
    multiplies the window of x at an offset by w[:, :, a + O, b + O]. Its adjoint is the gradient of
    the weights: E.H, an all-reduce, of the sums N_ab.H over samples and pixels."""
    C, P = X.global_shape[1], X.partition
    shape = (filters, C, F, F)
    W = TensorSpace(shape, P, X.dtype, [REPLICATED] * P.ndim, "w")
    copies = TensorSpace(shape, P, X.dtype, [COPIES] * P.ndim, "v")
    halo = halos(X, F)(X.scatter(x))
    terms = [
        weighed(X, copies, window(X, F, a, b)(halo), (..., a + F // 2, b + F // 2))
        for a, b in offsets(F)
    ]
    return reduce(add, terms) @ linop.repartition(W, copies)


def weighed(X: TensorSpace, copies: TensorSpace, s: Any, at: Any) -> LinearOperator:
    """N: to each pixel of a worker's block of y, the weights at an offset times the channels of s.

    Args:
        s: the vector of windows at this offset. at: the offset's index.
    """
    blocks, Y = renamed(X, "s"), renamed(X, "y", copies.global_shape[0])

    def here(worker: int) -> LinearOperator:
        x, w = s[blocks.region(worker).name], copies.region(worker)

        def its_adjoint(g: Array) -> Array:
            dw = np.zeros(w.shape, g.dtype)
            dw[at] = np.einsum("kfij,kcij->fc", g, x)
            return dw

        times = lambda w: np.einsum("fc,kcij->kfij", w[at], x)  # noqa: E731
        ends = Space(w, X.dtype), Space(Y.region(worker), X.dtype)
        return local(*ends, times, its_adjoint, name="N")

    return linop.direct_sum(*map(here, X.partition.workers))


# As printed


def by_index(g: Array, w: Array) -> Array:
    """The gradient of the input, dL/dx[k, c, i, j], as the sum over f, a and b that it is."""
    F, dx = w.shape[-1], np.zeros((len(g), w.shape[1], *g.shape[2:]))
    padded, half = edged(g, F // 2), F // 2
    for k, c, i, j in np.ndindex(dx.shape):
        dx[k, c, i, j] = sum(
            padded[k, f, i - a + half, j - b + half] * w[f, c, a + half, b + half]
            for f in range(len(w))
            for a, b in offsets(F)
        )
    return dx


def misprint(g: Array, w: Array) -> Array:
    """The same as a survey of parallel training prints it, with a sum over j from 0 to F - 1: so
    the column j of the result is lost, and f, which nothing sums over, is the last filter."""
    F, dx = w.shape[-1], np.zeros((len(g), w.shape[1], *g.shape[2:]))
    padded, half, f = edged(g, 2 * F), F // 2, len(w) - 1
    for k, c, i, j in np.ndindex(dx.shape):
        dx[k, c, i, j] = sum(
            padded[k, f, i - a + 2 * F, j - b + 2 * F] * w[f, c, a + half, b + half]
            for j in range(F)
            for a, b in offsets(F)
        )
    return dx


def edged(g: Array, width: int) -> Array:
    """A tensor with zeros around."""
    return np.pad(g, ((0, 0), (0, 0), (width, width), (width, width)))


def printed(Y: TensorSpace, X: TensorSpace, w: Array, formula: Formula) -> LinearOperator:
    """A formula for the gradient of the input, as the matrix that it is on whole tensors, on one
    worker, between a gather and a scatter. For small tensors."""
    one = Partition((1,) * X.ndim, X.partition.workers[:1])
    whole, result = (TensorSpace(V.global_shape, one, V.dtype) for V in (Y, X))
    columns = [formula(e.reshape(Y.global_shape), w).ravel() for e in np.eye(Y.size)]
    given = matrix(np.stack(columns, 1), whole, result)
    return linop.repartition(result, X) @ given @ linop.repartition(Y, whole)


def whole_numbers(*shape: int, seed: int) -> Array:
    """An array of numbers from -3 to 3, but not 0: sums of products are exact."""
    drawn = np.random.default_rng(seed).integers(-3, 3, shape)
    return (drawn + (drawn >= 0)).astype(float)


def main(workers: tuple[int, int] = (2, 2)) -> None:
    """Print what moves, what is proven and what is found, on a grid of workers in space."""
    X, F = TensorSpace((2, 3, 6, 5), Partition((1, 1, *workers))), 3
    w, x = whole_numbers(4, 3, F, F, seed=0), whole_numbers(*X.global_shape, seed=1)
    A, B, Y = forward(X, w), of_weights(X, x, 4, F), renamed(X, "y", 4)
    back = linop.repartition(renamed(X, "s"), X)
    for a, b in offsets(F):
        assert (window(X, F, a, b) @ halos(X, F)).equals(shifted(X, a, b))
        assert (back @ shifted(X, a, b)).H.equals(back @ shifted(X, -a, -b))
    print("proven: the windows of a block with its halo are the shifts S_ab, and S_ab.H = S_-a-b")
    for what, op in (("y", A), ("dL/dx", A.H), ("w", B), ("dL/dw", B.H)):
        print(f"{what}: {op.cost().messages} messages")
    for name, formula in (("as a sum over f", by_index), ("as printed", misprint)):
        report = linop.testing.check_dot_exact(A, adjoint=printed(Y, X, w, formula))
        print(f"dL/dx {name}: {'right' if report else report.worst.text}")


if __name__ == "__main__":
    main()
