"""The emitter: instructions as lines of Python, and functions made of lines, compiled once.

A Python function call costs about as much as a message of a few bytes in shared memory; so a run is
one function, whose instructions are inlined as lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

from linop.backends.engine.arrays.interface import NUMPY, Arrays
from linop.backends.engine.execution.instructions import (
    Add,
    Apply,
    Call,
    Clear,
    Contiguous,
    Copy,
    For,
    If,
    Interaction,
    Later,
    Operation,
    Set,
    Settle,
    Spin,
    Views,
)
from linop.backends.engine.execution.numbers import (
    Arithmetic,
    Condition,
    Field,
    Item,
    Joined,
    Number,
    Returned,
    Variable,
)
from linop.backends.engine.execution.views import Buffer, View, fixed, whole
from linop.normal_form.maps import read_only
from linop.spaces.scalars import Array, Scalar

_NARROW = 512
"""Largest contiguous run, in bytes, that NumPy copies faster as one wide item: a copy of 2,050 rows
of two float32 took 21 µs as it is, 7.6 µs as eight-byte items; one of 128 rows of 64 took 2.7 and
1.3 µs."""
_TALL = 16
"""Smallest number of rows for wide items if both views are fixed."""
_TALLER = 256
"""Smallest number of rows for wide items if a view is made in every run."""
_WIDE: dict[int, np.dtype[Any]] = {
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("c16"),
}


class Mode(NamedTuple):
    """Variant of the lines.

    Attributes:
        allocating: True if the run allocates its results.
        stay: names of the regions whose memory is the argument's, and need not be copied.
    """

    allocating: bool = False
    stay: frozenset[str] = frozenset()


class Emitter:
    """Lines and functions for one bound plan, and the names in them.

    Args:
        arrays: array module, whose `Arrays.functions` every source may call.
        dtype: dtype of the plan.
    """

    def __init__(self, arrays: Arrays, dtype: np.dtype[Any]) -> None:
        self.arrays = arrays
        self.dtype = dtype
        self._names = dict(arrays.functions)
        self._known: dict[int, str] = {}
        self._variables: dict[Buffer, str] = {}

    # Functions

    def function(self, parameters: Iterable[str], lines: Iterable[str]) -> Callable[..., Any]:
        """Function with these parameters and body lines; a generator function if a line yields."""
        body = "".join(f"\n    {line}" for line in lines)
        made: dict[str, Any] = {}
        exec(_compiled(f"def run({', '.join(parameters)}):{body}"), self._names, made)
        function: Callable[..., Any] = made["run"]
        return function

    # Names and expressions

    def name(self, thing: Any) -> str:
        """Name of an object, bound for all runs."""
        if id(thing) not in self._known:
            self._known[id(thing)] = name = f"{_kind(thing)}{len(self._names)}"
            self._names[name] = thing
        return self._known[id(thing)]

    def variable(self, buffer: Buffer) -> str:
        """Local variable of a buffer whose array differs from run to run."""
        return self._variables.setdefault(buffer, f"c{len(self._variables)}")

    def buffer(self, buffer: Buffer) -> str:
        """Expression of a buffer's array."""
        if buffer.array is not None:
            return self.name(buffer.array)
        if buffer.within is not None:
            return self.view(buffer.within)
        if buffer.choice is not None:
            arrays, number = buffer.choice
            return f"{self.name(arrays)}[{self.number(number)}]"
        if buffer.piece_of is not None:
            flat, begin = buffer.piece_of
            end = begin + int(np.prod(buffer.shape, dtype=np.int64))
            return f"{self.buffer(flat)}[{begin}:{end}].reshape({buffer.shape})"
        return self.variable(buffer)

    def view(self, view: View) -> str:
        """Expression of a view."""
        if isinstance(view.index, Number):
            return f"{self.buffer(view.buffer)}[{self.number(view.index)}]"
        if view.fixed:
            return self.name(view.get())
        text = self.buffer(view.buffer)
        return text if view.index is None else f"{text}[{self.name(view.index)}]"

    def target(self, view: View) -> str:
        """Expression of a view as the target of an assignment, which costs half of
        ``numpy.copyto``."""
        whole = view.fixed or view.index is None
        return f"{self.view(view)}[...]" if whole and not _varies(view) else self.view(view)

    def number(self, number: Number | int | None) -> str:
        """Expression of a number."""
        match number:
            case Variable():
                return number.name
            case Item():
                return f"{self.name(number.memory)}[{self.number(number.index)}]"
            case Field():
                return f"{self.name(number.of)}.{number.name}"
            case Returned():
                return f"{self.name(number.function)}()"
            case Arithmetic(left=left, sign=sign, right=right):
                first, second = self.number(left), self.number(right)
                first = f"({first})" if isinstance(left, Arithmetic) and sign != "+" else first
                second = f"({second})" if isinstance(right, Arithmetic) else second
                return f"{first} {sign} {second}"
        return str(number)

    def condition(self, condition: Condition | Joined | Number) -> str:
        if isinstance(condition, Number):
            return self.number(condition)
        if isinstance(condition, Joined):
            return f" {condition.word} ".join(map(self.condition, condition.conditions))
        left, right = self.number(condition.left), self.number(condition.right)
        return f"{left} {condition.sign} {right}"

    def argument(self, argument: Any) -> str:
        """Expression of an argument of a call."""
        match argument:
            case View():
                return self.view(argument)
            case Number() | int() | None:
                return self.number(argument)
            case Later():
                numbers = ", ".join(map(self.number, argument.arguments))
                return f"lambda: {self.name(argument.function)}({numbers})"
            case Views():
                return f"[{', '.join(map(self.view, argument))}]"
        return self.name(argument)

    # Lines

    def lines(self, operations: Iterable[Operation], mode: Mode = Mode()) -> list[str]:  # noqa: B008
        """Lines of some operations."""
        return [line for operation in operations for line in self._lines(operation, mode)]

    def _lines(self, operation: Operation, mode: Mode) -> list[str]:
        match operation:
            case Copy():
                return self._copy(operation, mode)
            case Add():
                return self._add(operation, mode)
            case Clear():
                return self._clear(operation, mode)
            case Apply():
                return self._apply(operation)
            case Interaction(by=by):
                return self.lines(by)
            case Call():
                return [self._call(operation)]
            case Contiguous(result=result, source=source):
                how = "contiguous" if not result.on_host else self.name(np.ascontiguousarray)
                return [f"{self.variable(result)} = {how}({self.view(source)})"]
            case Set(targets=targets, value=value):
                return [" = ".join(map(self.number, [*targets, value]))]
            case If():
                then = self._under(f"if {self.condition(operation.condition)}:", operation.then)
                other = operation.otherwise
                return then + (self._under("else:", other) if other else [])
            case For(variables=variables, values=values, body=body):
                names = ", ".join(variable.name for variable in variables)
                head = f"for {names} in {self.name(values)}:"
                return [head, *(f"    {line}" for line in self.lines(body))]
            case Spin(times=times, condition=condition, otherwise=otherwise):
                return [
                    f"for _ in {self.name(range(times))}:",
                    f"    if {self.condition(condition)}: break",
                    f"else: {self._call(otherwise)}",
                ]
            case Settle():
                raise AssertionError("only a device has copies to wait for")

    def _under(self, head: str, operations: Sequence[Operation]) -> list[str]:
        lines = self.lines(operations)
        return [f"{head} {lines[0]}"] if len(lines) == 1 else [head, *(f"    {x}" for x in lines)]

    def _call(self, call: Call) -> str:
        arguments = ", ".join(map(self.argument, call.arguments))
        text = f"{self.name(call.function)}({arguments})"
        targets = [
            self.variable(r) if isinstance(r, Buffer) else self.number(r) for r in call.results
        ]
        if call.unpack:
            return f"[{', '.join(targets)}] = {text}"
        return " = ".join([*targets, text])

    def _new(self, buffer: Buffer, how: str = "empty") -> str:
        """Expression that allocates memory for a result."""
        return f"{how}({self.name(buffer.shape)}, {self.name(self.dtype)})"

    def _clear(self, clear: Clear, mode: Mode) -> list[str]:
        if mode.allocating and clear.allocates:
            new = self._new(clear.buffer, "zeros" if clear.zeroed else "empty")
            return [f"{self.variable(clear.buffer)} = {new}"]
        return [f"{self.view(whole(clear.buffer))}.fill(0)"] if clear.zeroed else []

    def _copy(self, copy: Copy, mode: Mode) -> list[str]:
        if copy.keeps is not None and copy.keeps in mode.stay:
            return []
        if mode.allocating and copy.creates:
            target = self.variable(copy.target.buffer)
            if not self._is_long(copy.target, copy.source):
                return [f"{target} = {self.view(copy.source)}.copy()"]
            new = f"{target} = {self._new(copy.target.buffer)}"
            return [new, *self._copying(copy.target, copy.source)]
        do = self._adding if copy.accumulate else self._copying
        return do(copy.target, copy.source, copy.coefficient)

    def _add(self, add: Add, mode: Mode) -> list[str]:
        new = mode.allocating and add.creates
        target = self._new(add.target.buffer) if new else self.view(add.target)
        line = f"add({self.view(add.first)}, {self.view(add.second)}, {target})"
        return [f"{self.variable(add.target.buffer)} = {line}"] if new else [line]

    def _copying(self, target: View, source: View, coefficient: Scalar = 1) -> list[str]:
        if coefficient != 1:
            scale = self.name(self.dtype.type(coefficient))
            return [f"multiply({self.view(source)}, {scale}, {self.view(target)})"]
        if self._is_long(target, source):
            return [f"{self.name(self.arrays.copy_runs)}({self.view(target)}, {self.view(source)})"]
        both = target.fixed and source.fixed
        rows = _TALL if both else _TALLER
        if _varies(target) or not any(self._is_narrow(view, rows) for view in (target, source)):
            return [f"{self.target(target)} = {self.view(source)}"]
        if both:
            to, of = map(self.name, _widened(target.get(), source.get()))
            return [f"{to}[...] = {of}"]
        return [f"{self.name(_copy_narrow)}({self.view(target)}, {self.view(source)})"]

    def _adding(self, target: View, source: View, coefficient: Scalar = 1) -> list[str]:
        """Lines that add a multiple of a box to another. Narrow runs are summed in a contiguous
        array: with 2,048 rows of two columns NumPy's strided sum took 42 µs, the copies there and
        back with a contiguous sum 18 µs."""
        if coefficient != 1:
            at_once = self.arrays.multiple_added(self.dtype, coefficient)
            if at_once is not None:
                return [f"{self.name(at_once)}({self.view(target)}, {self.view(source)})"]
            scaled = fixed(self.arrays.empty(source.shape, self.dtype))
            return self._copying(scaled, source, coefficient) + self._adding(target, scaled)
        if not self._is_narrow(target, _TALL):
            return [f"y = {self.view(target)}", f"add(y, {self.view(source)}, y)"]
        total = fixed(self.arrays.empty(target.shape, self.dtype))
        return [
            *self._copying(total, target),
            *self._adding(total, source),
            *self._copying(target, total),
        ]

    def _is_long(self, target: View, source: View) -> bool:
        """True if a box is of runs, and long, which `Arrays.copy_runs` copies faster."""
        in_runs = not (target.contiguous and source.contiguous) and min(target.run, source.run) > 1
        long = target.size * self.dtype.itemsize >= self.arrays.long
        return self.arrays.copy_runs is not None and in_runs and long

    def _is_narrow(self, view: View, rows: int) -> bool:
        """True if a box has many short runs of several elements, which are copied faster as one
        item each."""
        if not self.arrays.wide_items:
            return False
        columns = view.shape[-1] if view.shape else 0
        short = 1 < columns <= _NARROW // self.dtype.itemsize
        return short and view.size >= rows * columns and not view.contiguous

    def unlike(self, array: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> str:
        """A condition: the array named so is not of this shape and dtype."""
        kind, wrong = self.name(dtype), f"{array}.shape != {self.name(shape)}"
        # NumPy has one object for each dtype of its own: `is` is faster, and not enough.
        odd = f"({array}.dtype is not {kind} and {array}.dtype != {kind})"
        return f"type({array}) is not ndarray or {wrong} or {odd}"

    def _apply(self, apply: Apply) -> list[str]:
        local, name = apply.local.on(self.arrays), self.name
        if apply.inside and local.inside is not None:
            return [f"{name(local.inside[0])}({self.view(apply.sources[0])})"]
        alone = len(apply.sources) == 1
        if len(apply.results) != 1 or not (alone or local.fresh):
            return [self._call(Call(local, [Views(apply.sources)], apply.results, unpack=True))]
        (result,) = apply.results
        views = [self.view(source) for source in apply.sources]
        named = zip(local.domain.regions, views, strict=True)
        forward = local.forward
        if alone:
            x = views[0]
        elif local.apart is not None:
            forward, x = local.apart, ", ".join(views)
        else:
            x = f"{{{', '.join(f'{r.name!r}: {view}' for r, view in named)}}}"
        y = self.variable(result)
        wrong, checked = (
            self.unlike(y, result.shape, apply.local.codomain.dtype),
            name(local.checked),
        )
        if local.fresh:
            line = f"{y} = {name(forward)}({x})"
            return [line, f"if {wrong}: ({y},) = {checked}({y})"]
        before: list[str] = []
        (source,) = apply.sources
        if source.fixed:
            x = name(read_only(source.get()))
        elif not self.arrays.asynchronous:
            before = [f"{y} = {x}.view()", f"{y}.flags.writeable = False"]
            x = y
        line = f"{y} = {name(local.forward)}({x})"
        return [*before, line, f"{y} = {checked}({y})[0] if {wrong} else {y}.copy()"]


def _kind(thing: Any) -> str:
    """The begin of an object's name, which says its kind."""
    name: str = getattr(thing, "__name__", None) or type(thing).__name__
    return f"{name}_" if name.isidentifier() else "v"  # as of lambdas, and of dtype[bfloat16]


def _varies(view: View) -> bool:
    """True if the index of a view is known in the run only."""
    return isinstance(view.index, Number)


def copied_on_host(copy: Copy, dtype: np.dtype[Any]) -> Callable[[Array, Array], None]:
    """Function of two NumPy arrays, target and source, that makes a copy; compiled separately,
    since the run's source has the device's functions."""
    emitter, shape = Emitter(NUMPY, dtype), copy.target.shape
    target, source = Buffer(shape), Buffer(shape)
    alike = Copy(whole(target), whole(source), copy.coefficient, copy.accumulate)
    parameters = [emitter.variable(target), emitter.variable(source)]
    return emitter.function(parameters, emitter.lines([alike]))


def _copy_narrow(target: Array, source: Array) -> None:
    to, of = _widened(target, source)
    to[...] = of


def _widened(target: Array, source: Array) -> tuple[Array, Array]:
    """Both views with each short contiguous run as one wide item; unchanged if rows are not
    contiguous in both."""
    runs = target.strides[-1] == source.strides[-1] == target.itemsize
    if not runs:
        return target, source
    width = target.shape[-1] * target.itemsize
    wide: np.dtype[Any] = _WIDE.get(width) or np.dtype((np.void, width))
    return target.view(wide), source.view(wide)


@lru_cache(maxsize=256)
def _compiled(text: str) -> CodeType:
    """Compiled source, cached: plans of equal structure have equal sources, with different objects
    for the names."""
    return compile(text, "<a plan of linop>", "exec")
