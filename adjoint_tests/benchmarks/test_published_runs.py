"""benchmarks/strategies/perceptrons: runs of Wang and Cao (2022), replayed; their node, fitted."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

_path = sys.path[:]  # the scripts put the root there, which hides an installed package
sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.strategies.perceptrons import mersenne, node, runs  # noqa: E402
from benchmarks.strategies.perceptrons.runs import Configuration  # noqa: E402

pytestmark = pytest.mark.slow

sys.path[:] = _path

needs_mnist = pytest.mark.skipif(
    "LINOP_MNIST" not in os.environ, reason="LINOP_MNIST names no folder with MNIST"
)


@pytest.fixture(scope="module")
def data() -> Any:
    return runs.handwritten.mnist()


def test_the_generator_is_that_of_the_standard() -> None:
    # [rand.predef] of C++: the 10000th draw of a default-constructed mt19937_64.
    assert mersenne.draws(5489, 10_000)[-1] == 9981545732273789042
    assert (mersenne.draws(5489, 3) == mersenne.draws(5489, 400)[:3]).all()
    assert mersenne.draws(5489, 0).shape == (0,)


def test_weights_by_shape() -> None:
    W, b = mersenne.layer(784, 16)
    again, _ = mersenne.layer(784, 16)
    assert W.shape == (784, 16) and W.dtype == b.dtype == np.float32
    assert not b.any() and (W == again).all()
    assert -0.1 <= W.min() < -0.099 and 0.099 < W.max() <= 0.1


def test_every_logged_run_is_a_configuration() -> None:
    known = runs.logs()
    assert len(known) == 126
    assert all(node.steps(c) == log.steps for c, log in known.items())


@needs_mnist
@pytest.mark.parametrize(
    "c",
    [
        Configuration("all-reduce", 1, 16, 1),
        Configuration("server", 1, 16, 4),
        Configuration("all-reduce", 3, 32, 8),
        Configuration("tensor", 1, 128, 2),
        Configuration("tensor", 1, 256, 16),
    ],
    ids=lambda c: f"{c.strategy}-{c.network}-{c.workers}",
)
def test_openings(c: Configuration, data: Any) -> None:
    log = runs.logs()[c]
    found = runs.train(c, data, mistakes=True, steps=5)
    # Printed digits are six; sums in float32 in another order may differ by one of the last.
    np.testing.assert_allclose(found.first, log.first, rtol=6e-6)
    right = runs.train(c, data, mistakes=False, steps=5)
    assert not np.allclose(right.first[1:], log.first[1:], rtol=1e-4)


@needs_mnist
def test_tensor_parallel_is_the_same_for_all_numbers_of_workers(data: Any) -> None:
    one, four = (
        runs.train(Configuration("tensor", 1, 128, n), data, mistakes=False, steps=5)
        for n in (1, 4)
    )
    np.testing.assert_allclose(four.first, one.first, rtol=1e-5)


def test_a_fit_to_some_of_the_logs() -> None:
    known = {
        c: log
        for c, log in runs.logs().items()
        if c.network in ("1x16", "1x128", "1x512") and c.workers <= 16
    }
    machine = node.fit(known.items())
    off = [abs(machine.step(c) * log.steps / log.seconds - 1) for c, log in known.items()]
    assert np.median(off) < 0.05 and max(off) < 0.15


def test_communication_is_counted_from_the_operators() -> None:
    c = Configuration("server", 2, 32, 8)
    parameters = sum((a + 1) * b for a, b in zip(c.sizes, c.sizes[1:], strict=False))
    found = [node.linop.simulate(op) for op in node.operators(c)]
    assert [each.bytes for each in found] == [4 * 7 * parameters] * 2
    assert sum(each.stages for each in found) == 2 * 3  # 2 L, for L layers
