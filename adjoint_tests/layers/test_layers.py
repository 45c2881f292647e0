"""Contracts of all layers, on threads and on ranks; and `Linear` beside torch's."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
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
from linop import REPLICATED, Partition
from linop.errors import BackendError
from support.layers import contracts as layer_contracts
from support.layers import embedding
from support.layers.cases import Case, grids, is_its_twin
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

contracts = pytest.mark.parametrize(
    "contract", layer_contracts.CONTRACTS, ids=lambda contract: contract.__name__
)


@contracts
@pytest.mark.parametrize("workers", [2, 4])
def test_on_threads(contract: Callable[..., None], workers: int) -> None:
    linop.launch(contract, workers)


@needs_mpi
@pytest.mark.timeout(300)
@contracts
@pytest.mark.parametrize("ranks", [3])
def test_on_ranks(contract: Callable[..., None], ranks: int) -> None:
    on_ranks(ranks, contract, wait_limit=10)


@needs_mpi
def test_no_new_communicators() -> None:
    on_ranks(3, layer_contracts.no_new_communicators)


@needs_mpi
def test_compiled() -> None:  # torch's compiler is not for several threads
    on_ranks(3, layer_contracts.layers_may_be_compiled)


@st.composite
def linears(draw: Any, most: int) -> Case:
    """Any linear layer, on grids of at most so many workers: column- and row-parallel forms,
    forms with fewer workers, and others."""
    dims = draw(st.integers(1, 3))
    P_x, P_y = (
        draw(grids(most, draw(st.integers(1, max(2, dims))) if dims > 1 else 1)) for _ in "xy"
    )
    n_in, n_out = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    shape = (*[draw(st.integers(1, 4)) for _ in range(dims - 1)], n_in)
    options = {"bias": draw(st.booleans())}
    P_W = draw(grids(most, 2))
    return Case(
        "Linear",
        (P_x,),
        shape,
        (n_in, n_out),
        options,
        {"P_y": P_y, "P_W": P_W},
        output=P_y,
        ends=True,
        seed=draw(st.integers(0, 99)),
    )


@given(linears(6))
def test_linear_on_threads(case: Case) -> None:
    on_threads(case.workers, is_its_twin, case)


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=12)
@given(linears(4))
def test_linear_on_ranks(case: Case) -> None:
    on_ranks(case.workers, is_its_twin, case)


def test_the_example_of_seed_001() -> None:
    """Input on 1×4, output on 1×3 other workers, the weight on 3×4."""
    P_x, P_y, P_W = Partition((1, 4)), Partition((1, 3), range(4, 7)), Partition((3, 4))
    places = {"P_y": P_y, "P_W": P_W}
    case = Case("Linear", (P_x,), (1, 16), (16, 12), {}, places, output=P_y)
    on_threads(case.workers, is_its_twin, case)


def test_one_worker_needs_no_launch() -> None:
    P = Partition((1, 1))
    layer = linop.layers.Linear(P, 3, 2, P_W=P)
    layer(torch.ones(4, 3)).sum().backward()
    assert layer.weight.grad.shape == (2, 3)
    with pytest.raises(BackendError, match=r"linop\.launch"):
        linop.layers.AllReduce(Partition((2,)))


def test_partitions_after_the_first_are_named() -> None:
    """Calls in the order of old are warned of with the new call, and are the same layers."""
    P, Q = Partition((1, 1)), Partition((1,))
    Linear, Embedding = linop.layers.Linear, linop.layers.Embedding
    old, said = [], []
    for make in (
        lambda: Linear(P, Q, P, 4, 3, False, dtype=torch.float64),
        lambda: Linear(P, Q, P_W=P, in_features=4, out_features=3),
        lambda: Embedding(Q, P, P, 5, 4, padding_idx=1),
    ):
        with pytest.warns(DeprecationWarning) as warned:
            old.append(make())
        (one,) = warned
        assert Path(one.filename).name == Path(__file__).name
        said.append(str(one.message).partition("; write ")[2])
    assert said == [
        f"Linear({P!r}, 4, 3, False, dtype=torch.float64, P_y={Q!r}, P_W={P!r})",
        f"Linear({P!r}, P_W={P!r}, in_features=4, out_features=3, P_y={Q!r})",
        f"Embedding({Q!r}, 5, 4, padding_idx=1, P_y={P!r}, P_W={P!r})",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new = [
            Linear(P, 4, 3, False, dtype=torch.float64, P_y=Q, P_W=P),
            Linear(P, 4, 3, P_y=Q, P_W=P),
            Embedding(Q, 5, 4, padding_idx=1, P_y=P, P_W=P),
        ]
    assert list(map(repr, old)) == list(map(repr, new))


def test_workers_that_compute_by_default() -> None:
    """Blocks of the input, in columns by its features."""
    find = linop.layers.linear.work_partition
    grid = Partition((2, 3))
    assert find("", grid, None) == grid
    assert find("", Partition((4,)), None) == Partition((4, 1))
    assert find("", Partition((2,)), [-1]) == Partition((1, 2))
    assert find("", Partition((2,)), [1]) == Partition((1, 2))
    assert find("", Partition((2,)), [REPLICATED]) == Partition((2, 1))
    assert find("", Partition((2, 2, 3)), None) == Partition((4, 3))
    assert find("", grid, [-1, 0]) == Partition((3, 2), [0, 3, 1, 4, 2, 5])

    case = Case("Linear", (grid,), (5, 7), (7, 4), ends=True, seed=3)
    on_threads(6, is_its_twin, case)
    case = Case("Embedding", (Partition((3,)),), (5,), (7, 4))
    on_threads(3, embedding.is_torch_s, case)
