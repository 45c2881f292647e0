"""Programs with point-to-point messages over a `Transport`: one packed message per peer and stage.

Receives are posted at the start of a run, directly into the result where its target is one
contiguous box. Each send starts as soon as it is packed; a worker's successor is first, so that not
all address the same worker. Requests are created once and started at every run.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from linop.backends.execution.arrays import NUMPY, Arrays
from linop.backends.execution.copies import SMALL, Move
from linop.backends.execution.program import Program
from linop.backends.execution.stage import Stage
from linop.backends.execution.views import Cell, View, cut, fixed
from linop.backends.transports.call_numbers import PACKED, Calls, Numbers
from linop.backends.transports.transport import Awaited, Transport, Who, peers_named
from linop.planning.plan import Plan, Put, Receive, Send, Wait
from linop.spaces.region import Region
from linop.spaces.scalars import Array

_APART = 256
"""Alignment in bytes of messages that share one device buffer."""


class Messages(Program):
    """A plan bound to point-to-point messages, all with one tag: between two workers they keep
    their order.

    Args:
        calls: call counter of all plans of the same workers; None if calls are not compared.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        tag: int,
        about: Callable[[], str],
        calls: Calls | None,
        arrays: Arrays = NUMPY,
    ) -> None:
        self._transport = transport
        self._tag = tag
        self._numbers = Numbers(plan, calls, not arrays.asynchronous, about)
        self._posts: list[tuple[int, Receive, View]] = []
        self._requests: list[Any] = []
        self._receiving: dict[int, list[Any]] = {}
        self._peers: dict[int, list[int]] = {}
        self._sending: list[Any] = []
        self._receivers: list[int] = []
        received = [step for step in plan.steps if isinstance(step, Receive)]
        self.small_stay = not all(map(self._numbers.inside, received))
        super().__init__(plan, about, calls, arrays)
        self.bind()
        self._release = weakref.finalize(self, transport.free, self._requests)
        self._release.atexit = False

    def memory(self, region: Region) -> Array:
        return self.arrays.of(region.memory).zeros(region.shape, self.plan.dtype)

    def receives(self, stage: Stage, steps: Sequence[Receive]) -> dict[int, View]:
        puts = {step.peer: stage.incoming(step.peer) for step in steps}
        inside = self._numbers.inside
        unpacked = [s for s in steps if inside(s) or not straight(stage, puts[s.peer], s)]
        apart = [all(stage.target(put).cell.apart for put in puts[s.peer]) for s in unpacked]
        buffers = {s.peer: b for s, b in zip(unpacked, self._buffers(unpacked, apart), strict=True)}
        for step in steps:
            where = buffers.get(step.peer) or stage.target(puts[step.peer][0])
            self._posts.append((stage.number, step, self._whole(step, where)))
        return {id(put): piece(b, put) for peer, b in buffers.items() for put in puts[peer]}

    def count(self) -> None:
        """Emit the step that counts a call."""
        lines = self._numbers.counting(self.code)
        if lines:
            self.step("count the call", *lines)

    def begin(self) -> None:
        self.count()
        self.post(self._posts)

    def post(self, posts: Sequence[tuple[int, Receive, View]]) -> None:
        """Emit the steps that post receives of some stages."""
        numbers: list[Any] = []
        started: list[Any] = []
        new: list[tuple[int, str]] = []
        name, receive = self.code.name, self._transport.receive
        for number, step, where in posts:
            pending = self._receiving.setdefault(number, [])
            if self._numbers.before(step):
                theirs = self._numbers.theirs(step)
                numbers.append(self._transport.receiver(step.peer, self._tag, theirs))
                self._peers.setdefault(number, []).append(step.peer)
                pending.append(numbers[-1])
            self._peers.setdefault(number, []).append(step.peer)
            if where.fixed:
                pending.append(self._transport.receiver(step.peer, self._tag, where.get()))
                started.append(pending[-1])
            else:
                call = f"{name(receive)}({step.peer}, {self._tag}, {where.text(self.code)})"
                new.append((step.peer, f"{name(pending)}[{len(pending)}] = {call}"))
                pending.append(None)
        self._requests += numbers + started
        for some in numbers, started:  # requests started together may match in any order
            if some:
                self.step(f"post {len(some)} receives", self._starting(some))
        for peer, post in new:
            self.step("post a receive into the result", post, peer=peer)

    def _starting(self, requests: list[Any]) -> str:
        return f"{self.code.name(self._transport.start)}({self.code.name(requests)})"

    def sends(self, stage: Stage, steps: Sequence[Send]) -> None:
        # A device packs all messages first, by few kernels; else each is sent once packed.
        for some in [steps] if self.arrays.asynchronous else [[step] for step in steps]:
            for step, where in self.packed(stage, some):
                size = self.bytes_of(step.size)
                self.step(str(step), *self.leaving(step, where), peer=step.peer, bytes=size)

    def packed(self, stage: Stage, steps: Sequence[Send]) -> list[tuple[Send, View]]:
        """Emit the steps that pack each message into a contiguous array.

        Returns:
            Each send with the view to be sent: the source itself if it is contiguous, or a fixed
                buffer.
        """
        sources = {step.peer: [stage.source(part) for part in step.parts] for step in steps}
        where = {step.peer: self.as_it_is(step, *sources[step.peer]) for step in steps}
        packing = [step for step in steps if where[step.peer] is None]
        apart = [all(source.cell.apart for source in sources[step.peer]) for step in packing]
        for step, buffer in zip(packing, self._buffers(packing, apart), strict=True):
            where[step.peer], offset = buffer, 0
            for source in sources[step.peer]:
                part = cut(buffer, offset, source.shape)
                about = {"peer": step.peer, "bytes": self.bytes_of(source.size)}
                self.move(Move(f"pack for {step.peer}", part, source, about))
                offset += source.size
        return [(step, view) for step in steps if (view := where[step.peer]) is not None]

    def _whole(self, step: Send | Receive, where: View) -> View:
        """View of a message, with the call number if that is appended."""
        return fixed(self._numbers.room(step).whole) if self._numbers.inside(step) else where

    def as_it_is(self, step: Send, first: View, *others: View) -> View | None:
        """View of a message whose source is one contiguous box, to be sent unpacked; None if it
        must be packed."""
        if others or not first.contiguous or self._numbers.inside(step):
            return None
        if first.cell.apart:
            self.settle()
        if first.fixed:
            return fixed(first.get(), first.cell.apart)
        if not self.arrays.asynchronous and self.bytes_of(step.size) <= PACKED:
            return None
        # Memory that differs from run to run.
        flat = Cell(first.shape, self.code.local(), apart=first.cell.apart)
        how = self.code.name(np.ascontiguousarray) if flat.apart else "contiguous"
        text = f"{flat.name} = {how}({first.text(self.code)})"
        self.step(f"find what is for {step.peer}", text, peer=step.peer)
        return View(flat, flat.shape)

    def leaving(self, step: Send, where: View) -> list[str]:
        """Lines that send a contiguous array."""
        name, sending, lines = self.code.name, self._sending, list[str]()
        if self._numbers.inside(step):
            lines.append(f"{name(self._numbers.room(step).number)}[0] = c")
        elif self._numbers.before(step):
            lines.append(self._sent(step.peer, self._numbers.mine))
        where = self._whole(step, where)
        if where.fixed:
            return [*lines, self._sent(step.peer, where.get())]
        self._receivers.append(step.peer)
        sending.append(None)
        call = f"{name(self._transport.send)}({step.peer}, {self._tag}, {where.text(self.code)})"
        return [*lines, f"{name(sending)}[{len(sending) - 1}] = {call}"]

    def _sent(self, peer: int, array: Array) -> str:
        """Line that sends a fixed array, by a persistent request."""
        request = self._transport.sender(peer, self._tag, array)
        self._receivers.append(peer)
        self._sending.append(request)
        self._requests.append(request)
        return self._starting([request])

    def wait(self, stage: Stage, step: Wait) -> None:
        pending, transport = self._receiving[stage.number], self._transport

        self.step(
            str(step),
            self._waiting(pending, lambda: self._who(stage.number)),
            *self._numbers.checking(self.code, stage.number),
            ready=lambda: transport.test(pending),
            peers=self._peers.get(stage.number, []),
            bytes=sum(self.bytes_of(r.size) for r in stage.receives),
        )

    def _who(self, stage: int) -> Awaited:
        what, late = self.awaited(stage)
        return Awaited(f"{what} in stage {stage} of {self.about()}", late, stage)

    def awaited(self, stage: int) -> tuple[str, Sequence[int]]:
        """Missing messages of a stage as text, and their senders."""
        pending = zip(self._peers[stage], self._receiving[stage], strict=True)
        late = {peer: 0 for peer, request in pending if not self._transport.test([request])}
        return f"a message from {peers_named(list(late))}", list(late)

    def end(self) -> None:
        sending, transport = self._sending, self._transport
        if sending:

            def late() -> list[int]:
                requests = zip(self._receivers, sending, strict=True)
                return [
                    peer for peer, one in requests if one is not None and not transport.test([one])
                ]

            def who() -> Awaited:
                # A peer in this call receives them, or is at an earlier stage and waits itself.
                words = f"its own messages of {self.about()} to leave"
                return Awaited(words, late(), math.inf, needs=-1)

            line = self._waiting(sending, who)
            self.step("wait until all is sent", line, ready=lambda: transport.test(sending))

    def _waiting(self, pending: list[Any], who: Who) -> str:
        name = self.code.name
        return f"{name(self._transport.wait)}({name(pending)}, {name(who)})"

    def buffer(self, size: int, apart: bool = False) -> View:
        """New fixed flat buffer of a number of elements; `apart`: in host memory."""
        arrays = self.arrays.of("host") if apart else self.arrays
        return fixed(arrays.empty((size,), self.plan.dtype), apart)

    def _buffers(self, steps: Sequence[Send | Receive], apart: Sequence[bool]) -> list[View]:
        """Flat buffers of messages, in host memory where `apart` says so. On a device, small ones
        are pieces of one buffer, so that one kernel reads or writes all of them."""
        pairs = list(zip(steps, apart, strict=True))
        if not self.arrays.asynchronous:
            inside, room = self._numbers.inside, self._numbers.room
            return [
                fixed(room(step).message) if inside(step) else self.buffer(step.size, here)
                for step, here in pairs
            ]
        each = max(1, _APART // self.plan.dtype.itemsize)
        sizes = [-(-step.size // each) * each for step in steps]
        small = [self.bytes_of(s.size) <= SMALL and not here for s, here in pairs]
        ends = list(accumulate(n if one else 0 for n, one in zip(sizes, small, strict=True)))
        together = self.buffer(ends[-1]) if sum(small) > 1 else None
        return [
            cut(together, end - n, (step.size,))
            if together is not None and one
            else self.buffer(step.size, here)
            for (step, here), n, one, end in zip(pairs, sizes, small, ends, strict=True)
        ]

    def describe(self) -> str:
        return f"messages over {self._transport.name}"

    def abandon(self) -> None:
        super().abandon()
        receives = [r for pending in self._receiving.values() for r in pending if r is not None]
        self._transport.abandon(receives, [s for s in self._sending if s is not None])
        self._release.detach()

    def release(self) -> None:
        self._release()


def straight(stage: Stage, puts: Sequence[Put], step: Receive) -> bool:
    """True if a message can be received directly into its target: one unscaled assignment to a
    contiguous box."""
    if len(puts) != 1 or puts[0].coefficient != 1 or puts[0].accumulate:
        return False
    target = stage.target(puts[0])
    return target.contiguous and target.size == step.size


def piece(buffer: View, put: Put) -> View:
    """View of the piece of a message that a put reads."""
    return cut(buffer, put.source.offset, put.target.shape)  # type: ignore[union-attr]
