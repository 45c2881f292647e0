"""Programs whose messages go through a transport: one packed message per peer and stage.

Receives are posted when a run begins, into the result itself where that is one contiguous box;
sends start as soon as they are packed, the farthest peer first, so that not all workers address the
same one. Requests are made once and started at every run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from linop.backends.arrays import NUMPY, Arrays
from linop.backends.execute import Program
from linop.backends.stage import Stage
from linop.backends.strided import View, cut, fixed
from linop.backends.transport import Transport, Who, peers_named
from linop.plan import Plan, Put, Receive, Send, Wait
from linop.region import Region
from linop.scalars import Array

_PACKED = 8 * 1024
"""Bytes of a contiguous part up to which it is packed all the same: a copy and a persistent request
cost less than a request for memory that is new at every run."""


class Messages(Program):
    """A plan over a transport's messages, all with one tag: between two workers they keep their
    order."""

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        tag: int,
        about: Callable[[], str],
        arrays: Arrays = NUMPY,
    ) -> None:
        self._transport = transport
        self._tag = tag
        self._posts: list[tuple[int, Receive, View]] = []
        self._requests: list[Any] = []
        self._receiving: dict[int, list[Any]] = {}
        self._peers: dict[int, list[int]] = {}
        self._sending: list[Any] = []
        self.small_stay = any(isinstance(step, Receive) for step in plan.steps)
        super().__init__(plan, about, arrays)
        self.bind()
        self._release = weakref.finalize(self, transport.free, self._requests)
        self._release.atexit = False

    def memory(self, region: Region) -> Array:
        return self.arrays.of(region.memory).zeros(region.shape, self.plan.dtype)

    def slots(self, regions: Sequence[Region]) -> list[tuple[Array, ...]]:
        del regions
        return []

    def receive(self, stage: Stage, step: Receive) -> dict[int, View]:
        puts = stage.incoming(step.peer)
        at_once = straight(stage, puts, step)
        where = stage.target(puts[0]) if at_once else self._buffer(step.size)
        self._posts.append((stage.number, step, where))
        return {} if at_once else {id(put): piece(where, put) for put in puts}

    def begin(self) -> None:
        started: list[Any] = []
        new: list[tuple[int, str]] = []
        name, receive = self.code.name, self._transport.receive
        for number, step, where in self._posts:
            pending = self._receiving.setdefault(number, [])
            self._peers.setdefault(number, []).append(step.peer)
            if where.fixed:
                pending.append(self._transport.receiver(step.peer, self._tag, where.get()))
                started.append(pending[-1])
            else:
                call = f"{name(receive)}({step.peer}, {self._tag}, {where.text(self.code)})"
                new.append((step.peer, f"{name(pending)}[{len(pending)}] = {call}"))
                pending.append(None)
        self._requests += started
        if started:
            self.step(f"post {len(started)} receives", self._starting(started))
        for peer, post in new:
            self.step("post a receive into the result", post, peer=peer)

    def _starting(self, requests: list[Any]) -> str:
        return f"{self.code.name(self._transport.start)}({self.code.name(requests)})"

    def send(self, stage: Stage, step: Send) -> None:
        sources = [stage.source(part) for part in step.parts]
        first = sources[0]
        k = len(self._sending)
        self._sending.append(None)
        whole = len(sources) == 1 and first.contiguous and not first.cell.apart
        size = self.bytes_of(step.size)
        if whole and first.fixed:
            self._send_from(step, first.get(), k)
        elif whole and size > _PACKED:
            # Memory that is another one at every run.
            name, given = self.code.name, f"contiguous({first.text(self.code)})"
            call = f"{name(self._transport.send)}({step.peer}, {self._tag}, {given})"
            line = f"{name(self._sending)}[{k}] = {call}"
            self.step(str(step), line, peer=step.peer, bytes=size)
        else:
            self._send_from(step, self._pack(step, sources), k)

    def _pack(self, step: Send, sources: Sequence[View]) -> Array:
        """A buffer that stays, where a message's parts are packed."""
        buffer, offset = self._buffer(step.size), 0
        for source in sources:
            part = cut(buffer, offset, source.shape)
            packed = self.bytes_of(source.size)
            for text, ready in self.moving(part, source):
                label = f"pack for {step.peer}"
                self.step(label, *text, ready=ready, peer=step.peer, bytes=packed)
            offset += source.size
        return buffer.get()

    def _send_from(self, step: Send, buffer: Array, k: int) -> None:
        request = self._sending[k] = self._transport.sender(step.peer, self._tag, buffer)
        self._requests.append(request)
        line = self._starting([request])
        self.step(str(step), line, peer=step.peer, bytes=self.bytes_of(step.size))

    def wait(self, stage: Stage, step: Wait) -> None:
        pending, transport = self._receiving[stage.number], self._transport

        self.step(
            str(step),
            self._waiting(pending, lambda: self._who(stage.number)),
            ready=lambda: transport.test(pending),
            peers=self._peers.get(stage.number, []),
            bytes=sum(self.bytes_of(r.size) for r in stage.receives),
        )

    def _who(self, stage: int) -> str:
        return f"{self.awaited(stage)} in stage {stage} of {self.about()}"

    def awaited(self, stage: int) -> str:
        """What has not come yet, in words."""
        pending = zip(self._peers[stage], self._receiving[stage], strict=True)
        late = [peer for peer, request in pending if not self._transport.test([request])]
        return f"a message from {peers_named(late)}"

    def end(self) -> None:
        sending, transport = self._sending, self._transport
        if sending:

            def who() -> str:
                return f"its own messages of {self.about()} to leave"

            line = self._waiting(sending, who)
            self.step("wait until all is sent", line, ready=lambda: transport.test(sending))

    def _waiting(self, pending: list[Any], who: Who) -> str:
        name = self.code.name
        return f"{name(self._transport.wait)}({name(pending)}, {name(who)})"

    def _buffer(self, size: int) -> View:
        return fixed(self.arrays.empty((size,), self.plan.dtype))

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
    """Whether a message, which some puts read, can be received where it belongs."""
    if len(puts) != 1 or puts[0].coefficient != 1 or puts[0].accumulate:
        return False
    target = stage.target(puts[0])
    return target.contiguous and target.size == step.size and not target.cell.apart


def piece(buffer: View, put: Put) -> View:
    """Where in a message a put finds what it reads."""
    return cut(buffer, put.source.offset, put.target.shape)  # type: ignore[union-attr]
