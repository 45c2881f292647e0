"""Numbers that are others on each worker, as lengths of a dimension that is cut.

A program computes with the lengths of its tensors: of one that is cut, with those of this worker's
block. Such a number carries those of all workers and that of the whole tensor, through arithmetic,
so that a function that gets it is known to. What Python's own C functions make of one is not seen:
`range`, `math.gcd`, slices of lists, arrays of NumPy take this worker's.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from linop.errors import PartitionError


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

    def __int__(self) -> int:
        return int.__int__(_told(self))

    def __float__(self) -> float:
        return int.__float__(_told(self))

    def __str__(self) -> str:
        return int.__repr__(_told(self))

    def __format__(self, form: str) -> str:
        return int.__format__(_told(self), form)

    __repr__ = __str__  # also of tuples and lists that it is in

    numerator = real = property(lambda self: self)


class VariedFloat(Varied):
    """A fraction that differs between workers; no float, of which the C library would take the
    value unseen."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return _told(self).value  # type: ignore[no-any-return]

    def __int__(self) -> int:
        return int(_told(self).value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch takes it for a number; a call that follows numbers refuses it before."""
        return func(*map(plain, args), **{k: plain(v) for k, v in (kwargs or {}).items()})

    def __repr__(self) -> str:
        return repr(_told(self).value)


class Shape(tuple[Any, ...]):
    """Lengths of which some differ between workers: a torch.Size, of which none can be derived."""

    @property  # type: ignore[misc]  # which is said to be writeable
    def __class__(self) -> Any:
        return torch.Size

    def numel(self) -> Any:
        return prod(self)

    def __getitem__(self, which: Any) -> Any:
        found = tuple.__getitem__(self, which)
        return Shape(found) if isinstance(which, slice) else found

    def __add__(self, other: Any) -> Any:
        return Shape((*self, *other)) if isinstance(other, tuple) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return Shape((*other, *self)) if isinstance(other, tuple) else NotImplemented

    def __mul__(self, times: Any) -> Any:
        return Shape(tuple.__mul__(self, times))

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"torch.Size({[*self]})"

    def __reduce__(self) -> Any:
        return torch.Size, (tuple(map(plain, self)),)


class _Live(threading.local):
    """Calls of this thread in which numbers are followed."""

    count = 0


_LIVE = _Live()


class Told:
    """Context in which a number that differs between workers does not become a plain one. Not a
    generator: one that an interrupt leaves behind would be closed in any thread."""

    def __enter__(self) -> None:
        _LIVE.count += 1

    def __exit__(self, *_: object) -> None:
        _LIVE.count -= 1


def _told(number: Any) -> Any:
    if _LIVE.count:
        raise Refused(
            f"a number becomes a plain one that is {plain(number)!r} on this worker, and "
            f"{number.whole!r} in the sequential program: it comes from the length of a dimension "
            f"that is split. Give the module that makes the tensor output_layouts=linop.REPLICATED"
        )
    return number


class Refused(PartitionError):
    """A function that is not computed block by block, without the place in the program."""


def varied(values: Sequence[Any], whole: Any, index: int) -> Any:
    """This worker's number; a plain one where all workers have that of the sequential program."""
    if type(whole) is bool or all(value == whole for value in values):
        return values[index]
    return length(values, whole, index)


def length(values: Sequence[Any], whole: Any, index: int) -> Any:
    """This worker's number, also where all workers have the same."""
    mine = values[index]
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
    if isinstance(number, VariedFloat):
        return number.value
    return torch.Size(map(plain, number)) if type(number) is Shape else number


def _each(function: Callable[..., Any], *numbers: Any) -> tuple[list[Any], Any, int] | None:
    """The results of all workers, of the sequential program, and the index of this worker; None of
    what are no numbers."""
    if not all(isinstance(n, int | float | VariedFloat) for n in numbers):
        return None
    first = next(n for n in numbers if isinstance(n, Varied))
    each = [values_of(n, len(first.values)) for n in numbers]
    values = [function(*(plain(values[w]) for values, _ in each)) for w in range(len(first.values))]
    return values, function(*(plain(whole) for _, whole in each)), first.index


def _computed(function: Callable[..., Any], *numbers: Any) -> Any:
    found = _each(function, *numbers)
    return NotImplemented if found is None else varied(*found)


def _answer(function: Callable[..., Any], *numbers: Any) -> Any:
    """A truth, or whatever a number cannot carry further."""
    found = _each(function, *numbers)
    if found is None:
        return NotImplemented
    values, whole, index = found
    if _LIVE.count and any(value != whole for value in values):
        first = next(n for n in numbers if isinstance(n, Varied))
        raise Refused(
            f"a number is {plain(first)!r} on this worker, and {first.whole!r} in the sequential "
            f"program, where {getattr(function, '__name__', function)} gives {whole!r} and not "
            f"{values[index]!r}: it comes from the length of a dimension that is split. Give the "
            f"module that makes the tensor output_layouts=linop.REPLICATED"
        )
    return values[index]


def _forward(function: Callable[..., Any], computed: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *numbers: computed(function, *numbers)


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    def reflected(one: Any, other: Any) -> Any:
        if isinstance(other, str | bytes | list | tuple):
            _told(one)  # so many times
        return _computed(function, other, one)

    return reflected


def _define(names: str, function_of: Callable[[str], Any], computed: Callable[..., Any]) -> None:
    for name in names.split():
        function = function_of(name)
        for kind in (VariedInt, VariedFloat):
            if kind is VariedFloat or hasattr(int, f"__{name}__"):
                setattr(kind, f"__{name}__", _forward(function, computed))
            if hasattr(int, f"__r{name}__"):
                setattr(kind, f"__r{name}__", _reflected(function))


def _of_operator(name: str) -> Any:
    return getattr(operator, f"__{name}__")


_define("add sub mul floordiv truediv mod pow", _of_operator, _computed)
_define("lshift rshift and or xor neg pos abs invert", _of_operator, _computed)
_define("floor ceil trunc", lambda name: getattr(math, name), _computed)
_define("round", lambda name: round, _computed)
_define("eq ne lt le gt ge", _of_operator, _answer)
_define("bool", lambda name: bool, _answer)
_define("hash", lambda name: hash, _answer)
for _kind in (VariedInt, VariedFloat):
    setattr(_kind, "__divmod__", lambda one, other: (one // other, one % other))  # noqa: B010
    setattr(_kind, "__rdivmod__", lambda one, other: (other // one, other % one))  # noqa: B010
for _name, _kept in {"bit_length": _computed, "bit_count": _computed, "to_bytes": _answer}.items():
    setattr(VariedInt, _name, _forward(getattr(int, _name), _kept))
