"""Shared-memory windows of the ranks of one machine, and allocation of blocks in them.

A window is a file in memory that all ranks map. It is unlinked once all have mapped it, so that a
killed job leaves nothing, and its memory lives until the last array in it is gone, even after MPI
ends. Its pages are allocated at creation: memory that runs out later breaks nothing. Creating a
window is slow (up to 37 ms), and windows live as long as the process, since results that users hold
lie in them; plans take blocks, and return them.

Other ranks may still write to a returned block. It is reused after the next collective compile: no
rank is in a call then, and a rank that calls or abandons an earlier plan finds that it is released
(`linop.backends.mpi.shared_memory.runs`).
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import shutil
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from linop.backends.engine.arrays.alignment import PAGE, placed
from linop.backends.engine.arrays.lending import PooledBuffer
from linop.spaces.scalars import Array

ALIGNED = 64
"""Alignment and granularity of blocks, in bytes: a cache line."""
_LEAST = 16 << 20
"""Smallest size of a window, in bytes per rank, if there is room."""
_SHARE = 2
"""Largest share of the free shared memory for one window, as a divisor."""
WHERE = Path("/dev/shm")
"""File system in memory; it may be small (64 MB in containers)."""
PREFIX = f"linop-{os.getuid()}-"
_ABANDONED = 60.0
"""Age in seconds from which a file that still has a name is left from a killed job: a window has
one for milliseconds."""

GatherAll = Callable[[str], list[str]]


@dataclass(frozen=True)
class Block:
    """A block of this rank's memory in a window; `offset` and `size` in bytes."""

    segment: int
    offset: int
    size: int


@dataclass(frozen=True)
class Place:
    """Location of a box for a remote writer, in one array or in each of several arrays of the same
    shape; offsets and strides in bytes."""

    segments: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class NoWindowError(Exception):
    """Raised on every rank if some rank could not create or map a window, with the first such
    rank's text."""


class Segment:
    """One window: this rank's memory with its free blocks, and views of that of the ranks of its
    machine, by rank.

    Args:
        gather_all: all-gather of texts by rank; creating a window is collective over the ranks of
            all machines, each of which creates its own.
        here: ranks of this machine.
        size: bytes per rank.

    Raises:
        NoWindowError: on every rank.
    """

    def __init__(self, gather_all: GatherAll, rank: int, here: Sequence[int], size: int) -> None:
        self.size = -(-size // PAGE) * PAGE
        first, ranks, mine = here[0], len(here), here.index(rank)
        path = _made(self.size * ranks) if rank == first else ""
        path = gather_all(path)[first]
        try:
            shared: mmap.mmap | None = None
            wrong = ""
            try:
                shared = _mapped(path, self.size * mine, self.size, self.size * ranks)
            except OSError as error:
                wrong = f"{error.strerror} on worker {rank}"
            except ValueError as error:  # the file is short: other ranks' allocations failed
                wrong = f"{error} on worker {rank}"
            said = [text for text in gather_all(wrong) if text]
        finally:
            if rank == first:
                Path(path).unlink(missing_ok=True)
        if said or shared is None:
            raise NoWindowError(said[0])
        self.memory: dict[int, Array] = {
            one: np.frombuffer(shared, np.uint8, self.size, self.size * k)
            for k, one in enumerate(here)
        }
        self._at = _address(self.memory[rank])
        self._free: list[tuple[int, int]] = [(0, self.size)]

    def take(self, size: int) -> int | None:
        """Take a free block: its start; None if no free block is long enough."""
        for k, (begin, stop) in enumerate(self._free):
            start = placed(self._at + begin, size) - self._at
            if stop - start >= size:
                rest = [(begin, start), (start + size, stop)]
                self._free[k : k + 1] = [(a, b) for a, b in rest if b > a]
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Return a block, and merge it with its free neighbours."""
        k = bisect.bisect(self._free, (start, start))
        stop = start + size
        before, after = self._free[max(k - 1, 0) : k], self._free[k : k + 1]
        if before and before[0][1] == start:
            start, k = before[0][0], k - 1
        else:
            before = []
        if after and after[0][0] == stop:
            stop = after[0][1]
        else:
            after = []
        self._free[k : k + len(before) + len(after)] = [(start, stop)]

    @property
    def longest(self) -> int:
        return max((b - a for a, b in self._free), default=0)


class Pool:
    """Windows of the ranks of a communicator, one for each machine. Use `of` to create them.

    Raises:
        NoWindowError: the first window could not be created; on every rank.
    """

    def __init__(self, gather_all: GatherAll, rank: int, here: Sequence[int]) -> None:
        self._rank, self._here = rank, here
        if rank == here[0]:
            _sweep()
        bells = Segment(gather_all, rank, here, ALIGNED)
        self.bells = {one: memory.data.cast("q") for one, memory in bells.memory.items()}
        """Numbers of each rank of this machine that change at an alarm for it: cheaper to poll than
        MPI."""
        self.segments: list[Segment] = []
        self._retired: deque[Block] = deque()
        self._idle: list[Block] = []
        self._fence: MPI.Win | None = None

    @staticmethod
    def of(comm: MPI.Intracomm, gather_all: GatherAll, here: Sequence[int]) -> Pool:
        """The pool of a communicator's ranks on this machine, shared by all communicators of the
        same ranks; collective."""
        group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
        key = tuple(group.Translate_ranks(None, world)), tuple(here)
        if key not in _POOLS:
            _POOLS[key] = Pool(gather_all, comm.rank, here)
        return _POOLS[key]

    def room(self) -> tuple[int, int]:
        """Longest free block of this rank, and the largest possible new window per rank, in
        bytes."""
        longest = max((s.longest for s in self.segments), default=0)
        try:
            free = shutil.disk_usage(WHERE).free
        except OSError:
            free = 0
        return longest, free // _SHARE // len(self._here)

    def grow(self, gather_all: GatherAll, size: int) -> None:
        """Add a window of at least `size` bytes per rank, if all ranks can map it; collective."""
        with contextlib.suppress(NoWindowError):
            self.segments.append(Segment(gather_all, self._rank, self._here, aligned(size)))

    def take(self, size: int) -> Block | None:
        """Take a free block of this rank's memory; None if there is none."""
        size = max(aligned(size), ALIGNED)
        for number, segment in enumerate(self.segments):
            start = segment.take(size)
            if start is not None:
                return Block(number, start, size)
        return None

    def give(self, block: Block) -> None:
        """Return a block; safe at any time, since a finalizer may run in the middle of a call."""
        self._retired.append(block)

    def retire(self) -> None:
        """Before a collective compile: mark the returned blocks for `reclaim`."""
        self._idle += [self._retired.popleft() for _ in range(len(self._retired))]

    def reclaim(self) -> None:
        """Free the marked blocks, after all ranks have met: they know of the release. No other rank
        may be in a call between this and the next `take`."""
        idle, self._idle = self._idle, []
        for block in idle:
            self.segments[block.segment].give(block.offset, block.size)

    def own(self, block: Block) -> Array:
        """Memory of a block, as an array of uint8."""
        memory = self.segments[block.segment].memory[self._rank]
        return memory[block.offset : block.offset + block.size]

    def place(self, views: Sequence[Array]) -> Place:
        """Location of views of this rank's blocks, for other ranks."""
        starts = [_address(segment.memory[self._rank]) for segment in self.segments]
        segments, offsets = [], []
        for view in views:
            at = _address(view)
            number = next(
                k for k, start in enumerate(starts) if start <= at < start + self.segments[k].size
            )
            segments.append(number)
            offsets.append(at - starts[number])
        return Place(tuple(segments), tuple(offsets), views[0].shape, views[0].strides)

    def views(self, place: Place, rank: int, dtype: np.dtype[Any]) -> list[Array]:
        """Arrays at another rank's location."""
        return [
            np.ndarray(place.shape, dtype, self.segments[s].memory[rank], offset, place.strides)
            for s, offset in zip(place.segments, place.offsets, strict=True)
        ]

    def numbers(self, segment: int, rank: int) -> memoryview:
        """A rank's memory in a window, as 64-bit integers."""
        return self.segments[segment].memory[rank].data.cast("q")

    def sync(self) -> None:
        """Memory barrier: writes before it become visible before those after it. MPI provides one
        for windows, and any window will do."""
        if self._fence is None:
            self._fence = MPI.Win.Allocate_shared(ALIGNED, 1, comm=MPI.COMM_SELF)
            self._fence.Lock_all()
        self._fence.Sync()


class Slots:
    """Pool of shared-memory buffers for a plan's large results. A slot has one buffer for each
    result; it is lent to a user, and returns once no array over it is left.

    Attributes:
        buffers: the buffers of each slot, one for each result.
        free: numbers of the free slots.
        number: number of the slot taken last.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._blocks: list[list[Block]] = []
        self._over = False
        self.buffers: list[list[PooledBuffer]] = []
        self.free: deque[int] = deque()
        self.number = 0

    def add(self, blocks: list[Block], buffers: list[PooledBuffer]) -> None:
        """Add a slot."""
        self.free.append(len(self._blocks))
        self._blocks.append(blocks)
        self.buffers.append(buffers)

    def take(self) -> list[Array]:
        """Take a free slot, `number`: its arrays. That which was given back last is in the cache:
        an all-reduce of 1 MiB takes two thirds of the time with it."""
        number = self.number = self.free.pop()
        left = deque(range(len(self.buffers[number])))

        def over() -> None:
            if left.pop() == 0:  # the last one of all
                self._back(number)

        return [buffer.array(over) for buffer in self.buffers[number]]

    def _back(self, number: int) -> None:
        self.free.append(number)
        if self._over:
            self.end()

    def end(self) -> None:
        """Return the blocks to the pool; those still referenced by users, once these are
        released."""
        self._over = True
        while self.free:
            try:
                number = self.free.pop()
            except IndexError:  # another thread was faster
                return
            for block in self._blocks[number]:
                self._pool.give(block)


_POOLS: dict[tuple[tuple[int, ...], tuple[int, ...]], Pool] = {}
"""Pools by ranks in COMM_WORLD and those of this machine, kept for the process: creating windows is
slow, and results lie in them."""


def wanted(need: int, room: Sequence[tuple[int, int]]) -> int | None:
    """Bytes per rank of a new window such that every rank has room for `need` bytes; 0 if all have
    room already, None if there is not enough shared memory. The same on every rank, for the same
    `room` (see `Pool.room`) of all ranks."""
    if all(longest >= need for longest, _ in room):
        return 0
    most = min(limit for _, limit in room)
    size = max(need, min(_LEAST, most))
    return size if size <= most else None


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _made(size: int) -> str:
    """Create a file of a given size, without pages; errors appear when it is mapped."""
    path = WHERE / f"{PREFIX}{uuid.uuid4()}"
    with contextlib.suppress(OSError):
        made = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.ftruncate(made, size)
        finally:
            os.close(made)
    return str(path)


def _mapped(path: str, offset: int, length: int, size: int) -> mmap.mmap:
    """Map a file, and allocate the pages of this rank's range, near the core that will use them."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(file, offset, length)
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def _sweep() -> None:
    """Remove files left by killed jobs of this user; see `_ABANDONED`."""
    with contextlib.suppress(OSError):
        for path in WHERE.glob(f"{PREFIX}*"):
            if time.time() - path.stat().st_mtime > _ABANDONED:
                path.unlink()


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
