"""Batches are cut among micro-batches as the user says, and results are joined."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import numpy
import torch

from linop.errors import ArgumentError
from linop.strategies import split
from linop.strategies.pipelines.batches import joined
from linop.strategies.pipelines.forms import form_of, rebuilt
from support.strategies.pipelines.batches import (
    Local,
    Result,
    is_cut_as_said,
    joins_results,
    refuses,
    refuses_other_structures,
)
from support.workers import on_threads

CONTRACTS = is_cut_as_said, joins_results, refuses, refuses_other_structures


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda one: one.__name__)
def test_batches(contract: Any) -> None:
    on_threads(2, contract)


def test_results_that_differ() -> None:
    with pytest.raises(ArgumentError, match="as many rows expected, or the same tensor for all"):
        joined([torch.ones(3, 2), torch.zeros(3, 2)], [4, 4])
    with pytest.raises(ArgumentError, match="rows are in the first dimension, whichever it is in"):
        joined([torch.ones(5, 4), torch.zeros(5, 4)], [4, 4])
    for other in (object(), 1.5, torch.ones(2), {"b": 1}, numpy.ones(2), (torch.ones(2), None)):
        kept = {"y": torch.ones(2), "other": other}
        if not isinstance(other, torch.Tensor):
            assert joined([kept, kept], [2, 2])["y"].shape == (4,)
        with pytest.raises(ArgumentError, match=r"differ|several .*expected, or what is the same"):
            joined([kept, {"y": torch.ones(2), "other": 2.5}], [2, 2])
    assert joined([numpy.ones(2), numpy.ones(2)], [2, 2]).shape == (2,)
    with pytest.raises(ArgumentError, match=r"values of several structures.*expected"):
        joined([(torch.ones(2),), (torch.ones(2), torch.ones(2))], [2, 2])
    with pytest.raises(ArgumentError, match=r"objects that differ .*return numbers as tensors"):
        joined([3.0, 4.0], [2, 2])


def test_classes_that_are_not_known() -> None:
    tensors: list[torch.Tensor] = []
    form = form_of(Result(*map(torch.tensor, (1.0, 2.0, 3.0))), tensors)
    assert rebuilt(form, tensors).same == 3.0
    with pytest.raises(ArgumentError, match="'nowhere:Result' comes to a stage whose worker has"):
        rebuilt((*form[:3], "nowhere:Result"), tensors)
    with pytest.raises(ArgumentError, match="'os:system' comes to a stage"):
        rebuilt((*form[:3], "os:system"), tensors)


def test_examples_that_are_no_tensors() -> None:
    net = torch.nn.Bilinear(2, 2, 2)
    with pytest.raises(ArgumentError, match=r"input 'input2' of the example is .*Local"):
        split(net, [], torch.ones(1, 2), input2=Local())
