"""Sequential twins of the perceptrons in examples/mlp.py, by hand and in plain NumPy: the oracle.

Contracts: programs of workers, run on threads and on ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from linop.backends.engine.base import Backend
from linop.networks import relu, squared_loss
from support.examples import example

mlp = example("mlp")
Arrays = list[np.ndarray]
STRATEGIES = [each.value for each in mlp.Strategy]
EXACT = {"activation": relu, "loss": squared_loss}


def whole_numbers(sizes: Sequence[int], batch: int, seed: int) -> tuple[Arrays, Arrays]:
    """Parameters, and [rows, targets], of small whole numbers: every product is exact."""
    random = np.random.default_rng(seed)
    shapes = [s for a, b in pairwise(sizes) for s in ((a, b), (b,))]
    values = [random.integers(-2, 3, s).astype(float) for s in shapes]
    data = [random.integers(-2, 3, (batch, n)).astype(float) for n in (sizes[0], sizes[-1])]
    return values, data


def real_numbers(sizes: Sequence[int], batch: int, seed: int) -> tuple[Arrays, Arrays]:
    """Parameters, and [rows, targets of 0 and 1]."""
    random = np.random.default_rng(seed)
    shapes = [s for a, b in pairwise(sizes) for s in ((a, b), (b,))]
    values = [random.standard_normal(s) for s in shapes]
    labels = random.integers(0, sizes[-1], batch)
    return values, [random.standard_normal((batch, sizes[0])), np.eye(sizes[-1])[labels]]


def twin(values: Arrays, x: np.ndarray, t: np.ndarray, exact: bool) -> tuple[float, Arrays]:
    """The loss and its gradient: with `exact`, ReLU and a sum of squares, else sigmoid and mean
    cross-entropy."""
    rows, masks = [x], []
    layers = list(zip(values[::2], values[1::2], strict=True))
    for k, (W, b) in enumerate(layers):
        z = rows[-1] @ W + b
        if k < len(layers) - 1:
            y = np.maximum(z, 0) if exact else 1 / (1 + np.exp(-z))
            masks.append((z > 0).astype(float) if exact else y * (1 - y))
            rows.append(y)
    if exact:
        loss, g = ((z - t) ** 2).sum(), 2 * (z - t)
    else:
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        loss, g = -(t * np.log(p)).sum() / len(x), (p - t) / len(x)
    gradient: Arrays = []
    for k in range(len(layers) - 1, -1, -1):
        gradient = [rows[k].T @ g, g.sum(0), *gradient]
        if k:
            g = (g @ layers[k][0].T) * masks[k - 1]
    return float(loss), gradient


@lru_cache(4)
def made(strategy: str, workers: int, sizes: tuple[int, ...], batch: int, exact: bool) -> Any:
    """The model, one for all threads, which lower it together."""
    return mlp.mlp(strategy, workers, sizes, batch, **(EXACT if exact else {}))


def has_its_twins_gradient(
    backend: Backend, strategy: str, sizes: tuple[int, ...], batch: int, exact: bool, seed: int
) -> None:
    """Loss and gradient are those of the twin, three times with new data; with whole numbers they
    are equal."""
    workers, me = backend.workers or 1, backend.worker or 0
    model = made(strategy, workers, sizes, batch, exact)
    program = model.map.compile(backend, model.names)
    for k in range(3):
        values, (x, t) = (whole_numbers if exact else real_numbers)(sizes, batch, seed + k)
        loss, gradient = twin(values, x, t, exact)
        found = program(model.held(values, me) | model.rows(x, t, me))
        slopes = program.gradient()
        wanted = model.held(gradient, me)
        assert slopes.keys() == wanted.keys()
        tolerance = 0 if exact else 1e-12
        assert abs(found[0] - loss) <= tolerance * abs(loss)
        for name, slope in slopes.items():
            worst = np.abs(slope - wanted[name]).max(initial=0)
            assert worst <= tolerance * max(1, np.abs(wanted[name]).max(initial=0)), (name, worst)


def trains_as_its_twin(
    backend: Backend, strategy: str, sizes: tuple[int, ...], batch: int, steps: int
) -> None:
    """The losses of some steps, and the parameters after them, are the twin's."""
    workers, me = backend.workers or 1, backend.worker or 0
    model = made(strategy, workers, sizes, batch, False)
    values = mlp.initial(sizes, 3)
    batches = [real_numbers(sizes, batch, 100 + k)[1] for k in range(steps)]
    theta = model.held(values, me)
    losses = list(mlp.train(backend, model, theta, batches, 0.5))
    trained = mlp.whole(backend, model, theta)
    for loss, (x, t) in zip(losses, batches, strict=True):
        wanted, gradient = twin(values, x, t, False)
        assert abs(loss - wanted) < 1e-10
        values = [a - 0.5 * g for a, g in zip(values, gradient, strict=True)]
    for a, b in zip(trained, values, strict=True):
        assert np.abs(a - b).max() < 1e-10


def counts_messages(backend: Backend, strategy: str, layers: int, each: int) -> None:
    """Messages that workers send in a step, beyond the sum of the loss: by counters.

    Args:
        each: sent by a worker and layer, on average over workers.
    """
    workers, me = backend.workers or 1, backend.worker or 0
    sizes = (2 * workers,) * (layers + 1)
    model = made(strategy, workers, sizes, 2 * workers, False)
    program = model.map.compile(backend, model.names)
    values, (x, t) = real_numbers(sizes, 2 * workers, 0)
    program(model.held(values, me) | model.rows(x, t, me))
    program.gradient()
    sent: Any = sum(p.counters.messages_each for p in (program._value, program._jacobian.H))
    for_the_loss = workers - 1
    assert sent - for_the_loss == each * layers, (sent, for_the_loss)
