"""A worker's plan bound to memory and to a transport: a flat tuple of calls, run many times.

Binding walks the steps of `linop.plan` once. Every array, view, buffer and request that can be
known then is made then; a run allocates nothing but its result, and nothing at all where the caller
passes ``out``. How messages travel is a subclass's affair: `linop.backends.messages` or
`linop.backends.windows`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from linop.backends.strided import Cell, View, Work, adding, copying, summing
from linop.plan import Advance, Alias, Apply, Make, Message, Plan, Put, Receive, Send, Step, Wait
from linop.region import Region, Subset
from linop.scalars import Array

SMALL = 32 * 1024
"""Bytes of results up to which they are received in the plan's own memory and copied out: that much
is copied sooner than views of new memory are made."""
KEPT = 3
"""Arrays for a large result that a plan keeps for later runs, once their users let go of them."""

Ready = Callable[[], bool]
Record = Callable[[str, Work, Mapping[str, Any]], None]
"""Does a step, given its label and what is to be said about it, and takes note."""


class Labelled(NamedTuple):
    """A step of a program, and what a trace says about it: peers, bytes."""

    label: str
    work: Work
    about: Mapping[str, Any]


class Stage:
    """The steps of one stage, with the cells of the regions before and after it."""

    def __init__(self, number: int, steps: Sequence[Step], current: dict[str, Cell]) -> None:
        self.number = number
        self.current = current
        self.new: dict[str, Cell] = {}
        self.made: list[tuple[Make, Cell]] = []
        self.puts: list[Put] = []
        self.receives: list[Receive] = []
        self.sends: list[Send] = []
        self.applies: list[Apply] = []
        self.waits: Wait | None = None
        for step in steps:
            match step:
                case Make():
                    cell = self.new[step.region.name] = Cell(step.region.shape)
                    self.made.append((step, cell))
                case Alias():
                    self.new[step.target.name] = current[step.source.name]
                case Apply():
                    self.new.update({region.name: Cell(region.shape) for region in step.outputs})
                    self.applies.append(step)
                case Put():
                    self.puts.append(step)
                case Receive():
                    self.receives.append(step)
                case Send():
                    self.sends.append(step)
                case Wait():
                    self.waits = step

    def incoming(self, peer: int) -> list[Put]:
        """The puts that read a message from a peer, in its order."""
        found = [p for p in self.puts if isinstance(p.source, Message) and p.source.peer == peer]
        return sorted(found, key=lambda put: put.source.offset)  # type: ignore[union-attr]

    def addend(self, put: Put) -> Put | None:
        """The first put that adds to what this one sets, if it adds to all of it."""
        region = put.target.region.name
        for other in self.puts:
            same = other.accumulate and other.target.region.name == region
            if same and other.target.overlaps(put.target):
                return other if other.target == put.target else None
        return None

    def target(self, put: Put) -> View:
        return View.of(self.new[put.target.region.name], put.target)

    def source(self, part: Subset) -> View:
        return View.of(self.current[part.region.name], part)


class Program(ABC):
    """A bound plan. `run` does it all; `start` and `finish` are its two halves.

    `about` says whose plan this is, when somebody asks.

    A subclass says where messages arrive (`receive`, before anything is placed or sent), how they
    leave (`send`), and how to wait for them (`wait`).
    """

    def __init__(self, plan: Plan, about: Callable[[], str]) -> None:
        self.plan = plan
        self.about = about
        self._inputs = tuple(Cell(region.shape) for region in plan.inputs)
        self._fills: list[Labelled] = []
        self._steps: list[Labelled] = []
        self._waits: dict[int, Ready] = {}
        self._kept: set[int] = set()
        self._running: Sequence[Work] = ()
        self._at = 0
        self._out: Sequence[Array] | None = None
        self._stages = self._staged()
        current = self._stages[-1].new if self._stages else {}
        self._results = tuple(current[region.name] for region in plan.outputs)
        self._place_results()
        self._inbox = [
            {k: v for step in stage.receives for k, v in self.receive(stage, step).items()}
            for stage in self._stages
        ]

    # What a subclass says

    @abstractmethod
    def memory(self, region: Region) -> Array:
        """Memory of a region for all runs."""

    @abstractmethod
    def slots(self, regions: Sequence[Region]) -> list[tuple[Array, ...]]:
        """Memory of large results, so many times over; none where it is made when needed."""

    @abstractmethod
    def receive(self, stage: Stage, step: Receive) -> dict[int, View]:
        """Get ready for a message at every run. Where the puts that read it (by id) find what they
        read; a put that is left out has been done by the message itself."""

    @abstractmethod
    def send(self, stage: Stage, step: Send) -> None:
        """Add the steps that send a message."""

    @abstractmethod
    def wait(self, stage: Stage, step: Wait) -> None:
        """Add the steps that wait for a stage's messages."""

    @abstractmethod
    def begin(self) -> None:
        """Add the steps that begin a run, once memory is filled."""

    @abstractmethod
    def end(self) -> None:
        """Add the steps that end a run."""

    @abstractmethod
    def describe(self) -> str:
        """How messages travel, in a line."""

    @abstractmethod
    def release(self) -> None:
        """Give back what the plan holds outside of Python."""

    # Binding

    def _staged(self) -> list[Stage]:
        stages: list[Stage] = []
        current = {r.name: cell for r, cell in zip(self.plan.inputs, self._inputs, strict=True)}
        steps: list[Step] = []
        for step in self.plan.steps:
            steps.append(step)
            if isinstance(step, Advance):
                stages.append(Stage(step.stage, steps, current))
                current, steps = stages[-1].new, []
        return stages

    def _place_results(self) -> None:
        """Give memory to every region that is made. A result gets new memory at every run, unless
        it is small; an argument or a local map's array that is a result is copied at the end."""
        made = {id(cell): make.region for s in self._stages for make, cell in s.made}
        self._own = tuple(dict.fromkeys(c for c in self._results if id(c) in made))
        own = [made.pop(id(cell)) for cell in self._own]
        self.small = sum(r.size for r in own) * self.plan.dtype.itemsize <= SMALL
        for stage in self._stages:
            for make, cell in stage.made:
                if self.small or cell not in self._own:
                    cell.array, cell.fixed = self.memory(make.region), True
        self._slots = [] if self.small else self.slots(own)
        self._unused = references(self._slots[0]) if self._slots else 0

    def bind(self) -> None:
        """Make the steps, once it is known where everything is."""
        for stage in self._stages:
            for make, cell in stage.made:
                if make.zeroed:
                    about = {"bytes": self.bytes_of(make.region.size)}
                    self._fills.append(Labelled(f"clear {make.region}", _filling(cell), about))
        self.begin()
        for stage, inbox in zip(self._stages, self._inbox, strict=True):
            for send in sorted(stage.sends, key=self._distance):
                self.send(stage, send)
            sources = {
                id(p): stage.source(p.source) for p in stage.puts if isinstance(p.source, Subset)
            } | inbox
            late = self._sums(stage, sources)
            for put in stage.puts:
                local = isinstance(put.source, Subset) and not put.accumulate
                if local and id(put) in sources:
                    self._put(stage, put, sources.pop(id(put)))
            if stage.waits is not None:
                self.wait(stage, stage.waits)
            for put in stage.puts:
                if id(put) in late:
                    self.step(*late[id(put)], bytes=self.bytes_of(put.target.size))
                elif id(put) in sources:
                    self._put(stage, put, sources[id(put)])
            for apply in stage.applies:
                self.step(str(apply), _applying(stage, apply))
        self.end()
        self._calls = tuple(step.work for step in self._labelled)
        self._in_place = self._without_kept(self._calls)
        self._copied_out = all(cell.fixed for cell in self._results)
        self._loose = [c for c in (*self._inputs, *self._results) if not c.fixed]

    def _distance(self, send: Send) -> tuple[bool, int]:
        """Every worker begins with the one after it, so that not all address the same one."""
        return send.peer < self.plan.worker, send.peer

    def _without_kept(self, calls: Sequence[Work]) -> tuple[Work, ...]:
        """The calls of a run in place: what stays is not copied."""
        return tuple(_nothing if k in self._kept else work for k, work in enumerate(calls))

    @property
    def _labelled(self) -> list[Labelled]:
        return self._fills + self._steps

    def step(self, label: str, work: Work, ready: Ready | None = None, **about: Any) -> None:
        """Add a step; one that waits says whether it would not have to. Traces say what is given as
        `about`: ``peer`` or ``peers``, ``bytes``."""
        if ready is not None:
            self._waits[len(self._labelled)] = ready
        self._steps.append(Labelled(label, work, about))

    def bytes_of(self, size: int) -> int:
        """Bytes of so many elements."""
        return int(size) * self.plan.dtype.itemsize

    def _sums(
        self, stage: Stage, sources: dict[int, View]
    ) -> dict[int, tuple[str, Work, Ready | None]]:
        """Puts that set what the next adds to, done by that one in one pass: by the latter's id,
        and both taken out of the sources."""
        found = {}
        for put in stage.puts:
            other = None if put.accumulate or put.coefficient != 1 else stage.addend(put)
            if other is None or other.coefficient != 1 or id(put) not in sources:
                continue
            first, second = sources.pop(id(put)), sources.pop(id(other))
            found[id(other)] = self.sum_step(stage, (put, other), (first, second))
        return found

    def sum_step(
        self, stage: Stage, puts: tuple[Put, Put], sources: tuple[View, View]
    ) -> tuple[str, Work, Ready | None]:
        """The step that sets a box to the sum of two; it runs once messages were waited for."""
        label = f"{puts[0].target} = {puts[0].source} + {puts[1].source}"
        return label, summing(stage.target(puts[0]), *sources), None

    def _put(self, stage: Stage, put: Put, source: View) -> None:
        if put.keeps and self.plan.in_place:
            self._kept.add(len(self._labelled))
        bind = adding if put.accumulate else copying
        work = bind(stage.target(put), source, self.plan.dtype, put.coefficient)
        self.step(str(put), work, bytes=self.bytes_of(put.target.size))

    # Running

    def run(self, arrays: Sequence[Array], out: Sequence[Array] | None = None) -> Sequence[Array]:
        """Results for arguments, both in the order of the plan's regions."""
        if out is not None or not self._copied_out:
            for work in self._load(arrays, out):
                work()
            return self._give()
        # The same, made short for small results, where every 0.1 µs counts.
        for cell, array in zip(self._inputs, arrays):  # noqa: B905
            cell.array = array
        for work in self._calls:
            work()
        for cell in self._loose:
            cell.array = None  # type: ignore[assignment]
        return [cell.array.copy() for cell in self._results]

    def start(self, arrays: Sequence[Array], out: Sequence[Array] | None = None) -> None:
        """Begin a run: as far as it goes without waiting."""
        self._running = self._load(arrays, out)
        self._at = 0
        for work in self._running:
            ready = self._waits.get(self._at)
            if ready is not None and not ready():
                return
            work()
            self._at += 1

    def finish(self) -> Sequence[Array]:
        """The results of the run that `start` began."""
        for work in self._running[self._at :]:
            work()
        return self._give()

    @contextmanager
    def watched(self, record: Record) -> Iterator[None]:
        """Inside, a recorder does the steps of runs that begin."""
        plain = self._calls, self._in_place
        self._calls = tuple(partial(record, *step) for step in self._labelled)
        self._in_place = self._without_kept(self._calls)
        try:
            yield
        finally:
            self._calls, self._in_place = plain

    def _load(self, arrays: Sequence[Array], out: Sequence[Array] | None) -> Sequence[Work]:
        """Put a run's arrays in their places; the calls to make."""
        self._given, self._out = arrays, out
        for cell, array in zip(self._inputs, arrays):  # noqa: B905  # they are as many
            cell.array = array
        if self.small:
            return self._calls
        memory = self.result_memory(out)
        for cell, array in zip(self._own, memory):  # noqa: B905
            cell.array = array
        in_place = out is not None and self._kept and any(a is b for a in memory for b in arrays)
        return self._in_place if in_place else self._calls

    def result_memory(self, out: Sequence[Array] | None) -> Sequence[Array]:
        """Where large results go in this run: what the caller passed, or arrays of an earlier run
        that nobody uses any more, or new ones."""
        if out is not None and all(array.flags.c_contiguous for array in out):
            wanted = dict(zip(map(id, self._results), out, strict=True))
            return [wanted[id(cell)] for cell in self._own]
        for arrays in self._slots:
            if references(arrays) <= self._unused:
                return arrays
        arrays = tuple(np.empty(cell.shape, self.plan.dtype) for cell in self._own)
        if len(self._slots) < KEPT and _COUNTED:
            self._slots.append(arrays)
            self._unused = self._unused or references(arrays)
        return arrays

    def handed_out(self, array: Array) -> bool:
        """Whether a large result may leave as it is."""
        del array
        return True

    def _give(self) -> Sequence[Array]:
        results: Sequence[Array]
        if self._out is not None:
            results = self._out
            for array, cell in zip(results, self._results):  # noqa: B905
                if array is not cell.array:
                    np.copyto(array, cell.array)
        elif self._copied_out:
            results = [cell.array.copy() for cell in self._results]
        else:
            leaving: list[Array] = []
            results = leaving
            for cell in self._results:
                array = cell.array
                if cell.fixed or not self._may_leave(cell, array, leaving):
                    array = array.copy()
                leaving.append(array)
        self.forget()
        return results

    def _may_leave(self, cell: Cell, array: Array, earlier: Sequence[Array]) -> bool:
        """Whether an array is a result as it is: it is no memory of an argument's, of an earlier
        result's, or that the plan needs."""
        for other in (*self._given, *earlier):
            if array is other:
                return False
        if cell in self._own:
            return self.handed_out(array)
        # A local map's array. One without a base owns its memory; the map may have kept it, too.
        if array.base is None:
            return not _COUNTED or sys.getrefcount(array) <= _OURS
        return not any(np.may_share_memory(array, a) for a in (*self._given, *earlier))

    def abandon(self) -> None:
        """Give up a run halfway; there can be no other."""
        self.forget()

    def forget(self) -> None:
        """Let go of a run's arrays."""
        for cell in self._loose:
            cell.array = None  # type: ignore[assignment]
        self._given = ()
        self._out = None


_COUNTED = hasattr(sys, "getrefcount") and sys.implementation.name == "cpython"
"""Whether it can be told that nobody uses an array any more."""


_OURS = 4
"""References to a local map's array that nobody else has: a cell's, those of two calls, and the
count's own."""


def peers_named(peers: Sequence[int]) -> str:
    """Some workers, in words."""
    return f"worker{'s' if len(peers) > 1 else ''} {', '.join(map(str, peers))}"


def references(arrays: tuple[Array, ...]) -> int:
    """The largest number of references to one of the arrays; a view of it holds one."""
    return max((sys.getrefcount(array) for array in arrays), default=0)


def _nothing() -> None:
    """What is left of a copy where memory stays as it is."""


def _filling(cell: Cell) -> Work:
    if cell.fixed:
        return partial(cell.array.fill, 0)
    return lambda: cell.array.fill(0)


def _applying(stage: Stage, step: Apply) -> Work:
    """A local map, checked: its result has the shapes and dtype of its codomain."""
    call = step.call
    inputs = [stage.current[name] for name in call.inputs]
    outputs = [stage.new[region.name] for region in step.outputs]
    if len(inputs) != 1 or len(outputs) != 1:

        def apply_all() -> None:
            results = call.map([cell.array for cell in inputs])
            for cell, array in zip(outputs, results, strict=True):
                cell.array = array

        return apply_all
    (source,), (target,) = inputs, outputs
    forward, shape, dtype = call.map.forward, target.shape, call.map.codomain.dtype

    def apply() -> None:
        array = forward(source.array)
        if type(array) is not np.ndarray or array.shape != shape or array.dtype != dtype:
            (array,) = call.map.checked(array)
        target.array = array

    return apply
