"""The programs of examples/inverse, on three backends: each checks its adjoint, or its result, and
is short."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import linop
from linop.backends.mpi import mpirun
from support.inverse_examples import (
    RIGHT,
    eigenvalues_are_right,
    is_right,
    passes_taylors_test,
)
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "inverse"
LINES = {
    "poisson": 18,
    "least_squares": 16,
    "heat_source": 18,
    "helmholtz": 12,
    "lasso": 15,
    "blocks": 16,
    "tomography": 12,
    "waves": 31,
    "eigenvalues": 2,
    "deconvolution": 18,
    "stencil": 11,
    "mass_matrix": 14,
    "stretched_grid": 19,
    "sobolev": 20,
    "poststack": 50,
    "reflectivity": 21,
    "migration": 22,
    "mdd": 37,
}
"""At most so many, of code: half of what each took before there were solvers. Then
three of inner products, which there were none of; and four that are PyLops-MPI's tutorials, and no
longer than these (docs/pylops_mpi.md)."""
each = pytest.mark.parametrize("name", RIGHT)


@each
def test_in_one_process(name: str) -> None:
    linop.launch(lambda backend: is_right(backend, name), 1, "reference")


@each
def test_on_threads(name: str) -> None:
    on_threads(3, is_right, name)


@needs_mpi
@each
def test_on_ranks(name: str) -> None:
    on_ranks(2, is_right, name)


def test_no_program_prints_results_that_another_rank_has() -> None:
    """`launch` returns None for the workers of other processes, as worker 0 is on rank 1."""
    for path in FOLDER.glob("*.py"):
        text = path.read_text()
        assert "launch(main)[0]" not in text or "(errors := linop.launch(main)[0])" in text, path


@needs_mpi
def test_a_program_under_mpiexec() -> None:
    done = mpirun.mpiexec(2, [sys.executable, str(FOLDER / "poisson.py")], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    said = sorted(done.stdout.splitlines())
    assert [line.partition(":")[0] for line in said] == ["worker 0", "worker 1"]


def test_the_gradient_of_full_waveform_inversion() -> None:
    linop.launch(passes_taylors_test, 1, "reference")
    on_threads(4, passes_taylors_test)


@needs_mpi
def test_the_gradient_of_full_waveform_inversion_on_ranks() -> None:
    on_ranks(4, passes_taylors_test)


def test_eigenvalues_in_one_process() -> None:
    linop.launch(eigenvalues_are_right, 1, "reference")


def test_eigenvalues_on_threads() -> None:
    on_threads(4, eigenvalues_are_right)


@needs_mpi
def test_eigenvalues_on_ranks() -> None:
    on_ranks(4, eigenvalues_are_right)


@pytest.mark.parametrize("name", LINES)
def test_how_long_it_is(name: str) -> None:
    lines = [line for line in (FOLDER / f"{name}.py").read_text().splitlines() if line.strip()]
    assert len(lines) - 1 <= LINES[name]  # without the docstring
