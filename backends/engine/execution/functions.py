"""Functions of a bound plan, generated from its instructions: one for each destination of the
results, as a run at once, as a generator that stops before each instruction, and as a fast call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from linop.backends.engine.execution.emitter import Emitter, Mode
from linop.backends.engine.execution.instructions import Instruction
from linop.backends.engine.execution.layout import Layout
from linop.backends.engine.execution.views import Buffer, whole
from linop.backends.engine.roads.communication import Communication
from linop.caching import cached_property


class Form(NamedTuple):
    """Destination of a run's results: one function is generated for each.

    Attributes:
        out: True: arrays passed by the caller; False: memory of their own.
        straight: True if results may be computed in these arrays (they are `Arrays.plain`).
        in_place: regions whose passed array is the argument's: unchanged elements are not copied.
    """

    out: bool = False
    straight: bool = False
    in_place: frozenset[str] = frozenset()


NEW = Form()
STRAIGHT = Form(out=True, straight=True)
"""Passed arrays that are `Arrays.plain`, and share no memory with arguments."""
LATE = Form(out=True)
"""Passed arrays that hold arguments which are read until the end: results are copied to them."""
Stops = Callable[[int, Instruction], Iterable[str]]
"""``stops(k, instruction)``: lines before an instruction, the k-th of its plan."""


def _nowhere(number: int, instruction: Instruction) -> Iterable[str]:
    del number, instruction
    return ()


def _each(number: int, instruction: Instruction) -> Iterable[str]:
    """Stop before every instruction."""
    del instruction
    return (f"yield {number}",)


class Functions:
    """Generator of a bound plan's functions, which are cached."""

    def __init__(
        self,
        layout: Layout,
        messages: Communication,
        instructions: Sequence[Instruction],
        emitter: Emitter,
    ) -> None:
        self.emitter = emitter
        self.plan = layout.plan
        self._layout = layout
        self._messages = messages
        self._instructions = instructions
        self.given = [emitter.variable(buffer) for buffer in layout.inputs]
        """Variables of the arguments."""
        self.passed = [emitter.variable(Buffer(region.shape)) for region in layout.plan.outputs]
        """Variables of the ``out`` arrays."""
        self._inputs = dict(zip(layout.inputs, layout.plan.inputs, strict=True))
        self._known: dict[tuple[Form, bool], Callable[..., Any]] = {}

    def run(self, form: Form, walk: bool = False) -> Callable[..., Any]:
        """Function of arguments and ``out`` arrays that returns the results; with `walk` a
        generator function that yields the numbers of instructions, and the results at the end."""
        if (form, walk) not in self._known:
            lines, results = self.text(form, _each if walk else _nowhere)
            lines.append(f"{'yield' if walk else 'return'} [{', '.join(results)}]")
            parameters = [*self.given, *(self.passed if form.out else ())]
            self._known[form, walk] = self.emitter.function(parameters, lines)
        return self._known[form, walk]

    def text(self, form: Form, stops: Stops = _nowhere) -> tuple[list[str], list[str]]:
        """Lines of a run, and the expressions of its results. Variables of arguments and ``out``
        arrays are `given` and `passed`.

        Args:
            stops: gives lines before each instruction.
        """
        straight, opened = self._is_straight(form), self._layout.open
        allocating = self._layout.small and not straight
        lines: list[str] = []
        if straight:
            places = ((self.emitter.variable(one), self._first[one]) for one in opened)
            lines += [f"{variable} = {self.passed[k]}" for variable, k in places]
        elif not allocating and opened:
            lines += self.emitter.lines(self._messages.lending())
        made = {self.plan.outputs[self._first[one]].name for one in opened}
        stay = made.intersection(form.in_place) if straight else frozenset[str]()
        mode = Mode(allocating, frozenset(stay))
        for k, each in enumerate(self._instructions):
            text = self.emitter.lines(each.operations, mode)
            if text:
                lines += [*stops(k, each), *text]
        if not form.out:
            results = range(len(self._layout.results))
            return lines, [self._result(k, lent=not allocating) for k in results]
        if form == LATE and len(self.passed) > 1:  # an argument may become another result
            aliased = (one for one in self._inputs if one in self._layout.results)
            kept = map(self.emitter.variable, aliased)
            lines += [f"{argument} = {argument}.copy()" for argument in kept]
        for k in range(len(self._layout.results)):
            lines += self._written(k, form)
        return lines, list(self.passed)

    def _is_straight(self, form: Form) -> bool:
        return form.straight and self._messages.takes_out

    @cached_property
    def _first(self) -> dict[Buffer, int]:
        """Index of the first result in each buffer."""
        return {one: k for k, one in reversed(list(enumerate(self._layout.results)))}

    def _result(self, k: int, lent: bool) -> str:
        """Expression of a result in memory of its own."""
        buffer, free = self._layout.results[k], self._messages.lent
        text = self.emitter.view(whole(buffer))
        if buffer.array is not None or buffer in self._inputs or self._first[buffer] != k:
            return f"{text}.copy()"
        if lent and buffer in self._layout.open and free is not None:
            return f"{text} if {self.emitter.name(free)} else {text}.copy()"
        return text

    def _written(self, k: int, form: Form) -> list[str]:
        """Lines that copy a result to its ``out`` array, unless it is there already."""
        buffer, name = self._layout.results[k], self.plan.outputs[k].name
        if self._is_straight(form) and buffer in self._layout.open and self._first[buffer] == k:
            return []
        given = self._inputs.get(buffer)
        if name in form.in_place and given is not None and given.name == name:
            return []
        return [f"{self.passed[k]}[...] = {self.emitter.view(whole(buffer))}"]
