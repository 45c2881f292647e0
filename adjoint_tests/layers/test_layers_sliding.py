"""Convolution and pooling over blocks are torch's, forward and back."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from hypothesis import given, settings

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

import linop
from linop import Partition, layers
from linop.errors import BackendError
from support.layers.cases import Case, is_its_twin
from support.layers.sliding import adaptive, convolutions, poolings, transposed
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads


@given(convolutions(8))
def test_convolutions_on_threads(case: Case) -> None:
    on_threads(case.workers, is_its_twin, case)


@given(transposed(8))
def test_transposed_convolutions_on_threads(case: Case) -> None:
    on_threads(case.workers, is_its_twin, case)


@pytest.mark.parametrize("kind", ["Conv1d", "ConvTranspose1d"])
@pytest.mark.parametrize("work", [None, (2, 1, 1), (5, 1, 1), (1, 2, 2), (2, 2, 1), (2, 4, 1)])
@pytest.mark.parametrize("outputs", [6, 9])
def test_blocks_that_cut_groups(kind: str, work: Any, outputs: int) -> None:
    """Of three groups: output channels in the middle of one, and input channels of each."""
    P_x, P_W = Partition((1, 2, 1)), None if work is None else Partition(work)
    case = Case(kind, (P_x,), (2, 9, 5), (9, outputs, 2), {"groups": 3}, {"P_W": P_W}, P_x, seed=1)
    on_threads(case.workers, is_its_twin, case)


def test_output_sizes_are_of_each_call() -> None:
    """Of one layer, also where nobody is asked."""

    def main(backend: Any) -> None:
        torch.manual_seed(0)
        layer = layers.ConvTranspose1d(Partition((1, 1, 2)), 1, 1, 2, stride=3)
        x = torch.ones(1, 1, 3)
        extents = [layer(x, [m]).shape[-1] for m in (18, 19)]
        with layers.fixed_shapes():
            extents += [layer(x, [m]).shape[-1] for m in (19, 17)] + [layer(x).shape[-1]]
        halves = [(9, 9), (10, 9), (10, 9), (9, 8), (9, 8)]
        assert extents == [half[backend.worker] for half in halves]
        with pytest.raises(BackendError, match=r"\(17,\) beside tensors on worker 0, and \(18"):
            layer(x, [17 + backend.worker])

    linop.launch(main, 2)


@given(poolings(6))
def test_poolings_on_threads(case: Case) -> None:
    on_threads(case.workers, is_its_twin, case)


@given(adaptive(8))
def test_adaptive_poolings_on_threads(case: Case) -> None:
    on_threads(case.workers, is_its_twin, case)


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=16)
@given(convolutions(4) | transposed(4))
def test_convolutions_on_ranks(case: Case) -> None:
    on_ranks(case.workers, is_its_twin, case)


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=16)
@given(poolings(4) | adaptive(4))
def test_poolings_on_ranks(case: Case) -> None:
    on_ranks(case.workers, is_its_twin, case)
