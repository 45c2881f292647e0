"""Point-to-point messages over a `Transport`, as instructions: one packed message per peer and
stage.

Receives are posted at the start of a run, directly into the result where its target is one
contiguous box. Each send starts as soon as it is packed. Requests are created once and started at
every run.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from linop.backends.engine.execution.instructions import (
    Call,
    Instruction,
    Operation,
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
from linop.planning.plan import Receive, Send
from linop.spaces.scalars import Array

_MOST_PIECES = 3
"""Largest number of pieces in which a message is sent. Sending more took longer than waiting until
the receiver is ready."""


Start = Callable[[int, int, Array], Any]
"""`Transport.send` or `Transport.receive`."""


class Post(NamedTuple):
    """A receive: its stage, its step, and the view that the message goes to."""

    stage: int
    step: Receive
    where: View


@dataclass(frozen=True)
class Piece:
    """A part of a message: a range of its bytes, by default all."""

    bytes: slice | None = None

    def of(self, message: Array) -> Array:
        """The piece of a contiguous array."""
        return message if self.bytes is None else message.reshape(-1).view(np.uint8)[self.bytes]

    def by(self, start: Start) -> Start:
        """A transport's `send` or `receive` of the piece, given the message."""
        if self.bytes is None:
            return start
        return lambda peer, tag, message: start(peer, tag, self.of(message))


class Requests:
    """Requests of one plan's messages, all with one tag: between two workers they keep their order.

    Attributes:
        receiving: requests of the receives of each stage, and `peers`, their senders.
        sending: requests of the sends, and `receivers`, their receivers.
    """

    def __init__(self, layout: Layout, transport: Transport, tag: int, numbers: Numbers) -> None:
        self._layout = layout
        self._transport = transport
        self._tag = tag
        self._numbers = numbers
        self.receiving: dict[int, list[Any]] = {}
        self.peers: dict[int, list[int]] = {}
        self.sending: list[Any] = []
        self.receivers: list[int] = []
        persistent: list[Any] = []
        self._persistent = persistent
        self.release = weakref.finalize(self, transport.free, persistent)
        self.release.atexit = False

    def count(self) -> Instructions:
        """The instruction that counts a call."""
        operations = self._numbers.counting()
        return [instruction("count the call", *operations)] if operations else []

    def post(self, posts: Sequence[Post]) -> Iterator[Instruction]:
        """Instructions that post receives of some stages.

        Those of one sender are posted in the order of its sends, each by an instruction of its own:
        MPI may start requests in any order that are started together.
        """
        rounds: list[list[tuple[int, Any]]] = []  # one receive of each sender: a request or a call
        before: dict[int, int] = {}

        def add(peer: int, receive: Any) -> None:
            number = before[peer] = before.get(peer, -1) + 1
            if number == len(rounds):
                rounds.append([])
            rounds[number].append((peer, receive))

        for number, step, where in posts:
            pending = self.receiving.setdefault(number, [])
            peers = self.peers.setdefault(number, [])
            if self._numbers.before(step):
                theirs = self._numbers.theirs(step)
                pending.append(self._transport.receiver(step.peer, self._tag, theirs))
                peers.append(step.peer)
                add(step.peer, pending[-1])
            for part in self._pieces(step):
                peers.append(step.peer)
                if where.fixed:
                    buffer = part.of(where.get())
                    pending.append(self._transport.receiver(step.peer, self._tag, buffer))
                    add(step.peer, pending[-1])
                else:
                    to, receive = [Item(pending, len(pending))], part.by(self._transport.receive)
                    add(step.peer, Call(receive, (step.peer, self._tag, where), to))
                    pending.append(None)
        for receives in rounds:
            started = [one for _, one in receives if not isinstance(one, Call)]
            self._persistent += started
            if started:
                yield instruction(f"post {len(started)} receives", self._starting(started))
            for peer, one in receives:
                if isinstance(one, Call):
                    yield instruction("post a receive into the result", one, peer=peer)

    def _starting(self, requests: list[Any]) -> Call:
        return Call(self._transport.starter(requests))

    def _waiting(self, pending: Sequence[Any], who: Who) -> Operation:
        """Operation that waits for requests: it polls for a while, then calls the transport."""
        wait, tests = Call(self._transport.wait, [pending, who]), self._transport.tests(pending)
        if not tests:
            return wait
        come = Joined("and", [Returned(test) for test in tests])
        return Spin(max(self._transport.spins, 1), come, wait)

    def send(self, step: Send, where: View) -> list[Operation]:
        """Operations that send a contiguous array."""
        operations: list[Operation] = []
        if self._numbers.inside(step):
            operations.append(Set([Item(self._numbers.room(step).number, 0)], CALL))
        elif self._numbers.before(step):
            operations.append(self._sent(step.peer, self._numbers.mine))
        where = self.message(step, where)
        for part in self._pieces(step):
            if where.fixed:
                operations.append(self._sent(step.peer, part.of(where.get())))
            else:
                to = [Item(self.sending, self.unknown(step.peer))]
                send = Call(part.by(self._transport.send), (step.peer, self._tag, where), to)
                operations.append(send)
        return operations

    def _pieces(self, step: Send | Receive) -> list[Piece]:
        """The pieces in which a message is sent, with the call number if that is appended: as few
        as the transport sends at once, unless these are many."""
        inside = self._numbers.inside(step)
        size = len(self._numbers.room(step).whole) if inside else self._layout.bytes_of(step.size)
        many = math.ceil(size / self._transport.eager.get(step.peer, math.inf))
        if not 1 < many <= _MOST_PIECES:
            return [Piece()]
        cuts = [size * k // many for k in range(many + 1)]
        return [Piece(slice(*ends)) for ends in pairwise(cuts)]

    def message(self, step: Send | Receive, where: View) -> View:
        """View of a message, with the call number if that is appended."""
        return fixed(self._numbers.room(step).whole) if self._numbers.inside(step) else where

    def unknown(self, peer: int) -> int:
        """Index in `sending` of a request that is new in every run."""
        self.receivers.append(peer)
        self.sending.append(None)
        return len(self.sending) - 1

    def _sent(self, peer: int, array: Array) -> Call:
        """Operation that sends a fixed array, by a persistent request."""
        request = self._transport.sender(peer, self._tag, array)
        self.receivers.append(peer)
        self.sending.append(request)
        self._persistent.append(request)
        return self._starting([request])

    def wait(self, stage: Stage, who: Who) -> Instruction:
        """The instruction that waits for a stage's messages."""
        pending, transport = self.receiving[stage.number], self._transport
        return instruction(
            str(stage.waits),
            self._waiting(pending, who),
            *self._numbers.checking(stage.number),
            ready=lambda: transport.test(pending),
            peers=self.peers.get(stage.number, []),
            bytes=sum(self._layout.bytes_of(r.size) for r in stage.receives),
        )

    def late(self, stage: int) -> list[int]:
        """Senders of the missing messages of a stage."""
        pending = zip(self.peers[stage], self.receiving[stage], strict=True)
        return list({peer: 0 for peer, one in pending if not self._transport.test([one])})

    def sent(self, about: Callable[[], str]) -> Instructions:
        """The instruction that waits until all messages have left."""
        sending, transport = self.sending, self._transport

        def late() -> list[int]:
            pending = zip(self.receivers, sending, strict=True)
            return [peer for peer, one in pending if one is not None and not transport.test([one])]

        def who() -> Awaited:
            # A peer in this call receives them, or is at an earlier stage and waits itself.
            words = f"its own messages of {about()} to leave"
            return Awaited(words, late(), math.inf, needs=-1)

        if sending:
            wait = self._waiting(sending, who)
            yield instruction("wait until all is sent", wait, ready=lambda: transport.test(sending))

    def abandon(self) -> None:
        """Abandon the requests of an unfinished run."""
        receives = [r for pending in self.receiving.values() for r in pending if r is not None]
        self._transport.abandon(receives, [s for s in self.sending if s is not None])
        self.release.detach()


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
        self.posts: list[Post] = []
        if not beside:
            received = [step for step in layout.messages if isinstance(step, Receive)]
            layout.place(layout.zeros, small_stay=not all(map(numbers.inside, received)))
        self.inbox = [{} if s.number in others else self._inbox(s) for s in layout.stages]

    def _inbox(self, stage: Stage) -> dict[int, View]:
        arriving, inbox = self.packing.arriving(stage)
        for step, where in arriving:
            self.posts.append(Post(stage.number, step, self.requests.message(step, where)))
        return inbox

    def begin(self) -> Instructions:
        yield from self.requests.count()
        yield from self.requests.post(self.posts)

    def sends(self, stage: Stage) -> Instructions:
        for step in stage.sends:
            made, ((_, where),) = self.packing.packed(stage, [step])
            yield from made
            yield sending(self.layout, step, self.requests.send(step, where))

    def wait(self, stage: Stage) -> Instructions:
        yield self.requests.wait(stage, lambda: self.awaited(stage.number))

    def awaited(self, stage: int) -> Awaited:
        """Description of the wait for a stage's messages."""
        late = self.requests.late(stage)
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
