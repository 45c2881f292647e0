"""Pipelines are, bit for bit, one process; on threads, on ranks and on torch's processes."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.graph import get_gradient_edge

import linop
from linop.backends.engine.base import Backend
from linop.errors import ArgumentError
from linop.schedules import GENERATORS
from linop.strategies import split
from linop.strategies.pipelines.stages.halves import input_half, weight_half
from linop.strategies.pipelines.stages.stage import Stage
from support.requirements import needs_mpi
from support.strategies.pipelines.cut_stages import cut_stage_is_whole
from support.strategies.pipelines.pipelines import (
    Case,
    Residual,
    clips_as_one_process,
    fill,
    has_the_sequential_state,
    is_one_process,
    is_the_delayed_loop,
    passes_several_outputs,
    ties_weights,
    trains_exported,
)
from support.strategies.pipelines.saved_bytes import (
    counted_and_predicted,
    forgets_outputs,
    keeps_what_is_predicted,
)
from support.torchrun import on_torchrun
from support.workers import on_ranks, on_threads

SYNCHRONOUS = [
    *(
        Case(name, p, M, dtype=dtype)
        for name in ("gpipe", "1f1b", "zb-h1", "backward-first")
        for p, M, dtype in (
            (1, 3, "float64"),
            (2, 1, "float32"),
            (2, 8, "float64"),
            (3, 2, "float64"),
            (4, 5, "float32"),
        )
    ),
    Case("interleaved-1f1b", 4, 4, (("chunks", 2),)),
    Case("interleaved-1f1b", 6, 6, (("chunks", 2),), dtype="float32"),
    Case("interleaved-1f1b", 6, 4, (("chunks", 3),)),
    Case("gpipe", 3, 4, recompute=True),
    Case("zb-h1", 3, 4, recompute=True),
    Case("zb-h1", 3, 4, tied=True),
    Case("zb-h1", 4, 4, skips=((0, 2), (0, 3), (1, 3))),
    Case("1f1b", 3, 4, rows=10),
    Case("1f1b", 3, 4, rows=10, reduction="mean"),
    Case("1f1b", 4, 5, skips=((0, 2), (0, 3), (1, 3))),
    Case("interleaved-1f1b", 4, 4, (("chunks", 2),), skips=((0, 2), (1, 3))),
    Case("1f1b", 2, 4, width=200),
    Case("1f1b", 3, 4, dtype="float32", autocast=True),
    Case("zb-h1", 2, 3, bare=True),
]
DELAYED = [
    *(Case("pipedream", p, M) for p in (1, 2, 4) for M in (1, 4, 7)),
    *(Case("pipedream-2bw", p, M, (("batches", 3),)) for p, M in ((2, 2), (3, 4), (4, 4))),
    Case("pipedream", 3, 6, dtype="float32", rows=20),
]


@pytest.mark.parametrize("case", SYNCHRONOUS, ids=str)
def test_synchronous_on_threads(case: Case) -> None:
    on_threads(case.workers, is_one_process, case)


@st.composite
def cases(draw: Any) -> Case:
    """Greedy tables of any numbers of stages, micro-batches and rows, and bounds in flight."""
    p, M = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    flight = tuple(draw(st.lists(st.integers(1, 4), min_size=p, max_size=p)))
    rows = draw(st.integers(max(M, 2), 3 * M + 1))
    return Case("backward-first", p, M, (("in_flight", flight),), rows=rows)


@given(case=cases())
def test_drawn_on_threads(case: Case) -> None:
    on_threads(case.workers, is_one_process, case)


@pytest.mark.parametrize("case", DELAYED, ids=str)
def test_delayed_on_threads(case: Case) -> None:
    on_threads(case.workers, is_the_delayed_loop, case)


@pytest.mark.parametrize("case", [DELAYED[4], DELAYED[-2]], ids=str)
def test_without_stashing_it_is_another(case: Case, monkeypatch: Any) -> None:
    monkeypatch.setattr(Stage, "renew", lambda self: None)
    with pytest.raises(AssertionError, match="of stage"):
        on_threads(case.workers, is_the_delayed_loop, case)


CONTRACTS = [clips_as_one_process, has_the_sequential_state, ties_weights]


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
@pytest.mark.parametrize(
    "case", [Case("1f1b", 1, 2), Case("gpipe", 3, 4), Case("1f1b", 4, 4), SYNCHRONOUS[20]], ids=str
)
def test_model_on_threads(contract: Any, case: Case) -> None:
    on_threads(case.workers, contract, case)


@needs_mpi
@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
def test_model_on_ranks(contract: Any) -> None:
    on_ranks(4, contract, Case("1f1b", 3, 2))  # one rank has no stage


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "pipedream"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 2), (2, 8), (4, 6), (4, 2)])
def test_saved_tensors_are_predicted(name: str, stages: int, micro_batches: int) -> None:
    case = Case(name, stages, micro_batches)
    on_threads(stages, keeps_what_is_predicted, case)


def test_the_last_stage_keeps_an_eighth_of_gpipes() -> None:
    """8 micro-batches, without recomputation: counted bytes, which are those predicted."""

    def both(backend: Backend) -> list[tuple[int, float]]:
        cases = (Case(name, 2, 8) for name in ("gpipe", "1f1b"))
        return [counted_and_predicted(backend, case) for case in cases]

    (gpipe, its), (one, own) = linop.launch(both, 2, "threads")[-1]
    assert (gpipe, one) == (its, own)
    assert gpipe == 8 * one > 0


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_in_debug_mode(name: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("LINOP_DEBUG", "1")
    on_threads(3, is_one_process, Case(name, 3, 4))


ON_RANKS = [
    *((is_one_process, case) for case in SYNCHRONOUS if case.workers in (2, 4)),
    *((is_the_delayed_loop, case) for case in DELAYED if case.workers in (2, 4)),
]


@needs_mpi
@pytest.mark.parametrize(
    ("contract", "case"), ON_RANKS[::2], ids=lambda one: getattr(one, "__name__", str(one))
)
def test_on_ranks(contract: Any, case: Case) -> None:
    on_ranks(case.workers, contract, case)


@needs_mpi
def test_on_ranks_without_shared_memory() -> None:
    for width in (5, 200):
        case = Case("1f1b", 2, 4, width=width)
        on_ranks(2, is_one_process, case, windows=False)


def test_on_processes_of_torch() -> None:
    on_torchrun(2, is_one_process, Case("1f1b", 2, 4))
    on_torchrun(2, is_the_delayed_loop, Case("pipedream", 2, 4))


def test_modules_that_torch_exports() -> None:
    model = Residual()
    fill(model, 3)
    stages = split(model, ["body.1", "norm"], example=torch.ones(2, 5))
    linop.launch(lambda b: trains_exported(b, model, copy.deepcopy(stages)), 3, "threads")
    with pytest.raises(ArgumentError, match=r"no submodule 'body\.7'"):
        split(model, ["body.7"], example=torch.ones(2, 5))
    with pytest.raises(ArgumentError, match="give an example of its input"):
        split(model, ["body.1"])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b"])
def test_several_outputs(schedule: str) -> None:
    workers = len(GENERATORS[schedule](4, 4).workers)
    on_threads(workers, passes_several_outputs, schedule)


@needs_mpi
def test_several_outputs_on_ranks() -> None:
    on_ranks(4, passes_several_outputs, "1f1b")


def test_outputs_are_not_kept() -> None:
    on_threads(2, forgets_outputs, Case("gpipe", 2, 4))


@needs_mpi
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_cut_stages_on_ranks(schedule: str) -> None:
    on_ranks(4, cut_stage_is_whole, schedule)


def test_the_halves_of_a_backward_run_each_node_once() -> None:
    layers = [torch.nn.Linear(3, 3) for _ in range(4)]
    x = torch.ones(2, 3, requires_grad=True)
    y = x
    for layer in layers:
        y = torch.tanh(layer(y))
    edge = get_gradient_edge(y)
    found = input_half([edge], [torch.ones(2, 3)], [x])
    assert x.grad is not None
    assert all(p.grad is None for layer in layers for p in layer.parameters())
    assert found is not None
    assert len(found) == 4
    x.grad = None
    weight_half(found)
    assert x.grad is None
    halves = [p.grad.clone() for layer in layers for p in layer.parameters()]
    for layer in layers:
        layer.zero_grad()
    y = x
    for layer in layers:
        y = torch.tanh(layer(y))
    y.backward(torch.ones(2, 3))
    for half, p in zip(halves, [p for layer in layers for p in layer.parameters()], strict=True):
        assert torch.equal(half, p.grad)


def test_split_keeps_modules_that_come_twice() -> None:
    inner, relu = torch.nn.Linear(2, 2), torch.nn.ReLU()
    model = torch.nn.Sequential(inner, relu, inner, relu, torch.nn.Linear(2, 1))
    assert [len(stage) for stage in split(model, ["4"])] == [4, 1]
    assert [len(stage) for stage in split(model, [])] == [5]
