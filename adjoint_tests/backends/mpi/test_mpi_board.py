"""Sums over a board in shared memory: by ranks that are ahead or late, after errors of all, and of
backends that have ended."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mpi4py")

from linop.backends.mpi.shared_memory.board import Board
from support.job_programs import runs, runs_beside_others
from support.requirements import needs_mpi

pytestmark = [needs_mpi, pytest.mark.timeout(200)]

several = pytest.mark.parametrize("ranks", [2, 3, 4])
BOARD = """
import threading, time
backend = linop.backends.get("mpi", comm=comm, wait_limit=10)
board = backend.board("sum numbers")
"""


@several
def test_sums_are_right_whoever_is_late(ranks: int) -> None:
    """Numbers of any sign, whose sum overflows as NumPy's does."""
    text = """
every = np.random.default_rng(3).integers(-(2**63), 2**63 - 1, (600, n))
with np.errstate(over="ignore"):
    wanted = every.sum(1)
for k in range(600):
    if k % 37 == me:
        time.sleep(0.002)
    found = board.sum(int(every[k, me]), 5 + me, "sum numbers")
    assert found == (wanted[k], sum(range(5, 5 + n))), (k, found, wanted[k])
"""
    runs_beside_others(ranks, BOARD + text)


@several
def test_boards_are_of_one_backend(ranks: int) -> None:
    """Of communicators of the same ranks, which have one pool of shared memory; in any order."""
    text = """
other = linop.backends.get("mpi", comm=comm.Dup(), wait_limit=10)
boards = [board, other.board("sum numbers"), backend.board("sum numbers")]
for k in range(100):
    for which in [(0, 1), (1, 2, 2), (0, 0, 2)][k % 3]:
        assert boards[which].sum(k + which, 1, "sum") == (n * (k + which), n)
"""
    runs_beside_others(ranks, BOARD + text)


@several
def test_a_rank_that_does_not_come_is_told_and_what_follows_is_right(ranks: int) -> None:
    """Also if ranks have left out other numbers of sums."""
    text = """
for round in range(3):
    for k in range(round + 1):
        assert board.sum(k, 1, "sum numbers") == (n * k, n)
    if me == round % n:
        said = raised(lambda: backend.transport.gather_all(None, "do something else"))
    else:
        said = raised(lambda: board.sum(1, 1, "sum numbers"))
    assert said.startswith("DeadlockError: deadlock: "), said
    assert f"waits for worker {round % n} to sum numbers" in said, said
    assert len(set(backend.transport.gather_all(said))) == 1
for k in range(5):
    assert board.sum(k, 1, "sum numbers") == (n * k, n)
"""
    runs_beside_others(ranks, BOARD + text)


def test_a_failed_backend_sums_nothing() -> None:
    text = """
from linop.errors import ShapeError
if me == 0:
    time.sleep(0.2)
    backend.fail(ShapeError("planted"))
said = raised(lambda: board.sum(1, 1, "sum numbers"))
assert said.startswith("ShapeError: ") and "planted" in said, said
assert "planted" in raised(lambda: board.sum(1, 1, "sum numbers"))
"""
    runs_beside_others(2, BOARD.replace("comm=comm", "comm=comm.Dup()") + text)


def test_forks_and_ended_backends_are_refused(tmp_path: Path) -> None:
    text = """
import os
assert board.sum(1, 1, "sum numbers") == (n, n)
if (child := os.fork()) == 0:
    said = raised(lambda: board.sum(5, 1, "sum numbers"))
    os._exit(0 if "is a fork of worker" in said else 1)
assert os.waitpid(child, 0)[1] == 0
assert board.sum(2, 1, "sum numbers") == (2 * n, n)
MPI.Finalize()
assert "MPI is finalized" in raised(lambda: board.sum(3, 1, "sum numbers"))
"""
    runs(2, tmp_path / "program.py", BOARD + text)


def test_threads_do_not_mix_their_sums() -> None:
    """One waits; another one of the same rank is refused."""
    text = """
said = []
if me == 0:
    waits = threading.Thread(target=lambda: said.append(board.sum(1, 1, "sum numbers")))
    waits.start()
    time.sleep(0.2)
    assert "threads sum numbers at once" in raised(lambda: board.sum(2, 1, "sum numbers"))
    comm.Barrier()
    waits.join()
    assert said == [(n, n)]
else:
    comm.Barrier()
    assert board.sum(1, 1, "sum numbers") == (n, n)
"""
    runs_beside_others(2, BOARD + text)


def test_who_reads_sees_all_or_nothing() -> None:
    """A rank writes its two numbers, and then that they are there; the next ones elsewhere."""
    written: list[int] = []

    class Line(list[int]):
        def __setitem__(self, k: Any, value: Any) -> None:
            written.append(k)
            super().__setitem__(k, value)

    points: dict[Any, Any] = {}
    transport = SimpleNamespace(channel=SimpleNamespace(epoch=0), points=points, spins=1)
    worker: Any = SimpleNamespace(transport=transport, worker=0, failure=None, ended=False)
    line: Any = Line(8 * [0])
    board = Board(worker, [line])
    assert board.sum(3, 5, "sum") == (3, 5)
    first, written[:] = written[:], []
    assert board.sum(4, 6, "sum") == (4, 6)
    for order, numbers, turn in ((first, [3, 5], 1), (written, [4, 6], 2)):
        assert [line[k] for k in order] == [*numbers, turn], order
    assert not set(first).intersection(written)
    assert list(points.values()) == [(2, math.inf)]
