"""States, memory, promised shapes and adjoints of all layers beside torch's."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from support.layers.cases import Case
from support.layers.norms import norms
from support.layers.promises import keeps_promises
from support.layers.shapes import activations, flattenings, shuffles, softmaxes, unflattenings
from support.layers.sliding import adaptive, convolutions, transposed
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads


def every(most: int) -> Any:
    """Layers of all kinds."""
    kinds = convolutions, transposed, adaptive, norms, flattenings, unflattenings, shuffles
    return st.one_of(*(kind(most) for kind in kinds), softmaxes(most), activations(most))


@given(every(6))
def test_promises_on_threads(case: Case) -> None:
    on_threads(case.workers, keeps_promises, case)


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=6)
@given(every(4))
def test_promises_on_ranks(case: Case) -> None:
    on_ranks(case.workers, keeps_promises, case, False)
