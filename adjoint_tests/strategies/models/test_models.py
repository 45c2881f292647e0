"""A part of the table of `docs/models.md`, and of what `oracle/models.py` draws: linop's strategies
on models of other people, beside one process that knows torch alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.models.packages import missing

if why := missing():
    pytest.skip(f"models of other people are {why}", allow_module_level=True)

import torch

import linop
from linop import strategies
from oracle.models import drawn, kinds
from support.models import running
from support.models.cases import Case, start
from support.models.model import made
from support.models.strategies import STRATEGIES, tensor_parallel
from support.models.twin import Seen, alone, faults
from support.models.zoo import ZOO
from support.requirements import needs_mpi

ROOT = Path(__file__).parents[3]
LLAMA, BERT, VIT = "transformers Llama", "transformers BERT", "timm ViT"
CELLS = [  # each strategy, and each package
    (LLAMA, "data parallel"),
    (BERT, "zero1"),
    ("torchvision ConvNeXt", "zero2"),
    (LLAMA, "zero3"),
    (LLAMA, "tensor parallel"),
    (BERT, "sequence parallel"),
    (VIT, "pipeline"),
    ("transformers T5", "pipeline"),
    ("torchvision MobileNet", "checkpoint"),
    (LLAMA, "checkpoint"),
    ("timm EfficientNet", "offload"),
    (BERT, "offload"),
    ("transformers ViT", "data × tensor"),
    (BERT, "zero3 × tensor"),
    ("timm ResNet", "data × pipeline"),
]


def case(model: str, strategy: str, **changes: Any) -> Case:
    """A cell of the table; `changes` are of the configuration, or fields of `Case`."""
    fields = {name: changes.pop(name) for name in [*changes] if name in Case.__annotations__}
    configuration = {**ZOO[model].usual, **changes}
    usual = Case(model, configuration, strategy, STRATEGIES[strategy][1])
    return replace(usual, **fields)


@pytest.mark.parametrize(("model", "strategy"), CELLS)
def test_cells_are_right_on_threads(model: str, strategy: str) -> None:
    assert running.on_threads(case(model, strategy)).kind == "right"


def test_tied_weights_of_replicas_of_stages() -> None:
    one = case("transformers GPT-2", "data × pipeline", tied=True, mask=True)
    assert running.on_threads(one).kind == "right"


@needs_mpi
@pytest.mark.parametrize("strategy", ["zero3", "tensor parallel"])
def test_models_on_ranks(strategy: str) -> None:
    assert running.on_ranks(case(LLAMA, strategy)).kind == "right"


@given(seed=st.integers(0, 2**31), k=st.integers(0, 2**31))
def test_draws_are_right_or_refused(seed: int, k: int) -> None:
    one = drawn(seed, k)
    verdict = running.on_threads(one)
    assert verdict.kind != "wrong", f"{one}: {verdict}"


def test_dropout_with_an_uneven_cut_is_the_same_on_all_workers() -> None:
    one = case(BERT, "tensor parallel", heads=3, groups=3, dropout=0.1, steps=3)
    assert running.on_threads(one).kind == "right"


@pytest.mark.parametrize("model", [LLAMA, "torchvision ConvNeXt"])
def test_any_number_of_workers_draws_the_same(model: str) -> None:
    """Dropouts and stochastic depths, of whole and of split tensors."""
    drops = {"dropout": 0.2, "path": 0.2, "heads": 3, "groups": 3}
    known = {name: drops[name] for name in drops if name in ZOO[model].usual}
    losses = []
    for workers in 1, 2, 3:
        one = case(model, "tensor parallel", mesh={"tp": workers}, **known)
        start(one)
        torch.manual_seed(11)
        losses += linop.launch(lambda b: tensor_parallel(b, one).losses, workers, "threads")  # noqa: B023
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=2e-5)


def test_fused_projections_are_right_or_refused() -> None:
    for heads in 1, 2, 3:
        options = {"cuts": "others"}
        one = case("transformers Phi-3", "tensor parallel", heads=heads, groups=1, options=options)
        assert running.on_threads(one).kind in ("right", "refused")


def test_an_unused_output_has_no_gradient_in_a_pipeline() -> None:
    one = case(BERT, "pipeline", unused=True, options={"point": "cls"})
    assert running.on_threads(one).kind == "right"


@pytest.mark.parametrize("model", ["transformers GPT-2", LLAMA])
def test_means_over_some_targets_are_right_or_refused(model: str) -> None:
    one = case(model, "pipeline", ignored=0.5, mean=True, options={"point": "lm_head"})
    assert running.on_threads(one).kind in ("right", "refused")


def test_parameters_read_beside_a_forward_are_whole_or_refused() -> None:
    one = case(VIT, "zero3", options={"read": True})
    assert running.on_threads(one).kind == "right"


def test_wrong_strategies_are_seen(monkeypatch: Any) -> None:
    """Gradients that are not summed; a parameter that a worker shifts."""
    with monkeypatch.context() as patched:
        patched.setattr(strategies, "DataParallel", Plain)
        assert running.on_threads(case(VIT, "data parallel")).kind == "wrong"
    right = case(VIT, "checkpoint")
    twin = alone(right)
    state = {**twin.parameters, **twin.buffers[0]}
    seen = Seen([*twin.losses[0]], set(twin.unused), set(twin.parameters), state)
    assert seen.losses and not faults(right, twin, seen)
    key = next(iter(twin.parameters))
    for other in (
        replace(seen, state={**state, key: state[key] + 1e-4}),
        replace(seen, losses=[1.001 * x for x in seen.losses]),
        replace(seen, unused={key}),
        replace(seen, keys=(f"module.{key}",)),
        replace(seen, written={key: state[key][:0]}),
        replace(seen, read={(key, "sum"): state[key][:0].sum()}),
    ):
        (fault,) = faults(right, twin, other)
        assert kinds(fault)


class Plain(torch.nn.Module):
    """No strategy at all."""

    def __init__(self, module: Any, axis: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *given: Any, **options: Any) -> Any:
        return self.module(*given, **options)


def test_draws_are_repeated_and_say_what_they_drew() -> None:
    one = drawn(3, 4)
    assert one == drawn(3, 4) and str(one) == str(drawn(3, 4))
    assert one.model in str(one) and str(one.seed) in str(one)
    assert len({str(drawn(3, k)) for k in range(30)}) == 30


@pytest.mark.parametrize("name", ["torchvision ViT", "transformers T5"])
def test_models_are_the_same_for_a_seed(name: str) -> None:
    first, second = (made(ZOO[name], ZOO[name].usual, 5).state_dict() for _ in range(2))
    other = made(ZOO[name], ZOO[name].usual, 6).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_the_table_has_reasons_as_footnotes(monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    from benchmarks.strategies.models import table

    refused, right = running.Verdict("refused", "say this"), running.Verdict("right")
    lines = table(
        [("m", "a", (refused, right)), ("m", "b", (right, None)), ("n", "a", (refused, right))]
    )
    assert lines[2:4] == [
        "| m | refused [1] / right | right / — |",
        "| n | refused [1] / right |  |",
    ]
    assert lines[5:] == ["1. linop: say this"]
