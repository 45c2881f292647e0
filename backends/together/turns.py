"""Exclusive use of what a process has once, by workers that are threads of it.

A worker may need such a thing while a user's function runs, as torch's generator with a seed of its
own. If that function waits for another worker, which needs it too, neither would go on: so a wait
for workers of the same process gives it up, and takes it again afterwards (`given_up`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self


class Turn(ABC):
    """Exclusive use: context of this thread's, the latest of its turns."""

    __slots__ = ("_outer",)

    @abstractmethod
    def give_up(self) -> None:
        """Leave it to others, as it was before this turn."""

    @abstractmethod
    def take_again(self) -> None:
        """Wait for it, and go on where this turn was, if it has begun. Others give it up when they
        wait."""

    def __enter__(self) -> Self:
        self.take_again()
        self._outer = _HERE.turns
        _HERE.turns = *self._outer, self
        return self

    def __exit__(self, *error: object) -> None:
        _HERE.turns = self._outer
        self.give_up()


class _Here(threading.local):
    turns: tuple[Turn, ...] = ()


_HERE = _Here()


def has_turns() -> bool:
    """True if this thread has something to give up."""
    return bool(_HERE.turns)


@contextmanager
def given_up() -> Iterator[None]:
    """Context of a wait for other workers of this process: this thread has no turn."""
    turns, _HERE.turns = _HERE.turns, ()
    for turn in reversed(turns):
        turn.give_up()
    try:
        yield
    finally:
        for turn in turns:
            turn.take_again()
        _HERE.turns = turns
