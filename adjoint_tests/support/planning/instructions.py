"""The instructions of a bound plan, executed one operation at a time: the oracle of the emitter.

It shares no code with it. Functions that a transport supplies are called, as is a local map; all
else is done here by NumPy, as the docstrings of `linop.backends.engine.execution.instructions` say.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

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
from linop.backends.engine.execution.program import Program
from linop.backends.engine.execution.views import Buffer, View

GARBAGE = 0x5A
"""Bytes of memory that nobody has written."""
SIGNS: dict[str, Callable[[int, int], Any]] = {
    "+": operator.add,
    "*": operator.mul,
    "%": operator.mod,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
}


def interpreted(program: Program, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of one worker's call, in the order of the plan's regions."""
    layout = program._layout
    run = _Run(layout.dtype, dict(zip(layout.inputs, arguments, strict=True)))
    if layout.open and not layout.small:
        run.each(program.messages.lending())
    for instruction in program.instructions:
        run.each(instruction.operations)
    return [run.array(buffer).copy() for buffer in layout.results]


class _Run:
    """The arrays and variables of a call, so far."""

    def __init__(self, dtype: np.dtype[Any], arrays: dict[Buffer, np.ndarray]) -> None:
        self.dtype, self.arrays = dtype, arrays
        self.variables: dict[str, Any] = {}

    # Values

    def array(self, buffer: Buffer) -> np.ndarray:
        if buffer.array is not None:
            return buffer.array
        if buffer.within is not None:
            return self.view(buffer.within)
        if buffer.choice is not None:
            arrays, number = buffer.choice
            return arrays[self.number(number)]
        if buffer.piece_of is not None:
            flat, begin = buffer.piece_of
            size = int(np.prod(buffer.shape, dtype=np.int64))
            return self.array(flat).ravel()[begin : begin + size].reshape(buffer.shape)
        if buffer not in self.arrays:
            new = self.arrays[buffer] = np.empty(buffer.shape, self.dtype)
            new.reshape(-1).view(np.uint8)[:] = GARBAGE
        return self.arrays[buffer]

    def view(self, view: View) -> np.ndarray:
        array = self.array(view.buffer)
        if view.index is None:
            return array
        return array[self.number(view.index) if isinstance(view.index, Number) else view.index]

    def number(self, number: Any) -> Any:
        match number:
            case Variable(name=name):
                return self.variables[name]
            case Item(memory=memory, index=index):
                return memory[self.number(index)]
            case Field(of=of, name=name):
                return getattr(of, name)
            case Returned(function=function):
                return function()
            case Arithmetic(left=left, sign=sign, right=right):
                return SIGNS[sign](self.number(left), self.number(right))
        return number

    def holds(self, condition: Any) -> bool:
        match condition:
            case Joined(word=word, conditions=conditions):
                return (all if word == "and" else any)(map(self.holds, conditions))
            case Condition(left=left, sign=sign, right=right):
                return bool(SIGNS[sign](self.number(left), self.number(right)))
        return bool(self.number(condition))

    def argument(self, argument: Any) -> Any:
        match argument:
            case View():
                return self.view(argument)
            case Views():
                return [self.view(view) for view in argument]
            case Later(function=function, arguments=arguments):
                return lambda: function(*map(self.number, arguments))
        return self.number(argument)

    def give(self, target: Any, value: Any) -> None:
        match target:
            case Buffer():
                self.arrays[target] = value
            case Variable(name=name):
                self.variables[name] = value
            case Item(memory=memory, index=index):
                memory[self.number(index)] = value
            case Field(of=of, name=name):
                setattr(of, name, value)
            case _:
                raise AssertionError(f"nothing can be set to {target!r}")

    # Operations

    def each(self, operations: Sequence[Operation]) -> None:
        for one in operations:
            self.do(one)

    def do(self, operation: Operation) -> None:
        match operation:
            case Clear(buffer=buffer, zeroed=zeroed):
                if zeroed:
                    self.array(buffer)[...] = 0
            case Copy():
                self.copy(operation)
            case Add(target=target, first=first, second=second):
                self.view(target)[...] = self.view(first) + self.view(second)
            case Apply(local=local, sources=sources, results=results):
                made = local([self.view(source) for source in sources])
                for result, array in zip(results, made, strict=True):
                    if operation.inside:
                        self.array(result)[...] = array
                    else:
                        self.give(result, np.array(array))
            case Call():
                self.call(operation)
            case Interaction(by=by):
                self.each(by)
            case Contiguous(result=result, source=source):
                self.give(result, np.array(self.view(source), order="C"))
            case Set(targets=targets, value=value):
                known = self.number(value)
                for target in targets:
                    self.give(target, known)
            case If(condition=condition, then=then, otherwise=otherwise):
                self.each(then if self.holds(condition) else otherwise)
            case For(variables=variables, values=values, body=body):
                for each in values:
                    for variable, value in zip(variables, each, strict=True):
                        self.give(variable, value)
                    self.each(body)
            case Spin(times=times, condition=condition, otherwise=otherwise):
                if not any(self.holds(condition) for _ in range(times)):
                    self.call(otherwise)
            case _:
                raise AssertionError(f"no operation of NumPy: {operation!r}")

    def copy(self, copy: Copy) -> None:
        target, source = self.view(copy.target), self.view(copy.source)
        value = source if copy.coefficient == 1 else source * self.dtype.type(copy.coefficient)
        target[...] = target + value if copy.accumulate else value

    def call(self, call: Call) -> None:
        value = call.function(*map(self.argument, call.arguments))
        if call.unpack:
            for result, one in zip(call.results, value, strict=True):
                self.give(result, one)
            return
        for result in call.results:
            self.give(result, value)
