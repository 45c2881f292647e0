"""Memory that the ranks of one machine share: windows, and blocks of them.

Windows are dear to make (up to 37 ms) and live as long as the process, since results that users
hold lie in them; plans take blocks, and give them back.
"""

from __future__ import annotations

import bisect
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from linop.backends.placing import placed
from linop.scalars import Array

ALIGNED = 64
"""Bytes that blocks are multiples of, and start at: a cache line."""
_LEAST = 16 << 20
"""Bytes a rank that a window has at least, if there is room."""
_SHARE = 2
"""At most one part in so many of the free shared memory becomes a window."""
_WHERE = "/dev/shm"
"""What MPI libraries keep windows in; it may be small, in containers 64 MB."""


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


class Segment:
    """One window: this rank's memory in it, which parts are free, and everybody's memory."""

    def __init__(self, comm: MPI.Intracomm, size: int) -> None:
        self.window = MPI.Win.Allocate_shared(size, 1, comm=comm)
        self.window.Lock_all()
        self.memory: list[Array] = [
            np.asarray(self.window.Shared_query(rank)[0]) for rank in range(comm.size)
        ]
        self.size = size
        self._at = _address(self.memory[comm.rank])
        self._free: list[tuple[int, int]] = [(0, size)]

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
        self._free.insert(k, (start, start + size))
        merged: list[tuple[int, int]] = []
        for a, b in self._free:
            if merged and merged[-1][1] == a:
                merged[-1] = merged[-1][0], b
            else:
                merged.append((a, b))
        self._free = merged

    @property
    def longest(self) -> int:
        return max((b - a for a, b in self._free), default=0)


class Pool:
    """The windows of the ranks of a communicator, all on one machine. `of` makes them."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        bells = Segment(comm, ALIGNED)
        self.bells = [memory.data.cast("q") for memory in bells.memory]
        """A number of each rank's that is not zero when there is an alarm for it: cheaper to look
        at than to ask MPI."""
        self.segments: list[Segment] = []
        self._retired: deque[tuple[Block, Callable[[], bool]]] = deque()

    @staticmethod
    def of(comm: MPI.Intracomm) -> Pool:
        """The pool of these ranks, whatever their communicator: collective."""
        group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
        ranks = tuple(group.Translate_ranks(None, world))
        if ranks not in _POOLS:
            _POOLS[ranks] = Pool(comm.Dup())
        return _POOLS[ranks]

    def room(self) -> tuple[int, int]:
        """The longest free piece here, and how much a new window could have a rank, in bytes."""
        self._reclaim()
        longest = max((s.longest for s in self.segments), default=0)
        try:
            free = shutil.disk_usage(_WHERE).free
        except OSError:
            free = 0
        return longest, free // _SHARE // self._comm.size

    def grow(self, size: int) -> None:
        """A new window with at least so many bytes a rank: collective."""
        self.segments.append(Segment(self._comm, aligned(size)))

    def take(self, size: int) -> Block | None:
        """A free block of this rank's memory."""
        self._reclaim()
        size = max(aligned(size), ALIGNED)
        for number, segment in enumerate(self.segments):
            start = segment.take(size)
            if start is not None:
                return Block(number, start, size)
        return None

    def give(self, block: Block) -> None:
        """Give a block back: when the next is taken, for garbage may be collected at any time."""
        self._retired.append((block, lambda: True))

    def retire(self, block: Block, over: Callable[[], bool]) -> None:
        """Give a block back as soon as other ranks have done with it."""
        self._retired.append((block, over))

    def _reclaim(self) -> None:
        for _ in range(len(self._retired)):
            block, over = self._retired.popleft()
            if over():
                self.segments[block.segment].give(block.offset, block.size)
            else:
                self._retired.append((block, over))

    def own(self, block: Block) -> Array:
        """A block's memory, as bytes."""
        memory = self.segments[block.segment].memory[self._comm.rank]
        return memory[block.offset : block.offset + block.size]

    def place(self, views: Sequence[Array]) -> Place:
        """Where views of this rank's blocks are, for other ranks."""
        starts = [_address(segment.memory[self._comm.rank]) for segment in self.segments]
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
        """Make what was written before seen before what is written after."""
        for segment in self.segments:
            segment.window.Sync()


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


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
