"""Means over a batch in parts: micro-batches, and workers, of which unequal parts count."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import given
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from linop.errors import ArgumentError, LinopError
from linop.schedules import GENERATORS
from linop.strategies import Pipeline
from support.requirements import needs_mpi
from support.strategies.means import is_the_mean, shares_what_counts
from support.workers import on_ranks, on_threads

NAMES = st.sampled_from(
    ["module", "smoothed", "partial", "logarithms", "count", "hidden", "selected", "regularised"]
)
SIZES = st.lists(st.integers(1, 4), min_size=2, max_size=4)
CASES = NAMES, st.booleans(), st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 0.9]), SIZES


@given(*CASES)
def test_pipelines(name: str, weighted: bool, seed: int, part: float, sizes: list[int]) -> None:
    on_threads(2, is_the_mean, name, weighted, seed, part, sizes)


@needs_mpi
@given(*CASES)
def test_pipelines_on_ranks(
    name: str, weighted: bool, seed: int, part: float, sizes: list[int]
) -> None:
    on_ranks(2, is_the_mean, name, weighted, seed, part, sizes)


@given(st.integers(1, 3), st.integers(0, 10**6))
def test_data_parallel(workers: int, seed: int) -> None:
    on_threads(workers, shares_what_counts, seed)


def test_counts_are_numbers() -> None:
    def refuses(backend: object) -> None:
        import torch

        stages = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
        table, loss = GENERATORS["gpipe"](2, 2), torch.nn.functional.mse_loss
        with pytest.raises(ArgumentError, match="reduction='mean' expected"):
            Pipeline(stages, table, loss, count=len, backend=backend)  # type: ignore[arg-type]
        pipe = Pipeline(
            stages,
            table,
            loss,
            reduction="mean",
            count=lambda target: -1,
            backend=backend,  # type: ignore[arg-type]
        )
        with pytest.raises(LinopError, match="count: it gives -1; a number from 0 expected"):
            pipe.step(torch.ones(4, 2), torch.ones(4, 2))

    on_threads(2, refuses)
