"""Messages through shared-memory windows, as instructions: every transfer is one copy into the
receiver's memory.

Receive buffers lie in a window that all ranks of the machine map. A receiver signals up to which
run its memory may be written, and which result array it will use; a sender writes the elements to
their target, strided to strided, and signals completion
(`linop.backends.mpi.shared_memory.signals`). Messages that are small, or a small share of the
result, or to be summed, go to separate buffers, so that a sender may be several runs ahead of its
receiver.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

from linop.backends.engine.arrays.interface import SMALL
from linop.backends.engine.execution.instructions import (
    Add,
    Call,
    Copy,
    Flag,
    For,
    If,
    Instruction,
    Interaction,
    Operation,
    Set,
    Sign,
    Signal,
    Until,
    instruction,
)
from linop.backends.engine.execution.layout import Layout
from linop.backends.engine.execution.numbers import Condition, Field, Item, Number, Variable
from linop.backends.engine.execution.stage import Stage
from linop.backends.engine.execution.views import Buffer, View, fixed, whole
from linop.backends.engine.roads.call_numbers import CALL, TURNS, Calls
from linop.backends.engine.roads.communication import Communication, Instructions
from linop.backends.mpi.shared_memory.offers import PIECES, Offer, Piece, Said, pieces_of
from linop.backends.mpi.shared_memory.plan_memory import FEW, MANY, PlanMemory
from linop.backends.mpi.shared_memory.pool import Place, Pool
from linop.backends.mpi.shared_memory.runs import Runs, WaitUntil
from linop.backends.mpi.shared_memory.signals import MARK, PIECE, PIECES_BASE, RUN, TURN, Signals
from linop.backends.together.transport import Awaited
from linop.planning.plan import Message, Put, Receive, Send, Sum
from linop.spaces.region import Region
from linop.spaces.scalars import Array

_LONG = 512 * 1024
"""Total bytes of messages from which each has one buffer: two would evict each other from the
cache."""
_SHARE = 8
"""Messages are written into the result if they are more than one `_SHARE`-th of it."""
_RUN = 1024
"""Smallest contiguous run, in bytes, that is written into the result: two workers that alternately
write shorter ones contend for cache lines."""
_LEAST = 16 * 1024
"""Total bytes of messages up to which they go to buffers: faster than a wait for the receiver."""
_TO, _FIRST, _SECOND = Variable("l"), Variable("i"), Variable("j")
"""Indices of a piece in a target and in two sources."""


class Windows(Communication):
    """Messages of a bound plan through shared-memory windows. Binding takes two steps: `offers`
    gives the locations for each peer, and `connect` takes those of the peers.

    Args:
        layout: of the plan, or the part of it that has the messages of this machine.
        small_stay: as for `Layout.place`.

    Raises:
        NoRoomError: there is too little shared memory.
    """

    def __init__(
        self,
        layout: Layout,
        pool: Pool,
        until: WaitUntil,
        spins: int,
        about: Callable[[], str],
        calls: Calls,
        small_stay: bool = False,
    ) -> None:
        self.layout = layout
        self._pool = pool
        self._me = layout.plan.worker
        self._calls = calls
        self._about = about
        self._senders: dict[int, Offer] = {}
        self._asked: dict[int, Offer] = {}
        self._ready_lines: list[tuple[memoryview, int]] = []
        self._met: set[int] = set()
        self._in_pieces: dict[tuple[int, int], list[Piece]] = {}
        self._memory = PlanMemory(pool, layout.dtype)
        receivers = {s.peer for s in layout.messages if isinstance(s, Send)}
        receives = [s.peer for s in layout.messages if isinstance(s, Receive)]
        self._from = frozenset(receives)
        peers, lines = sorted(receivers.union(receives)), len(receivers) + len(receives)
        self._signals = Signals(self._memory, peers, lines, until, spins, about)
        self._receivers = {p: Offer(ready=self._signals.line()) for p in sorted(receivers)}
        self._choose()
        layout.place(self._array, small_stay)
        if self._direct:
            self._memory.add_slots(buffer.shape for buffer in layout.open)
        self._slots = self._memory.slots
        self.lent = None if self._slots is None else self._slots.free
        self.takes_out = self.early = not self._direct
        self.inbox = [self._inbox(stage) for stage in layout.stages]
        self._release = weakref.finalize(self, _give_back, self._memory, self._signals.runs)
        self._release.atexit = False

    # Memory

    def _choose(self) -> None:
        """Decide if peers write into the regions that are made, which then lie in shared memory, or
        into separate buffers used in turn, so that they need not wait for this worker's call."""
        layout = self.layout
        moved = [(s, p) for s in layout.stages for p in s.puts if self._comes(p)]
        size = layout.bytes_of(sum(p.target.size for s, p in moved if self._is_straight(s, p)))
        results = layout.bytes_of(sum(region.size for region in layout.plan.outputs))
        limit = max(_LEAST, results // _SHARE)
        allocated = layout.small and layout.makes_results
        self._direct = size > limit and not allocated
        self._why = f"{size} bytes that come are parts of the result as they are, "
        self._why += f"{'more' if self._direct else 'no more'} than {limit}"
        if allocated:
            self._why = f"the result has no more than {SMALL} bytes"
        beside = layout.bytes_of(sum(put.target.size for _, put in moved))
        self._turns = MANY if beside <= SMALL else FEW if beside <= _LONG else 1
        self._turns = 0 if self._direct else self._turns

    def _comes(self, put: Put) -> bool:
        """True if a put reads a message that comes through shared memory."""
        return isinstance(put.source, Message) and put.source.peer in self._from

    def _is_straight(self, stage: Stage, put: Put) -> bool:
        """True if a message alone determines a box of the result, with contiguous runs that are
        long enough."""
        runs, size = (self.layout.bytes_of(n) for n in (stage.target(put).run, put.target.size))
        alone = put.is_copy and not any(put is step.first for step in stage.sums)
        return alone and self._comes(put) and runs >= min(_RUN, size)

    def _array(self, region: Region) -> Array:
        return self._memory.array(region.shape) if self._direct else self.layout.zeros(region)

    def lending(self) -> Sequence[Operation]:
        if self._slots is None:
            return super().lending()
        # Other workers cannot write to the caller's ``out``; the result is copied there.
        return [Call(self._slots.take, (), list(self.layout.open), unpack=True)]

    # Interaction of locations

    def _inbox(self, stage: Stage) -> dict[int, View]:
        return {k: v for step in stage.receives for k, v in self._receive(stage, step).items()}

    def _receive(self, stage: Stage, step: Receive) -> dict[int, View]:
        offer = self._senders.setdefault(step.peer, Offer(turns=self._turns))
        offer.done[stage.number] = self._signals.line()
        incoming = stage.incoming(step.peer)
        pieces = self._cuts(stage, incoming[0]) if incoming else []
        self._in_pieces[stage.number, step.peer] = offer.pieces[stage.number] = pieces
        places = offer.places.setdefault(stage.number, [])
        inbox: dict[int, View] = {}
        for put in incoming:
            target = stage.target(put)
            if self._direct and self._is_straight(stage, put):
                places.append(self._pool.place(self._views(target)))
                continue
            arrays = [self._memory.array(target.shape) for _ in range(self._turns or 1)]
            places.append(self._pool.place(arrays))
            inbox[id(put)] = _chosen(arrays, TURN)
        return inbox

    def _views(self, target: View) -> list[Array]:
        """A box of a result, in each of the arrays that the result may be in."""
        if target.fixed:
            return [target.get()]
        assert self._slots is not None
        k = self.layout.open[target.buffer]
        return [target.of_array(buffers[k].array()) for buffers in self._slots.buffers]

    def _cuts(self, stage: Stage, put: Put) -> list[Piece]:
        """Pieces of a message, if it is one long box that is summed; else empty."""
        for step in stage.sums:
            both = step.first, step.second
            if any(put is one for one in both):
                peers = [one.source.peer for one in both if isinstance(one.source, Message)]
                here = all(p in self._from and len(stage.incoming(p)) == 1 for p in peers)
                if peers and here:
                    return pieces_of(put.target.shape, self.layout.dtype.itemsize)
        return []

    def offers(self) -> dict[int, Said]:
        """Offers to each peer, to be exchanged before the first run."""
        return {
            p: (self._senders.get(p), self._receivers.get(p), self._signals.word(p))
            for p in self._signals.peers.words
        }

    def connect(self, said: dict[int, Said]) -> None:
        """Take the peers' `offers`; the instructions need them."""
        signals = self._signals
        signals.tell({peer: word for peer, (_, _, word) in said.items()})
        self._asked = {peer: offer for peer, (offer, _, _) in said.items() if offer is not None}
        told = [(p, offer.ready) for p, (_, offer, _) in sorted(said.items()) if offer is not None]
        self._ready_lines = [
            (self._pool.numbers(line[0], peer), line[1]) for peer, line in told if line is not None
        ]
        for peer, offer in self._asked.items():
            if offer.turns:  # else the receiver signals it, and may have done so already
                signals.flags[signals.index(self._receivers[peer].ready)] = offer.turns

    # Instructions

    def begin(self) -> Instructions:
        signals, runs = self._signals, self._signals.runs
        number = Field(runs, "number")
        operations: list[Operation] = [
            Set([RUN, number], number + 1),
            If(signals.flag(signals.gone), [Call(signals.peers.begin)]),
            *self._calls.counting(),
            Set([MARK], RUN % TURNS + CALL),
        ]
        asked = [offer.pieces.values() for offer in self._asked.values()]
        if any(self._in_pieces.values()) or any(any(pieces) for pieces in asked):
            operations.append(Set([PIECES_BASE], RUN * PIECES))
        if self._slots is not None:
            slot = Field(self._slots, "number")
            operations += [Set([Item(lines, k + 1)], slot) for lines, k in self._ready_lines]
        elif self._ready_lines:
            operations.append(Set([TURN], RUN % self._turns))
        ready = [self._ready(0)] if self._slots is not None else []
        yield instruction("begin", Interaction(operations), *ready)

    def _ready(self, ahead: int) -> Signal:
        """Signal to the senders that this worker's memory is ready up to so many runs ahead."""
        said = [Set([Item(lines, k)], RUN + ahead) for lines, k in self._ready_lines]
        flags = [Flag(Sign.READY, self._me, peer) for peer in self._senders]
        return Signal([*self._signals.sync, *said], flags, ahead)

    def end(self) -> Instructions:
        if self._ready_lines and not self._direct:
            yield instruction("say that messages are read", self._ready(self._turns))

    def sends(self, stage: Stage) -> Instructions:
        for step in stage.sends:
            if step.peer not in self._met:
                self._met.add(step.peer)
                yield self._until_ready(step.peer, stage.number)
            yield from self._send(stage, step)

    def _send(self, stage: Stage, step: Send) -> Instructions:
        offer, peer, sync = self._asked[step.peer], step.peer, self._signals.sync
        segment, line = offer.done[stage.number]
        done = self._pool.numbers(segment, peer)
        places = zip(step.parts, offer.places[stage.number], strict=True)
        boxes = [(part, stage.source(part), self._box(place, peer)) for part, place in places]
        # One signal for each buffer: this worker may be a run ahead of who reads it.
        at = _slot(peer) + line if offer.turns > 1 else line
        pieces = offer.pieces[stage.number]
        if pieces:
            ((part, source, target),) = boxes
            parts = [(target.part(*p), source.part(*p), k) for k, p in enumerate(pieces, 1)]
            there = Set([Item(done, line)], PIECES_BASE + PIECE)
            flag = Flag(Sign.PIECE, self._me, peer, stage.number)
            body: list[Operation] = [
                Copy(target.at(_FIRST), source.at(_SECOND)),
                Signal([*sync, there], [flag], piece=PIECE),
            ]
            yield instruction(
                f"write {part} to {peer}, {len(pieces)} pieces",
                Interaction([Set([Item(done, at + 1)], MARK)]),
                For([_FIRST, _SECOND, PIECE], parts, body),
                peer=peer,
                bytes=self.layout.bytes_of(part.size),
            )
            return
        for part, source, target in boxes:
            size = self.layout.bytes_of(part.size)
            copy = Copy(target, source)
            yield instruction(f"write {part} to {peer}", copy, peer=peer, bytes=size)
        flag = Flag(Sign.DONE, self._me, peer, stage.number, max(offer.turns, 1))
        done_now = Signal([*sync, Set([Item(done, at)], MARK)], [flag])
        yield instruction(f"tell {peer}", done_now, peer=peer)

    def _box(self, place: Place, peer: int) -> View:
        """View of a peer's target of a box, in this run."""
        return _chosen(self._pool.views(place, peer, self.layout.dtype), _slot(peer))

    def _until_ready(self, peer: int, stage: int) -> Instruction:
        """The wait until a peer's memory is ready for this run, and the choice of its array: the
        one it signals, or the next in turn."""
        signals, runs = self._signals, self._signals.runs
        flags, k = signals.flags, signals.index(self._receivers[peer].ready)
        turns = self._asked[peer].turns

        def ready() -> bool:
            return flags[k] >= runs.number or signals.peers.gone()

        def who() -> Awaited:
            # Buffers are free once the run that read them has ended.
            needs = math.inf if turns else -1
            words = f"worker {peer} to receive {self._about()}"
            return Awaited(words, (peer,), stage - 0.5, needs, back=turns)

        spin = signals.spin(Condition(signals.flag(k), ">=", RUN), ready, who)
        slot = RUN % turns if turns else signals.flag(k + 1)
        choose = Set([_slot(peer)], slot)
        until = Until([*spin, choose], [Flag(Sign.READY, peer, self._me)])
        wait = instruction(f"wait until {peer} is ready", until, ready=ready, peer=peer)
        return replace(wait, stage=stage - 0.5)

    def sum(self, stage: Stage, step: Sum, first: View, second: View) -> Instruction:
        """Sum of two boxes. Each piece of a long message is added once it has arrived, while the
        next one is written."""
        pieces = self._cuts(stage, step.first)
        if not pieces:
            return super().sum(stage, step, first, second)
        both = step.first, step.second
        peers = [put.source.peer for put in both if isinstance(put.source, Message)]
        target = stage.target(step.first)
        views = (first, second, target)
        parts = [(*(v.part(*p) for v in views), k) for k, p in enumerate(pieces, 1)]
        lines = self._lines(stage.number, peers)
        until_piece, ready = self._signals.until_pieces(stage.number, lines)
        flags = [Flag(Sign.PIECE, peer, self._me, stage.number) for peer in lines]
        after = {peer: line + 1 for peer, line in lines.items()}
        until_whole, _ = self._signals.until_come(stage.number, after, self._turns or 1)
        add = Add(target.at(_TO), first.at(_FIRST), second.at(_SECOND))
        return instruction(
            f"{step}, {len(pieces)} pieces",
            For([_FIRST, _SECOND, _TO, PIECE], parts, [Until(until_piece, flags, PIECE), add]),
            Interaction(until_whole),  # for the number of the call
            ready=lambda: ready(len(pieces)),
            peers=peers,
            bytes=self.layout.bytes_of(target.size),
        )

    def _lines(self, stage: int, peers: Sequence[int]) -> dict[int, int]:
        """Index of the signal of each peer's message in a stage."""
        return {p: self._signals.index(self._senders[p].done[stage]) for p in peers}

    def wait(self, stage: Stage) -> Instructions:
        number = stage.number
        peers = [p for n, p in self._in_pieces if n == number and not self._in_pieces[n, p]]
        if peers:
            size = sum(receive.size for receive in stage.receives if receive.peer in peers)
            lines = self._lines(number, peers)
            until, ready = self._signals.until_come(number, lines, self._turns or 1)
            about = {"peers": peers, "bytes": self.layout.bytes_of(size)}
            turns = self._turns or 1
            flags = [Flag(Sign.DONE, peer, self._me, number, turns) for peer in peers]
            yield Instruction(str(stage.waits), [Until(until, flags)], about, ready)

    def describe(self) -> str:
        if self._direct:
            return f"shared memory: what comes is written into the result, for {self._why}"
        buffers = "a buffer" if self._turns == 1 else f"{self._turns} buffers in turn"
        return (
            f"shared memory: what comes is written into {buffers} beside the result, "
            f"for {self._why}"
        )

    def abandon(self) -> None:
        self._signals.runs.leave(failed=True)
        self._release()

    def release(self) -> None:
        self._release()


def _slot(peer: int) -> Variable:
    """Index of the buffer of a peer that a run writes to."""
    return Variable(f"s{peer}")


def _chosen(arrays: list[Array], number: Number) -> View:
    """View of the array that a run uses."""
    if len(arrays) == 1:
        return fixed(arrays[0])
    return whole(Buffer(arrays[0].shape, choice=(arrays, number)))


def _give_back(memory: PlanMemory, runs: Runs) -> None:
    """Finalizer: notify the peers, and return a plan's shared memory."""
    runs.leave()
    memory.give_back()
