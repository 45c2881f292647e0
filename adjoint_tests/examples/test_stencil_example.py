"""examples/inverse/stencil.py, on three backends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import linop
from linop.backends import Backend
from support.contracts.stencils import by_slices
from support.examples import example
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

NAME = "inverse/stencil"


def has_the_norm(backend: Backend) -> None:
    index = sum(np.ogrid[:60, :48])
    star = [(k, 0) for k in range(-4, 5)] + [(0, k) for k in range(-4, 5) if k]
    taps = {at: np.cos(index + sum(at)) for at in star}
    y = by_slices(np.ones((60, 48)), taps, ["reflect", "reflect"])
    assert example(NAME).main(backend) == pytest.approx(np.linalg.norm(y), rel=1e-12)


def test_in_one_process() -> None:
    for workers in (1, 3):
        has_the_norm(linop.backends.get("reference", workers=workers))


def test_on_threads() -> None:
    for workers in (1, 3):
        on_threads(workers, has_the_norm)


@needs_mpi
def test_on_ranks() -> None:
    on_ranks(2, has_the_norm)


def test_its_length() -> None:
    """The issue's: at most 11 lines."""
    path = Path(__file__).resolve().parents[2] / "examples" / f"{NAME}.py"
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    assert len(lines) - 1 <= 11  # without the docstring
