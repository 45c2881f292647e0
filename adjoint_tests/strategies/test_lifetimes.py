"""Nothing holds a parallel model, or the backend of a program, once its user has let go of it."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import linop
from support.draws import ON_RANKS
from support.requirements import needs_mpi
from support.strategies.lifetimes import models_are_let_go, pipelines_are_let_go
from support.strategies.states import COMPOSITIONS, EXTENTS
from support.workers import on_ranks, on_threads

GENERATORS = "gpipe", "1f1b", "zb-h1", "pipedream"


@given(st.sampled_from(COMPOSITIONS), st.integers(0, 99), st.sampled_from(EXTENTS))
def test_models_on_threads(names: list[str], seed: int, extents: tuple[int, int, int]) -> None:
    mesh = dict(zip(("ep", "dp", "tp"), extents, strict=True))
    on_threads(extents[0] * extents[1] * extents[2], models_are_let_go, names, seed, mesh)


@needs_mpi
@ON_RANKS
@given(st.sampled_from(COMPOSITIONS), st.integers(0, 99), st.integers(0, 2))
def test_models_on_ranks(names: list[str], seed: int, cut: int) -> None:
    mesh = {axis: 2 if k == cut else 1 for k, axis in enumerate(("ep", "dp", "tp"))}
    on_ranks(2, models_are_let_go, names, seed, mesh)


@pytest.mark.parametrize("generator", GENERATORS)
def test_pipelines_on_threads(generator: str) -> None:
    on_threads(2, pipelines_are_let_go, 1, generator)


@needs_mpi
@pytest.mark.parametrize("generator", GENERATORS)
def test_pipelines_on_ranks(generator: str) -> None:
    on_ranks(2, pipelines_are_let_go, 1, generator)


@pytest.mark.parametrize("generator", GENERATORS)
def test_backends_of_ended_programs(generator: str) -> None:
    known = []

    def program(backend: Any) -> None:
        known.append(weakref.ref(backend))
        pipelines_are_let_go(backend, 1, generator)

    linop.launch(program, 2, "threads")
    gc.collect()
    assert [ref() for ref in known] == [None, None]
