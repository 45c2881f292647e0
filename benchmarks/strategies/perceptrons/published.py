"""The networks that Wang and Cao (2022) trained, made of the pieces of `linop.networks`.

Their mistakes are maps and operators that say what they do: all but the first are right for some
network, which is not the one of the text.

=====================================================  ============================================
mistake                                                here
=====================================================  ============================================
the derivative of the sigmoid is left out              a sigmoid whose Jacobian is the identity
gradients are added where the text says averaged       a loss scaled by the rows of one worker
shards of a layer have equal weights                   drawn from the same seed
every worker adds the bias of the outputs              a bias in `COPIES`, before the sum of terms
=====================================================  ============================================
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mlp as right
import numpy as np
from numpy.typing import DTypeLike

import linop
from benchmarks.strategies.perceptrons import mersenne
from linop import COPIES, REPLICATED, Partition, TensorSpace
from linop.networks import Map, bias, chain, linear, sigmoid, softmax_cross_entropy
from linop.networks.blockwise import blockwise
from linop.networks.derivatives import renaming


def sigmoid_without_slope(X: TensorSpace, name: str = "h") -> Map:
    """The sigmoid, with the identity for its Jacobian."""
    whole: Any = sigmoid(X, name)
    value = whole.functions[0].value
    return blockwise(
        "σ without σ'",
        [X],
        whole.codomain,
        value,
        lambda x, y: (lambda at: renaming(x, y, X.dtype),),
    )


def mlp(
    strategy: str, workers: int, sizes: Sequence[int], batch: int, *, dtype: DTypeLike = np.float32
) -> right.MLP:
    """A perceptron as published; arguments as of ``examples/mlp.py``. Its loss is that of each
    worker's rows: nothing adds them up."""
    if strategy == right.Strategy.TENSOR:
        return _tensor_parallel(workers, sizes, batch, dtype)
    local_mean = partial(softmax_cross_entropy, scale=workers / batch)
    model = right.mlp(
        strategy, workers, sizes, batch,
        dtype=dtype, activation=sigmoid_without_slope, loss=local_mean,
    )  # fmt: skip
    links: Any = model.map
    return replace(model, map=chain(*links.links[:-1]))


def _tensor_parallel(workers: int, sizes: Sequence[int], batch: int, dtype: DTypeLike) -> right.MLP:
    """One hidden layer, its units on workers, and a bias of the outputs on each of them."""
    inputs, width, outputs = sizes
    grid = Partition((workers,))

    def tensor(name: str, shape: tuple[int, ...], role: Any) -> TensorSpace:
        return TensorSpace(shape, grid, dtype, [role], name=name)

    x, t = tensor("x", (batch, inputs), COPIES), tensor("t", (batch, outputs), REPLICATED)
    W0, b0 = tensor("W0", (inputs, width), 1), tensor("b0", (width,), 0)
    W1, b1 = tensor("W1", (width, outputs), 0), tensor("b1", (outputs,), COPIES)
    z0: Any = linear(x, W0, b0, name="z0")
    h: Any = sigmoid_without_slope(z0.codomain)
    terms: Any = linear(h.codomain, W1, name="p1")
    biased: Any = bias(terms.codomain, b1, name="z1")
    total: Any = linop.repartition(tensor("Σz1", (batch, outputs), REPLICATED), biased.codomain).H
    links = [z0, h, terms, biased, total, softmax_cross_entropy(total.codomain, t)]
    return right.MLP(chain(*links), (W0, b0, W1, b1), x, t)


def initial(strategy: str, workers: int, sizes: Sequence[int]) -> list[np.ndarray]:
    """The weights that they drew, W0, b0, W1, …; float32. In tensor parallel, those of one worker's
    shapes, on every worker."""
    if strategy != right.Strategy.TENSOR:
        return right_initial(sizes)
    inputs, width, outputs = sizes
    (W0, b0), (W1, b1) = (
        mersenne.layer(*shape)
        for shape in ((inputs, width // workers), (width // workers, outputs))
    )
    return [np.tile(W0, (1, workers)), np.tile(b0, workers), np.tile(W1, (workers, 1)), b1]


def right_initial(sizes: Sequence[int]) -> list[np.ndarray]:
    """Weights and biases of a sequential network, drawn as theirs; float32."""
    return [a for shape in itertools.pairwise(sizes) for a in mersenne.layer(*shape)]
