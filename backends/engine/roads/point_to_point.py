"""Point-to-point messages over a `Transport`, as instructions: one packed message per peer and
stage.

Receives are posted at the start of a run, directly into the result where its target is one
contiguous box. Each send starts as soon as it is packed. Requests are created once and started at
every run.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from linop.backends.engine.execution.instructions import (
    Call,
    Complete,
    Instruction,
    Interaction,
    Operation,
    Packet,
    Post,
    Set,
    Spin,
    instruction,
)
from linop.backends.engine.execution.layout import Layout
from linop.backends.engine.execution.numbers import Item, Joined, Returned
from linop.backends.engine.execution.stage import Stage
from linop.backends.engine.execution.views import View, fixed
from linop.backends.engine.roads.call_numbers import CALL, Calls, Numbers, never
from linop.backends.engine.roads.communication import Communication, Instructions
from linop.backends.engine.roads.packing import Packing
from linop.backends.together.transport import Awaited, Transport, Who, peers_named
from linop.planning.plan import GROUP, Receive, Send
from linop.spaces.scalars import Array

_MOST_PIECES = 3
"""Largest number of pieces in which a message is sent. Sending more took longer than waiting until
the receiver is ready."""


Start = Callable[[int, int, Array], Any]
"""`Transport.send` or `Transport.receive`."""


class Expected(NamedTuple):
    """A receive: its stage, its step, and the view that the message goes to."""

    stage: int
    step: Receive
    where: View


class Pending(NamedTuple):
    """Packets that are waited for together, and their requests: None where a run makes its own."""

    packets: list[Packet]
    requests: list[Any]

    def add(self, packet: Packet, request: Any = None) -> Item:
        """Add a packet; returns where its request is."""
        self.packets.append(packet)
        self.requests.append(request)
        return Item(self.requests, len(self.requests) - 1)


class Requests:
    """Requests of one plan's messages, all with one tag: between two workers they keep their order.

    Attributes:
        coming: the receives of each stage; `leaving`: all sends.
    """

    def __init__(self, layout: Layout, transport: Transport, tag: int, numbers: Numbers) -> None:
        self._layout = layout
        self._transport = transport
        self._tag = tag
        self._numbers = numbers
        self.coming: defaultdict[int, Pending] = defaultdict(lambda: Pending([], []))
        self.leaving = Pending([], [])
        persistent: list[Any] = []
        self._persistent = persistent
        self.release = weakref.finalize(self, transport.free, persistent)
        self.release.atexit = False
        self._request: dict[Packet, Any] = {}
        """Persistent requests."""

    def count(self) -> Instructions:
        """The instruction that counts a call."""
        operations = self._numbers.counting()
        return [instruction("count the call", Interaction(operations))] if operations else []

    def post(self, expected: Sequence[Expected]) -> Iterator[Instruction]:
        """Instructions that post receives of some stages.

        Those of one sender are posted in the order of its sends, each by an instruction of its own:
        MPI may start requests in any order that are started together.
        """
        rounds: list[list[tuple[Packet, Operation | None]]] = []  # one receive of each sender
        before: Counter[int] = Counter()
        for number, step, where in expected:
            packets = [Packet(step.peer, True, where, part) for part in self._pieces(step)]
            if self._numbers.before(step):
                packets.insert(0, Packet(step.peer, True, fixed(self._numbers.theirs(step))))
            for packet in packets:
                turn = before[step.peer]
                before[step.peer] += 1
                rounds += [[] for _ in range(turn + 1 - len(rounds))]
                rounds[turn].append((packet, self._begun(packet, self.coming[number])))
        for receives in rounds:
            started = [packet for packet, alone in receives if alone is None]
            if started:
                begin = self._starting(started)
                yield instruction(f"post {len(started)} receives", begin)
            for packet, alone in receives:
                if alone is not None:
                    post = Post([alone], [packet])
                    yield instruction("post a receive into the result", post, peer=packet.peer)

    def _begun(self, packet: Packet, pending: Pending) -> Operation | None:
        """The operation that begins a packet whose memory differs from run to run; None for a
        packet that a persistent request begins (`_starting`)."""
        transport, peer, tag = self._transport, packet.peer, self._tag
        if packet.where.fixed:
            make = transport.receiver if packet.incoming else transport.sender
            request = make(peer, tag, _bytes_of(packet, packet.where.get()))
            pending.add(packet, request)
            self._persistent.append(request)
            self._request[packet] = request
            return None
        start = transport.receive if packet.incoming else transport.send
        how = start if packet.bytes is None else _by_bytes(start, packet)
        return Call(how, (peer, tag, packet.where), [pending.add(packet)])

    def _starting(self, packets: Sequence[Packet]) -> Post:
        requests = [self._request[packet] for packet in packets]
        return Post([Call(self._transport.starter(requests))], packets)

    def _waiting(self, pending: Pending, who: Who) -> Complete:
        """Operation that waits for packets: it polls for a while, then calls the transport."""
        requests = pending.requests
        wait, tests = Call(self._transport.wait, [requests, who]), self._transport.tests(requests)
        if not tests:
            return Complete([wait], pending.packets)
        come = Joined("and", [Returned(test) for test in tests])
        return Complete([Spin(max(self._transport.spins, 1), come, wait)], pending.packets)

    def send(self, step: Send, where: View) -> list[Operation]:
        """Operations that send a contiguous array."""
        packets = [
            Packet(step.peer, False, self.message(step, where), part) for part in self._pieces(step)
        ]
        operations: list[Operation] = []
        if self._numbers.inside(step):
            number = Item(self._numbers.room(step).number, 0)
            operations.append(Interaction([Set([number], CALL)]))
        elif self._numbers.before(step):
            packets.insert(0, Packet(step.peer, False, fixed(self._numbers.mine)))
        for packet in packets:
            alone = self._begun(packet, self.leaving)
            operations.append(
                self._starting([packet]) if alone is None else Post([alone], [packet])
            )
        return operations

    def _pieces(self, step: Send | Receive) -> list[slice | None]:
        """The pieces in which a message is sent, with the call number if that is appended: as few
        as the transport sends at once, unless these are many."""
        inside = self._numbers.inside(step)
        size = len(self._numbers.room(step).whole) if inside else self._layout.bytes_of(step.size)
        many = math.ceil(size / self._transport.eager.get(step.peer, math.inf))
        if not 1 < many <= _MOST_PIECES:
            return [None]
        cuts = [size * k // many for k in range(many + 1)]
        return [slice(*ends) for ends in pairwise(cuts)]

    def message(self, step: Send | Receive, where: View) -> View:
        """View of a message, with the call number if that is appended."""
        return fixed(self._numbers.room(step).whole) if self._numbers.inside(step) else where

    def wait(self, stage: Stage, who: Who) -> Instruction:
        """The instruction that waits for a stage's messages."""
        pending, transport = self.coming[stage.number], self._transport
        checks = self._numbers.checking(stage.number)
        return instruction(
            str(stage.waits),
            self._waiting(pending, who),
            *([Interaction(checks)] if checks else []),
            ready=lambda: transport.test(pending.requests),
            peers=[packet.peer for packet in pending.packets if packet.peer != GROUP],
            bytes=sum(self._layout.bytes_of(r.size) for r in stage.receives),
        )

    def late(self, pending: Pending) -> list[int]:
        """Peers of the packets that are not complete: this worker for its part of a collective."""
        pairs = zip(pending.packets, pending.requests, strict=True)
        late = (p.peer for p, one in pairs if one is not None and not self._transport.test([one]))
        return list({self._layout.plan.worker if peer == GROUP else peer: 0 for peer in late})

    def sent(self, about: Callable[[], str]) -> Instructions:
        """The instruction that waits until all messages have left."""
        requests, transport = self.leaving.requests, self._transport

        def who() -> Awaited:
            # A peer in this call receives them, or is at an earlier stage and waits itself.
            words = f"its own messages of {about()} to leave"
            return Awaited(words, self.late(self.leaving), math.inf, needs=-1)

        if requests:
            wait = self._waiting(self.leaving, who)
            yield instruction(
                "wait until all is sent", wait, ready=lambda: transport.test(requests)
            )

    def abandon(self) -> None:
        """Abandon the requests of an unfinished run."""
        receives = [r for one in self.coming.values() for r in one.requests if r is not None]
        self._transport.abandon(receives, [s for s in self.leaving.requests if s is not None])
        self.release.detach()


def _bytes_of(packet: Packet, message: Array) -> Array:
    """The part of a contiguous array that a packet is."""
    every = packet.bytes is None
    return message if every else message.reshape(-1).view(np.uint8)[packet.bytes]


def _by_bytes(start: Start, packet: Packet) -> Start:
    """A transport's `send` or `receive` of a packet, given the whole message."""
    return lambda peer, tag, message: start(peer, tag, _bytes_of(packet, message))


class PointToPoint(Communication):
    """Messages of a bound plan, over a transport.

    Args:
        about: gives the plan's name for messages to users.
        calls: call counter of all plans of the same workers; None if calls are not compared.
        others: numbers of the stages whose messages are not supplied here.
        beside: True if other messages of the plan go another way, which has given the layout its
            memory, and counts the calls.
    """

    def __init__(
        self,
        layout: Layout,
        transport: Transport,
        tag: int,
        about: Callable[[], str],
        calls: Calls | None,
        others: Collection[int] = (),
        beside: bool = False,
    ) -> None:
        self.layout = layout
        self._about = about
        self._transport = transport
        most = never if layout.arrays.asynchronous else transport.packed
        numbers = Numbers(layout.messages, layout.dtype, calls, most, about, beside)
        self.packing = Packing(layout, numbers)
        self.requests = Requests(layout, transport, tag, numbers)
        self.expected: list[Expected] = []
        if not beside:
            received = [step for step in layout.messages if isinstance(step, Receive)]
            layout.place(layout.zeros, small_stay=not all(map(numbers.inside, received)))
        self.inbox = [{} if s.number in others else self._inbox(s) for s in layout.stages]

    def _inbox(self, stage: Stage) -> dict[int, View]:
        arriving, inbox = self.packing.arriving(stage)
        for step, where in arriving:
            message = self.requests.message(step, where)
            self.expected.append(Expected(stage.number, step, message))
        return inbox

    def begin(self) -> Instructions:
        yield from self.requests.count()
        yield from self.requests.post(self.expected)

    def sends(self, stage: Stage) -> Instructions:
        for step in stage.sends:
            made, ((_, where),) = self.packing.packed(stage, [step])
            yield from made
            yield sending(self.layout, step, self.requests.send(step, where))

    def wait(self, stage: Stage) -> Instructions:
        yield self.requests.wait(stage, lambda: self.awaited(stage.number))

    def awaited(self, stage: int) -> Awaited:
        """Description of the wait for a stage's messages."""
        late = self.requests.late(self.requests.coming[stage])
        return coming(f"a message from {peers_named(late)}", late, stage, self._about)

    def end(self) -> Instructions:
        return self.requests.sent(self._about)

    def describe(self) -> str:
        return f"messages over {self._transport.name}"

    def abandon(self) -> None:
        self.requests.abandon()

    def release(self) -> None:
        self.requests.release()


def sending(layout: Layout, step: Send, operations: Sequence[Operation]) -> Instruction:
    """The instruction that sends a message."""
    size = layout.bytes_of(step.size)
    return instruction(str(step), *operations, peer=step.peer, bytes=size)


def coming(what: str, late: Sequence[int], stage: int, about: Callable[[], str]) -> Awaited:
    """Description of a wait for messages of a stage, `what`, by some peers that are late."""
    return Awaited(f"{what} in stage {stage} of {about()}", late, stage)
