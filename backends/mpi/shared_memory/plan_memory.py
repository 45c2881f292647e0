"""Shared memory of one bound plan: blocks of a pool, and the buffers of its results."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from linop.backends.engine.arrays.alignment import PAGE
from linop.backends.engine.arrays.interface import SMALL
from linop.backends.engine.arrays.lending import PooledBuffer
from linop.backends.mpi.shared_memory.pool import ALIGNED, Block, Pool, Slots
from linop.planning.plan import LoweredPlan, Make, Receive, Send
from linop.spaces.scalars import Array

SLOTS = 3
"""Buffers for each large result; the last free one is not lent, but copied."""
MANY, FEW = 8, 2
"""Buffers for each message that is not written into the result: if all messages are at most `SMALL`
bytes, and otherwise."""


class NoRoomError(Exception):
    """Raised if there is too little shared memory for a plan."""


class PlanMemory:
    """Blocks of a pool that one plan holds until `give_back`.

    Attributes:
        slots: pool of its results' buffers; None if the results lie in ordinary memory.
    """

    def __init__(self, pool: Pool, dtype: np.dtype[Any]) -> None:
        self.pool = pool
        self.slots: Slots | None = None
        self._dtype = dtype
        self._blocks: list[Block] = []

    def take(self, size: int) -> Block:
        """A new block.

        Raises:
            NoRoomError: there is too little shared memory; all blocks are given back.
        """
        block = self._found(size)
        self._blocks.append(block)
        return block

    def _found(self, size: int) -> Block:
        block = self.pool.take(size)
        if block is None:
            self.give_back()
            raise NoRoomError
        return block

    def array(self, shape: tuple[int, ...]) -> Array:
        """Zeros in a new block."""
        array = self._buffer(self.take(self._size(shape)), shape).array()
        array.fill(0)
        return array

    def add_slots(self, shapes: Iterable[tuple[int, ...]]) -> None:
        """Allocate buffers for results of these shapes."""
        self.slots, every = Slots(self.pool), list(shapes)
        for _ in range(SLOTS):
            blocks: list[Block] = []
            for shape in every:
                try:
                    blocks.append(self._found(self._size(shape)))
                except NoRoomError:
                    for block in blocks:
                        self.pool.give(block)
                    raise
            pairs = zip(blocks, every, strict=True)
            self.slots.add(blocks, [self._buffer(block, shape) for block, shape in pairs])

    def _buffer(self, block: Block, shape: tuple[int, ...]) -> PooledBuffer:
        return PooledBuffer(self.pool.own(block), 0, shape, self._dtype)

    def _size(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * self._dtype.itemsize

    def give_back(self) -> None:
        """Return the blocks; those of results still referenced by users, once these are
        released."""
        if self.slots is not None:
            self.slots.end()
        while self._blocks:
            self.pool.give(self._blocks.pop())


def memory_needed(plan: LoweredPlan) -> int:
    """Bytes of shared memory that a plan and its adjoint may need on one worker."""
    made = sum(step.region.size for step in plan.steps if isinstance(step, Make))
    moved = sum(step.size for step in plan.steps if isinstance(step, Send | Receive))
    ends = sum(region.size for region in (*plan.inputs, *plan.outputs))
    elements = 2 * (made + FEW * moved) + SLOTS * ends
    blocks = 2 * len(plan.steps) + SLOTS * (len(plan.inputs) + len(plan.outputs))
    elements += min(elements, blocks * PAGE // plan.dtype.itemsize)  # padding for alignment
    return elements * plan.dtype.itemsize + 2 * MANY * (SMALL + ALIGNED * len(plan.steps))
