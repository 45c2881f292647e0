"""A bound plan: its instructions, made once, and the functions that execute them, run many times.

Binding walks the stages of a plan (`linop.backends.engine.execution.layout`) once, and asks a
transport for the instructions of messages (`linop.backends.engine.roads.communication`). A run
allocates its result only, or nothing with ``out``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from linop.backends.engine.arrays.arguments import same_array
from linop.backends.engine.execution.emitter import Emitter
from linop.backends.engine.execution.functions import LATE, NEW, Form, Functions
from linop.backends.engine.execution.instructions import (
    Apply,
    Call,
    Clear,
    Copy,
    Instruction,
    instruction,
)
from linop.backends.engine.execution.layout import Layout
from linop.backends.engine.execution.stage import Stage, creates
from linop.backends.engine.execution.views import View, whole
from linop.backends.engine.roads.call_numbers import Calls
from linop.backends.engine.roads.communication import Communication, Instructions
from linop.caching import cached_property
from linop.planning.plan import Put, Sum
from linop.spaces.region import Subset
from linop.spaces.scalars import Array

Record = Callable[[str, Callable[[], Any], Mapping[str, Any]], Any]
"""``record(label, step, about)``: runs and records an instruction, and returns its value."""


class Program:
    """A bound plan: `run` executes it; `begin` and `finish` are the two halves of a run.

    Args:
        layout: its memory.
        messages: supplies the instructions of its messages.
        calls: call counter shared by all plans of the same workers; None if calls are not compared.
    """

    def __init__(self, layout: Layout, messages: Communication, calls: Calls | None) -> None:
        self.plan = layout.plan
        self.arrays = layout.arrays
        self.messages = messages
        self._layout = layout
        self.uncounted: AbstractContextManager[None] = calls or nullcontext()
        """Context of calls without a number."""
        self._follow = self.arrays.following()
        self._where: AbstractContextManager[Any] = nullcontext()
        self.instructions, self._settle = self.arrays.adapted(self._bound(), self.plan.dtype)
        emitter = Emitter(self.arrays, self.plan.dtype)
        self.functions = Functions(layout, messages, self.instructions, emitter)
        self._walk = _nothing()
        self.is_under_way = False
        """True from the beginning of a run in halves until its end."""
        self._at: Any = ()
        self._record: Record | None = None
        self._recording: Record | None = None

    # Binding

    def _bound(self) -> Instructions:
        """The instructions of a run, in order."""
        if self._follow is not None:
            yield instruction("come after the last run", Call(self._follow))
        stages = self._layout.stages
        for stage in stages:
            yield from self._cleared(stage)
        yield from self.messages.begin()
        for stage, inbox in zip(stages, self.messages.inbox, strict=True):
            for each in self._of_stage(stage, inbox):
                yield replace(each, stage=min(each.stage, stage.number))
        yield from self.messages.end()

    def _cleared(self, stage: Stage) -> Instructions:
        for make, buffer in stage.made:
            own = buffer.array is None and buffer.within is None
            allocates = own and make.region.name not in stage.created
            if make.zeroed or allocates:
                size = self._layout.bytes_of(make.region.size)
                clear = Clear(buffer, make.zeroed, allocates)
                yield instruction(f"clear {make.region}", clear, bytes=size)

    def _of_stage(self, stage: Stage, inbox: Mapping[int, View]) -> Instructions:
        """Messages leave first; local copies overlap with them; then what needs those that come."""
        yield from self.messages.sends(stage)
        sources = dict(inbox)
        for put in stage.puts:
            if isinstance(put.source, Subset) and not put.stored:
                sources[id(put)] = stage.source(put.source)
        for step in stage.writes:
            if isinstance(step, Sum) or step.accumulate or not isinstance(step.source, Subset):
                continue
            if id(step) in sources:
                yield self._copy(stage, step, sources.pop(id(step)))
        yield from self.messages.depart(stage)
        if stage.waits is not None:
            yield from self.messages.wait(stage)
        for step in stage.writes:
            if isinstance(step, Sum) and id(step.first) in sources:
                first, second = sources[id(step.first)], sources[id(step.second)]
                yield self.messages.sum(stage, step, first, second)
                continue
            put = step.second if isinstance(step, Sum) else step
            if id(put) in sources:
                yield self._copy(stage, put, sources[id(put)])
        for apply in stage.applies:
            read = [whole(stage.current[name]) for name in apply.call.inputs]
            made = [stage.new[region.name] for region in apply.outputs]
            yield instruction(str(apply), Apply(apply.call.map, read, made))

    def _copy(self, stage: Stage, put: Put, source: View) -> Instruction:
        target = stage.target(put)
        created = creates(put) and target.buffer in self._layout.open
        keeps = put.target.region.name if put.keeps and self.plan.in_place else None
        how = (put.coefficient, put.accumulate, created, keeps)
        size = self._layout.bytes_of(target.size)
        return instruction(str(put), Copy(target, source, *how), bytes=size)

    # Running

    def run(self, arrays: Sequence[Array], out: Sequence[Array] | None = None) -> Sequence[Array]:
        """Execute the plan: results for arguments, both in the order of the plan's regions."""
        if self._record is not None:
            self.record(arrays, out)
            return self.finish()
        results: Sequence[Array] = self.functions.run(self.form(arrays, out))(*arrays, *(out or ()))
        return results

    def record(self, arrays: Sequence[Array], out: Sequence[Array] | None = None) -> None:
        """Begin a run whose instructions are recorded (`watched`), up to the first one that would
        have to wait."""
        self._recording = self._record
        self.begin(self.functions.run(self.form(arrays, out), walk=True)(*arrays, *(out or ())))

    def begin(self, run: Generator[Any, Any, Any]) -> None:
        """Begin a run up to the first instruction that would have to wait.

        Args:
            run: stops there once, or at its end, and then gives the results
                (`linop.backends.engine.execution.calls`); or stops before each instruction, if the
                run is recorded.
        """
        self.is_under_way = True
        if self._follow is not None:
            self._where = self.arrays.surroundings()
        with self.uncounted:
            self._walk, self._at = run, next(run)
            if self._recording is not None:
                self._go(waiting=False)

    def finish(self) -> Sequence[Array]:
        """Complete the run that has begun, and return its results."""
        with self._where:  # the stream on which the beginning allocated memory
            if self._recording is None:
                self._at = self._walk.send(True)
            else:
                self._go(waiting=True)
            results: Sequence[Array] = self._at
            self._forget()
        if self._follow is not None:
            self._follow()
        return results

    @property
    def is_recorded(self) -> bool:
        """True if the run that has begun is recorded."""
        return self._recording is not None

    def stops(self, number: int, step: Instruction) -> str:
        """Condition under which the beginning of a run stops before an instruction: it would have
        to wait, and nothing follows that peers execute together; empty if it never stops."""
        waits = step.ready is not None and number >= self._joint
        return f"not {self.functions.emitter.name(step.ready)}()" if waits else ""

    @cached_property
    def _joint(self) -> int:
        """Number of instructions up to the last one of `Instruction.together`."""
        return max((k + 1 for k, each in enumerate(self.instructions) if each.together), default=0)

    @property
    def reached(self) -> float:
        """The stage at which a run waits between `begin` and `finish`: messages of later ones have
        not left. Infinity without such a run."""
        at = self._at
        return self.instructions[at].stage if isinstance(at, int) else math.inf

    def _go(self, waiting: bool) -> None:
        """Execute and record instructions: to the end, or (not `waiting`) up to one that would have
        to wait, after those that peers execute together."""
        last, record = 0 if waiting else self._joint, self._recording
        assert record is not None
        while isinstance(self._at, int):
            step = self.instructions[self._at]
            ready = waiting or self._at < last or step.ready is None or step.ready()
            if not ready:
                return
            self._at = record(step.label, partial(next, self._walk), step.about)

    @contextmanager
    def watched(self, record: Record) -> Iterator[None]:
        """Context in which the instructions of new runs are executed by a recorder."""
        self._record = record
        try:
            yield
        finally:
            self._record = None

    def form(self, arrays: Sequence[Array], out: Sequence[Array] | None) -> Form:
        """The `Form` of a run with these arguments and ``out`` arrays."""
        if out is None:
            return NEW
        kinds = [self.arrays.of(region.memory) for region in self.plan.outputs]
        straight = all(getattr(o.flags, kind.plain) for kind, o in zip(kinds, out, strict=True))
        given = {r.name: a for r, a in zip(self.plan.inputs, arrays, strict=True)}
        outs = zip(self.plan.outputs, out, strict=True)
        same = [r.name for r, o in outs if r.name in given and same_array(o, given[r.name])]
        if same and not self.plan.in_place:
            return LATE
        return Form(out=True, straight=straight, in_place=frozenset(same))

    def describe(self) -> str:
        """Transport of the messages, as one line of text."""
        return self.messages.describe()

    def listing(self) -> str:
        """The instructions of a run, each as the Python that executes it."""
        lines, results = self.functions.text(NEW, lambda _, each: [f"# {each.label}"])
        return "\n".join([*lines, f"return [{', '.join(results)}]"])

    def abandon(self) -> None:
        """Abandon an unfinished run; no other can follow."""
        if self._settle is not None:
            self._settle()  # device copies must not write to memory that is reused
        self._forget()
        self.messages.abandon()

    def release(self) -> None:
        """Release requests and shared memory."""
        self.messages.release()

    def _forget(self) -> None:
        """Drop references to a run's arrays."""
        self._walk, self._at, self._recording = _nothing(), (), None
        self.is_under_way = False


def _nothing() -> Generator[Any, Any, Any]:
    """The run before the first one."""
    yield from ()
