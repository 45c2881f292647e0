"""An embedding whose table is in blocks is torch's, forward and back."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

import linop
from layer_cases import Case, block, cut, grids, made, normal, same, same_parameters
from linop import Partition, TensorSpace
from linop.backends import Backend, use
from linop.errors import ArgumentError, DTypeError, LinopError, PartitionError
from mpi_job import job, needs_mpi
from plan_facts import mine


@st.composite
def embeddings(draw: Any, most: int) -> Case:
    """Any embedding, on grids of at most so many workers."""
    ndim = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(1, 5)) for _ in range(ndim))
    rows, columns = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    P_x, P_W = draw(grids(most, draw(st.integers(1, ndim)))), draw(grids(most, 2))
    P_y = draw(grids(most, draw(st.integers(1, ndim + 1))))
    options: dict[str, Any] = {
        "padding_idx": draw(st.none() | st.integers(-rows, rows - 1)),
        draw(st.sampled_from(["scale_grad_by_freq", "sparse"])): draw(st.booleans()),
    }
    if P_W.shape[1] == 1:
        options["max_norm"] = draw(st.sampled_from([None, 0.5, 1.0]))
    seed = draw(st.integers(0, 99))
    places = (P_x, P_y, P_W)
    return Case("Embedding", places, shape, (rows, columns), options, output=P_y, seed=seed)


def is_torch_s(backend: Backend, case: Case) -> None:
    """Result, gradient and table are those of torch.nn."""
    layer, twin = made(backend, case)
    generator = torch.Generator().manual_seed(case.seed)
    whole = torch.randint(case.arguments[0], case.shape, generator=generator)
    wanted = twin(whole)
    upstream = normal(tuple(wanted.shape), case.seed)
    wanted.backward(upstream)
    P_x, P_y, P_W = case.partitions
    x = None
    if mine(backend) in P_x:
        x = whole[cut(case.shape, P_x, case.seed).slices(mine(backend))]
    y = layer(x)
    axes = [0, wanted.ndim - 1] if P_y.ndim == 2 else None
    Y = TensorSpace(tuple(wanted.shape), P_y, axes=axes)
    if mine(backend) in P_y:
        same(y, block(Y, wanted, backend))
    y.backward(block(Y, upstream, backend).reshape(y.shape))
    same_parameters(layer, twin)  # max_norm changes them
    if mine(backend) in P_W:
        where = layer.spaces["weight"].slices(mine(backend))
        gradient = layer.weight.grad
        if 0 not in gradient.shape:
            assert gradient.is_sparse == case.options.get("sparse", False)
        same(gradient.to_dense(), twin.weight.grad.to_dense()[where])


@settings(max_examples=40)
@given(embeddings(5))
def test_embeddings_on_threads(case: Case) -> None:
    linop.launch(lambda backend: is_torch_s(backend, case), case.workers)


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=12)
@given(embeddings(4))
def test_embeddings_on_ranks(case: Case) -> None:
    job(case.workers).run(_on_rank, case)


def _on_rank(comm: Any, case: Case) -> None:
    torch.set_num_threads(1)
    backend = linop.backends.get("mpi", comm=comm)
    with use(backend):
        is_torch_s(backend, case)


def test_what_is_wrong_is_said_on_every_worker() -> None:
    """An index that is out of range on one worker, too; and then the layer goes on."""
    one, two = Partition((1,)), Partition((2,))

    def main(backend: Backend) -> list[str]:
        layer = linop.layers.Embedding(two, one, Partition((2, 1), [1, 2]), 5, 3)
        good = None if backend.worker == 2 else torch.tensor([0, 4])
        layer(good)
        said = []
        for bad in (torch.tensor([0, 5]), torch.tensor([-1, 2])):
            with pytest.raises(IndexError) as error:
                layer(bad if backend.worker == 1 else good)
            assert isinstance(error.value, LinopError)
            said.append(str(error.value))
        with pytest.raises(DTypeError) as kind:
            layer(None if good is None else good.float())
        layer(good)
        return [*said, str(kind.value)]

    first, *others = linop.launch(main, 3)
    assert all(said == first for said in others)
    assert "worker 1 passes indices from 0 to 5; there are 5 embeddings" in first[0]


def test_bad_arguments() -> None:
    P, grid = Partition((1,)), Partition((1, 1))
    with pytest.raises(PartitionError, match="two axes"):
        linop.layers.Embedding(P, P, P, 5, 3)
    with pytest.raises(ArgumentError, match="padding_idx=5"):
        linop.layers.Embedding(P, P, grid, 5, 3, padding_idx=5)

    with pytest.raises(ArgumentError, match="sparse"):
        linop.layers.Embedding(P, P, grid, 5, 3, sparse=True, scale_grad_by_freq=True)

    def main(backend: Backend) -> None:
        with pytest.raises(ArgumentError, match="splits the rows"):
            linop.layers.Embedding(P, P, Partition((1, 2)), 5, 3, max_norm=1.0)

    linop.launch(main, 2)
