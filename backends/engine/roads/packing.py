"""Packing of messages into contiguous buffers: one message per peer and stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from linop.backends.engine.execution.instructions import (
    Contiguous,
    Copy,
    Instruction,
    Settle,
    instruction,
)
from linop.backends.engine.execution.layout import Layout
from linop.backends.engine.execution.stage import Stage
from linop.backends.engine.execution.views import Buffer, View, cut, fixed, whole
from linop.backends.engine.roads.call_numbers import PACKED, Numbers
from linop.planning.plan import Put, Receive, Send

FUSED = 256 * 1024
"""Largest box, in bytes, that a device copies by the same kernel as others
(`linop.backends.device.fused_copies`)."""
_ALIGNED = 256
"""Alignment in bytes of messages that share one device buffer."""

Allocate = Callable[[int, bool], View]
"""``allocate(size, on_host)``: a flat buffer for a message."""


class Packing:
    """Buffers of one plan's messages, and the instructions that fill them.

    Args:
        allocate: as `Allocate`; by default fixed buffers.
        unpacked: True if a message that is one contiguous box is sent from where it is.
        in_host_memory: False: all messages lie in device memory. True: those do not whose boxes are
            all in host memory.
    """

    def __init__(
        self,
        layout: Layout,
        numbers: Numbers,
        allocate: Allocate | None = None,
        unpacked: bool = True,
        in_host_memory: bool = True,
    ) -> None:
        self._layout = layout
        self._numbers = numbers
        self._allocate = allocate or self._fixed
        self._unpacked = unpacked
        self._in_host_memory = in_host_memory

    def _fixed(self, size: int, on_host: bool) -> View:
        arrays = self._layout.arrays.of("host") if on_host else self._layout.arrays
        return fixed(arrays.empty((size,), self._layout.dtype), on_host)

    def packed(
        self, stage: Stage, sends: Sequence[Send]
    ) -> tuple[list[Instruction], list[tuple[Send, View]]]:
        """(instructions that pack messages, each send with the view that is to be sent): a
        contiguous source itself, or a buffer."""
        made: list[Instruction] = []
        sources = {step.peer: [stage.source(part) for part in step.parts] for step in sends}
        where: dict[int, View] = {}
        for step in sends:
            found = self._as_it_is(step, sources[step.peer])
            if found is not None:
                made += found[0]
                where[step.peer] = found[1]
        packing = [step for step in sends if step.peer not in where]
        on_host = [self._on_host(sources[step.peer]) for step in packing]
        for step, buffer in zip(packing, self.buffers(packing, on_host), strict=True):
            where[step.peer] = buffer
            made += self._filled(step, buffer, sources[step.peer])
        return made, [(step, where[step.peer]) for step in sends]

    def _on_host(self, boxes: Sequence[View]) -> bool:
        """True if the message of some boxes lies in host memory."""
        return self._in_host_memory and all(box.buffer.on_host for box in boxes)

    def _filled(self, step: Send, buffer: View, sources: Sequence[View]) -> Iterator[Instruction]:
        offset = 0
        for source in sources:
            copy = Copy(cut(buffer, offset, source.shape), source)
            size = self._layout.bytes_of(source.size)
            yield instruction(f"pack for {step.peer}", copy, peer=step.peer, bytes=size)
            offset += source.size

    def _as_it_is(
        self, step: Send, sources: Sequence[View]
    ) -> tuple[list[Instruction], View] | None:
        """The view of a message whose source is one contiguous box, to be sent unpacked, after some
        instructions; None if it must be packed."""
        first = sources[0]
        packs = len(sources) > 1 or not first.contiguous or self._numbers.inside(step)
        on_host = first.buffer.on_host
        if packs or not self._unpacked or on_host != self._on_host(sources):
            return None
        before = [instruction("wait for copies", Settle())] if on_host else []
        if first.fixed:
            return before, fixed(first.get(), on_host)
        if not self._layout.arrays.asynchronous and self._layout.bytes_of(step.size) <= PACKED:
            return None
        flat = Buffer(first.shape, on_host=on_host)  # memory that differs from run to run
        find = instruction(f"find what is for {step.peer}", Contiguous(flat, first), peer=step.peer)
        return [*before, find], whole(flat)

    def arriving(self, stage: Stage) -> tuple[list[tuple[Receive, View]], dict[int, View]]:
        """(each receive with the view that its message goes to, the views that puts read, by their
        ids): a contiguous target itself, which its put leaves out, or a buffer."""
        puts = {step.peer: stage.incoming(step.peer) for step in stage.receives}
        targets = {peer: [stage.target(put) for put in each] for peer, each in puts.items()}
        unpacked = [
            step
            for step in stage.receives
            if self._numbers.inside(step)
            or not is_straight(stage, puts[step.peer], step)
            or self._on_host(targets[step.peer]) != targets[step.peer][0].buffer.on_host
        ]
        on_host = [self._on_host(targets[step.peer]) for step in unpacked]
        found = zip(unpacked, self.buffers(unpacked, on_host), strict=True)
        buffers = {step.peer: buffer for step, buffer in found}
        where = [(s, buffers.get(s.peer) or targets[s.peer][0]) for s in stage.receives]
        return where, {id(put): piece(b, put) for peer, b in buffers.items() for put in puts[peer]}

    def buffers(self, steps: Sequence[Send | Receive], on_host: Sequence[bool]) -> list[View]:
        """Flat buffers of messages, in host memory where `on_host` says so. On a device, small ones
        are pieces of one buffer, so that one kernel reads or writes all of them."""
        pairs = list(zip(steps, on_host, strict=True))
        if not self._layout.arrays.asynchronous:
            inside, room = self._numbers.inside, self._numbers.room
            return [
                fixed(room(step).message) if inside(step) else self._allocate(step.size, here)
                for step, here in pairs
            ]
        each = max(1, _ALIGNED // self._layout.dtype.itemsize)
        sizes = [-(-step.size // each) * each for step in steps]
        small = [self._layout.bytes_of(s.size) <= FUSED and not here for s, here in pairs]
        ends = list(accumulate(n if one else 0 for n, one in zip(sizes, small, strict=True)))
        shared = self._allocate(ends[-1], False) if sum(small) > 1 else None
        return [
            cut(shared, end - n, (step.size,))
            if shared is not None and one
            else self._allocate(step.size, here)
            for (step, here), n, one, end in zip(pairs, sizes, small, ends, strict=True)
        ]


def is_straight(stage: Stage, puts: Sequence[Put], step: Receive) -> bool:
    """True if a message can be received directly into its target: one unscaled assignment to a
    contiguous box."""
    if len(puts) != 1 or puts[0].coefficient != 1 or puts[0].accumulate:
        return False
    target = stage.target(puts[0])
    return target.contiguous and target.size == step.size


def piece(buffer: View, put: Put) -> View:
    """View of the piece of a message that a put reads."""
    return cut(buffer, put.source.offset, put.target.shape)  # type: ignore[union-attr]
