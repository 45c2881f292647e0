"""A worker's plan bound to memory and to a transport: the text of a function, run many times.

Binding walks the steps of `linop.plan` once. Every array, view, buffer and request that can be
known then is made then, and each step becomes lines of Python (`linop.backends.code`); a run
allocates nothing but its result, and nothing at all where the caller passes ``out``. How messages
travel is a subclass's affair: `linop.backends.messages` or `linop.backends.windows`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

from linop.backends.arrays import NUMPY, Arrays
from linop.backends.code import Code
from linop.backends.crossing import Crossing
from linop.backends.device import DeviceArrays
from linop.backends.fusing import Fusing
from linop.backends.moving import Move, Moving
from linop.backends.stage import Lines, Ready, Stage, cell_of, creates
from linop.backends.strided import Cell, View, summing
from linop.plan import Advance, Apply, Make, Plan, Put, Receive, Send, Step, Wait
from linop.region import Region, Subset
from linop.scalars import Array

SMALL = 32 * 1024
"""Bytes of results up to which new memory is made at every run: that takes less than to look for
memory of an earlier run's that nobody uses any more."""
KEPT = 3
"""Arrays for a large result that a plan keeps for later runs, once their users let go of them."""

Record = Callable[[str, Callable[[], Any], Mapping[str, Any]], Any]
"""Does a step, given its label and what is to be said about it, and takes note."""


class Program(ABC):
    """A bound plan. `run` does it all; `start` and `finish` are its two halves.

    `about` says whose plan this is, when somebody asks.

    A subclass says where messages arrive (`receive`, before anything is placed or sent), how they
    leave (`send`), and how to wait for them (`wait`).

    Attributes:
        inputs: where the text has the arguments.
        open: where it has the memory for results that it is given, or makes.
        small: whether it makes it.
        plain: whether results are memory of their own, or arguments.
        kept: whether they are arguments.
    """

    takes_out = True
    """Whether results can be written to memory that a caller passes."""
    small_stay = False
    """Whether small results have memory that stays, and are copied out of it."""

    def __init__(self, plan: Plan, about: Callable[[], str], arrays: Arrays = NUMPY) -> None:
        self.plan = plan
        self.about = about
        self.arrays = arrays
        self.code = Code(arrays)
        self._follow = arrays.following()
        self._where: AbstractContextManager[Any] = nullcontext()
        self._moving = Moving(self.code, plan.dtype)
        self._crossing: Crossing | None = None
        if isinstance(arrays, DeviceArrays):
            self._crossing = Crossing(arrays, self.code)
            self._moving = Fusing(self.code, plan.dtype, self._crossing, arrays)
        self.inputs = tuple(cell_of(region, self.code) for region in plan.inputs)
        self._steps: list[Lines] = []
        self._functions: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._walk: Iterator[Any] = iter(())
        self._at: Any = ()
        self._given: Sequence[Array] = ()
        self._out: Sequence[Array] | None = None
        self._record: Record | None = None
        self._recording: Record | None = None
        self._stages = self._staged()
        current = self._stages[-1].new if self._stages else {}
        self._results = tuple(current[region.name] for region in plan.outputs)
        made = {cell: make.region for stage in self._stages for make, cell in stage.made}
        self._own = {cell: made[cell] for cell in self._results if cell in made}
        size = sum(self.bytes_of(region.size) for region in self._own.values())
        most = 0 if arrays.asynchronous else SMALL
        self.small = size <= most and not any(cell.apart for cell in self._own)
        self._place_results()
        self._inbox = [self.receives(stage, stage.receives) for stage in self._stages]

    # What a subclass says

    @abstractmethod
    def memory(self, region: Region) -> Array:
        """Memory of a region for all runs."""

    @abstractmethod
    def slots(self, regions: Sequence[Region]) -> list[tuple[Array, ...]]:
        """Memory of large results, so many times over; none where it is made when needed."""

    @abstractmethod
    def receives(self, stage: Stage, steps: Sequence[Receive]) -> dict[int, View]:
        """Get ready for messages at every run. Where the puts that read them (by id) find what they
        read; a put that is left out has been done by a message itself."""

    @abstractmethod
    def sends(self, stage: Stage, steps: Sequence[Send]) -> None:
        """Add the steps that send messages."""

    def depart(self, stage: Stage) -> None:  # noqa: B027  # what is sent has left
        """Add the steps that are left to do for what a stage sends, once its local copies are."""

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
        current = {r.name: cell for r, cell in zip(self.plan.inputs, self.inputs, strict=True)}
        steps: list[Step] = []
        for step in self.plan.steps:
            steps.append(step)
            if isinstance(step, Advance):
                stages.append(Stage(step.stage, steps, current, self.code))
                current, steps = stages[-1].new, []
        return stages

    def _place_results(self) -> None:
        """Give memory to every region that is made. A result gets new memory at every run; an
        argument or a local map's array that is a result is copied at the end."""
        self._placed = {} if self.small else dict(self._early())
        for stage in self._stages:
            for make, cell in stage.made:
                stays = self.small and self.small_stay if cell in self._own else True
                if stays and cell not in self._placed.values():
                    cell.array = self.memory(make.region)
        self.open = tuple(cell for cell in self._own if cell.array is None)
        made_here = [cell for cell in self._results if cell not in self.inputs]
        apart = len(made_here) == len(set(made_here))
        self.kept = not made_here
        self.plain = apart and all(cell in self._own for cell in made_here)
        self._slots = [] if self.small else self.slots(list(self._own.values()))
        self._unused = references(self._slots[0]) if self._slots else 0

    def _early(self) -> Iterator[tuple[int, Cell]]:
        """Puts of a sum into a result (by id) that need not be done, for it is summed there; and
        the cells of these sums."""
        for stage, after in pairwise(self._stages):
            summed = {first.target.region.name for first, _ in stage.pairs() if creates(first)}
            for put in after.puts:
                target, source = after.target(put), put.source
                alone = not put.accumulate and put.coefficient == 1 and after.addend(put) is None
                if put.crosses or not (alone and isinstance(source, Subset) and source.whole):
                    continue
                cell = after.current[source.region.name]
                mine = source.region.name in summed and cell not in self._own
                if mine and target.cell in self._own and target.contiguous:
                    summed.remove(source.region.name)
                    cell.name = target.text(self.code)
                    yield id(put), cell

    def bind(self) -> None:
        """Make the steps, once it is known where everything is."""
        if self._follow is not None:
            self.step("come after the last run", f"{self.code.name(self._follow)}()")
        for stage in self._stages:
            for make, cell in stage.made:
                self._make(stage, make, cell)
        self.begin()
        for stage, inbox in zip(self._stages, self._inbox, strict=True):
            self.sends(stage, sorted(stage.sends, key=self._distance))
            sources = {
                id(p): stage.source(p.source) for p in stage.puts if isinstance(p.source, Subset)
            } | inbox
            sources = {key: view for key, view in sources.items() if key not in self._placed}
            late = self._sums(stage, sources)
            for put in stage.puts:
                local = isinstance(put.source, Subset) and not put.accumulate
                if local and id(put) in sources:
                    self._put(stage, put, sources.pop(id(put)))
            self.depart(stage)
            if stage.waits is not None:
                self.wait(stage, stage.waits)
            for put in stage.puts:
                if id(put) in late:
                    self.sum(stage, *late[id(put)])
                elif id(put) in sources:
                    self._put(stage, put, sources[id(put)])
            for apply in stage.applies:
                self._apply(stage, apply)
        self._steps += self._moving.gathered()
        self.end()
        if self._crossing is not None and self._crossing.used:
            self.settle()

    def _distance(self, send: Send) -> tuple[bool, int]:
        """Every worker begins with the one after it, so that not all address the same one."""
        return send.peer < self.plan.worker, send.peer

    def settle(self) -> None:
        """Add the step that waits for copies from and to main memory."""
        assert self._crossing is not None
        self.step("wait for copies", self._crossing.settling(), ready=self._crossing.over)

    def step(
        self,
        label: str,
        *text: str,
        ready: Ready | None = None,
        fresh: Sequence[str] | None = None,
        keeps: str | None = None,
        **about: Any,
    ) -> None:
        """Add a step; see `Lines`."""
        self._steps += self._moving.gathered()
        self._steps.append(Lines(label, text, about, ready, fresh, keeps))

    def bytes_of(self, size: int) -> int:
        """Bytes of so many elements."""
        return int(size) * self.plan.dtype.itemsize

    def _make(self, stage: Stage, make: Make, cell: Cell) -> None:
        """Memory as the steps expect it."""
        text = [f"{View(cell, cell.shape).text(self.code)}.fill(0)"] if make.zeroed else []
        fresh = None
        if cell.array is None:
            if not any(put.target.region == make.region and creates(put) for put in stage.puts):
                fresh = [f"{cell.name} = {self._new(cell, 'zeros' if make.zeroed else 'empty')}"]
        if text or fresh:
            size = self.bytes_of(make.region.size)
            self.step(f"clear {make.region}", *text, fresh=fresh, bytes=size)

    def _new(self, cell: Cell, how: str = "empty") -> str:
        """New memory for a result."""
        return f"{how}({self.code.name(cell.shape)}, {self.code.name(self.plan.dtype)})"

    def _sums(
        self, stage: Stage, sources: dict[int, View]
    ) -> dict[int, tuple[tuple[Put, Put], tuple[View, View]]]:
        """The pairs of puts that are done in one pass, when the latter is: by its id, and both
        taken out of the sources."""
        return {
            id(other): ((put, other), (sources.pop(id(put)), sources.pop(id(other))))
            for put, other in stage.pairs()
            if id(put) in sources
        }

    def sum(self, stage: Stage, puts: tuple[Put, Put], sources: tuple[View, View]) -> None:
        """Add the step that sets a box to the sum of two; it runs once messages were waited for."""
        target = stage.target(puts[0])
        text = summing(self.code, target.text(self.code), *sources)
        fresh = None
        if creates(puts[0]) and target.cell in self.open:
            (line,) = summing(self.code, self._new(target.cell), *sources)
            fresh = [f"{target.cell.name} = {line}"]
        label = f"{puts[0].target} = {puts[0].source} + {puts[1].source}"
        self.step(label, *text, fresh=fresh, bytes=self.bytes_of(target.size))

    def _put(self, stage: Stage, put: Put, source: View) -> None:
        target = stage.target(put)
        fresh = None
        if creates(put) and target.cell in self.open:
            fresh = [f"{target.cell.name} = {source.text(self.code)}.copy()"]
        keeps = put.target.region.name if put.keeps and self.plan.in_place else None
        about, how = {"bytes": self.bytes_of(target.size)}, (put.coefficient, put.accumulate)
        self.move(Move(str(put), target, source, about, *how, fresh, keeps))

    def move(self, move: Move) -> None:
        """Add the steps of a move; on a device they may come later, but before any other."""
        self._steps += self._moving.steps(move)

    def _apply(self, stage: Stage, step: Apply) -> None:
        """A local map, checked: its result has the shapes and dtype of its codomain."""
        call, name = step.call, self.code.name
        read = [stage.current[n] for n in call.inputs]
        made = [stage.new[region.name] for region in step.outputs]
        if self._crossing is not None and any(cell.apart for cell in read + made):
            text, ready = self._crossing.applying(call.map, read, made)
            self.step(str(step), *text, ready=ready)
            return
        local = call.map.on(self.arrays)
        inputs = [View(cell, cell.shape) for cell in read]
        given = [view.text(self.code) for view in inputs]
        outputs = [cell.name for cell in made]
        if len(inputs) != 1 or len(outputs) != 1:
            line = f"[{', '.join(outputs)}] = {name(local)}([{', '.join(given)}])"
            self.step(str(step), line)
            return
        (y,), shape = outputs, stage.new[step.outputs[0].name].shape
        wrong = f"{y}.shape != {name(shape)} or {y}.dtype != {name(call.map.codomain.dtype)}"
        self.step(
            str(step),
            f"{y} = {name(local.forward)}({given[0]})",
            f"if type({y}) is not ndarray or {wrong}: ({y},) = {name(local.checked)}({y})",
        )

    # Text

    def lines(
        self, given: bool, in_place: Collection[str] = (), walk: bool = False
    ) -> tuple[list[str], list[str]]:
        """The lines of a run, and the results; see `_function`. Arguments, and memory that is
        given, are where the cells say."""
        lines: list[str] = []
        for k, step in enumerate(self._steps):
            text = step.text if given or step.fresh is None else step.fresh
            if text and step.keeps not in in_place:
                lines += [f"yield {k}", *text] if walk else text
        results = []
        for cell in self._results:
            stays = cell.array is not None or cell in self.inputs
            copy = ".copy()" if stays and not given else ""
            results.append(View(cell, cell.shape).text(self.code) + copy)
        return lines, results

    def _function(
        self, given: bool, in_place: Collection[str] = (), walk: bool = False
    ) -> Callable[..., Any]:
        """What runs the steps, and returns the results as they are.

        Args:
            given: whether memory for results is given, after the arguments.
            in_place: regions whose memory is the argument's: what stays is not copied.
            walk: a generator instead: of the number of each step before that is done, then of the
                results.
        """
        key = given, in_place, walk
        function = self._functions.get(key)
        if function is None:
            lines, results = self.lines(given, in_place, walk)
            lines.append(f"{'yield' if walk else 'return'} [{', '.join(results)}]")
            cells = (*self.inputs, *self.open) if given else self.inputs
            function = self.code.function([cell.name for cell in cells], lines)
            self._functions[key] = function
        return function

    # Running

    def run(self, arrays: Sequence[Array], out: Sequence[Array] | None = None) -> Sequence[Array]:
        """Results for arguments, both in the order of the plan's regions."""
        if self._record is not None:
            self.start(arrays, out)
            return self.finish()
        function, given = self._prepared(arrays, out, walk=False)
        return self._give(function(*given))

    def start(self, arrays: Sequence[Array], out: Sequence[Array] | None = None) -> None:
        """Begin a run: as far as it goes without waiting."""
        if self._follow is not None:
            self._where = self.arrays.surroundings()
        function, given = self._prepared(arrays, out, walk=True)
        self._walk, self._recording = function(*given), self._record
        self._at = next(self._walk)
        self._go(waiting=False)

    def finish(self) -> Sequence[Array]:
        """The results of the run that `start` began."""
        with self._where:  # its memory belongs to the stream that it began on
            self._go(waiting=True)
            results, self._at = self._at, ()
            given = self._give(results)
        if self._follow is not None:
            self._follow()
        return given

    def _go(self, waiting: bool) -> None:
        """Walk on: to the end, or to a step that would have to wait."""
        while isinstance(self._at, int):
            step = self._steps[self._at]
            if not waiting and step.ready is not None and not step.ready():
                return
            go = partial(next, self._walk)
            record = self._recording
            self._at = go() if record is None else record(step.label, go, step.about)

    @contextmanager
    def watched(self, record: Record) -> Iterator[None]:
        """Inside, a recorder does the steps of runs that begin."""
        self._record = record
        try:
            yield
        finally:
            self._record = None

    def _prepared(
        self, arrays: Sequence[Array], out: Sequence[Array] | None, walk: bool
    ) -> tuple[Callable[..., Any], Sequence[Array]]:
        """What does a run, and what to give it."""
        self._given, self._out = arrays, out
        if self.small and out is None:
            return self._function(given=False, walk=walk), arrays
        memory = self.result_memory(out) if self.open else ()
        in_place: tuple[str, ...] = ()
        if out is not None and memory:
            ends = zip(self.plan.outputs, self._results, strict=True)
            names = {self.open.index(cell): r.name for r, cell in ends if cell in self.open}
            passed = dict(zip((r.name for r in self.plan.inputs), arrays, strict=True))
            in_place = tuple(name for k, name in names.items() if passed.get(name) is memory[k])
        return self._function(given=True, in_place=in_place, walk=walk), (*arrays, *memory)

    def result_memory(self, out: Sequence[Array] | None) -> Sequence[Array]:
        """Where results go in this run: what the caller passed, or arrays of an earlier run that
        nobody uses any more, or new ones."""
        if out is not None and all(array.flags.c_contiguous for array in out):
            wanted = dict(zip(map(id, self._results), out, strict=True))
            return [wanted[id(cell)] for cell in self.open]
        for arrays in self._slots:
            if references(arrays) <= self._unused:
                return arrays
        arrays = tuple(self._of(cell).empty(cell.shape, self.plan.dtype) for cell in self.open)
        # A device's pool gives memory as fast, and in the order of the stream that asks.
        if len(self._slots) < KEPT and _COUNTED and not self.arrays.asynchronous:
            self._slots.append(arrays)
            self._unused = self._unused or references(arrays)
        return arrays

    def handed_out(self, array: Array) -> bool:
        """Whether a result may leave as it is."""
        del array
        return True

    def _give(self, made: Sequence[Array]) -> Sequence[Array]:
        """The results of a run, memory of their own, from the arrays that it made."""
        results: list[Array] = []
        if self._out is not None:
            for array, mine, cell in zip(self._out, made, self._results, strict=True):
                if array is not mine:
                    self._of(cell).copyto(array, mine)
            results += self._out
        else:
            for k, cell in enumerate(self._results):
                array = made[k]
                results.append(array if self._may_leave(cell, array, results) else array.copy())
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
        if cell.apart:
            return False  # a local map's; it may be a view of memory that the plan needs
        # A local map's array. One without a base owns its memory; the map may have kept it, too.
        if array.base is None:
            return not _COUNTED or sys.getrefcount(array) <= _OURS
        return not any(self.arrays.may_share_memory(array, a) for a in (*self._given, *earlier))

    def _of(self, cell: Cell) -> Arrays:
        """The arrays that a cell's is one of."""
        return self.arrays.of("host") if cell.apart else self.arrays

    def abandon(self) -> None:
        """Give up a run halfway; there can be no other."""
        if self._crossing is not None:
            self._crossing.settle()  # nobody else is given memory that is still written to
        self.forget()

    def forget(self) -> None:
        """Let go of a run's arrays."""
        self._walk = iter(())
        self._given = ()
        self._out = None


_COUNTED = hasattr(sys, "getrefcount") and sys.implementation.name == "cpython"
"""Whether it can be told that nobody uses an array any more."""

_OURS = 4
"""References to a local map's array that nobody else has: a list's, those of two calls, and the
count's own."""


def references(arrays: tuple[Array, ...]) -> int:
    """The largest number of references to one of the arrays; a view of it holds one."""
    return max((sys.getrefcount(array) for array in arrays), default=0)
