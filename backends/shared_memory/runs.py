"""The runs of a plan over shared memory, as its workers count them and tell each other.

A worker that has released a plan, or lost it to the garbage collector, has told its peers from
which run on they are without it, before its memory goes to another plan. That shows for nothing but
a comparison in the call that goes well; so do calls that a worker left out
(`linop.backends.transports.call_numbers`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from linop.backends.transports.call_numbers import TURNS, check_step
from linop.backends.transports.transport import Who
from linop.errors import BackendError

Until = Callable[[Callable[[], bool], Who], None]
"""Waits until something is so; raises where it takes too long."""
_ALARM = 5.0
"""Seconds in which the alarm of a worker that failed comes."""


class Word(NamedTuple):
    """The way to tell a peer of one's end: two numbers in its shared memory. The first is of all
    its peers, the second holds the first run that this one is not part of: negative, where it
    failed."""

    segment: int
    any: int
    own: int


class Runs:
    """How many runs of a plan there were, which array the last had for its result, and where its
    peers hear that there will be no more. It refers to no plan, and so lives a little longer."""

    def __init__(self) -> None:
        self.number = 0
        self.slot = 0
        self._process = os.getpid()
        self._words: list[tuple[memoryview, Word, Callable[[], int]]] = []

    def tell(self, words: Sequence[tuple[memoryview, Word, Callable[[], int]]]) -> None:
        """Places where peers hear that this worker is gone, and what each has said of itself."""
        self._words = list(words)

    def leave(self, failed: bool = False) -> None:
        """Tell the peers, once, that there will be no more runs: those that have not left before.
        The memory of one that has may be another plan's since the workers last compiled, and by
        then its own words are here."""
        words, self._words = self._words, []
        if self._process != os.getpid():
            return  # a fork has the same shared memory, and no part in it
        for numbers, word, said in words:
            if not said():
                numbers[word.own] = -(self.number + 1) if failed else self.number + 1
                numbers[word.any] = 1


class Peers:
    """State of a plan's peers, as they say it.

    Args:
        words: where each one's is in `flags`; `gone` is that of all.
        about: says whose plan this is.
    """

    def __init__(
        self,
        runs: Runs,
        flags: memoryview,
        gone: int,
        words: Mapping[int, int],
        until: Until,
        about: Callable[[], str],
    ) -> None:
        self.words = words
        self._runs = runs
        self._flags, self._gone = flags, gone
        self._until, self._about = until, about

    def begin(self) -> None:
        """Raise where a peer is gone that this run needs.

        Raises:
            BackendError: it released the plan. LinopError: it failed, and this is its alarm.
        """
        self._check()
        number = self._runs.number
        failed = [p for p, k in self.words.items() if 0 < -self._flags[k] <= number]
        if failed:
            late = time.monotonic() + _ALARM
            self._until(lambda: time.monotonic() > late, lambda: f"worker {failed[0]}'s alarm")
            raise BackendError(f"worker {failed[0]} gave up {self._about()}; compile it again")

    def _check(self) -> None:
        number = self._runs.number
        for peer, k in self.words.items():
            if 0 < self._flags[k] <= number:
                raise BackendError(
                    f"call {number} of {self._about()}: worker {peer} released its plan after "
                    f"{self._flags[k] - 1} calls, or no longer refers to it; keep the plan on all "
                    f"workers while one calls it, or compile it again"
                )

    def gone(self) -> bool:
        """False, while there is hope for what this run waits for; see `begin`."""
        if self._flags[self._gone]:
            self._check()
        return False

    def come(self, peer: int, at: int, said: int) -> bool:
        """True if a peer's message has come: a number that should be `said` tells.

        Raises:
            BackendError: it is that of another call; or it will never come.
        """
        heard = self._flags[at]
        if (heard ^ said) % TURNS:
            return self.gone()
        check_step(peer, heard, said, self._about)
        return True
