"""Programs with messages through shared-memory windows: every transfer is one copy into the
receiver's memory.

Receive buffers lie in a window that all ranks of the machine map. A receiver signals up to which
run its memory may be written, and which result array it will use; a sender writes the elements to
their target, strided to strided, and signals completion. Messages that are small, or a small share
of the result, or to be summed, go to separate buffers, so that a sender may be several runs ahead
of its receiver.

Each signal is one increasing number, the run's, with one writer and one reader, in a cache line of
its own. Stores are seen in order on x86; elsewhere the window is synchronised before a signal is
written and after it is read. The signal of a message also holds the call number
(`linop.backends.shared_memory.runs`), so that a missing call is detected.
"""

from __future__ import annotations

import math
import platform
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from linop.backends.execution.alignment import PAGE
from linop.backends.execution.lending import Buffer
from linop.backends.execution.program import SMALL, Program
from linop.backends.execution.stage import Ready, Stage
from linop.backends.execution.views import Cell, View, copying, fixed
from linop.backends.shared_memory.offers import MOST, Line, Offer, Piece, Said, pieces_of
from linop.backends.shared_memory.pool import ALIGNED, Block, Place, Pool, Slots
from linop.backends.shared_memory.runs import Peers, Runs, Until, Word
from linop.backends.transports.call_numbers import TURNS, Calls, counting
from linop.backends.transports.transport import Awaited, Who, peers_named
from linop.planning.plan import Make, Message, Plan, Put, Receive, Send, Wait
from linop.spaces.region import Region
from linop.spaces.scalars import Array

SLOTS = 3
"""Buffers for each large result; the last free one is not lent, but copied."""
_MANY, _FEW = 8, 2
"""Buffers for each message that is not written into the result: if all messages are at most `SMALL`
bytes, and otherwise."""
_LONG = 512 * 1024
"""Total bytes of messages from which each has one buffer: two would evict each other from the
cache."""
_PART = 8
"""Messages are written into the result if they are more than one `_PART`-th of it."""
_RUN = 1024
"""Smallest contiguous run, in bytes, that is written into the result: two workers that alternately
write shorter ones contend for cache lines."""
_LEAST = 16 * 1024
"""Total bytes of messages up to which they go to buffers: faster than a wait for the receiver."""
_LINE = 64
"""Bytes of a cache line, and the distance of signals."""
_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")
"""True if other cores see stores in program order."""


class Windows(Program):
    """A plan bound to shared-memory windows. Binding takes two steps: `offers` gives the locations
    for each peer, and `connect` takes those of the peers.

    Raises:
        NoRoomError: there is too little shared memory.
    """

    def __init__(
        self,
        plan: Plan,
        pool: Pool,
        until: Until,
        spins: int,
        about: Callable[[], str],
        calls: Calls,
    ) -> None:
        self._pool = pool
        self._until = until
        self._spins = max(spins, 1)
        self._blocks: list[Block] = []
        self._slots: Slots | None = None
        self._lines = 0
        self._senders: dict[int, Offer] = {}
        self._receivers: dict[int, Offer] = {}
        self._asked: dict[int, Offer] = {}
        self._ready_lines: list[tuple[memoryview, int]] = []
        self._met: set[int] = set()
        self._in_pieces: dict[tuple[int, int], list[Piece]] = {}
        peers = {s.peer for s in plan.steps if isinstance(s, Send)}
        receives = [s.peer for s in plan.steps if isinstance(s, Receive)]
        everybody = sorted(peers.union(receives))
        lines = (len(peers) + len(receives)) * _LINE // 8
        self._flags_block = self._take(lines * 8 + (len(everybody) + 1) * 8)
        flags = pool.own(self._flags_block)
        flags[:] = 0
        self._flags = flags.data.cast("q")
        self._gone = lines
        words = {peer: k for k, peer in enumerate(everybody, lines + 1)}
        self._runs = Runs()
        self._peers = Peers(self._runs, self._flags, lines, words, until, about)
        for peer in sorted(peers):
            self._receivers[peer] = Offer(ready=self._line())
        super().__init__(plan, about, calls)
        self._flags_name = self.code.name(self._flags)
        held = (pool, self._runs, self._blocks, self._slots)
        self._release = weakref.finalize(self, _give_back, *held)
        self._release.atexit = False

    # Memory

    def _take(self, size: int) -> Block:
        block = self._pool.take(size)
        if block is None:
            if self._slots is not None:
                self._slots.end()
            for taken in self._blocks:
                self._pool.give(taken)
            raise NoRoomError
        self._blocks.append(block)
        return block

    def _line(self) -> tuple[int, int]:
        """Location of a new signal of this worker: the window, and the index in it."""
        self._lines += 1
        start = self._flags_block.offset + (self._lines - 1) * _LINE
        return self._flags_block.segment, start // 8

    def _array(self, block: Block, shape: tuple[int, ...]) -> Array:
        array = self._buffer(block, shape).array()
        array.fill(0)
        return array

    def _buffer(self, block: Block, shape: tuple[int, ...]) -> Buffer:
        return Buffer(self._pool.own(block), 0, shape, self.plan.dtype)

    def _size(self, shape: tuple[int, ...]) -> int:
        return int(np.prod(shape, dtype=np.int64)) * self.plan.dtype.itemsize

    def _place_results(self) -> None:
        """Decide if peers write into results, which then lie in shared memory, or into separate
        buffers used in turn, so that they need not wait for this worker's call."""
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
        if self._direct:
            self._slots = Slots(self._pool)
            for _ in range(SLOTS):
                blocks = [self._take(self._size(cell.shape)) for cell in self.open]
                del self._blocks[len(self._blocks) - len(blocks) :]
                pairs = zip(blocks, self.open, strict=True)
                self._slots.add(blocks, [self._buffer(b, cell.shape) for b, cell in pairs])

    def _straight(self, stage: Stage, put: Put) -> bool:
        """True if a message alone determines a box of the result, with contiguous runs that are
        long enough."""
        plain = isinstance(put.source, Message) and not put.accumulate and put.coefficient == 1
        runs = self.bytes_of(stage.target(put).run)
        return plain and runs >= min(_RUN, self.bytes_of(put.target.size)) and not stage.addend(put)

    def memory(self, region: Region) -> Array:
        if not self._direct:
            return np.zeros(region.shape, self.plan.dtype)
        return self._array(self._take(self._size(region.shape)), region.shape)

    def lending(self) -> list[str]:
        if self._slots is None:
            return super().lending()
        # Other workers cannot write to the caller's ``out``; the result is copied there.
        results, take = ", ".join(cell.name for cell in self.open), self.code.name(self._slots.take)
        return [f"{self.code.name(self._runs)}.slot, [{results}] = {take}()"]

    def lent(self, cell: Cell) -> str:
        if self._slots is None:
            return super().lent(cell)
        return f"{cell.name} if {self.code.name(self._slots.free)} else {cell.name}.copy()"

    # Exchange of locations

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
        """A box of a result, in each of the arrays that the result may be in."""
        if target.fixed:
            return [target.get()]
        assert self._slots is not None
        k = self.open[target.cell]
        return [target.of_array(buffers[k].array()) for buffers in self._slots.buffers]

    def offers(self) -> dict[int, Said]:
        """Offers to each peer, to be exchanged before the first run."""
        segment, first = self._flags_block.segment, self._flags_block.offset // 8
        return {
            p: (
                self._senders.get(p),
                self._receivers.get(p),
                Word(segment, first + self._gone, first + k),
            )
            for p, k in self._peers.words.items()
        }

    def connect(self, said: dict[int, Said]) -> None:
        """Complete the binding with the peers' `offers`."""
        heard = {p: partial(self._flags.__getitem__, k) for p, k in self._peers.words.items()}
        self._runs.tell(
            [(self._pool.numbers(w.segment, p), w, heard[p]) for p, (_, _, w) in said.items()]
        )
        self._asked = {peer: offer for peer, (offer, _, _) in said.items() if offer is not None}
        told = [(p, offer.ready) for p, (_, offer, _) in sorted(said.items()) if offer is not None]
        self._ready_lines = [
            (self._pool.numbers(line[0], peer), line[1]) for peer, line in told if line is not None
        ]
        for peer, offer in self._asked.items():
            if offer.turns:  # else the receiver signals it, and may have done so already
                self._flags[self._index(self._receivers[peer].ready)] = offer.turns
        self.bind()

    def _index(self, line: Line | None) -> int:
        """Index in `_flags` of one of this worker's own signals."""
        assert line is not None
        return line[1] - self._flags_block.offset // 8

    # Steps

    def begin(self) -> None:
        runs = self.code.name(self._runs)
        asked = [offer.pieces.values() for offer in self._asked.values()]
        text = [
            f"n = {runs}.number = {runs}.number + 1",
            f"if {self._flags_name}[{self._gone}]: {self.code.name(self._peers)}.begin()",
            *counting(self.code, self.calls),
            f"e = n % {TURNS} + c",
        ]
        if any(self._in_pieces.values()) or any(any(pieces) for pieces in asked):
            text.append(f"m = n * {MOST}")
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
        """Lines between a write of data and its signal, and between a signal and a read of data."""
        return [] if _ORDERED else [f"{self.code.name(self._pool.sync)}()"]

    def sends(self, stage: Stage, steps: Sequence[Send]) -> None:
        for step in steps:
            self._send(stage, step)

    def _send(self, stage: Stage, step: Send) -> None:
        offer, peer = self._asked[step.peer], step.peer
        if peer not in self._met:
            self._met.add(peer)
            self._wait_ready(peer, stage.number)
        numbers, k = (
            self._pool.numbers(offer.done[stage.number][0], peer),
            offer.done[stage.number][1],
        )
        said = self.code.name(numbers)
        places = zip(step.parts, offer.places[stage.number], strict=True)
        boxes = [(part, stage.source(part), self._box(place, peer)) for part, place in places]
        pieces = offer.pieces[stage.number]
        if pieces:
            ((part, source, target),) = boxes
            parts = [(target.part(*p), source.part(*p), k) for k, p in enumerate(pieces, 1)]
            self.step(
                f"write {part} to {peer}, {len(pieces)} pieces",
                f"{said}[{k + 1}] = e",
                f"for i, j, k in {self.code.name(parts)}:",
                f"    {target.array(self.code)}[i] = {source.array(self.code)}[j]",
                *(f"    {line}" for line in (*self._sync, f"{said}[{k}] = m + k")),
                peer=peer,
                bytes=self.bytes_of(part.size),
            )
            return
        for part, source, target in boxes:
            text = copying(self.code, target, source, self.plan.dtype)
            self.step(f"write {part} to {peer}", *text, peer=peer, bytes=self.bytes_of(part.size))
        turn = f"{k} + s{peer}" if offer.turns > 1 else str(k)
        self.step(f"tell {peer}", *self._sync, f"{said}[{turn}] = e", peer=peer)

    def _box(self, place: Place, peer: int) -> View:
        """View of a peer's target of a box, in this run."""
        arrays = self._pool.views(place, peer, self.plan.dtype)
        if len(arrays) == 1:
            return fixed(arrays[0])
        return View(Cell(place.shape, f"{self.code.name(arrays)}[s{peer}]"), place.shape)

    def sum(self, stage: Stage, puts: tuple[Put, Put], sources: tuple[View, View]) -> None:
        """Sum of two boxes. Each piece of a long message is added once it has arrived, while the
        next one is written."""
        pieces = self._cuts(stage, puts[0])
        if not pieces:
            super().sum(stage, puts, sources)
            return
        peers = [put.source.peer for put in puts if isinstance(put.source, Message)]
        views = (*sources, stage.target(puts[0]))
        parts = [(*(v.part(*p) for v in views), k) for k, p in enumerate(pieces, 1)]
        first, second, target = (view.array(self.code) for view in views)
        text, ready = self._until_pieces(stage.number, peers)
        whole = self._until_come(stage.number, peers, 1)[0]
        self.step(
            f"{puts[0].target} = {puts[0].source} + {puts[1].source}, {len(pieces)} pieces",
            f"for i, j, l, k in {self.code.name(parts)}:",
            *(f"    {line}" for line in text),
            f"    add({first}[i], {second}[j], {target}[l])",
            *whole,
            ready=lambda: ready(len(pieces)),
            peers=peers,
            bytes=self.bytes_of(puts[0].target.size),
        )

    def _cuts(self, stage: Stage, put: Put) -> list[Piece]:
        """Pieces of a message, if it is one long box that is summed; else empty."""
        for pair in stage.pairs():
            if any(put is one for one in pair):
                peers = [one.source.peer for one in pair if isinstance(one.source, Message)]
                if peers and all(len(stage.incoming(peer)) == 1 for peer in peers):
                    return pieces_of(put.target.shape, self.plan.dtype.itemsize)
        return []

    def _wait_ready(self, peer: int, stage: int) -> None:
        """Emit the wait until a peer's memory is ready for this run, and the choice of its array:
        the one it signals, or the next in turn."""
        flags, k = self._flags, self._index(self._receivers[peer].ready)
        turns, runs, peers = self._asked[peer].turns, self._runs, self._peers

        def ready() -> bool:
            return flags[k] >= runs.number or peers.gone()

        def who() -> Awaited:
            # Buffers are free once the run that read them has ended.
            needs = math.inf if turns else -1
            words = f"worker {peer} to receive {self.about()}"
            return Awaited(words, (peer,), stage - 0.5, needs, back=turns)

        slot = f"n % {turns}" if turns else f"{self._flags_name}[{k + 1}]"
        text = self._spinning(f"{self._flags_name}[{k}] >= n", self.code.name(ready), who)
        label = f"wait until {peer} is ready"
        self.step(label, *text, f"s{peer} = {slot}", ready=ready, peer=peer)

    def _spinning(self, come: str, ready: str, who: Who) -> list[str]:
        """Lines that wait for a condition: they spin for a while first, since other workers take
        microseconds."""
        until = f"{self.code.name(self._until)}({ready}, {self.code.name(who)})"
        spin = f"for _ in {self.code.name(range(self._spins))}:"
        return [spin, f"    if {come}: break", f"else: {until}", *self._sync]

    def wait(self, stage: Stage, step: Wait) -> None:
        peers = [p for n, p in self._in_pieces if n == stage.number and not self._in_pieces[n, p]]
        if peers:
            sizes = [receive.size for receive in stage.receives if receive.peer in peers]
            text, ready = self._until_come(stage.number, peers)
            size = self.bytes_of(sum(sizes))
            self.step(str(step), *text, ready=ready, peers=peers, bytes=size)

    def _until_come(self, stage: int, peers: Sequence[int], at: int = 0) -> tuple[list[str], Ready]:
        """Lines that wait for peers' completion signals of a stage (`at` indices further on); and a
        test that they have arrived, for `start`."""
        lines = {p: self._index(self._senders[p].done[stage]) + at for p in peers}
        runs, turns = self._runs, 1 if at else self._turns or 1

        def late(said: int) -> list[int]:
            turn = runs.number % turns
            return [p for p, k in lines.items() if not self._peers.come(p, k + turn, said)]

        def ready(said: int) -> bool:
            return not late(said)

        def who() -> Awaited:
            named = late(runs.number % TURNS) or peers
            words = f"a message from {peers_named(named)} in stage {stage} of {self.about()}"
            return Awaited(words, named, stage)

        turn = " + t" if turns > 1 else ""
        come = " and ".join(f"{self._flags_name}[{k}{turn}] == e" for k in lines.values())
        text = self._spinning(come, f"lambda: {self.code.name(ready)}(e)", who)
        return text, lambda: ready(runs.number % TURNS)

    def _until_pieces(
        self, stage: int, peers: Sequence[int]
    ) -> tuple[list[str], Callable[[int], bool]]:
        """Lines that wait for piece `k` of some messages; and a test that `count` pieces have
        arrived."""
        lines = {p: self._index(self._senders[p].done[stage]) for p in peers}
        flags, runs = self._flags, self._runs

        def late(count: int) -> list[int]:
            return [p for p, k in lines.items() if flags[k] < runs.number * MOST + count]

        def ready(count: int) -> bool:
            return not late(count) or self._peers.gone()

        def who() -> Awaited:
            # Checks all pieces: a peer is named if any of its pieces is missing.
            named = late(1) or late(MOST) or peers
            words = f"a message from {peers_named(named)} in stage {stage} of {self.about()}"
            return Awaited(words, named, stage)

        come = " and ".join(f"{self._flags_name}[{k}] >= m + k" for k in lines.values())
        return self._spinning(come, f"lambda: {self.code.name(ready)}(k)", who), ready

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
        self._runs.leave(failed=True)
        self._release()

    def release(self) -> None:
        self._release()


def memory_needed(plan: Plan) -> int:
    """Bytes of shared memory that a plan and its adjoint may need on one worker."""
    made = sum(step.region.size for step in plan.steps if isinstance(step, Make))
    moved = sum(step.size for step in plan.steps if isinstance(step, Send | Receive))
    ends = sum(region.size for region in (*plan.inputs, *plan.outputs))
    elements = 2 * (made + _FEW * moved) + SLOTS * ends
    blocks = 2 * len(plan.steps) + SLOTS * (len(plan.inputs) + len(plan.outputs))
    elements += min(elements, blocks * PAGE // plan.dtype.itemsize)  # padding for alignment
    return elements * plan.dtype.itemsize + 2 * _MANY * (SMALL + ALIGNED * len(plan.steps))


class NoRoomError(Exception):
    """Raised if there is too little shared memory for a plan."""


def _give_back(pool: Pool, runs: Runs, blocks: list[Block], slots: Slots | None) -> None:
    """Finalizer: notify the peers, and return a plan's blocks; those of results still referenced by
    users, once these are released."""
    runs.leave()
    for block in blocks:
        pool.give(block)
    if slots is not None:
        slots.end()
