"""The GPT of examples/ under its strategies, beside one process: losses, and bytes."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

import linop
from linop.backends.engine.base import Backend
from support.requirements import needs_mpi
from support.strategies.gpts import (
    BATCH,
    SMALL,
    STEPS,
    TOLERANCE,
    WIDE,
    alone,
    follows,
    gpt,
    losses,
)
from support.strategies.memory.saved_memory import between_passes
from support.workers import on_ranks


@pytest.mark.parametrize("strategy", gpt.STRATEGIES)
def test_losses_on_threads(strategy: str) -> None:
    twin = alone("stored" if strategy in ("stored", "reversible") else "sequential")
    assert len(set(twin)) == STEPS
    every = linop.launch(lambda b: losses(b, strategy), gpt.STRATEGIES[strategy], "threads")
    for found in every:
        assert found == pytest.approx(twin, abs=TOLERANCE, rel=0)


@pytest.mark.parametrize("strategy", ["dp", "zero3"])
def test_losses_are_those_of_accumulation_to_the_last_bit(strategy: str) -> None:
    """One process that adds the workers' terms in their order."""
    (twin,) = linop.launch(lambda b: losses(b, "accumulated"), 1, "threads")
    every = linop.launch(lambda b: losses(b, strategy), 4, "threads")
    assert every == [twin] * 4
    assert twin != alone("sequential")


@needs_mpi
def test_losses_on_ranks() -> None:
    for strategy in ("zero3", "tp"):
        on_ranks(4, follows, strategy, alone("sequential"), watch=120.0)


def test_another_learning_rate_is_seen(monkeypatch: Any) -> None:
    twin = alone("sequential")
    monkeypatch.setattr(
        gpt.language_model, "optimizer", lambda given: torch.optim.AdamW(given, lr=2e-3)
    )
    (found,) = linop.launch(lambda b: losses(b, "sequential"), 1, "threads")
    assert found[0] == twin[0]
    assert found != pytest.approx(twin, abs=1e-6, rel=0)


@pytest.mark.parametrize("strategy", ["sequential", "checkpoint", "stored", "reversible"])
def test_bytes_of_a_block(strategy: str) -> None:
    """A further block keeps what Megatron's formula says of it, without dropout and without the
    matrix of attention, and the norms' and attention's statistics; its input alone, checkpointed;
    nothing, reversible."""

    def program(backend: Backend) -> list[int]:
        found = []
        for blocks in (2, 3):
            size = gpt.Size(16, 4, blocks, 8)
            run = gpt.made(strategy, backend, gpt.network(strategy, size, WIDE), size)
            text = torch.arange(BATCH * 9).view(BATCH, 9)
            found.append(between_passes(run, text))
        return found

    ((two, three),) = linop.launch(program, 1, "threads")
    sb = SMALL.length * BATCH * WIDE.itemsize
    stored = 16 * sb * SMALL.width + sb * SMALL.heads + 2 * 2 * sb
    wanted = {"checkpoint": sb * SMALL.width, "reversible": 0}
    assert three - two == wanted.get(strategy, stored)
