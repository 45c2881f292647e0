"""Models with several tensors across a cut: stages and the edges between them."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

import linop
from linop.backends import Backend
from linop.errors import ArgumentError
from linop.strategies import split
from support.layers.cases import normal
from support.strategies.pipelines.cut_models import (
    Branching,
    Modal,
    Tied,
    cut_model_is_whole,
    modes_are_kept,
    refuses_other_modes,
    returns_dicts,
    tied_model_is_whole,
)
from support.strategies.pipelines.pipelines import squares
from support.strategies.pipelines.repeated_modules import Repeated, trained
from support.workers import on_threads

NAMES = ["mixed", "third", "last"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("several", [False, True], ids=["tensor", "dict"])
def test_exported(schedule: str, several: bool) -> None:
    model = Branching(several)
    stages = split(model, NAMES, example=torch.ones(2, 5))
    edges = stages.edges  # type: ignore[attr-defined]
    assert {(0, 1, 0), (0, 1, 1), (1, 2, 0), (1, 3, 0), (2, 3, 0)} <= set(edges)
    assert (0, 3, 2) in edges  # the input
    assert sorted(k for stage in stages for k in stage.state_dict()) == sorted(model.state_dict())
    on_threads(4, cut_model_is_whole, model, stages, schedule, several)


def test_outputs_in_dicts_and_lists() -> None:
    on_threads(3, returns_dicts)


def test_exported_with_tied_weights(tmp_path: Path) -> None:
    model = Tied()
    stages = split(model, ["middle", "last"], example=torch.ones(2, 5, dtype=torch.float64))
    assert list(stages[0].state_dict()) == ["first.weight"]
    assert stages[2].last.weight is stages[0].first.weight is model.first.weight
    path = str(tmp_path / "pipeline")
    linop.launch(lambda b: tied_model_is_whole(b, model, copy.deepcopy(stages), path), 3, "threads")


class Again(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """It uses a weight at its start and at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(5, 5))
        self.middle = torch.nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.middle(x @ self.weight) @ self.weight


def test_a_parameter_of_two_stages(tmp_path: Path) -> None:
    """It is one, whose gradients are added."""
    model = Again().double()
    stages = split(model, ["middle"], example=torch.ones(2, 5).double())
    assert stages[0].weight is stages[1].weight is model.weight
    batches = normal((8, 5), 1), normal((8, 5), 2)

    def main(backend: Backend) -> None:
        twin, path = copy.deepcopy(model), str(tmp_path)
        trained(backend, twin, stages, Repeated(max_norm=0.1), path, squares, batches)

    linop.launch(main, 2, "threads")


class Twice(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A part is run before the first cut too, or it begins with the part."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
        self.first = first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return self.outer(y) if self.first else self.outer(self.inner(self.outer(y)))


@pytest.mark.parametrize(
    ("first", "name", "words"), [(True, "inner", "1 stages"), (False, "outer", "3 stages")]
)
def test_cuts_that_make_no_stages(first: bool, name: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        split(Twice(first), [name], example=torch.ones(2, 5))


@pytest.mark.parametrize("trains", [True, False], ids=["in training", "in evaluation"])
def test_exported_in_both_modes(trains: bool) -> None:
    model = Modal().train(trains)
    before = [vars(m).copy() for m in model.modules()]
    stages = split(model, ["norm"], example=torch.ones(2, 5))
    assert [vars(m) for m in model.modules()] == before
    on_threads(2, modes_are_kept, model, stages)


def test_exported_in_one_mode() -> None:
    stages = split(Modal(apart=True), ["norm"], example=torch.ones(2, 5))
    on_threads(2, refuses_other_modes, stages)
