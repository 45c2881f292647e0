"""Flight recorder of one worker: its last calls, and the user's source line that a thread is in.

A call records its plan's tag only; texts are composed when a report is written. The source line of
each call is not recorded, since finding it takes longer than a small call: a plan keeps that of its
first call, and the current line is read from the stack.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from types import FrameType
from typing import Any, Protocol

from linop.backends.together.counted_threads import frames

_KEPT = 32
"""Number of calls and collective operations that are remembered."""
_SHOWN = 160
"""Longest text of an operation's subject, in characters."""
_OURS = "linop", "torch", "functools", "contextlib", "threading"
"""Packages whose frames are skipped in the search for the user's line."""


class Recorded(Protocol):
    """Interface of plans that the recorder uses."""

    def called(self) -> Called:
        """Summary of the plan's calls so far."""


@dataclass(frozen=True)
class Called:
    """Summary of a plan's calls.

    Args:
        plan: name of the plan.
        number: number of the last call; `begun` is its start, by ``time.perf_counter``.
        runs: True if it is still running.
        messages, bytes: sent by this worker in each call.
        line: source line of the first call.
    """

    plan: str
    number: int
    begun: float
    runs: bool
    messages: int
    bytes: int
    line: str

    def words(self) -> str:
        line = f"first called at {self.line}, " if self.line else ""
        last = f"call {self.number} {'is under way, ' if self.runs else ''}begun {_ago(self.begun)}"
        return f"{self.plan}: sends {self.messages} messages, {self.bytes:,} bytes; {line}{last}"


@dataclass(frozen=True)
class Met:
    """A collective operation of all workers: its name, its subject, the user's source line, and its
    start."""

    doing: str
    about: Callable[[], object]
    line: str
    begun: float

    def __str__(self) -> str:
        about = self.about()
        of = "" if about is None else f" {about}"[:_SHOWN].rstrip()
        line = f" at {self.line}" if self.line else ""
        return f"{self.doing}{of}{line}, begun {_ago(self.begun)}"


class Recorder:
    """Last calls of one worker.

    Attributes:
        note: records the tag of a plan at the start of a call.
    """

    def __init__(self) -> None:
        self._last: deque[int | Met] = deque(maxlen=_KEPT)
        self.note: Callable[[int | Met], None] = self._last.append

    def meets(self, doing: str, about: object) -> None:
        """Record a collective operation of all workers."""
        # Weakly: an operator may keep a plan, whose memory the user may release.
        said = (lambda: about) if isinstance(about, str) else weakref.ref(about)
        self.note(Met(doing, said, users_line(), time.perf_counter()))

    def withdraw(self, tag: int) -> None:
        """Remove the last record if it is of this plan: a first call is recorded while its workers
        meet, and again when it runs."""
        if self._last and self._last[-1] == tag:
            self._last.pop()

    def words(self, bound: Mapping[int, Recorded]) -> str:
        """Report in lines: the last calls, oldest first, and summaries of their plans.

        Args:
            bound: existing plans by tag.
        """
        last = [*self._last]
        tags = Counter(one for one in last if isinstance(one, int))
        plans = {tag: plan.called() for tag in tags if (plan := bound.get(tag)) is not None}
        lines = [*_in_order(last, plans, tags), *(called.words() for called in plans.values())]
        return "".join(f"  {line}\n" for line in lines or ["none"])


def _in_order(
    last: list[int | Met], plans: Mapping[int, Called], left: Counter[int]
) -> Iterator[str]:
    """Lines for the last calls; consecutive calls of plans are given by numbers.

    Args:
        left: number of recorded calls of each plan; decreased as they are listed.
    """
    for kind, ones in groupby(last, type):
        if kind is Met:
            yield from map(str, ones)
            continue
        calls = []
        for tag, same in groupby(ones):
            assert isinstance(tag, int)
            name = f"plan {tag // 2}{' (adjoint)' if tag % 2 else ''}"
            count = len([*same])
            left[tag] -= count
            if tag in plans:
                end = plans[tag].number - left[tag]
                name = f"{end} of {name}"
                calls.append(f"calls {end - count + 1} to {name}" if count > 1 else f"call {name}")
            else:
                calls.append(f"{count} of {name}, which is gone")
        yield ", ".join(calls)


def _ago(begun: float) -> str:
    return f"{time.perf_counter() - begun:.3g} s ago"


# The user's source line

namers: list[Callable[[FrameType], str]] = []
"""Functions that describe a stack frame in the user's terms, such as the layer; empty if
unknown."""


def users_line() -> str:
    """Source line at which the user's program called linop (or torch, which called linop) in this
    thread; empty if there is none."""
    return _line(_outside(sys._getframe(1)))


def at_place(words: str, thread: int | None = None) -> str:
    """A text about a thread's activity, extended by its source line and its layer.

    Args:
        thread: identifier of another thread than the current one.
    """
    place = _place(sys._getframe(1) if thread is None else frames().get(thread))
    return f"{words} ({place})" if place else words


def _place(top: FrameType | None) -> str:
    end, frame, name = _outside(top), top, ""
    while frame is not end and not name:
        assert frame is not None
        name = next(filter(None, (namer(frame) for namer in namers)), "")
        frame = frame.f_back
    return ", ".join(filter(None, [name and f"in {name}", _line(end)]))


def _outside(frame: FrameType | None) -> FrameType | None:
    """Innermost frame of the user's own code."""
    while frame is not None and _is_ours(frame.f_globals):
        frame = frame.f_back
    return frame


def _line(frame: FrameType | None) -> str:
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _is_ours(names: dict[str, Any]) -> bool:
    module = str(names.get("__name__", ""))
    return not module or module.partition(".")[0] in _OURS
