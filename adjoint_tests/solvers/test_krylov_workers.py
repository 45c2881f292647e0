"""Krylov methods on workers: bits, reductions and votes are those of one process; and checkpoints
of all workers together."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import linop
from linop.errors import ArgumentError
from linop.spaces import vector
from support.contracts import solvers as contracts
from support.contracts.plans import raised
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

solvers = linop.solvers
names = st.sampled_from(sorted(contracts.METHODS))
dtypes = st.sampled_from(["float64", "complex128", "float32"])
few = settings(max_examples=8)
"""Of ranks, which take the roads of threads, and other messages."""
each_method = pytest.mark.parametrize("name", sorted(contracts.METHODS))


@each_method
def test_bits_of_each(name: str) -> None:
    on_threads(3, contracts.has_the_bits_of_the_reference, name, 2, "complex128")


@given(names, st.integers(1, 8), st.integers(0, 5), dtypes)
def test_bits_on_threads(name: str, workers: int, more: int, dtype: str) -> None:
    on_threads(workers, contracts.has_the_bits_of_the_reference, name, more, dtype)


@needs_mpi
@few
@given(names, st.integers(1, 4), st.integers(0, 5), dtypes)
def test_bits_on_ranks(name: str, ranks: int, more: int, dtype: str) -> None:
    on_ranks(ranks, contracts.has_the_bits_of_the_reference, name, more, dtype)


@each_method
@given(st.integers(6, 20), st.integers(0, 100))
def test_reductions_are_counted(name: str, size: int, seed: int) -> None:
    """`Result.reductions` is the number of calls, and the docstring's number an iteration and a few
    at the ends."""
    make, solve, most = contracts.METHODS[name]
    op = make(size, 2, "float64")
    b = op.codomain.random(seed)
    calls = 0
    real = vector.summed

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vector, "summed", counted)
        found = solve(op, b)
    assert found.reductions == calls
    assert found.nit > 0
    assert calls <= 5 + most * found.nit


def test_checkpoint_of_one_process(tmp_path: Path) -> None:
    op = contracts.hermitian(12, 2, "complex128", 1.0)
    b = op.codomain.random(1)
    whole = solvers.cg(op, [b, 2 * b], rtol=1e-12)
    file = tmp_path / "state"
    solvers.cg(op, [b, 2 * b], rtol=1e-12, maxiter=5, checkpoint=file, every=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state", "state.previous"]
    found = solvers.cg(op, [b, 2 * b], rtol=1e-12, resume=file)
    for one, other in zip(found, whole, strict=True):
        assert one.nit > 5
        assert (one.residuals, one.message) == (other.residuals, other.message)
        assert one.x.equals(other.x)


@each_method
def test_runs_resume_on_threads(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        on_threads(2, contracts.resumes, name, 16, 2, folder + "/state")


@needs_mpi
@few
@given(names, st.integers(1, 3), st.integers(1, 3))
def test_runs_resume_on_ranks(name: str, ranks: int, stop: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(ranks, contracts.resumes, name, 16, stop, folder + "/state")


@given(st.integers(2, 4), st.data())
def test_workers_resume_together(workers: int, data: st.DataObject) -> None:
    behind = data.draw(st.integers(0, workers - 1))
    with tempfile.TemporaryDirectory() as folder:
        on_threads(workers, contracts.resumes_together, 12, behind, folder + "/state")


def test_workers_fail_together(tmp_path: Path) -> None:
    on_threads(3, contracts.fails_together, 12, str(tmp_path / "state"))


def test_a_file_that_cannot_be_written_leaves_the_last_one(tmp_path: Path) -> None:
    """A failure in the middle of writing is as if nothing had been written."""
    op = contracts.hermitian(12, 1, "float64", 1.0)
    b = op.codomain.random(1)
    file = tmp_path / "state"
    solvers.cg(op, b, maxiter=2, checkpoint=file)
    before = file.read_bytes()
    with pytest.MonkeyPatch.context() as patch:

        def full(handle: int) -> None:
            raise OSError("no space left")

        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="no space left"):
            solvers.cg(op, b, maxiter=4, resume=file, checkpoint=file)
    assert file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


@given(st.data())
def test_damaged_files_are_not_resumed_from(data: st.DataObject) -> None:
    """A byte changed or cut off anywhere is noticed, or changes nothing that is read."""
    op = contracts.hermitian(12, 1, "float64", 1.0)
    b = op.codomain.random(1)
    whole = solvers.cg(op, b)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state"
        solvers.cg(op, b, maxiter=2, checkpoint=file)
        content = bytearray(file.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content[at] ^= data.draw(st.integers(1, 255))
        else:
            del content[at:]
        file.write_bytes(content)
        try:
            found = solvers.cg(op, b, resume=file)
        except ArgumentError as error:
            assert "find none or a damaged one" in str(error)
        else:
            assert found.residuals == whole.residuals


def test_other_problems_are_not_resumed(tmp_path: Path) -> None:
    op = contracts.hermitian(12, 1, "float64", 1.0)
    b, file = op.codomain.random(1), tmp_path / "state"
    solvers.cg(op, b, maxiter=2, checkpoint=file)
    for call in (
        lambda: solvers.cg(op, 2 * b, resume=file),
        lambda: solvers.cg(op, b, rtol=1e-3, resume=file),
        lambda: solvers.cg(op, b, b, resume=file),
        lambda: solvers.cg(op, [b, b], resume=file),
        lambda: solvers.minres(op, b, resume=file),
    ):
        words = raised(ArgumentError, call)
        assert "1 of 1 workers have no checkpoint of this problem there" in words
        assert "1 one of another method, space, right-hand side or argument" in words
    words = raised(ArgumentError, lambda: solvers.cg(op, b, resume=tmp_path / "none"))
    assert "1 find none or a damaged one" in words
    with pytest.raises(ArgumentError, match="is a directory"):
        solvers.cg(op, b, resume=tmp_path)
    with pytest.raises(ArgumentError, match="every is a whole number from 1; given 0"):
        solvers.cg(op, b, checkpoint=file, every=0)
