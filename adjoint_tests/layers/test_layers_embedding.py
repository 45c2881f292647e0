"""An embedding whose table is in blocks is torch's, forward and back."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import given, settings

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

import linop
from linop import Partition
from linop.backends import Backend
from linop.errors import ArgumentError, DTypeError, LinopError, PartitionError
from support.layers.cases import Case
from support.layers.embedding import embeddings, is_torch_s
from support.requirements import needs_mpi
from support.workers import on_ranks


@given(embeddings(5))
def test_embeddings_on_threads(case: Case) -> None:
    linop.launch(lambda backend: is_torch_s(backend, case), case.workers)


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=12)
@given(embeddings(4))
def test_embeddings_on_ranks(case: Case) -> None:
    on_ranks(case.workers, is_torch_s, case)


def test_what_is_wrong_is_said_on_every_worker() -> None:
    """An index that is out of range on one worker, too; and then the layer goes on."""
    one, two = Partition((1,)), Partition((2,))

    def main(backend: Backend) -> list[str]:
        layer = linop.layers.Embedding(two, 5, 3, P_y=one, P_W=Partition((2, 1), [1, 2]))
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
        linop.layers.Embedding(P, 5, 3, P_W=P)
    with pytest.raises(ArgumentError, match="padding_idx=5"):
        linop.layers.Embedding(P, 5, 3, P_W=grid, padding_idx=5)

    with pytest.raises(ArgumentError, match="sparse"):
        linop.layers.Embedding(P, 5, 3, P_W=grid, sparse=True, scale_grad_by_freq=True)

    def main(backend: Backend) -> None:
        with pytest.raises(ArgumentError, match="splits the rows"):
            linop.layers.Embedding(P, 5, 3, P_W=Partition((1, 2)), max_norm=1.0)

    linop.launch(main, 2)
