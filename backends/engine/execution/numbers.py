"""Integers that are known when a run reaches them, as expressions; and comparisons of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


class Number:
    """An integer expression of a run."""

    def __add__(self, other: Number | int) -> Number:
        return Arithmetic(self, "+", other) if other != 0 else self

    def __mul__(self, other: Number | int) -> Number:
        return Arithmetic(self, "*", other)

    def __mod__(self, other: Number | int) -> Number:
        return Arithmetic(self, "%", other)


@dataclass(frozen=True)
class Variable(Number):
    """A local variable of the run."""

    name: str


@dataclass(frozen=True, eq=False)
class Item(Number):
    """An item of a sequence: of a signal's memory, or of a list."""

    memory: Any
    index: Number | int


@dataclass(frozen=True, eq=False)
class Field(Number):
    """An attribute of an object."""

    of: object
    name: str


@dataclass(frozen=True, eq=False)
class Returned(Number):
    """The value that a function returns, called without arguments."""

    function: Callable[[], int]


@dataclass(frozen=True, eq=False)
class Arithmetic(Number):
    left: Number
    sign: str
    right: Number | int


@dataclass(frozen=True, eq=False)
class Condition:
    """A comparison."""

    left: Number
    sign: str
    right: Number | int


@dataclass(frozen=True, eq=False)
class Joined:
    """Conditions, or numbers that are not 0, joined by ``and`` or ``or``."""

    word: str
    conditions: Sequence[Condition | Number]
