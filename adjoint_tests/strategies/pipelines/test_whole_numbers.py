"""Whole numbers and booleans go between any stages of a pipeline, and no gradient comes back."""

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

import linop
from linop.backends.engine.base import Backend
from linop.strategies import split
from support.requirements import needs_mpi
from support.strategies.pipelines.pipelines import fill
from support.strategies.pipelines.whole_numbers import (
    KINDS,
    Graph,
    Language,
    exported_tokens,
    is_one_process,
)
from support.workers import on_ranks, on_threads

ALL = ((0, 1, 0), (0, 1, 1), (0, 1, 2), (0, 2, 1), (0, 3, 3), (1, 2, 2), (1, 3, 0), (2, 3, 1))
"""Stage 2 takes no numbers with gradients, and gives some to none."""


@st.composite
def graphs(draw: Any) -> Graph:
    """Any edges; each stage takes one output at least, and gives one."""
    chunks, workers = draw(st.sampled_from([(1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (4, 1)]))
    stages = chunks * workers
    every = [(a, b, k) for a in range(stages) for b in range(a + 1, stages) for k in range(4)]
    chosen = set(draw(st.sets(st.sampled_from(every), max_size=6)) if every else ())
    for s in range(1, stages):
        chosen.add((draw(st.integers(0, s - 1)), s, draw(st.integers(0, 3))))
        chosen.add((s - 1, draw(st.integers(s, stages - 1)), draw(st.integers(0, 3))))
    kinds = tuple(draw(st.sampled_from(KINDS)) for _ in range(stages))
    name = "interleaved-1f1b" if chunks > 1 else draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"]))
    recompute, writes = draw(st.booleans()), draw(st.booleans())
    return Graph(name, tuple(sorted(chosen)), kinds, chunks, recompute, writes)


@given(graph=graphs())
def test_drawn_on_threads(graph: Graph) -> None:
    on_threads(graph.workers, is_one_process, graph)


def test_one_slot() -> None:
    on_threads(4, is_one_process, Graph("gpipe", ALL, KINDS[2:], slots=1))


@needs_mpi
def test_on_ranks() -> None:
    on_ranks(4, is_one_process, Graph("1f1b", ALL, KINDS[2:]))
    on_ranks(2, is_one_process, Graph("interleaved-1f1b", ALL, KINDS[2:], 2), windows=False)


def test_exported() -> None:
    model = Language()
    fill(model, 1)

    def cut(backend: Backend | None = None) -> Any:
        mine = model if backend is None else copies[backend.worker or 0]
        return split(mine, ["body", "again"], example=torch.ones(2, 5, dtype=torch.int64))

    copies = [copy.deepcopy(model) for _ in range(2)]
    stages = cut()
    # Threads may cut at one time.
    assert [one.edges for one in linop.launch(cut, 2, "threads")] == [stages.edges] * 2
    assert any(edge[:2] == (0, 2) for edge in stages.edges)
    linop.launch(lambda b: exported_tokens(b, model, stages), 3, "threads")
