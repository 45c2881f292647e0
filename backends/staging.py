"""Programs whose arrays are a device's, and whose messages go over MPI.

``aware``: MPI is given the device's memory. Else messages are *staged*: copied to pinned buffers in
main memory, sent from there, and copied up again as each one comes.

Work is queued on the current stream, and the host waits for it only here, once a stage at most:

- aware: before MPI reads what was packed, or writes where earlier work may still read or write.
  Both kinds of requests start after that.
- staged: for each message, until it is copied down; the next ones are copied meanwhile. And before
  a buffer is received into, until the last run has copied it up, which it has long done.

Local copies are queued before the host waits, so that the device has something to do; kernels that
read messages, after these have come. A result is there when the stream gets to it, as with all of
CuPy: nothing waits for that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from linop.backends.device import DeviceArrays
from linop.backends.messages import Messages
from linop.backends.ranks import Ranks
from linop.backends.stage import Stage
from linop.backends.strided import View
from linop.plan import Plan, Receive, Send, Wait
from linop.scalars import Array


class DeviceMessages(Messages):
    """A plan over MPI, on arrays of a device.

    Args:
        aware: whether MPI is given the device's memory.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Ranks,
        tag: int,
        about: Callable[[], str],
        arrays: DeviceArrays,
        aware: bool,
    ) -> None:
        self._ranks = transport
        self._device = arrays
        self._aware = aware
        self._leaving: dict[int, list[tuple[Send, int, str]]] = {}
        self._packed: list[Any] = []
        self._pinned: list[tuple[list[Any], list[Array]]] = []
        super().__init__(plan, transport, tag, about, arrays)
        # What is copied up after the plan is gone is copied from memory that nobody else has.
        weakref.finalize(self, _read, self._pinned).atexit = False

    def begin(self) -> None:
        """Nothing: messages are awaited once it is known that their memory is free."""

    def send(self, stage: Stage, step: Send) -> None:
        """Queue what makes a message one contiguous piece, in main memory if it is staged."""
        k = len(self._sending)
        self._sending.append(None)
        self._packed.append(None)
        text, array = self._contiguous(stage, step)
        name, leaving = self.code.name, self._leaving.setdefault(stage.number, [])
        if self._aware and array is None:
            call = f"{name(self._transport.send)}({step.peer}, {self._tag}, {text})"
            leaving.append((step, k, f"{name(self._sending)}[{k}] = {call}"))
            return
        if not self._aware:
            shape = (step.size,) if array is None else array.shape
            array = self._device.pinned(shape, self.plan.dtype)
            copied = f"{name(self._device.down)}({text}, {name(array)})"
            line = f"{name(self._packed)}[{k}] = {copied}"
            self.step(f"copy down for {step.peer}", line, peer=step.peer)
        assert array is not None
        request = self._sending[k] = self._transport.sender(step.peer, self._tag, array)
        self._requests.append(request)
        leaving.append((step, k, self._starting([request])))

    def _contiguous(self, stage: Stage, step: Send) -> tuple[str, Array | None]:
        """A message's text, packed where it has to be; and the array, if that stays."""
        sources = [stage.source(part) for part in step.parts]
        first, name = sources[0], self.code.name
        if len(sources) == 1 and first.contiguous and not first.cell.apart:
            if first.fixed:
                return name(first.get()), first.get()
            flat = self.code.local()
            line = f"{flat} = contiguous({first.text(self.code)}).reshape(-1)"
            self.step(f"find what is for {step.peer}", line, peer=step.peer)
            return flat, None
        buffer = self._pack(step, sources)
        return name(buffer), buffer

    def depart(self, stage: Stage) -> None:
        leaving = self._leaving.get(stage.number, [])
        posts = [(step, where) for number, step, where in self._posts if number == stage.number]
        if not leaving and not posts:
            return
        name, packed = self.code.name, self._packed
        if self._aware:
            self.step("wait until all is packed", f"{name(self._device.mark)}().synchronize()")
            self._post(stage.number, posts)
        elif posts:
            self._land(stage.number, posts)
        for step, k, line in leaving:
            lines = [line] if self._aware else [f"{name(packed)}[{k}].synchronize()", line]
            self.step(str(step), *lines, peer=step.peer, bytes=self.bytes_of(step.size))

    def _post(self, number: int, posts: Sequence[tuple[Receive, View]]) -> None:
        """Receive into the device's memory."""
        name, receive = self.code.name, self._transport.receive
        pending = self._receiving[number] = []
        self._peers[number] = [step.peer for step, _ in posts]
        for step, where in posts:
            if where.fixed:
                pending.append(self._transport.receiver(step.peer, self._tag, where.get()))
                self._requests.append(pending[-1])
                lines = [self._starting([pending[-1]])]
            else:
                call = f"{name(receive)}({step.peer}, {self._tag}, {where.text(self.code)})"
                lines = [f"{name(pending)}[{len(pending)}] = {call}"]
                pending.append(None)
            self.step("post a receive", *lines, peer=step.peer)

    def _land(self, number: int, posts: Sequence[tuple[Receive, View]]) -> None:
        """Receive into pinned buffers; `wait` copies them up."""
        buffers = [self._device.pinned(where.shape, self.plan.dtype) for _, where in posts]
        peers = self._peers[number] = [step.peer for step, _ in posts]
        pairs = zip(peers, buffers, strict=True)
        pending = [self._transport.receiver(peer, self._tag, buffer) for peer, buffer in pairs]
        self._receiving[number] = pending
        self._requests += pending
        read: list[Any] = []
        self._pinned.append((read, buffers))

        def free() -> None:
            while read:
                read.pop().synchronize()

        def land(targets: Sequence[Array]) -> None:
            left = list(range(len(pending)))

            def come() -> bool:
                for k in [k for k in left if self._transport.test([pending[k]])]:
                    self._device.up(buffers[k], targets[k])
                    left.remove(k)
                return not left

            self._ranks.until(come, lambda: self._who(number))
            read.append(self._device.mark())

        self._landing = land
        line = self._starting(pending)
        self.step(f"post {len(pending)} receives", f"{self.code.name(free)}()", line)

    def wait(self, stage: Stage, step: Wait) -> None:
        if self._aware:
            super().wait(stage, step)
            return
        number, transport = stage.number, self._transport
        targets = [where.text(self.code) for at, _, where in self._posts if at == number]
        pending = self._receiving[number]
        self.step(
            f"{step}, and copy them up",
            f"{self.code.name(self._landing)}([{', '.join(targets)}])",
            ready=lambda: transport.test(pending),
            peers=self._peers[number],
            bytes=sum(self.bytes_of(r.size) for r in stage.receives),
        )

    def describe(self) -> str:
        return way(self._aware)


def _read(pinned: Sequence[tuple[list[Any], list[Array]]]) -> None:
    """Wait until buffers were copied up."""
    for read, _ in pinned:
        while read:
            read.pop().synchronize()


def way(aware: bool) -> str:
    """How messages travel."""
    if aware:
        return "messages over MPI, which is given the device's memory"
    return "messages over MPI, staged through pinned main memory"
