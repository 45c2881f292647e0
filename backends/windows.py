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
import math
import platform
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from linop.backends.execute import SMALL, Program, references
from linop.backends.placing import PAGE
from linop.backends.shared import ALIGNED, Block, Place, Pool
from linop.backends.stage import Stage
from linop.backends.strided import Cell, View, copying, fixed
from linop.backends.transport import Who, peers_named
from linop.plan import Make, Message, Plan, Put, Receive, Send, Wait
from linop.region import Region
from linop.scalars import Array

SLOTS = 3
"""Arrays for each large result; the last one that is free is not handed out, but copied."""
_MANY, _FEW = 8, 2
"""Buffers for each message that is not written into the result: for all of them small, or not."""
_LONG = 512 * 1024
"""Bytes of messages from which there is one: two would drive each other out of the cache."""
_PART = 8
"""Messages are written into a result if they are more than one part in so many of it."""
_RUN = 1024
"""Bytes of contiguous runs from which it is worth it to write them into a result: two workers that
write short ones in turn take each other's cache lines."""
_LEAST = 16 * 1024
"""Bytes of messages up to which they are not: it is faster not to wait for the receiver."""
_PIECE = 256 * 1024
"""Bytes of a piece of a long message: it stays in the cache of a core until it is summed."""
_MOST = 1024
"""Pieces of a message at most, and a few: what a run's number is multiplied by."""
_LINE = 64
"""Bytes of a cache line."""
_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")
"""Whether stores are seen in the order in which they were made."""

Until = Callable[[Callable[[], bool], Who], None]
"""Waits until something is so; raises where it takes too long."""


Piece = tuple[int, int, int]
"""An axis, and two indices along it: a part of a message that is one box."""
Line = tuple[int, int]
"""Where a number is in a worker's shared memory: the window, and the number's index there."""


@dataclass
class Offer:
    """What one worker tells another before a plan's first run. As the receiver of its messages:
    where to say that a stage is sent, and where the parts of each stage's message go. As the
    sender: where to say that memory is ready."""

    done: dict[int, Line] = field(default_factory=dict)
    places: dict[int, list[Place]] = field(default_factory=dict)
    pieces: dict[int, list[Piece]] = field(default_factory=dict)
    """How each stage's message is cut, if it is: for a receiver that sums it piece by piece."""
    turns: int = 0
    """How many buffers there are for messages, used in turn; 0 where they go into the result."""
    ready: Line | None = None


class Windows(Program):
    """A plan over shared memory. Workers have to tell each other where things are before they can
    be bound: `offers` says what to tell whom, and `connect` takes what they said.

    Raises:
        NoRoomError: there is too little shared memory left.
    """

    def __init__(
        self, plan: Plan, pool: Pool, until: Until, spins: int, about: Callable[[], str]
    ) -> None:
        self._pool = pool
        self._until = until
        self._spins = max(spins, 1)
        self._blocks: list[Block] = []
        self._slot_blocks: list[list[Block]] = []
        self._lines = 0
        self._runs = Runs()
        self._senders: dict[int, Offer] = {}
        self._receivers: dict[int, Offer] = {}
        self._asked: dict[int, Offer] = {}
        self._ready_lines: list[tuple[memoryview, int]] = []
        self._met: set[int] = set()
        self._in_pieces: dict[tuple[int, int], list[Piece]] = {}
        peers = {s.peer for s in plan.steps if isinstance(s, Send)}
        receives = sum(isinstance(s, Receive) for s in plan.steps)
        self._flags_block = self._take((len(peers) + receives) * _LINE)
        flags = pool.own(self._flags_block)
        flags[:] = 0
        self._flags = flags.data.cast("q")
        for peer in sorted(peers):
            self._receivers[peer] = Offer(ready=self._line())
        super().__init__(plan, about)
        self._flags_name = self.code.name(self._flags)
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
        limit = max(_LEAST, results // _PART)
        self._direct = size > limit and not self.small
        self.takes_out = not self._direct
        self._why = f"{size} bytes that come are parts of the result as they are, "
        self._why += f"{'more' if self._direct else 'no more'} than {limit}"
        if self.small:
            self._why = f"the result has no more than {SMALL} bytes"
        beside = sum(put.target.size for put in moved) * itemsize
        self._turns = _MANY if beside <= SMALL else _FEW if beside <= _LONG else 1
        self._turns = 0 if self._direct else self._turns
        super()._place_results()

    def _straight(self, stage: Stage, put: Put) -> bool:
        """Whether a message is all that a part of the result is."""
        plain = isinstance(put.source, Message) and not put.accumulate and put.coefficient == 1
        runs = self.bytes_of(stage.target(put).run)
        return plain and runs >= min(_RUN, self.bytes_of(put.target.size)) and not stage.addend(put)

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
        self._runs.slot = next(free)
        return self._slots[self._runs.slot]

    def handed_out(self, array: Array) -> bool:
        rest = (arrays for k, arrays in enumerate(self._slots) if k != self._runs.slot)
        return not self._direct or any(references(arrays) <= self._unused for arrays in rest)

    # What workers tell each other

    def receives(self, stage: Stage, steps: Sequence[Receive]) -> dict[int, View]:
        return {k: view for step in steps for k, view in self._receive(stage, step).items()}

    def _receive(self, stage: Stage, step: Receive) -> dict[int, View]:
        offer = self._senders.setdefault(step.peer, Offer(turns=self._turns))
        offer.done[stage.number] = self._line()
        incoming = stage.incoming(step.peer)
        pieces = self._cuts(stage, incoming[0]) if incoming else []
        self._in_pieces[stage.number, step.peer] = offer.pieces[stage.number] = pieces
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
            cell = Cell(target.shape, f"{self.code.name(arrays)}[t]")
            inbox[id(put)] = fixed(arrays[0]) if count == 1 else View(cell, target.shape)
        return inbox

    def _views(self, target: View) -> list[Array]:
        """A box of a result, in each of the arrays that this may be in."""
        if target.fixed:
            return [target.get()]
        k = list(self._own).index(target.cell)
        return [target.of_array(arrays[k]) for arrays in self._slots]

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
        runs = self.code.name(self._runs)
        text = [f"n = {runs}.number = {runs}.number + 1", f"m = n * {_MOST}"]
        lines = [(self.code.name(numbers), k) for numbers, k in self._ready_lines]
        if self._direct:
            text += [f"{numbers}[{k + 1}] = {runs}.slot" for numbers, k in lines]
            text += [*self._sync, *(f"{numbers}[{k}] = n" for numbers, k in lines)]
        elif lines:
            text.append(f"t = n % {self._turns}")
        self.step("begin", *text)

    def end(self) -> None:
        lines = [(self.code.name(numbers), k) for numbers, k in self._ready_lines]
        if lines and not self._direct:
            said = [f"{numbers}[{k}] = n + {self._turns}" for numbers, k in lines]
            self.step("say that messages are read", *self._sync, *said)

    @property
    def _sync(self) -> list[str]:
        """What is between writing memory and saying so, and between hearing and reading."""
        return [] if _ORDERED else [f"{self.code.name(self._pool.sync)}()"]

    def sends(self, stage: Stage, steps: Sequence[Send]) -> None:
        for step in steps:
            self._send(stage, step)

    def _send(self, stage: Stage, step: Send) -> None:
        offer, peer = self._asked[step.peer], step.peer
        if peer not in self._met:
            self._met.add(peer)
            self._wait_ready(peer)
        numbers, k = (
            self._pool.numbers(offer.done[stage.number][0], peer),
            offer.done[stage.number][1],
        )
        done = f"{self.code.name(numbers)}[{k}] = m + "
        places = zip(step.parts, offer.places[stage.number], strict=True)
        boxes = [(part, stage.source(part), self._box(place, peer)) for part, place in places]
        pieces = offer.pieces[stage.number]
        if pieces:
            ((part, source, target),) = boxes
            parts = [(target.part(*p), source.part(*p), k) for k, p in enumerate(pieces, 1)]
            self.step(
                f"write {part} to {peer}, {len(pieces)} pieces",
                f"for i, j, k in {self.code.name(parts)}:",
                f"    {target.array(self.code)}[i] = {source.array(self.code)}[j]",
                *(f"    {line}" for line in (*self._sync, f"{done}k")),
                peer=peer,
                bytes=self.bytes_of(part.size),
            )
            return
        for part, source, target in boxes:
            text = copying(self.code, target, source, self.plan.dtype)
            self.step(f"write {part} to {peer}", *text, peer=peer, bytes=self.bytes_of(part.size))
        self.step(f"tell {peer}", *self._sync, f"{done}1", peer=peer)

    def _box(self, place: Place, peer: int) -> View:
        """Where a peer wants a part of a message in this run."""
        arrays = self._pool.views(place, peer, self.plan.dtype)
        if len(arrays) == 1:
            return fixed(arrays[0])
        return View(Cell(place.shape, f"{self.code.name(arrays)}[s{peer}]"), place.shape)

    def sum(self, stage: Stage, puts: tuple[Put, Put], sources: tuple[View, View]) -> None:
        """Of a long message each piece is added once it has come, while the next is written."""
        pieces = self._cuts(stage, puts[0])
        if not pieces:
            super().sum(stage, puts, sources)
            return
        peers = [put.source.peer for put in puts if isinstance(put.source, Message)]
        views = (*sources, stage.target(puts[0]))
        parts = [(*(v.part(*p) for v in views), k) for k, p in enumerate(pieces, 1)]
        first, second, target = (view.array(self.code) for view in views)
        text, ready = self._until_come(stage.number, peers, "k")
        self.step(
            f"{puts[0].target} = {puts[0].source} + {puts[1].source}, {len(pieces)} pieces",
            f"for i, j, l, k in {self.code.name(parts)}:",
            *(f"    {line}" for line in text),
            f"    add({first}[i], {second}[j], {target}[l])",
            ready=lambda: ready(len(pieces)),
            peers=peers,
            bytes=self.bytes_of(puts[0].target.size),
        )

    def _cuts(self, stage: Stage, put: Put) -> list[Piece]:
        """How a message is cut, if it is: where it is one long box, to be summed."""
        for pair in stage.pairs():
            if any(put is one for one in pair):
                peers = [one.source.peer for one in pair if isinstance(one.source, Message)]
                if peers and all(len(stage.incoming(peer)) == 1 for peer in peers):
                    return _pieces(put.target.shape, self.plan.dtype.itemsize)
        return []

    def _wait_ready(self, peer: int) -> None:
        """Until a peer's memory is ready for this run. Which of its arrays to write to, it says; or
        it is the next in turn."""
        flags, k = self._flags, self._index(self._receivers[peer].ready)
        turns, runs = self._asked[peer].turns, self._runs

        def ready() -> bool:
            return flags[k] >= runs.number

        def who() -> str:
            return f"worker {peer} to receive {self.about()}"

        slot = f"n % {turns}" if turns else f"{self._flags_name}[{k + 1}]"
        text = self._spinning(f"{self._flags_name}[{k}] >= n", self.code.name(ready), who)
        label = f"wait until {peer} is ready"
        self.step(label, *text, f"s{peer} = {slot}", ready=ready, peer=peer)

    def _spinning(self, come: str, ready: str, who: Who) -> list[str]:
        """Until something is so: looked at here for a while first, for others take microseconds."""
        until = f"{self.code.name(self._until)}({ready}, {self.code.name(who)})"
        spin = f"for _ in {self.code.name(range(self._spins))}:"
        return [spin, f"    if {come}: break", f"else: {until}", *self._sync]

    def wait(self, stage: Stage, step: Wait) -> None:
        peers = [p for n, p in self._in_pieces if n == stage.number and not self._in_pieces[n, p]]
        if peers:
            sizes = [receive.size for receive in stage.receives if receive.peer in peers]
            text, ready = self._until_come(stage.number, peers, "1")
            size = self.bytes_of(sum(sizes))
            self.step(str(step), *text, ready=lambda: ready(1), peers=peers, bytes=size)

    def _until_come(
        self, stage: int, peers: Sequence[int], count: str
    ) -> tuple[list[str], Callable[[int], bool]]:
        """What waits for so many pieces of some messages; and whether they have come."""
        lines = {p: self._index(self._senders[p].done[stage]) for p in peers}
        flags, runs = self._flags, self._runs

        def late(count: int) -> list[int]:
            return [p for p, k in lines.items() if flags[k] < runs.number * _MOST + count]

        def ready(count: int) -> bool:
            return not late(count)

        def who() -> str:
            # All pieces, for a peer that is late with one is named, whichever that is.
            said = peers_named(late(1) or late(_MOST) or peers)
            return f"a message from {said} in stage {stage} of {self.about()}"

        come = " and ".join(f"{self._flags_name}[{k}] >= m + {count}" for k in lines.values())
        return self._spinning(come, f"lambda: {self.code.name(ready)}({count})", who), ready

    def describe(self) -> str:
        if self._direct:
            return f"shared memory: what comes is written into the result, for {self._why}"
        buffers = "a buffer" if self._turns == 1 else f"{self._turns} buffers in turn"
        return (
            f"shared memory: what comes is written into {buffers} beside the result, "
            f"for {self._why}"
        )

    def abandon(self) -> None:
        super().abandon()
        self._release.detach()  # a peer may still write to these blocks: they are lost

    def release(self) -> None:
        self._release()


def _pieces(shape: tuple[int, ...], itemsize: int) -> list[Piece]:
    """How a box is cut; not at all if it is short."""
    axis = next((k for k, n in enumerate(shape) if n == max(shape) or n >= _MOST // 2), 0)
    count = min(math.prod(shape) * itemsize // _PIECE, shape[axis] if shape else 1, _MOST - 1)
    if count < 2:
        return []
    cuts = [shape[axis] * k // count for k in range(count + 1)]
    return [(axis, a, b) for a, b in pairwise(cuts)]


class Runs:
    """How many runs there were, and which array the last had for its result; and which numbers of
    this worker's its receivers still write."""

    def __init__(self) -> None:
        self.number = 0
        self.slot = 0
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
    blocks = 2 * len(plan.steps) + SLOTS * (len(plan.inputs) + len(plan.outputs))
    elements += min(elements, blocks * PAGE // plan.dtype.itemsize)  # what placing them costs
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
