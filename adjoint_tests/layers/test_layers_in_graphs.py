"""Each layer is part of a graph of torch's compiler and of its export, with the results of eager
calls, or says that it is not."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from linop import layers
from linop.backends.autograd.functions import FOLLOWS
from linop.layers import Layer
from support.layers.compiled import modes_of_layers
from support.layers.graph_examples import are_graphs, examples, says_why
from support.layers.mixtures import Mixture
from support.layers.mixtures_in_graphs import is_eager, is_forgotten, serves_compilers
from support.requirements import needs_mpi
from support.workers import on_ranks

if not FOLLOWS:
    pytest.skip("torch's compiler runs modules since 2.13", allow_module_level=True)

PARTS = 8
BASES = {"Layer", "Loss", "Movement", "Reduction"}


def test_each_layer_has_an_example() -> None:
    every = {
        name
        for name in layers.__all__
        if isinstance(kind := getattr(layers, name), type) and issubclass(kind, Layer)
    }
    assert every - BASES == {example.layer for example in examples()}


@needs_mpi
@pytest.mark.parametrize("part", range(PARTS))
def test_layers_are_graphs(part: int) -> None:
    on_ranks(2, are_graphs, part, PARTS, watch=300.0)


@needs_mpi
def test_layers_that_are_none_say_why() -> None:
    on_ranks(2, says_why, watch=200.0)


@needs_mpi
@pytest.mark.parametrize(
    "case",
    [
        Mixture((3, 0, 9), experts=4, k=2, one=1, factor=0.5),
        Mixture((4, 3), more=2, experts=3, k=2, normalize=False, outside=1),
    ],
)
def test_mixtures(case: Mixture) -> None:
    on_ranks(case.workers, is_eager, case, watch=300.0)


@needs_mpi
@pytest.mark.parametrize("contract", [is_forgotten, serves_compilers])
def test_what_mixtures_record(contract: Any) -> None:
    on_ranks(2, contract, watch=300.0)


@needs_mpi
def test_compiled_layers_train_and_evaluate() -> None:
    on_ranks(2, modes_of_layers, watch=300.0)
