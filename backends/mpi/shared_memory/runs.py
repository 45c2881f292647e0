"""Run numbers of a plan over shared memory, and the protocol of its release.

A worker that releases a plan, or whose plan is garbage-collected, writes to its peers the first run
without it, before its memory is reused. A successful call pays one comparison for that; the same
holds for detection of missing calls (`linop.backends.engine.roads.call_numbers`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from linop.backends.engine.roads.call_numbers import TURNS, check_step
from linop.backends.together.transport import Who
from linop.errors import BackendError

WaitUntil = Callable[[Callable[[], bool], Who], None]
"""``until(done, who)``: wait until `done`; raises after the wait limit."""
_ALARM = 5.0
"""Longest wait, in seconds, for the alarm of a failed worker."""


class Word(NamedTuple):
    """Location of a worker's release signals in a peer's shared memory, as indices in a window.
    `any`: a flag shared by all of the peer's peers. `own`: the first run that the worker takes no
    part in; negative if it failed."""

    segment: int
    any: int
    own: int


class Runs:
    """Run counter of a plan, and the peers to notify of its release. It has no reference to the
    plan, so that it outlives the plan's finalizer."""

    def __init__(self) -> None:
        self.number = 0
        self._process = os.getpid()
        self._words: list[tuple[memoryview, Word, Callable[[], int]]] = []

    def tell(self, words: Sequence[tuple[memoryview, Word, Callable[[], int]]]) -> None:
        """Set the release signals in the peers' memory, each with a function that reads the peer's
        own signal."""
        self._words = list(words)

    def leave(self, failed: bool = False) -> None:
        """Notify the peers, once, of the release: those that have not left before. The memory of
        one that has may be reused since the last collective compile, and by then its signal has
        arrived here."""
        words, self._words = self._words, []
        if self._process != os.getpid():
            return  # a fork maps the same shared memory, but is not a worker
        for numbers, word, said in words:
            if not said():
                numbers[word.own] = -(self.number + 1) if failed else self.number + 1
                numbers[word.any] = 1


class Peers:
    """Release state of a plan's peers, as read from their signals.

    Args:
        words: index in `flags` of each peer's signal; `gone` is that of the shared flag.
        about: gives the plan's name.
    """

    def __init__(
        self,
        runs: Runs,
        flags: memoryview,
        gone: int,
        words: Mapping[int, int],
        until: WaitUntil,
        about: Callable[[], str],
    ) -> None:
        self.words = words
        self._runs = runs
        self._flags, self._gone = flags, gone
        self._until, self._about = until, about

    def begin(self) -> None:
        """Check that all peers take part in this run.

        Raises:
            BackendError: a peer released the plan. LinopError: a peer failed, and this is its
                alarm.
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
        """Always False; raises BackendError if a peer has released the plan. Added to wait
        conditions."""
        if self._flags[self._gone]:
            self._check()
        return False

    def come(self, peer: int, at: int, said: int) -> bool:
        """True if a peer's message has arrived: its signal equals `said`, modulo `TURNS`.

        Raises:
            BackendError: it belongs to another call; or it will never arrive.
        """
        heard = self._flags[at]
        if (heard ^ said) % TURNS:
            return self.gone()
        check_step(peer, heard, said, self._about)
        return True
