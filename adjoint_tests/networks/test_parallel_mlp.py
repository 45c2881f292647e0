"""The perceptrons of examples/mlp.py: every strategy has the gradient of the sequential network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import COPIES, Partition, TensorSpace
from linop.errors import ArgumentError, MissingExtraError, PartitionError
from support.networks.twins import (
    STRATEGIES,
    counts_messages,
    has_its_twins_gradient,
    mlp,
    real_numbers,
    trains_as_its_twin,
    twin,
)
from support.requirements import needs_mpi
from support.workers import MACHINES, on_ranks, on_threads

pytestmark = pytest.mark.slow

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
SIZES = (4, 9, 6, 2), (3, 5, 8, 5, 4)


@given(
    st.sampled_from(STRATEGIES),
    st.integers(1, 8),
    st.sampled_from([(3, 8, 2), (1, 9, 8, 3), (2, 11, 9, 10, 1)]),
    st.integers(8, 13),  # with more workers than rows in W0
    st.booleans(),
    st.integers(0, 99),
)
def test_gradients_on_threads(
    strategy: str, workers: int, sizes: tuple[int, ...], batch: int, exact: bool, seed: int
) -> None:
    on_threads(workers, has_its_twins_gradient, strategy, sizes, batch, exact, seed)


@needs_mpi
@each_strategy
@pytest.mark.parametrize("windows", [True, False, MACHINES])
def test_gradients_under_mpi(strategy: str, windows: bool | str) -> None:
    for ranks in (2, 4):
        for exact, sizes in zip((True, False), SIZES, strict=True):
            on_ranks(
                ranks, has_its_twins_gradient, strategy, sizes, 9, exact, ranks, windows=windows
            )


@needs_mpi
@each_strategy
def test_fifty_steps_under_mpi(strategy: str) -> None:
    on_ranks(4, trains_as_its_twin, strategy, (6, 9, 4), 10, 50)


@each_strategy
def test_fifty_steps_under_torchrun(strategy: str) -> None:
    pytest.importorskip("torch")
    from support.torchrun import on_torchrun

    on_torchrun(2, trains_as_its_twin, strategy, (6, 9, 4), 10, 50)


@each_strategy
def test_fifty_steps_on_threads(strategy: str) -> None:
    on_threads(4, trains_as_its_twin, strategy, (6, 9, 4), 10, 50)


@pytest.mark.parametrize("layers", [2, 3])
def test_messages_of_a_step(layers: int) -> None:
    """2 L collectives for the server: each worker gets the parameters of a layer, and sends its
    gradient. 2 (N - 1) messages of each worker and layer around the ring."""
    on_threads(5, counts_messages, "ring", layers, 2 * (5 - 1))
    model = mlp.mlp("server", 5, (6,) * (layers + 1), 10)
    collectives = [
        link for link in model.map.links if isinstance(link, linop.LinearOperator)
    ]  # the last one adds up the loss
    assert len(collectives) - 1 == layers
    for share in collectives[:-1]:
        assert share.cost().stages == share.H.cost().stages == 1
        assert share.cost().messages == share.H.cost().messages == 4


@pytest.mark.parametrize(("layers", "sums"), [(2, 0), (3, 1), (4, 1), (5, 2)])
def test_messages_of_tensor_parallel_gradients(layers: int, sums: int) -> None:
    """An all-reduce for every second hidden layer but the last: none with one hidden layer."""
    model = mlp.mlp("tensor", 3, (6,) * (layers + 1), 4)
    movements = [link for link in model.map.links if isinstance(link, linop.LinearOperator)]
    assert sum(link.H.cost().messages for link in movements) == sums * 3 * 2


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("n", [3, 8, 13])
def test_a_ring_is_an_all_gather_and_a_reduce_scatter(workers: int, n: int) -> None:
    X = TensorSpace((2, n), Partition((workers,)), axes=[1])
    ring, copies = linop.ring_all_gather(X), X.like(X.partition, [COPIES])
    assert ring.equals(linop.all_gather(X)) and ring.H.equals(linop.reduce_scatter(copies, 0, 1))
    assert linop.in_steps(ring, ring.H).equals(linop.all_reduce(copies))
    assert ring.movement() == linop.all_gather(X).movement()
    each = workers - 1
    assert ring.cost().stages == max(each, 0) and ring.cost().messages == each * min(n, workers)


def test_it_is_torchs_gradient() -> None:
    torch = pytest.importorskip("torch")
    sizes = (5, 7, 3)
    values, (x, t) = real_numbers(sizes, 9, 0)
    leaves = [torch.tensor(v, requires_grad=True) for v in values]
    z = torch.sigmoid(torch.tensor(x) @ leaves[0] + leaves[1]) @ leaves[2] + leaves[3]
    wanted = torch.nn.functional.cross_entropy(z, torch.tensor(t))
    wanted.backward()
    loss, gradient = twin(values, x, t, False)
    assert abs(loss - wanted.item()) < 1e-12
    for a, b in zip(gradient, leaves, strict=True):
        assert np.abs(a - b.grad.numpy()).max() < 1e-12
    model = mlp.mlp("tensor", 3, sizes, 9)
    at = {}
    for worker in range(3):
        at |= model.held(values, worker) | model.rows(x, t, worker)
    slopes = model.map.jacobian(at, model.names).H(np.ones(1))
    for space, leaf in zip(model.parameters, leaves, strict=True):
        found = space.gather({r.name: slopes[r.name] for r in space.regions})
        assert np.abs(found - leaf.grad.numpy()).max() < 1e-12


def test_mistakes_are_refused_everywhere() -> None:
    for make, error, text in [
        (lambda: mlp.mlp("star", 2, (3, 4, 2), 8), ArgumentError, "expected one of server"),
        (lambda: mlp.mlp("server", 2, (3, 4, 2), 8, server=2), ArgumentError, "one of 2 workers"),
        (lambda: mlp.mlp("ring", 2, (4,), 8), ArgumentError, "numbers of inputs"),
        (lambda: mlp.mlp("tensor", 2, (4, 0, 2), 8), ArgumentError, "numbers of inputs"),
        (lambda: mlp.mlp("ring", 0, (4, 2), 8), ArgumentError, "at least 1"),
        (lambda: mlp.mlp("ring", 9, (3, 9, 2), 8), PartitionError, "batch of 8 rows"),
        (lambda: mlp.mlp("tensor", 5, (3, 4, 2), 8), PartitionError, "take fewer workers"),
    ]:
        with pytest.raises(error, match=text):
            make()


def test_data_that_is_missing_or_damaged_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    handwritten = mlp.handwritten
    monkeypatch.setenv("LINOP_MNIST", str(tmp_path))
    with pytest.raises(ArgumentError, match="there is no file"):
        handwritten.mnist()
    for name in handwritten.HASHES:
        (tmp_path / f"{name}-ubyte.gz").write_bytes(b"\x1f\x8b damaged")
    with pytest.raises(ArgumentError, match="is damaged"):
        handwritten.mnist()
    few = handwritten.Images(np.zeros((3, 2, 2)), np.zeros(3, int))
    with pytest.raises(ArgumentError, match="at most 3"):
        list(mlp.batches_of(few, 4))


def test_digits_without_scikit_learn(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match="linop-algebra"):
        mlp.handwritten.digits()


def test_the_script_prints_an_error_as_one_line(tmp_path: Path) -> None:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    done = subprocess.run(
        [sys.executable, mlp.__file__, "--mnist"],
        env=os.environ | {"PYTHONPATH": path, "LINOP_MNIST": str(tmp_path)},
        capture_output=True,
        check=False,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("ArgumentError: MNIST: there is no file ")


@pytest.mark.parametrize("mistake", ["strategy", "batch", "data"])
def test_mistakes_are_the_same_everywhere(mistake: str) -> None:
    """Every worker raises before a message, or hears of it from the one that did."""

    def main(backend: Any) -> None:
        if mistake == "data":
            if backend.worker == 1:
                raise ArgumentError("MNIST: there is no file")
            on_all = mlp.mlp("ring", 3, (4, 3), 6)
            on_all.map.compile(backend, on_all.names)
        mlp.mlp("star" if mistake == "strategy" else "ring", 3, (4, 3), 2)

    with pytest.raises((ArgumentError, PartitionError)):
        linop.launch(main, 3)
