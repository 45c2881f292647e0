"""Errors of pipelines: on every worker, before a message where that can be."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

from linop.errors import ArgumentError
from linop.strategies import split
from support.requirements import needs_mpi
from support.strategies.pipelines.wrong_pipelines import BEFORE, LATER, Wrong, all_raise
from support.workers import on_ranks, on_threads


def named(wrong: Wrong) -> str:
    program: Any = wrong[0]
    if isinstance(program, partial):
        return "-".join([program.func.__name__, *program.keywords.values()])
    return str(program.__name__)


@pytest.mark.parametrize("wrong", BEFORE, ids=named)
def test_before_a_message(wrong: Wrong) -> None:
    on_threads(wrong[3], all_raise, wrong, True)


@needs_mpi
def test_before_a_message_on_ranks() -> None:
    for wrong in BEFORE:
        on_ranks(wrong[3], all_raise, wrong, True)


@pytest.mark.parametrize("wrong", LATER, ids=named)
def test_in_a_step(wrong: Wrong) -> None:
    on_threads(wrong[3], all_raise, wrong, False)


@needs_mpi
@pytest.mark.parametrize("wrong", LATER, ids=named)
def test_in_a_step_on_ranks(wrong: Wrong) -> None:
    on_ranks(wrong[3], all_raise, wrong, False, wait_limit=20)


def test_split() -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), inner, torch.nn.Tanh())
    stages = split(model, ["1.1", "2"])
    keys = [key for stage in stages for key in stage.state_dict()]
    assert keys == list(model.state_dict())
    x = torch.ones(2, 3)
    assert torch.equal(stages[2](stages[1](stages[0](x))), model(x))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["7"], "no submodule '7'"),
        (["2", "1"], "'1' comes before '2'"),
        (["0"], "no submodule is left for the stage before '0'"),
        ("1", "a list of names expected"),
        (None, "a list of names expected"),
        ([1], "a list of names expected"),
        (["0.weight"], "no submodule '0.weight'"),
    ],
)
def test_split_of_other_names(names: list[str], words: str) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(3)])
    with pytest.raises(ArgumentError, match=words):
        split(model, names)
