"""Bound plans under MPI: checks that a `PersistentJob` runs as ``check(comm, *arguments)``.

Most are the contracts of `support.contracts.plans` and `support.contracts.failing_calls`, on a
backend with the options that a test wants. This module must not import MPI when it is imported:
that of pytest's own process is never started.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import linop
from linop import COPIES, Partition, TensorSpace
from linop.backends import Backend
from linop.errors import DeadlockError
from linop.planning import Placement
from support.contracts.plans import argument, raised, result, same, stencil, total, works
from support.workers import on_mpi

if TYPE_CHECKING:
    from mpi4py import MPI


def makes_no_communicators(comm: MPI.Comm) -> None:
    """Applications after the first one, and their gradients. A new communicator has the lowest
    handle that is free."""
    import torch

    backend = linop.backends.get("mpi", comm=comm)
    op = total(comm.size)
    handles = []
    for _ in range(3):
        for _ in range(10):
            x = torch.ones(5, dtype=torch.float64, requires_grad=True)
            linop.autograd.apply(op, x, backend).sum().backward()
        other = comm.Dup()
        handles.append(other.py2f())
        other.Free()
    assert len(set(handles)) == 1, handles


def boxes_cross_once(backend: Backend, n: int) -> None:
    """Between two machines of two ranks, collectives are of two levels, and give the same."""
    assert backend.placement == Placement([0, 1, 0, 1])
    each = TensorSpace((n,), Partition((4,)), axes=[COPIES])
    gather = linop.all_gather(TensorSpace((4 * n,), Partition((4,))))
    total = linop.sum_reduce(each, Partition((1,)))
    for op in (linop.all_reduce(each), total, total.H, gather, gather.H):
        plan, x = op.compile(backend), op.domain.integers(n)
        found, wanted = plan(backend.vector(op.domain, x.arrays)), op(x)
        for name, array in found.arrays.items():
            assert (array == wanted[name]).all()
        assert backend.worker in (1, 2) or plan.describe().count("next stage") > 1


LIMIT = 2.0


def waits_end(comm: MPI.Comm, windows: bool | str | None, when: str, odd: int) -> None:
    """A call left out by one rank is an error of all ranks that wait, within seconds, and of that
    rank when it waits next."""
    backend = on_mpi(comm, windows=windows, wait_limit=LIMIT)
    plan = total(comm.size).compile(backend)
    if when != "first call":
        works(plan)
    begun = time.monotonic()
    if when == "compile":
        call: Callable[[], Any] = partial(total(comm.size).compile, backend)
    else:
        call = partial(plan, np.ones(5))
    if comm.rank != odd:
        text = raised(DeadlockError, call)
        assert "longer than 2 s" in text and "worker " in text, text
    assert time.monotonic() - begun < LIMIT + 5
    met = comm.Ibarrier()  # MPI's own wait would keep a core busy until the limit
    while not met.Test():
        time.sleep(1e-3)


def nothing_accumulates(comm: MPI.Comm, cycles: int) -> None:
    """Compiling, calling and dropping plans, by `release` or without a word, leaves no memory,
    no windows and no handles behind. MPICH has 2048 communicators and would run out of them."""
    backend: Any = linop.backends.get("mpi", comm=comm)
    op = total(comm.size, 4)
    x = np.ones(4)
    before: list[Any] = []
    for k in range(cycles):
        plan = op.compile(backend)
        y = plan(x)
        if k % 2:
            plan.H(y)
            plan.release()
        if k == cycles // 5:
            del plan
            gc.collect()
            before = [resident(), unused(backend), shared()]
    assert y.tolist() == [comm.size] * 4
    del plan, y
    gc.collect()
    grown = resident() - before[0]
    assert grown < 8 << 20, f"{grown / 2**20:.1f} MB more after {cycles} cycles"
    taken = before[1] - unused(backend)
    assert taken < 16 << 10, f"{taken} bytes of windows less after {cycles} cycles"
    assert shared() == before[2]


def unused(backend: Any) -> int:
    """Bytes of windows that no plan has."""
    pool = backend._pool
    return sum(b - a for s in pool.segments for a, b in s._free) if pool is not None else 0


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def shared() -> list[str]:
    """The mappings of shared memory that this process has."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted(line.split()[-1] for line in lines if " rw-s " in line)


def collected_anywhere(comm: MPI.Comm, cycles: int) -> None:
    """Plans, and results that outlive them, are collected at any moment, in other plans' binding
    too: no memory is given to two."""
    backend = linop.backends.get("mpi", comm=comm)
    threshold = gc.get_threshold()
    kept: list[tuple[Any, Any]] = []
    gc.set_threshold(7, 2, 2)
    try:
        for k in range(cycles):
            plan = stencil(comm.size, 700 if k % 3 else 3).compile(backend)
            kept.append((plan(argument(plan, k)), result(plan, k)))
            plan.H(argument(plan.H, k))
            if k % 4 == 0:
                del kept[::2]
            for given, wanted in kept:
                same(given, wanted, k)
    finally:
        gc.set_threshold(*threshold)


def shared_memory_or_not_is_the_same(comm: MPI.Comm, seed: int) -> None:
    """Numbers that round are the same to the bit with and without windows, run after run."""
    n = comm.size
    X = TensorSpace((9000,), Partition((n,)), np.float32, axes=(COPIES,))
    x = X.random(seed)
    found = set()
    for windows in (None, False):
        own = comm.Dup()
        backend = linop.backends.get("mpi", comm=own, windows=windows)
        plan = linop.all_reduce(X).compile(backend)
        mine = x[X.region(comm.rank).name]
        kept = [plan(mine * 1.0) for _ in range(20)]
        found |= {array.tobytes() for array in kept}
        plan.release()
        own.Free()
    assert len(set().union(*comm.allgather(found))) == 1
