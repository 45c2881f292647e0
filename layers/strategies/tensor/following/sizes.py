"""Numbers that are others on each worker, as lengths of a dimension that is cut.

A program computes with the lengths of its tensors: of one that is cut, with those of this worker's
block. Such a number carries those of all workers and that of the whole tensor, through arithmetic,
so that a function that gets it is known to.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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


class VariedFloat(Varied):
    """A fraction that differs between workers; no float, of which the C library would take the
    value unseen."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return _told(self).value  # type: ignore[no-any-return]

    def __int__(self) -> int:
        return int(_told(self).value)

    __trunc__ = __int__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch takes it for a number; a call that follows numbers refuses it before."""
        return func(*map(plain, args), **{k: plain(v) for k, v in (kwargs or {}).items()})

    def __eq__(self, other: object) -> bool:
        return bool(self.value == plain(other))

    def __lt__(self, other: Any) -> bool:
        return bool(self.value < plain(other))

    def __gt__(self, other: Any) -> bool:
        return bool(self.value > plain(other))

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


class _Live(threading.local):
    """Calls of this thread in which numbers are followed."""

    count = 0


_LIVE = _Live()


@contextmanager
def told() -> Iterator[None]:
    """Context in which a number that differs between workers does not become a plain one."""
    _LIVE.count += 1
    try:
        yield
    finally:
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
    return number.value if isinstance(number, VariedFloat) else number


def _computed(function: Callable[..., Any], *numbers: Any) -> Any:
    first = next(n for n in numbers if isinstance(n, Varied))
    if not all(isinstance(n, int | float | VariedFloat) for n in numbers):
        return NotImplemented
    each = [values_of(n, len(first.values)) for n in numbers]
    values = [function(*(plain(values[w]) for values, _ in each)) for w in range(len(first.values))]
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
