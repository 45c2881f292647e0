"""Messages of threads that share a device, as instructions: device arrays, passed by reference.

A message is packed into new memory at every run, and the receiver reads it there: each element is
moved twice. The host waits for the device only if the target is in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from linop.backends.device.device_arrays import DeviceArrays
from linop.backends.engine.execution.instructions import Call, Instruction, Operation, instruction
from linop.backends.engine.execution.layout import Layout
from linop.backends.engine.execution.stage import Stage
from linop.backends.engine.execution.views import Buffer, View, whole
from linop.backends.engine.roads.call_numbers import Calls, Numbers, never
from linop.backends.engine.roads.communication import Communication, Instructions
from linop.backends.engine.roads.packing import Packing, piece
from linop.backends.engine.roads.point_to_point import sending
from linop.backends.together.transport import Transport
from linop.planning.plan import Receive, Send
from linop.spaces.scalars import Array


class Handover(Transport, Protocol):
    """Transport that also passes objects by reference."""

    def hand(self, peer: int, tag: int, message: Any) -> None:
        """Send an object without a copy."""

    def has(self, peer: int, tag: int) -> bool:
        """True if a message has arrived."""

    def take(self, peer: int, tag: int, size: int, dtype: Any) -> Any:
        """Next message; wait for it."""


class Message(NamedTuple):
    """A device array sent from one thread to another."""

    array: Array
    stream: Any
    ready: Any
    """Event after which the array has its contents."""

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    @property
    def size(self) -> int:
        return self.array.size


class MailboxMessages(Communication):
    """Messages of a bound plan through mailboxes, with device arrays."""

    def __init__(
        self,
        layout: Layout,
        transport: Handover,
        tag: int,
        about: Callable[[], str],
        calls: Calls | None,
    ) -> None:
        assert isinstance(layout.arrays, DeviceArrays)
        self.layout = layout
        self._mailbox = transport
        self._tag = tag
        self._device, self._streams = layout.arrays, layout.arrays.streams
        self._numbers = Numbers(layout.messages, layout.dtype, calls, never, about)
        # The source may change before the receiver has read it: so all is packed.
        self._packing = Packing(layout, self._numbers, self._allocate, unpacked=False)
        self._made: list[Instruction] = []
        self._coming: dict[int, list[tuple[Receive, Buffer]]] = {}
        self._taken: list[Any] = []
        layout.place(layout.zeros, small_stay=True)
        self.inbox = [self._inbox(stage) for stage in layout.stages]

    def _inbox(self, stage: Stage) -> dict[int, View]:
        inbox: dict[int, View] = {}
        coming = self._coming[stage.number] = []
        for step in stage.receives:
            puts = stage.incoming(step.peer)
            on_host = all(stage.target(put).buffer.on_host for put in puts)
            buffer = Buffer((step.size,), on_host=on_host)
            coming.append((step, buffer))
            inbox |= {id(put): piece(whole(buffer), put) for put in puts}
        return inbox

    def _allocate(self, size: int, on_host: bool) -> View:
        """Flat buffer, newly allocated at every run; the receiver releases it."""
        buffer = Buffer((size,), on_host=on_host)
        arrays = self.layout.arrays_of(buffer)
        make = Call(arrays.empty, (buffer.shape, self.layout.dtype), [buffer])
        self._made.append(instruction("make a message", make))
        return whole(buffer)

    def begin(self) -> Instructions:
        """Receives need no posting: messages are taken on arrival."""
        operations = self._numbers.counting()
        if operations:
            yield instruction("count the call", *operations)

    def sends(self, stage: Stage) -> Instructions:
        packing, packed = self._packing.packed(stage, stage.sends)
        made, self._made = self._made, []
        yield from made
        yield from packing
        for step, where in packed:
            yield sending(self.layout, step, self._handed(step, where))

    def _handed(self, step: Send, where: View) -> list[Operation]:
        hand, to = self._mailbox.hand, (step.peer, self._tag)
        before: list[Operation] = []
        if self._numbers.before(step):
            number = Buffer((1,))
            before = [Call(self._numbers.mine.copy, (), [number]), Call(hand, (*to, whole(number)))]
        message = Buffer(where.shape)
        call = Call(self._message, [where], [message])
        return [*before, call, Call(hand, (*to, whole(message)))]

    def _message(self, array: Array) -> Any:
        """A message for another thread, from an array in device or host memory."""
        if isinstance(array, np.ndarray):
            return array
        return Message(array, self._streams.current, self._streams.mark())

    def wait(self, stage: Stage) -> Instructions:
        coming, tag, has = self._coming[stage.number], self._tag, self._mailbox.has
        operations: list[Operation] = []
        for step, _ in coming:
            if self._numbers.before(step):
                operations.append(Call(self._take_number, (step.peer, self._numbers.theirs(step))))
        for step, buffer in coming:
            operations.append(Call(self._take, (step.peer, step.size, buffer.on_host), [buffer]))
        yield instruction(
            str(stage.waits),
            *operations,
            *self._numbers.checking(stage.number),
            ready=lambda: all(has(step.peer, tag) for step, _ in coming),
            peers=[step.peer for step, _ in coming],
            bytes=sum(self.layout.bytes_of(step.size) for step, _ in coming),
        )

    def _take_number(self, peer: int, number: Array) -> None:
        """Take the call number that precedes a message."""
        number[...] = self._mailbox.take(peer, self._tag, 1, number.dtype)

    def _take(self, peer: int, size: int, here: bool) -> Array:
        """Array of a message, in host memory (`here`) or on the device; a copy if it is in the
        other memory. A copy to host memory is waited for."""
        message = self._mailbox.take(peer, self._tag, size, self.layout.dtype)
        self._taken.append(message)
        if isinstance(message, np.ndarray):
            return message if here else self._device.put(message)
        stream = self._streams.current
        if stream != message.stream:
            stream.wait_event(message.ready)
        return self._device.fetched(message.array) if here else message.array

    def end(self) -> Instructions:
        if any(self._coming.values()):
            yield instruction("let go of what came", Call(self._let_go))

    def _let_go(self) -> None:
        """Keep messages alive until this stream has read them: the sender's memory pool would reuse
        their memory on its own stream."""
        stream = self._streams.current
        read = [m for m in self._taken if isinstance(m, Message) and m.stream != stream]
        self._taken.clear()
        if read:
            self._streams.hold([(self._streams.mark(), read)])
            self._streams.let_go()

    def describe(self) -> str:
        return f"messages over {self._mailbox.name}"

    def abandon(self) -> None:
        """Messages under way stay in their mailboxes."""

    def release(self) -> None:
        """Nothing is held between runs."""
