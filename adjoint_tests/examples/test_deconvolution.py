"""The example of a deconvolution finds the image, on one thread, on several, and on ranks."""

from __future__ import annotations

import runpy
from pathlib import Path

import linop
from linop.backends import Backend
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "inverse" / "deconvolution.py"


def finds_the_image(backend: Backend) -> None:
    blurred, found = runpy.run_path(str(SCRIPT))["main"](backend)
    assert abs(blurred - 0.115) < 0.001
    assert abs(found - 0.058) < 0.001


def test_deconvolution_on_threads() -> None:
    linop.launch(finds_the_image, 1, "threads")
    on_threads(3, finds_the_image)


@needs_mpi
def test_deconvolution_on_ranks() -> None:
    on_ranks(2, finds_the_image)


def test_the_program_is_short() -> None:
    lines = [line for line in SCRIPT.read_text().splitlines() if line.strip()]
    assert len(lines) <= 18
