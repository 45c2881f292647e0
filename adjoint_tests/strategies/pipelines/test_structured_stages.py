"""Pipelines between whose stages any structures of tensors go are one process."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from hypothesis import given
from hypothesis import strategies as st

from support.requirements import needs_mpi
from support.strategies.pipelines.structured_stages import (
    FORMS,
    Chain,
    is_delayed,
    is_encoder_decoder,
    is_one_process,
)
from support.workers import on_ranks, on_threads


@st.composite
def chains(draw: Any) -> Chain:
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1", "backward-first"]))
    forms = draw(st.lists(st.sampled_from(FORMS), min_size=1, max_size=2))
    return Chain(
        schedule,
        tuple(forms),
        draw(st.integers(1, 3)),
        positions=draw(st.sampled_from(["shared", "each", "none"])),
        recompute=draw(st.booleans()),
        by_name=draw(st.booleans()),
        slots=draw(st.sampled_from([1, 1, None])),
    )


@given(chain=chains())
def test_drawn_structures_on_threads(chain: Chain) -> None:
    on_threads(chain.workers, is_one_process, chain)


def test_structures_of_stages_of_one_worker() -> None:
    chain = Chain("interleaved-1f1b", ("dict", "tuple", "record inside"), chunks=2)
    on_threads(chain.workers, is_one_process, chain)


@pytest.mark.parametrize("recompute", [False, True])
def test_structures_under_older_weights(recompute: bool) -> None:
    chain = Chain("pipedream", ("dict", "named tuple inside"), recompute=recompute)
    on_threads(chain.workers, is_delayed, chain)


@needs_mpi
@pytest.mark.parametrize("form", ["record", "named tuple inside"])
def test_structures_on_ranks(form: str) -> None:
    chain = Chain("zb-h1", (form,))
    on_ranks(chain.workers, is_one_process, chain)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved-1f1b", 2)]
)
def test_encoders_and_decoders(schedule: str, chunks: int) -> None:
    on_threads(4 // chunks, is_encoder_decoder, schedule, chunks)


@needs_mpi
def test_encoders_and_decoders_on_ranks() -> None:
    on_ranks(4, is_encoder_decoder, "1f1b", 1)
