"""The instructions of one worker's bound plan as plain data, for `support.planning.machine`: what
the emitter gets, with each array as the places of its elements.

A place is an address in a *room*: the worker's own memory, a window that workers share, or a buffer
that a run has to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from linop.backends.engine.execution import instructions as i
from linop.backends.engine.execution.numbers import Number, Variable
from linop.backends.engine.execution.program import Program
from linop.backends.engine.execution.views import Buffer, View
from linop.normal_form.stages import Stages
from linop.planning.patterns import Pattern
from linop.spaces.scalars import Scalar

Room = tuple[Any, ...]
Index = Any
"""Of an array; the name of a variable; None: all of it."""


@dataclass(frozen=True)
class Static:
    """Arrays at known places, of which run n has number n modulo their count."""

    rooms: tuple[Room, ...]
    places: tuple[np.ndarray, ...]
    """Address of each element."""
    itemsize: int


@dataclass(frozen=True)
class OfRun:
    """The array of a buffer that each run has another of."""

    buffer: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A piece of a flat array, reshaped."""

    flat: Base
    begin: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A box of an array."""

    base: Base
    index: Index = None


Base = Static | OfRun | Piece | Box

# Operations


@dataclass(frozen=True)
class Clear:
    target: Base


@dataclass(frozen=True)
class Move:
    """target = coefficient * source, or += (`adds`)."""

    target: Base
    source: Base
    coefficient: Scalar = 1
    adds: bool = False


@dataclass(frozen=True)
class Sum:
    target: Base
    first: Base
    second: Base


@dataclass(frozen=True)
class Map:
    """Results of an unknown function."""

    number: int
    sources: tuple[Base, ...]
    results: tuple[Base, ...]


@dataclass(frozen=True)
class Alias:
    """A contiguous array: the source itself if it is one."""

    result: OfRun
    source: Base
    contiguous: bool


@dataclass(frozen=True)
class Packet:
    number: int
    peer: int
    incoming: bool
    where: Base
    start: int | None = None
    stop: int | None = None


@dataclass(frozen=True)
class Post:
    packets: tuple[Packet, ...]


@dataclass(frozen=True)
class Complete:
    packets: tuple[int, ...]


@dataclass(frozen=True)
class Join:
    found: Pattern
    sends: Packet
    receives: Packet | None
    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True)
class Signal:
    flags: tuple[i.Flag, ...]
    ahead: int = 0
    piece: str | None = None


@dataclass(frozen=True)
class Until:
    flags: tuple[i.Flag, ...]
    piece: str | None = None


@dataclass(frozen=True)
class Each:
    """Operations for each of some values of variables."""

    names: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]
    body: tuple[Operation, ...]


Operation = Clear | Move | Sum | Map | Alias | Post | Complete | Join | Signal | Until | Each


@dataclass(frozen=True)
class Exported:
    """A worker's program: operations, and the arrays of its arguments and results, by region."""

    worker: int
    dtype: np.dtype[Any]
    inputs: dict[str, Base]
    outputs: dict[str, Base]
    operations: tuple[Operation, ...]
    ready: dict[int, int]
    """Runs for which each peer's memory is ready from the start."""


def exported(program: Program, stages: Stages) -> Exported:
    """A worker's program, of the operator that has these stages."""
    return _Export(program, stages).program()


class _Export:
    def __init__(self, program: Program, stages: Stages) -> None:
        self.layout, self.bound = program._layout, program
        self.maps = {id(call.map): k for k, call in reversed([*enumerate(stages.calls)])}
        self.worker = self.layout.plan.worker
        self.numbers: dict[int, int] = {}
        self.kept: list[Any] = []  # no id is used twice
        near = getattr(program.messages, "near", program.messages)  # of a hybrid
        self.windows = near if hasattr(near, "_slots") else None

    def program(self) -> Exported:
        plan, layout = self.layout.plan, self.layout
        ready = {} if self.windows is None else self.windows._asked
        return Exported(
            self.worker,
            plan.dtype,
            {r.name: self.buffer(b) for r, b in zip(plan.inputs, layout.inputs, strict=True)},
            {r.name: self.buffer(b) for r, b in zip(plan.outputs, layout.results, strict=True)},
            tuple(self.each(o for one in self.bound.instructions for o in one.operations)),
            {peer: offer.turns for peer, offer in ready.items() if offer.turns},
        )

    def number(self, thing: Any) -> int:
        self.kept.append(thing)
        return self.numbers.setdefault(id(thing), len(self.numbers))

    # Memory

    def static(self, arrays: Sequence[np.ndarray]) -> Static:
        found = [self.located(array) for array in arrays]
        rooms, places = zip(*found, strict=True)
        return Static(rooms, places, arrays[0].itemsize)

    def located(self, array: np.ndarray) -> tuple[Room, np.ndarray]:
        begin = array.__array_interface__["data"][0]
        places = np.zeros((), np.int64)
        for many, stride in zip(array.shape, array.strides, strict=True):
            places = places[..., None] + np.arange(many) * stride
        segments = [] if self.windows is None else self.windows._pool.segments
        for k, segment in enumerate(segments):
            for rank, memory in segment.memory.items():
                offset = begin - memory.__array_interface__["data"][0]
                if 0 <= offset < segment.size:
                    return ("window", rank, k), places + offset
        return ("own", self.worker), places + begin

    def buffer(self, buffer: Buffer) -> Base:
        if buffer.array is not None:
            return self.static([buffer.array])
        if buffer.within is not None:
            return self.view(buffer.within)
        if buffer.choice is not None:
            return self.static(buffer.choice[0])
        if buffer.piece_of is not None:
            flat, begin = buffer.piece_of
            return Piece(self.buffer(flat), begin, buffer.shape)
        slots = None if self.windows is None else self.windows._slots
        if slots is not None and buffer in self.layout.open:
            k = self.layout.open[buffer]
            return self.static([each[k].array() for each in slots.buffers])
        return self.of_run(buffer)

    def of_run(self, buffer: Buffer) -> OfRun:
        return OfRun(self.number(buffer), buffer.shape)

    def view(self, view: View) -> Base:
        base, index = self.buffer(view.buffer), view.index
        if index is None:
            return base
        return Box(base, index.name if isinstance(index, Variable) else index)

    # Operations

    def each(self, operations: Any) -> list[Operation]:
        return [made for one in operations for made in self.of(one)]

    def of(self, one: i.Operation) -> list[Operation]:
        match one:
            case i.Clear(buffer=buffer, zeroed=zeroed):
                return [Clear(self.buffer(buffer))] if zeroed else []
            case i.Copy():
                target, source = self.view(one.target), self.view(one.source)
                return [Move(target, source, one.coefficient, one.accumulate)]
            case i.Add():
                return [Sum(*map(self.view, (one.target, one.first, one.second)))]
            case i.Apply(local=local, sources=sources, results=results):
                made = tuple(map(self.buffer if one.inside else self.of_run, results))
                return [Map(self.maps[id(local)], tuple(map(self.view, sources)), made)]
            case i.Contiguous(result=result, source=source):
                return [Alias(self.of_run(result), self.view(source), source.contiguous)]
            case i.For(variables=variables, values=values, body=body):
                names = tuple(variable.name for variable in variables)
                return [Each(names, tuple(values), tuple(self.each(body)))]
            case i.Post(packets=packets):
                return [Post(tuple(map(self.packet, packets)))]
            case i.Complete(packets=packets):
                return [Complete(tuple(map(self.number, packets)))]
            case i.Join(found=found, sends=sends, receives=receives):
                to = None if receives is None else self.packet(receives)
                return [Join(found, self.packet(sends), to, tuple(one.sent), tuple(one.received))]
            case i.Signal(flags=flags, ahead=ahead, piece=piece):
                return [Signal(tuple(flags), ahead, _name(piece))]
            case i.Until(flags=flags, piece=piece):
                return [Until(tuple(flags), _name(piece))]
            case i.Interaction():
                return []
        raise AssertionError(f"an operation that nobody can prove: {one!r}")

    def packet(self, one: i.Packet) -> Packet:
        ends = (None, None) if one.bytes is None else (one.bytes.start, one.bytes.stop)
        return Packet(self.number(one), one.peer, one.incoming, self.view(one.where), *ends)


def _name(number: Number | None) -> str | None:
    assert number is None or isinstance(number, Variable)
    return None if number is None else number.name
