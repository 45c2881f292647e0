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
from linop.backends.execution.stage import Stage
from linop.backends.execution.views import View, cut, fixed
from linop.backends.transports.call_numbers import Calls
from linop.backends.transports.mpi_transport import Ranks
from linop.backends.transports.point_to_point import Messages
from linop.planning.plan import Plan, Receive, Send, Wait
from linop.spaces.scalars import Array


class Staged(NamedTuple):
    """Device buffer of some messages, and the pinned buffer for one copy of all of them."""

    where: View
    pinned: View
    messages: list[tuple[Send | Receive, View]]
    """Messages, each with its view of the pinned buffer."""


class DeviceMessages(Messages):
    """A plan bound to messages over MPI, with device arrays.

    Args:
        aware: True: MPI gets device memory.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Ranks,
        tag: int,
        about: Callable[[], str],
        arrays: DeviceArrays,
        aware: bool,
        calls: Calls | None,
    ) -> None:
        self._ranks = transport
        self._device = arrays
        self._aware = aware
        self._leaving: dict[int, list[tuple[Send, View, list[str]]]] = {}
        self._landing: dict[int, tuple[list[Staged], list[Any]]] = {}
        self._pinned: list[tuple[list[Any], list[Array]]] = []
        super().__init__(plan, transport, tag, about, calls, arrays)
        # Pinned buffers outlive the plan until pending copies to the device are complete.
        weakref.finalize(self, _held, arrays, self._pinned).atexit = False

    def begin(self) -> None:
        """Receives are posted later, in `depart`, once their memory is free."""
        self.count()

    def sends(self, stage: Stage, steps: Sequence[Send]) -> None:
        """Emit the packing of messages, and their copies to host memory if staged."""
        packed = self.packed(stage, steps)
        below: dict[int, tuple[View, list[str]]] = {}
        for staged in self._pinned_for(packed):
            awaiting = self._copy_down(staged)
            for step, part in staged.messages:
                below[step.peer] = part, awaiting
                awaiting = []  # one wait for all messages copied together
        leaving = self._leaving[stage.number] = []
        for step, view in packed:
            where, awaiting = below.get(step.peer, (view, []))
            leaving.append((step, view, [*awaiting, *self.leaving(step, where)]))

    def _pinned_for(self, messages: Iterable[tuple[Send | Receive, View]]) -> list[Staged]:
        """Pinned buffers of the messages that are staged."""
        found: dict[int, Staged] = {}
        for step, view in messages:
            if self._aware or view.cell.apart:
                continue
            flat, begin = view.cell.within or (view.cell, 0)
            whole = View(flat, flat.shape) if view.cell.within else view
            key = id(flat) if view.cell.within else id(view)
            if key not in found:
                pinned = fixed(self._device.pinned(whole.shape, self.plan.dtype), apart=True)
                found[key] = Staged(whole, pinned, [])
            pinned = found[key].pinned
            part = cut(pinned, begin, view.shape) if view.cell.within else pinned
            found[key].messages.append((step, part))
        return list(found.values())

    def _copy_down(self, staged: Staged) -> list[str]:
        """Emit a copy to host memory; returns the lines that wait for it."""
        name, marks = self.code.name, [None]
        call = f"{name(self._device.down)}({staged.where.text(self.code)}, "
        line = f"{name(marks)}[0] = {call}{name(staged.pinned.get())})"
        peers = [step.peer for step, _ in staged.messages]
        size = self.bytes_of(staged.where.size)
        self.step("copy down what is sent", line, peers=peers, bytes=size)
        return [f"{name(marks)}[0].synchronize()"]

    def depart(self, stage: Stage) -> None:
        leaving = self._leaving.get(stage.number, [])
        posts = [(step, where) for at, step, where in self._posts if at == stage.number]
        views = [view for _, view, _ in leaving] + [where for _, where in posts]
        if self._aware and not all(view.cell.apart for view in views):
            mark = self.code.name(self._device.mark)
            self.step("wait until all is packed", f"{mark}().synchronize()")
        staged = self._pinned_for(posts)
        below = {step.peer: part for one in staged for step, part in one.messages}
        if staged:
            read: list[Any] = []
            self._landing[stage.number] = staged, read
            self._pinned.append((read, [one.pinned.get() for one in staged]))
            self.step(
                "wait until the last ones were read",
                f"{self.code.name(_done)}({self.code.name(read)})",
            )
        self.post([(stage.number, step, below.get(step.peer, where)) for step, where in posts])
        for step, _, lines in leaving:
            self.step(str(step), *lines, peer=step.peer, bytes=self.bytes_of(step.size))

    def wait(self, stage: Stage, step: Wait) -> None:
        if stage.number in self._landing:
            self._land(stage.number, *self._landing[stage.number])
        super().wait(stage, step)

    def _land(self, number: int, staged: Sequence[Staged], read: list[Any]) -> None:
        """Emit the copies of received messages to the device, each once all its messages have
        arrived."""
        # The last request of each peer: one for a call number may precede it.
        requests = dict(zip(self._peers[number], self._receiving[number], strict=True))
        parts = [[requests[step.peer] for step, _ in one.messages] for one in staged]
        buffers = [one.pinned.get() for one in staged]
        test, up, name = self._transport.test, self._device.up, self.code.name

        def land(targets: Sequence[Array]) -> None:
            left = list(range(len(parts)))

            def come() -> bool:
                for k in [k for k in left if test(parts[k])]:
                    up(buffers[k], targets[k])
                    left.remove(k)
                return not left

            self._ranks.until(come, lambda: self._who(number))
            read.append(self._device.mark())

        pending = [request for requests in parts for request in requests]
        self.step(
            "copy up what comes",
            f"{name(land)}([{', '.join(one.where.text(self.code) for one in staged)}])",
            ready=lambda: test(pending),
            bytes=self.bytes_of(sum(one.where.size for one in staged)),
        )

    def describe(self) -> str:
        return way(self._aware)


def _done(marks: list[Any]) -> None:
    """Wait for events, and remove them."""
    while marks:
        marks.pop().synchronize()


def _held(device: DeviceArrays, pinned: Sequence[tuple[list[Any], list[Array]]]) -> None:
    """Finalizer: keep pinned buffers alive until they have been copied to the device."""
    for marks, buffers in pinned:
        device.hold((mark, buffers) for mark in marks)


def way(aware: bool) -> str:
    """Transport of the messages, as text."""
    if aware:
        return "messages over MPI, which is given the device's memory"
    return "messages over MPI, staged through pinned main memory"
