"""Memory that the ranks of one machine share: windows, and blocks of them.

A window is a file in memory that all ranks map and nobody names any more: it is unlinked once all
have it, so that nothing is left of a job that is killed, and its memory lives until the last array
in it is gone, after MPI too. Its pages are there from the start: memory that runs out later breaks
nothing. Windows are dear to make (up to 37 ms) and live as long as the process, since results that
users hold lie in them; plans take blocks, and give them back.

Another rank may still write to a block that is given back. It is used again from the next time on
that all ranks compile: nobody is in a call then, and who calls a plan of before, or gives it up,
finds out that it is gone (`linop.backends.shared_memory.runs`).
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

from linop.backends.execution.alignment import PAGE, placed
from linop.backends.execution.lending import Buffer
from linop.spaces.scalars import Array

ALIGNED = 64
"""Bytes that blocks are multiples of, and start at: a cache line."""
_LEAST = 16 << 20
"""Bytes a rank that a window has at least, if there is room."""
_SHARE = 2
"""At most one part in so many of the free shared memory becomes a window."""
WHERE = Path("/dev/shm")
"""A file system in memory; it may be small, in containers 64 MB."""
PREFIX = f"linop-{os.getuid()}-"
_ABANDONED = 60.0
"""Seconds after which a file that still has a name is one of a job that was killed: a window has
one for milliseconds."""

GatherAll = Callable[[bytes], list[bytes]]


@dataclass(frozen=True)
class Block:
    """A piece of this rank's part of a window."""

    segment: int
    offset: int
    size: int


@dataclass(frozen=True)
class Place:
    """Where another rank is to write: a box of an array, or of one of several arrays of the same
    form."""

    segments: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class NoWindowError(Exception):
    """A rank could not make or map a window: none has it. The text is the first such rank's."""


class Segment:
    """One window: this rank's memory in it, which parts are free, and everybody's memory.

    Args:
        gather_all: everybody's data, by rank: the ranks make a window together.
        size: bytes of each rank.

    Raises:
        NoWindowError: on every rank.
    """

    def __init__(self, gather_all: GatherAll, rank: int, ranks: int, size: int) -> None:
        self.size = -(-size // PAGE) * PAGE
        path = _made(self.size * ranks) if rank == 0 else ""
        path = gather_all(path.encode())[0].decode()
        try:
            shared: mmap.mmap | None = None
            wrong = ""
            try:
                shared = _mapped(path, self.size * rank, self.size, self.size * ranks)
            except OSError as error:
                wrong = f"{error.strerror} on worker {rank}"
            except ValueError as error:  # the file is short: others have no room for their parts
                wrong = f"{error} on worker {rank}"
            said = [text.decode() for text in gather_all(wrong.encode()) if text]
        finally:
            if rank == 0:
                Path(path).unlink(missing_ok=True)
        if said or shared is None:
            raise NoWindowError(said[0])
        self.memory: list[Array] = [
            np.frombuffer(shared, np.uint8, self.size, self.size * k) for k in range(ranks)
        ]
        self._at = _address(self.memory[rank])
        self._free: list[tuple[int, int]] = [(0, self.size)]

    def take(self, size: int) -> int | None:
        """The start of a free piece; None if there is none so long."""
        for k, (begin, stop) in enumerate(self._free):
            start = placed(self._at + begin, size) - self._at
            if stop - start >= size:
                rest = [(begin, start), (start + size, stop)]
                self._free[k : k + 1] = [(a, b) for a, b in rest if b > a]
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Make a piece free again."""
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
    """The windows of the ranks of a communicator, all on one machine. `of` makes them.

    Raises:
        NoWindowError: there is no room for the first; on every rank.
    """

    def __init__(self, gather_all: GatherAll, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        if rank == 0:
            _sweep()
        bells = Segment(gather_all, rank, ranks, ALIGNED)
        self.bells = [memory.data.cast("q") for memory in bells.memory]
        """A number of each rank's that is not zero when there is an alarm for it: cheaper to look
        at than to ask MPI."""
        self.segments: list[Segment] = []
        self._retired: deque[Block] = deque()
        self._idle: list[Block] = []
        self._fence: MPI.Win | None = None

    @staticmethod
    def of(comm: MPI.Intracomm, gather_all: GatherAll) -> Pool:
        """The pool of these ranks, whatever their communicator: collective."""
        group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
        ranks = tuple(group.Translate_ranks(None, world))
        if ranks not in _POOLS:
            _POOLS[ranks] = Pool(gather_all, comm.rank, comm.size)
        return _POOLS[ranks]

    def room(self) -> tuple[int, int]:
        """The longest free piece here, and how much a new window could have a rank, in bytes."""
        longest = max((s.longest for s in self.segments), default=0)
        try:
            free = shutil.disk_usage(WHERE).free
        except OSError:
            free = 0
        return longest, free // _SHARE // self._ranks

    def grow(self, gather_all: GatherAll, size: int) -> None:
        """A new window with at least so many bytes a rank, if all can have it: collective."""
        with contextlib.suppress(NoWindowError):
            self.segments.append(Segment(gather_all, self._rank, self._ranks, aligned(size)))

    def take(self, size: int) -> Block | None:
        """A free block of this rank's memory."""
        size = max(aligned(size), ALIGNED)
        for number, segment in enumerate(self.segments):
            start = segment.take(size)
            if start is not None:
                return Block(number, start, size)
        return None

    def give(self, block: Block) -> None:
        """Give a block back, at any time: garbage may be collected in the middle of a call."""
        self._retired.append(block)

    def retire(self) -> None:
        """Before all ranks meet: what was given back is to be free after it."""
        self._idle += [self._retired.popleft() for _ in range(len(self._retired))]

    def reclaim(self) -> None:
        """Make free what was given back before all ranks met: they know that it is gone. No other
        rank may be in a call between this and the next `take`."""
        idle, self._idle = self._idle, []
        for block in idle:
            self.segments[block.segment].give(block.offset, block.size)

    def own(self, block: Block) -> Array:
        """A block's memory, as bytes."""
        memory = self.segments[block.segment].memory[self._rank]
        return memory[block.offset : block.offset + block.size]

    def place(self, views: Sequence[Array]) -> Place:
        """Where views of this rank's blocks are, for other ranks."""
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
        """The arrays that another rank's place stands for."""
        return [
            np.ndarray(place.shape, dtype, self.segments[s].memory[rank], offset, place.strides)
            for s, offset in zip(place.segments, place.offsets, strict=True)
        ]

    def numbers(self, segment: int, rank: int) -> memoryview:
        """A rank's memory in a window, as whole numbers of eight bytes."""
        return self.segments[segment].memory[rank].data.cast("q")

    def sync(self) -> None:
        """Make what was written before seen before what is written after: a barrier of the
        processor, which MPI offers for windows, whichever."""
        if self._fence is None:
            self._fence = MPI.Win.Allocate_shared(ALIGNED, 1, comm=MPI.COMM_SELF)
            self._fence.Lock_all()
        self._fence.Sync()


class Slots:
    """Memory of a plan's large results, so many times over: each is lent to a user, and comes back
    once nobody sees any array of it.

    Attributes:
        buffers: of each slot, one for each result.
        free: the numbers of those that nobody has.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._blocks: list[list[Block]] = []
        self._over = False
        self.buffers: list[list[Buffer]] = []
        self.free: deque[int] = deque()

    def add(self, blocks: list[Block], buffers: list[Buffer]) -> None:
        """One more of them."""
        self.free.append(len(self._blocks))
        self._blocks.append(blocks)
        self.buffers.append(buffers)

    def take(self) -> tuple[int, list[Array]]:
        """The number of a slot, and its arrays."""
        number = self.free.popleft()
        left = deque(range(len(self.buffers[number])))

        def over() -> None:
            if left.pop() == 0:  # the last one of all
                self._back(number)

        return number, [buffer.array(over) for buffer in self.buffers[number]]

    def _back(self, number: int) -> None:
        self.free.append(number)
        if self._over:
            self.end()

    def end(self) -> None:
        """Give the blocks back: those that users still see, when they let go."""
        self._over = True
        while self.free:
            try:
                number = self.free.pop()
            except IndexError:  # another thread was faster
                return
            for block in self._blocks[number]:
                self._pool.give(block)


_POOLS: dict[tuple[int, ...], Pool] = {}
"""By the ranks in COMM_WORLD. They are kept: making windows is slow, and results lie in them."""


def wanted(need: int, room: Sequence[tuple[int, int]]) -> int | None:
    """How long a new window must be for so many bytes a rank: 0 if all have room, None if there is
    not enough shared memory. The same on every rank, for the same `room` of all."""
    if all(longest >= need for longest, _ in room):
        return 0
    most = min(limit for _, limit in room)
    size = max(need, min(_LEAST, most))
    return size if size <= most else None


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _made(size: int) -> str:
    """A new file of so many bytes, still without pages; an error shows when it is mapped."""
    path = WHERE / f"{PREFIX}{uuid.uuid4()}"
    with contextlib.suppress(OSError):
        made = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.ftruncate(made, size)
        finally:
            os.close(made)
    return str(path)


def _mapped(path: str, offset: int, length: int, size: int) -> mmap.mmap:
    """A file's memory. This rank's part gets its pages here, near the core that will use them."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(file, offset, length)
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def _sweep() -> None:
    """Remove what killed jobs of this user left: see `_ABANDONED`."""
    with contextlib.suppress(OSError):
        for path in WHERE.glob(f"{PREFIX}*"):
            if time.time() - path.stat().st_mtime > _ABANDONED:
                path.unlink()


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
