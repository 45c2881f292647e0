"""Programs with device arrays and messages over MPI: CUDA-aware, or staged through host memory.

``aware``: MPI gets device memory. Else messages are *staged*: copied to pinned host buffers, sent
from there, and copied to the device as each one arrives. Messages between host regions only are
sent and received in host memory in either case.

Operations are queued on the current stream, and the host waits for it at most once per stage:

- aware: before MPI reads packed messages, or writes to memory that earlier operations may still
use. Sends and receives start after that.
- staged: for each message, until its copy to the host is complete, while the next ones are copied.
And before a buffer is received into, until the last run's copy from it is complete, usually long
before. Small messages are packed together (`linop.backends.device.fused_copies`), and copied
together.

Local copies are queued before the host waits, to keep the device busy; kernels that read messages
are queued after their arrival. A result is valid in stream order, as always in CuPy: the host does
not wait for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from linop.backends.device.device_arrays import DeviceArrays
from linop.backends.engine.execution.instructions import (
    Call,
    Instruction,
    Operation,
    Views,
    instruction,
)
from linop.backends.engine.execution.layout import Layout
from linop.backends.engine.execution.numbers import Item
from linop.backends.engine.execution.stage import Stage
from linop.backends.engine.execution.views import View, cut, fixed, whole
from linop.backends.engine.roads.call_numbers import Calls
from linop.backends.engine.roads.communication import Communication, Instructions
from linop.backends.engine.roads.point_to_point import PointToPoint, sending
from linop.backends.mpi.transport import Ranks
from linop.planning.plan import Receive, Send
from linop.spaces.scalars import Array


class Staged(NamedTuple):
    """Device buffer of some messages, and the pinned buffer for one copy of all of them."""

    where: View
    pinned: View
    messages: list[tuple[Send | Receive, View]]
    """Messages, each with its view of the pinned buffer."""


class DeviceMessages(Communication):
    """Messages of a bound plan over MPI, with device arrays.

    Args:
        aware: True: MPI gets device memory.
    """

    def __init__(
        self,
        layout: Layout,
        transport: Ranks,
        tag: int,
        about: Callable[[], str],
        arrays: DeviceArrays,
        aware: bool,
        calls: Calls | None,
    ) -> None:
        self.layout = layout
        self._messages = PointToPoint(layout, transport, tag, about, calls)
        self.inbox = self._messages.inbox
        self._ranks = transport
        self._device = arrays
        self._aware = aware
        self._leaving: dict[int, list[tuple[Send, View, list[Operation]]]] = {}
        self._landing: dict[int, tuple[list[Staged], list[Any]]] = {}
        self._pinned: list[tuple[list[Any], list[Array]]] = []
        # Pinned buffers outlive the plan until pending copies to the device are complete.
        weakref.finalize(self, _held, arrays, self._pinned).atexit = False

    def begin(self) -> Instructions:
        """Receives are posted later, in `depart`, once their memory is free."""
        return self._messages.requests.count()

    def sends(self, stage: Stage) -> Instructions:
        """The packing of messages, and their copies to host memory if staged."""
        made, packed = self._messages.packing.packed(stage, stage.sends)
        yield from made
        below: dict[int, tuple[View, list[Operation]]] = {}
        for staged in self._pinned_for(packed):
            down, awaiting = self._copied_down(staged)
            yield down
            for step, part in staged.messages:
                below[step.peer] = part, awaiting
                awaiting = []  # one wait for all messages copied together
        leaving = self._leaving[stage.number] = []
        for step, view in packed:
            where, awaiting = below.get(step.peer, (view, []))
            sent = self._messages.requests.send(step, where)
            leaving.append((step, view, [*awaiting, *sent]))

    def _pinned_for(self, messages: Iterable[tuple[Send | Receive, View]]) -> list[Staged]:
        """Pinned buffers of the messages that are staged."""
        found: dict[int, Staged] = {}
        for step, view in messages:
            if self._aware or view.buffer.on_host:
                continue
            flat, begin = view.buffer.piece_of or (view.buffer, 0)
            every = whole(flat) if view.buffer.piece_of else view
            key = id(flat) if view.buffer.piece_of else id(view)
            if key not in found:
                pinned = fixed(
                    self._device.host.empty(every.shape, self.layout.dtype), on_host=True
                )
                found[key] = Staged(every, pinned, [])
            pinned = found[key].pinned
            part = cut(pinned, begin, view.shape) if view.buffer.piece_of else pinned
            found[key].messages.append((step, part))
        return list(found.values())

    def _copied_down(self, staged: Staged) -> tuple[Instruction, list[Operation]]:
        """A copy to host memory; and the operations that wait for it."""
        marks: list[Any] = [None]
        down = Call(self._device.host.down, (staged.where, staged.pinned), [Item(marks, 0)])
        peers = [step.peer for step, _ in staged.messages]
        size = self.layout.bytes_of(staged.where.size)
        made = instruction("copy down what is sent", down, peers=peers, bytes=size)

        def wait() -> None:
            marks[0].synchronize()

        return made, [Call(wait)]

    def depart(self, stage: Stage) -> Instructions:
        leaving = self._leaving.get(stage.number, [])
        coming = [one for one in self._messages.expected if one.stage == stage.number]
        views = [view for _, view, _ in leaving] + [one.where for one in coming]
        if self._aware and not all(view.buffer.on_host for view in views):
            yield instruction("wait until all is packed", Call(self._packed))
        staged = self._pinned_for((one.step, one.where) for one in coming)
        below = {step.peer: part for one in staged for step, part in one.messages}
        if staged:
            read: list[Any] = []
            self._landing[stage.number] = staged, read
            self._pinned.append((read, [one.pinned.get() for one in staged]))
            yield instruction("wait until the last ones were read", Call(_done, [read]))
        yield from self._messages.requests.post(
            [one._replace(where=below.get(one.step.peer, one.where)) for one in coming]
        )
        for step, _, operations in leaving:
            yield sending(self.layout, step, operations)

    def _packed(self) -> None:
        self._device.streams.mark().synchronize()

    def wait(self, stage: Stage) -> Instructions:
        if stage.number in self._landing:
            yield self._landed(stage.number, *self._landing[stage.number])
        yield from self._messages.wait(stage)

    def _landed(self, number: int, staged: Sequence[Staged], read: list[Any]) -> Instruction:
        """The copies of received messages to the device, each once all its messages have
        arrived."""
        messages = self._messages
        # The last request of each peer: one for a call number may precede it.
        packets, pending = messages.requests.coming[number]
        of = {one.peer: request for one, request in zip(packets, pending, strict=True)}
        parts = [[of[step.peer] for step, _ in one.messages] for one in staged]
        buffers = [one.pinned.get() for one in staged]
        test, up = self._ranks.test, self._device.host.up

        def land(targets: Sequence[Array]) -> None:
            left = list(range(len(parts)))

            def come() -> bool:
                for k in [k for k in left if test(parts[k])]:
                    up(buffers[k], targets[k])
                    left.remove(k)
                return not left

            self._ranks.until(come, lambda: messages.awaited(number))
            read.append(self._device.streams.mark())

        every = [request for some in parts for request in some]
        return instruction(
            "copy up what comes",
            Call(land, [Views(one.where for one in staged)]),
            ready=lambda: test(every),
            bytes=self.layout.bytes_of(sum(one.where.size for one in staged)),
        )

    def end(self) -> Instructions:
        return self._messages.end()

    def describe(self) -> str:
        return way(self._aware)

    def abandon(self) -> None:
        self._messages.abandon()

    def release(self) -> None:
        self._messages.release()


def _done(marks: list[Any]) -> None:
    """Wait for events, and remove them."""
    while marks:
        marks.pop().synchronize()


def _held(device: DeviceArrays, pinned: Sequence[tuple[list[Any], list[Array]]]) -> None:
    """Finalizer: keep pinned buffers alive until they have been copied to the device."""
    for marks, buffers in pinned:
        device.streams.hold((mark, buffers) for mark in marks)


def way(aware: bool) -> str:
    """Transport of the messages, as text."""
    if aware:
        return "messages over MPI, which is given the device's memory"
    return "messages over MPI, staged through pinned main memory"
