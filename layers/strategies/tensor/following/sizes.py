"""Numbers that are others on each worker, as lengths of a dimension that is cut.

A program computes with the lengths of its tensors: of one that is cut, with those of this worker's
block. Such a number carries those of all workers and that of the whole tensor, through arithmetic,
so that a function that gets it is known to.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any


class Varied:
    """A number of this worker, beside those of all.

    Attributes:
        values: of each worker.
        whole: of the sequential program.
        index: of this worker.
    """

    values: tuple[Any, ...]
    whole: Any
    index: int


class VariedInt(int, Varied):
    """A whole number that differs between workers."""


class VariedFloat(float, Varied):
    """A fraction that differs between workers."""


def varied(values: Sequence[Any], whole: Any, index: int) -> Any:
    """This worker's number; a plain one where all workers have that of the sequential program."""
    mine = values[index]
    if type(whole) is bool or all(value == whole for value in values):
        return mine
    made: Any = (VariedFloat if isinstance(mine, float) else VariedInt)(mine)
    made.values, made.whole, made.index = tuple(values), whole, index
    return made


def values_of(number: Any, workers: int) -> tuple[tuple[Any, ...], Any]:
    """The numbers of all workers, and that of the sequential program."""
    if isinstance(number, Varied):
        return number.values, number.whole
    return (number,) * workers, number


def plain(number: Any) -> Any:
    """The number without those of others."""
    if isinstance(number, VariedInt):
        return int.__int__(number)
    return float.__float__(number) if isinstance(number, VariedFloat) else number


def _computed(function: Callable[..., Any], *numbers: Any) -> Any:
    first = next(n for n in numbers if isinstance(n, Varied))
    if not all(isinstance(n, int | float) for n in numbers):
        return NotImplemented
    each = [values_of(n, len(first.values)) for n in numbers]
    values = [
        function(*(plain(values[w]) for values, _ in each)) for w in range(len(first.values))
    ]
    return varied(values, function(*(plain(whole) for _, whole in each)), first.index)


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *numbers: _computed(function, *numbers)


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda one, other: _computed(function, other, one)


for _name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow"):
    _function = getattr(operator, _name)
    for _kind in (VariedInt, VariedFloat):
        setattr(_kind, f"__{_name}__", _forward(_function))
        setattr(_kind, f"__r{_name}__", _reflected(_function))
for _name in ("neg", "pos", "abs"):
    for _kind in (VariedInt, VariedFloat):
        setattr(_kind, f"__{_name}__", _forward(getattr(operator, _name)))
