"""Strategies inside each other equal one process, and `linop.strategies.check` names faults."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from hypothesis import example, given
from hypothesis import strategies as st

from support.requirements import needs_mpi
from support.strategies.checking.compositions import (
    Composition,
    Fault,
    block_is_sharded,
    fault_is_named,
    is_its_twin,
    says_what_is_wrong,
    unlike_side_by_side,
)
from support.workers import on_ranks, on_threads

MESHES = [
    (dp, tp, pp)
    for dp in (1, 2, 3, 4, 8)
    for tp in (1, 2, 3, 4)
    for pp in (1, 2, 3, 4)
    if dp * tp * pp <= 8
]


@st.composite
def compositions(draw: Any) -> Composition:
    dp, tp, pp = draw(st.sampled_from(MESHES))
    return Composition(
        dp,
        tp,
        pp,
        micro=draw(st.integers(1, 3)) if pp == 1 else draw(st.integers(pp, pp + 2)),
        data=draw(st.sampled_from(["copies", "shards", "gathered"])),
        pairs=draw(st.booleans()),
        every=draw(st.none() | st.integers(1, 3)),
        prefetch=draw(st.none() | st.integers(0, 2)),
        away=draw(st.sampled_from(["activations", "parameters", "activations parameters"])),
        first=draw(st.booleans()),
        schedule=draw(st.sampled_from(["gpipe", "1f1b"])),
    )


@example(Composition(2, 2, 2, 3, "copies", True, 2, 1))
@example(Composition(2, 2, 1, 2, "shards", False, 2, 0))
@example(Composition(2, 2, 1, 2, "copies", False, 2, 1, "parameters"))
@example(Composition(2, 1, 2, 2, "shards", True, None, 1, "parameters"))
@example(Composition(1, 2, 1, 1, "copies", False, None, 0, "parameters"))
@example(Composition(4, 2, 1, 2, "shards", True, 3))
@given(compositions())
def test_compositions_on_threads(case: Composition) -> None:
    on_threads(case.workers, is_its_twin, case)


@needs_mpi
def test_on_ranks() -> None:
    on_ranks(4, is_its_twin, Composition(2, 2, 1, 2, "shards", False, 2, 1))
    on_ranks(4, is_its_twin, Composition(1, 2, 2, 2, "copies", True, None, 1))
    on_ranks(4, fault_is_named, Fault("again", "dp", 4, 1))


FAULTS = st.builds(
    Fault,
    kind=st.sampled_from(["again", "term", "one"]),
    axis=st.sampled_from(["dp", "tp"]),
    dp=st.just(2),
    tp=st.just(3),
    seed=st.integers(0, 9),
) | st.builds(Fault, dp=st.integers(2, 4), tp=st.just(1), seed=st.integers(0, 9))


@example(Fault("again", "tp", 2, 3, 1))
@example(Fault("term", "dp", 2, 3, 2))
@example(Fault("one", "dp", 2, 3, 3))
@given(FAULTS)
def test_faults_are_named(fault: Fault) -> None:
    on_threads(fault.dp * fault.tp, fault_is_named, fault)


def test_refused() -> None:
    on_threads(2, says_what_is_wrong)
    on_threads(2, block_is_sharded)


@needs_mpi
def test_refused_on_ranks() -> None:
    on_ranks(2, says_what_is_wrong)


def test_pipelines_side_by_side() -> None:
    on_threads(4, unlike_side_by_side)
