"""torch.func's transforms of nets whose parameters are sharded give what they give of plain nets,
and torch's graph leads on to the shards."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import given
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from torch import func

import linop
from linop.backends import Backend
from linop.errors import ArgumentError
from support.layers.cases import normal
from support.requirements import needs_mpi
from support.strategies.data.transformed import (
    FORWARD,
    OF_INPUTS,
    OF_PARAMETERS,
    of_inputs,
    of_parameters,
    plain,
    sharded,
)
from support.workers import on_ranks, on_threads


@given(
    st.sampled_from([*OF_INPUTS]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1),
    st.integers(1, 3),
)
def test_of_inputs(name: str, units: bool, reshards: bool, ahead: int, workers: int) -> None:
    workers = 1 if name in FORWARD else workers
    on_threads(workers, of_inputs, plain(), name, units, reshards, ahead)


@needs_mpi
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(FORWARD | {"grad"}))
def test_of_inputs_on_ranks(name: str) -> None:
    on_ranks(2, of_inputs, plain(), name, True, True, 0)


@given(st.sampled_from([*OF_PARAMETERS]), st.booleans(), st.integers(1, 3))
def test_of_parameters(name: str, units: bool, workers: int) -> None:
    on_threads(workers, of_parameters, plain(), name, units)


def test_some_parameters_are_refused() -> None:
    base = plain()

    def main(backend: Backend) -> None:
        net = sharded(backend, base, False)
        given = {"0.weight": base[0].weight.detach()}
        with pytest.raises(ArgumentError, match=r"functional_call: give it whole tensors, of all"):
            func.functional_call(net, given, (normal((5, 3), 1),))

    linop.launch(main, 2, "threads")
