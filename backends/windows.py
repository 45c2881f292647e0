"""Programs whose workers share a machine: every transfer is one copy into the receiver's memory.

What a worker receives into lives in a window that all ranks of the machine map. A receiver says up
to which run its memory may be written, and which of its arrays for results it is going to use; a
sender writes the elements where they belong, strided to strided, and says that it is done.
Messages that are small, or a small part of the result, or to be summed, go to buffers beside it: a
sender may then be several runs ahead of its receiver.

One number each says so: the run's, which only grows. Its writer is one worker, its reader one
other, and it has a cache line of its own. Stores are seen in order on x86; elsewhere the window is
synchronised before a number is written and after it is read.
"""

from __future__ import annotations

import ctypes
import platform
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from linop.backends.execute import SMALL, Program, Ready, Stage, peers_named, references
from linop.backends.shared import ALIGNED, Block, Place, Pool
from linop.backends.strided import Cell, View, Work, copying, summing
from linop.backends.transport import Who
from linop.plan import Make, Message, Plan, Put, Receive, Send, Wait
from linop.region import Region
from linop.scalars import Array

SLOTS = 3
"""Arrays for each large result; the last one that is free is not handed out, but copied."""
_MANY, _FEW = 8, 2
"""Buffers for each message that is not written into the result: for all of them small, or not."""
_PART = 8
"""Messages are written into a result if they are more than one part in so many of it."""
_PIECE = 128 * 1024
"""Bytes of a piece of a long message: it stays in the cache of a core until it is summed."""
_MOST = 1024
"""Pieces of a message at most, and a few: what a run's number is multiplied by."""
_LINE = 64
"""Bytes of a cache line."""
_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")
"""Whether stores are seen in the order in which they were made."""

Until = Callable[[Callable[[], bool], Who], None]
"""Waits until something is so; raises where it takes too long."""


Piece = tuple[int, int, int] | None
"""An axis, and two indices along it: a part of a message that is one box; or all of it."""
Line = tuple[int, int]
"""Where a number is in a worker's shared memory: the window, and the number's index there."""


@dataclass
class Offer:
    """What one worker tells another before a plan's first run. As the receiver of its messages:
    where to say that a stage is sent, and where the parts of each stage's message go. As the
    sender: where to say that memory is ready."""

    done: dict[int, Line] = field(default_factory=dict)
    places: dict[int, list[Place]] = field(default_factory=dict)
    turns: int = 0
    """How many buffers there are for messages, used in turn; 0 where they go into the result."""
    ready: Line | None = None


class Windows(Program):
    """A plan over shared memory. Workers have to tell each other where things are before they can
    be bound: `offers` says what to tell whom, and `connect` takes what they said.

    Raises:
        NoRoomError: there is too little shared memory left.
    """

    def __init__(self, plan: Plan, pool: Pool, until: Until, about: Callable[[], str]) -> None:
        self._pool = pool
        self._until = until
        self._blocks: list[Block] = []
        self._slot_blocks: list[list[Block]] = []
        self._lines = 0
        self._runs = Runs()
        self._slot = 0
        self._senders: dict[int, Offer] = {}
        self._receivers: dict[int, Offer] = {}
        self._asked: dict[int, Offer] = {}
        self._ready_lines: list[tuple[memoryview, int]] = []
        self._taken_in_turn: list[tuple[Cell, list[Array]]] = []
        self._slotted: dict[int, list[tuple[Cell, list[Array]]]] = {}
        self._met: set[int] = set()
        self._pieces: dict[tuple[int, int], list[Piece]] = {}
        self._summed_in_pieces: set[tuple[int, int]] = set()
        peers = {s.peer for s in plan.steps if isinstance(s, Send)}
        receives = sum(isinstance(s, Receive) for s in plan.steps)
        self._flags_block = self._take((len(peers) + receives) * _LINE)
        flags = pool.own(self._flags_block)
        flags[:] = 0
        self._flags = flags.data.cast("q")
        for peer in sorted(peers):
            self._receivers[peer] = Offer(ready=self._line())
        super().__init__(plan, about)
        held = (pool, self._runs, self._blocks, self._slots, self._slot_blocks, self._unused)
        self._release = weakref.finalize(self, _give_back, *held)
        self._release.atexit = False

    # Memory

    def _take(self, size: int) -> Block:
        block = self._pool.take(size)
        if block is None:
            for taken in [*self._blocks, *(b for blocks in self._slot_blocks for b in blocks)]:
                self._pool.give(taken)
            raise NoRoomError
        self._blocks.append(block)
        return block

    def _line(self) -> tuple[int, int]:
        """Where the next number of this worker's is: the window, and the number's index in it."""
        self._lines += 1
        start = self._flags_block.offset + (self._lines - 1) * _LINE
        return self._flags_block.segment, start // 8

    def _array(self, block: Block, shape: tuple[int, ...]) -> Array:
        # Memory that is no array: the base of a user's view is then this array, which so counts its
        # users.
        own: Any = self._pool.own(block)
        memory: Any = (ctypes.c_char * block.size).from_buffer(own)
        array: Array = np.ndarray(shape, self.plan.dtype, memory)
        array.fill(0)
        return array

    def _size(self, shape: tuple[int, ...]) -> int:
        return int(np.prod(shape, dtype=np.int64)) * self.plan.dtype.itemsize

    def _place_results(self) -> None:
        """Decide whether peers write into results, which then lie in shared memory, or beside them:
        into a few buffers in turn, so that they need not wait for this worker's call."""
        itemsize = self.plan.dtype.itemsize
        moved = [p for s in self._stages for p in s.puts if isinstance(p.source, Message)]
        straight = {id(p) for s in self._stages for p in s.puts if self._straight(s, p)}
        size = sum(p.target.size for p in moved if id(p) in straight) * itemsize
        results = sum(region.size for region in self.plan.outputs) * itemsize
        limit = max(SMALL, results // _PART)
        self._direct = size > limit
        self._why = f"{size} bytes that come are parts of the result as they are, "
        self._why += f"{'more' if self._direct else 'no more'} than {limit}"
        small = sum(put.target.size for put in moved) * itemsize <= SMALL
        self._turns = 0 if self._direct else _MANY if small else _FEW
        super()._place_results()

    def _straight(self, stage: Stage, put: Put) -> bool:
        """Whether a message is all that a part of the result is."""
        plain = isinstance(put.source, Message) and not put.accumulate and put.coefficient == 1
        return plain and stage.addend(put) is None

    def memory(self, region: Region) -> Array:
        if not self._direct:
            return np.zeros(region.shape, self.plan.dtype)
        return self._array(self._take(self._size(region.shape)), region.shape)

    def slots(self, regions: Sequence[Region]) -> list[tuple[Array, ...]]:
        if not self._direct:
            return []
        found = []
        for _ in range(SLOTS):
            blocks = [self._take(self._size(region.shape)) for region in regions]
            del self._blocks[len(self._blocks) - len(blocks) :]
            self._slot_blocks.append(blocks)
            arrays = (self._array(b, r.shape) for b, r in zip(blocks, regions, strict=True))
            found.append(tuple(arrays))
        return found

    def result_memory(self, out: Sequence[Array] | None) -> Sequence[Array]:
        if not self._direct:
            return super().result_memory(out)
        # No other worker can reach what the caller passed; the result is copied there.
        free = (k for k, arrays in enumerate(self._slots) if references(arrays) <= self._unused)
        self._slot = next(free)
        return self._slots[self._slot]

    def handed_out(self, array: Array) -> bool:
        rest = (arrays for k, arrays in enumerate(self._slots) if k != self._slot)
        return not self._direct or any(references(arrays) <= self._unused for arrays in rest)

    # What workers tell each other

    def receive(self, stage: Stage, step: Receive) -> dict[int, View]:
        offer = self._senders.setdefault(step.peer, Offer(turns=self._turns))
        offer.done[stage.number] = self._line()
        incoming = stage.incoming(step.peer)
        shapes = [put.target.shape for put in incoming]
        self._pieces[stage.number, step.peer] = _pieces(shapes, self.plan.dtype.itemsize)
        places = offer.places.setdefault(stage.number, [])
        inbox: dict[int, View] = {}
        for put in incoming:
            target = stage.target(put)
            if self._direct and self._straight(stage, put):
                places.append(self._pool.place(self._views(target)))
                continue
            size = self._size(target.shape)
            count = self._turns or 1
            arrays = [self._array(self._take(size), target.shape) for _ in range(count)]
            places.append(self._pool.place(arrays))
            cell = Cell(target.shape, arrays[0] if count == 1 else None)
            self._taken_in_turn += [(cell, arrays)] if count > 1 else []
            inbox[id(put)] = View(cell, target.shape)
        return inbox

    def _views(self, target: View) -> list[Array]:
        """A box of a result, in each of the arrays that this may be in."""
        if target.cell.fixed:
            return [target.get()]
        views = []
        k = self._own.index(target.cell)
        for arrays in self._slots:
            target.cell.array = arrays[k]
            views.append(target.get())
        target.cell.array = None  # type: ignore[assignment]
        return views

    def offers(self) -> dict[int, tuple[Offer | None, Offer | None]]:
        """What to tell each peer: as the receiver of its messages, and as the sender to it."""
        peers = sorted(self._senders.keys() | self._receivers.keys())
        return {p: (self._senders.get(p), self._receivers.get(p)) for p in peers}

    def connect(self, said: dict[int, tuple[Offer | None, Offer | None]]) -> None:
        """Bind the plan to what the peers' `offers` said."""
        self._asked = {peer: offer for peer, (offer, _) in said.items() if offer is not None}
        told = [(p, offer.ready) for p, (_, offer) in sorted(said.items()) if offer is not None]
        self._ready_lines = [
            (self._pool.numbers(line[0], peer), line[1]) for peer, line in told if line is not None
        ]
        for peer, offer in self._asked.items():
            k = self._index(self._receivers[peer].ready)
            self._runs.ahead.append((self._flags, k, offer.turns))
            if offer.turns:  # else the receiver says when, and may have said so already
                self._flags[k] = offer.turns
        self.bind()

    def _index(self, line: Line | None) -> int:
        """Where a number of this worker's own is in `_flags`."""
        assert line is not None
        return line[1] - self._flags_block.offset // 8

    # Steps

    def begin(self) -> None:
        pool, ordered, lines, turns = self._pool, _ORDERED, self._ready_lines, self._turns
        in_turn = self._taken_in_turn

        def begin_in_turn() -> None:
            self._runs.number += 1
            turn = self._runs.number % turns
            for cell, arrays in in_turn:
                cell.array = arrays[turn]

        def say_ready() -> None:
            self._runs.number += 1
            for numbers, k in lines:
                numbers[k + 1] = self._slot
            if not ordered:
                pool.sync()
            for numbers, k in lines:
                numbers[k] = self._runs.number

        self.step("begin", say_ready if self._direct else begin_in_turn)

    def end(self) -> None:
        pool, ordered, lines, turns = self._pool, _ORDERED, self._ready_lines, self._turns

        def say_read() -> None:
            if not ordered:
                pool.sync()
            for numbers, k in lines:
                numbers[k] = self._runs.number + turns

        if lines and not self._direct:
            self.step("say that messages are read", say_read)

    def send(self, stage: Stage, step: Send) -> None:
        offer = self._asked[step.peer]
        targets = []
        for place in offer.places[stage.number]:
            arrays = self._pool.views(place, step.peer, self.plan.dtype)
            cell = Cell(place.shape, arrays[0] if len(arrays) == 1 else None)
            targets.append(cell)
            if len(arrays) > 1:
                self._slotted.setdefault(step.peer, []).append((cell, arrays))
        if step.peer not in self._met:
            self._met.add(step.peer)
            self._wait_ready(step.peer)
        pieces = _pieces([part.shape for part in step.parts], self.plan.dtype.itemsize)
        for number, piece in enumerate(pieces):
            for part, cell in zip(step.parts, targets, strict=True):
                target, source = View(cell, part.shape), stage.source(part)
                if piece is not None:
                    target, source = target.cut(*piece), source.cut(*piece)
                work = copying(target, source, self.plan.dtype)
                size = self.bytes_of(target.size)
                self.step(f"write {part} to {step.peer}", work, peer=step.peer, bytes=size)
            self._say_done(step.peer, offer.done[stage.number], number + 1)

    def _say_done(self, peer: int, line: Line, pieces: int) -> None:
        """Tell a receiver how many pieces of a message are there."""
        numbers, k = self._pool.numbers(line[0], peer), line[1]
        pool, ordered, runs = self._pool, _ORDERED, self._runs

        def say_done() -> None:
            if not ordered:
                pool.sync()
            numbers[k] = runs.number * _MOST + pieces

        self.step(f"tell {peer}", say_done, peer=peer)

    def sum_step(
        self, stage: Stage, puts: tuple[Put, Put], sources: tuple[View, View]
    ) -> tuple[str, Work, Ready | None]:
        """Of a long message each piece is added once it has come, while the next is written."""
        peers = [put.source.peer for put in puts if isinstance(put.source, Message)]
        pieces = self._pieces[stage.number, peers[0]] if peers else [None]
        label, work, _ = super().sum_step(stage, puts, sources)
        if len(pieces) == 1:
            return label, work, None
        self._summed_in_pieces.update((stage.number, peer) for peer in peers)
        views = (stage.target(puts[0]), *sources)
        sums = [summing(*(view.cut(*piece) for view in views)) for piece in pieces if piece]
        waits = [self._waiting(stage.number, peers, k + 1) for k in range(len(pieces))]

        def add_pieces() -> None:
            for (wait, _), add in zip(waits, sums, strict=True):
                wait()
                add()

        return label, add_pieces, waits[-1][1]

    def _wait_ready(self, peer: int) -> None:
        """Until a peer's memory is ready for this run. Which of its arrays to write to, it says; or
        it is the next in turn."""
        flags, k = self._flags, self._index(self._receivers[peer].ready)
        turns = self._asked[peer].turns
        slotted = self._slotted.setdefault(peer, [])
        until, pool, ordered = self._until, self._pool, _ORDERED

        def ready() -> bool:
            return flags[k] >= self._runs.number

        def wait() -> None:
            if flags[k] < self._runs.number:
                until(ready, lambda: f"worker {peer} to receive {self.about()}")
            if not ordered:
                pool.sync()
            slot = self._runs.number % turns if turns else flags[k + 1]
            for cell, arrays in slotted:
                cell.array = arrays[slot]

        self.step(f"wait until {peer} is ready", wait, ready, peer=peer)

    def wait(self, stage: Stage, step: Wait) -> None:
        peers = [
            peer
            for number, peer in self._pieces
            if number == stage.number and (number, peer) not in self._summed_in_pieces
        ]
        if peers:
            sizes = [receive.size for receive in stage.receives if receive.peer in peers]
            work, ready = self._waiting(stage.number, peers)
            self.step(str(step), work, ready, peers=peers, bytes=self.bytes_of(sum(sizes)))

    def _waiting(
        self, stage: int, peers: Sequence[int], pieces: int | None = None
    ) -> tuple[Work, Ready]:
        """What waits for messages, or for some pieces of them; and whether they have come."""
        lines = [
            (self._index(self._senders[p].done[stage]), pieces or len(self._pieces[stage, p]))
            for p in peers
        ]
        flags, runs = self._flags, self._runs
        until, pool, ordered = self._until, self._pool, _ORDERED

        def ready() -> bool:
            number = runs.number * _MOST
            for k, count in lines:
                if flags[k] < number + count:
                    return False
            return True

        def who() -> str:
            number = runs.number * _MOST
            late = [
                peer
                for peer, (k, count) in zip(peers, lines, strict=True)
                if flags[k] < number + count
            ]
            return f"a message from {peers_named(late)} in stage {stage} of {self.about()}"

        def wait() -> None:
            if not ready():
                until(ready, who)
            if not ordered:
                pool.sync()

        return wait, ready

    def describe(self) -> str:
        if self._direct:
            return f"shared memory: what comes is written into the result, for {self._why}"
        return (
            f"shared memory: what comes is written into {self._turns} buffers in turn beside the "
            f"result, for {self._why}"
        )

    def abandon(self) -> None:
        super().abandon()
        self._release.detach()  # a peer may still write to these blocks: they are lost

    def release(self) -> None:
        self._release()


def _pieces(shapes: Sequence[tuple[int, ...]], itemsize: int) -> list[Piece]:
    """How a message is cut, the same for sender and receiver: only one box is, if it is long."""
    if len(shapes) != 1 or not shapes[0]:
        return [None]
    (shape,) = shapes
    axis = next(k for k, n in enumerate(shape) if n == max(shape) or n >= _MOST // 2)
    length = shape[axis]
    size = int(np.prod(shape, dtype=np.int64)) * itemsize
    count = min(size // _PIECE, length, _MOST - 1)
    if count < 2:
        return [None]
    cuts = [length * k // count for k in range(count + 1)]
    return [(axis, a, b) for a, b in pairwise(cuts)]


class Runs:
    """How many runs there were; and which numbers of this worker's its receivers still write."""

    def __init__(self) -> None:
        self.number = 0
        self.ahead: list[tuple[memoryview, int, int]] = []

    def over(self) -> bool:
        """Whether all receivers have read the last message, and said so."""
        return all(flags[k] >= self.number + turns for flags, k, turns in self.ahead)


def memory_needed(plan: Plan) -> int:
    """Bytes of shared memory that a plan and its adjoint may need on one worker."""
    made = sum(step.region.size for step in plan.steps if isinstance(step, Make))
    moved = sum(step.size for step in plan.steps if isinstance(step, Send | Receive))
    ends = sum(region.size for region in (*plan.inputs, *plan.outputs))
    elements = 2 * (made + _FEW * moved) + SLOTS * ends
    return elements * plan.dtype.itemsize + 2 * _MANY * (SMALL + ALIGNED * len(plan.steps))


class NoRoomError(Exception):
    """There is too little shared memory for a plan."""


def _give_back(
    pool: Pool,
    runs: Runs,
    blocks: list[Block],
    slots: list[tuple[Array, ...]],
    slot_blocks: list[list[Block]],
    unused: int,
) -> None:
    """Give a plan's blocks back: those of results that users still hold, when they let go; that of
    its numbers, the first, once no receiver is going to write to it."""
    pool.retire(blocks[0], runs.over)
    for block in blocks[1:]:
        pool.give(block)
    while slot_blocks:
        arrays, held = slots.pop(), slot_blocks.pop()
        in_use = references(arrays) > unused - 1  # the list no longer refers to them
        for block, array in zip(held, arrays, strict=True):
            if in_use:
                weakref.finalize(array, pool.give, block).atexit = False
            else:
                pool.give(block)
