"""Programs of threads that share a device: messages are device arrays, passed by reference.

A message is packed into new memory at every run, and the receiver reads it there: each element is
moved twice. The host waits for the device only if the target is in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from linop.backends.device.device_arrays import DeviceArrays
from linop.backends.execution.stage import Stage
from linop.backends.execution.views import Cell, View
from linop.backends.transports.call_numbers import Calls
from linop.backends.transports.point_to_point import Messages, piece
from linop.backends.transports.transport import Transport
from linop.planning.plan import Plan, Receive, Send, Wait
from linop.spaces.scalars import Array


class Handover(Transport, Protocol):
    """Transport that also passes objects by reference."""

    def hand(self, peer: int, tag: int, message: Any) -> None:
        """Send an object without a copy."""

    def has(self, peer: int, tag: int) -> bool:
        """True if a message has arrived."""

    def take(self, peer: int, tag: int, size: int, dtype: Any) -> Any:
        """Next message; wait for it."""


class Handing(Messages):
    """A plan bound to mailboxes, with device arrays."""

    def __init__(
        self,
        plan: Plan,
        transport: Handover,
        tag: int,
        about: Callable[[], str],
        arrays: DeviceArrays,
        calls: Calls | None,
    ) -> None:
        self._mailbox = transport
        self._device = arrays
        self._coming: dict[int, list[tuple[Receive, Cell]]] = {}
        self._taken: list[Any] = []
        super().__init__(plan, transport, tag, about, calls, arrays)

    def receives(self, stage: Stage, steps: Sequence[Receive]) -> dict[int, View]:
        inbox: dict[int, View] = {}
        coming = self._coming[stage.number] = []
        for step in steps:
            puts = stage.incoming(step.peer)
            apart = all(stage.target(put).cell.apart for put in puts)
            cell = Cell((step.size,), self.code.local(), apart=apart)
            coming.append((step, cell))
            inbox |= {id(put): piece(View(cell, cell.shape), put) for put in puts}
        return inbox

    def begin(self) -> None:
        """Receives need no posting: messages are taken on arrival."""
        self.count()

    def as_it_is(self, step: Send, first: View, *others: View) -> View | None:
        """Always None: the source may change before the receiver has read it."""
        del step, first, others
        return None

    def buffer(self, size: int, apart: bool = False) -> View:
        """Flat buffer, newly allocated at every run; the receiver releases it."""
        cell = Cell((size,), self.code.local(), apart=apart)
        arrays, name = self.arrays.of("host") if apart else self.arrays, self.code.name
        made = f"{name(arrays.empty)}({name(cell.shape)}, {name(self.plan.dtype)})"
        self.step("make a message", f"{cell.name} = {made}")
        return View(cell, cell.shape)

    def leaving(self, step: Send, where: View) -> list[str]:
        hand, message = map(self.code.name, (self._mailbox.hand, self._device.message))
        lines = []
        if self._numbers.before(step):
            copied = self.code.name(self._numbers.mine.copy)
            lines.append(f"{hand}({step.peer}, {self._tag}, {copied}())")
        return [*lines, f"{hand}({step.peer}, {self._tag}, {message}({where.text(self.code)}))"]

    def wait(self, stage: Stage, step: Wait) -> None:
        coming, tag, has = self._coming[stage.number], self._tag, self._mailbox.has
        take = self.code.name(self._take)
        numbers = [self._taking(s) for s, _ in coming if self._numbers.before(s)]
        self.step(
            str(step),
            *numbers,
            *(f"{cell.name} = {take}({s.peer}, {s.size}, {cell.apart})" for s, cell in coming),
            *self._numbers.checking(self.code, stage.number),
            ready=lambda: all(has(s.peer, tag) for s, _ in coming),
            peers=[s.peer for s, _ in coming],
            bytes=sum(self.bytes_of(s.size) for s, _ in coming),
        )

    def _taking(self, step: Receive) -> str:
        """Line that takes the call number that precedes a message."""
        number, name = self._numbers.theirs(step), self.code.name
        take = f"{name(self._mailbox.take)}({step.peer}, {self._tag}, 1, {name(number.dtype)})"
        return f"{name(number)}[...] = {take}"

    def _take(self, peer: int, size: int, here: bool) -> Array:
        """Array of a message, in device or host memory."""
        message = self._mailbox.take(peer, self._tag, size, self.plan.dtype)
        self._taken.append(message)
        return self._device.arrived(message, here)

    def end(self) -> None:
        if any(self._coming.values()):
            self.step("let go of what came", f"{self.code.name(self._let_go)}()")

    def _let_go(self) -> None:
        self._device.keep(self._taken)
        self._taken.clear()
