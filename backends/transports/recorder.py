"""The flight recorder of one worker: its last calls, and where in the user's program it is.

A call notes one number, its plan's tag; what else is said of it is known already, and is put into
words when somebody asks. The line of each call is not kept, for to find it takes longer than small
calls do: a plan keeps that of its first call, and where a worker is now, its stack says.
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

_KEPT = 32
"""Calls, and meetings of all workers, that are remembered."""
_SHOWN = 160
"""Characters of what they are about."""
_OURS = "linop", "torch", "functools", "contextlib", "threading"
"""Modules between a wait and the user's line."""


class Recorded(Protocol):
    """A plan, as it is asked about its calls."""

    def called(self) -> Called:
        """Its calls so far."""


@dataclass(frozen=True)
class Called:
    """A plan's calls.

    Args:
        plan: in words.
        number: of the last one, and when it began (`time.perf_counter`).
        runs: whether it is under way.
        messages, bytes: that this worker sends in each.
        line: where the first was made.
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
    """A meeting of all workers: what for, of what, at which line, and when it began."""

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
    """The last calls of one worker.

    Attributes:
        note: takes the tag of a plan when a call of it begins.
    """

    def __init__(self) -> None:
        self._last: deque[int | Met] = deque(maxlen=_KEPT)
        self.note: Callable[[int | Met], None] = self._last.append

    def meets(self, doing: str, about: object) -> None:
        """Note a meeting of all workers."""
        # An operator may keep a plan, whose memory is the user's to give back.
        said = (lambda: about) if isinstance(about, str) else weakref.ref(about)
        self.note(Met(doing, said, users_line(), time.perf_counter()))

    def words(self, bound: Mapping[int, Recorded]) -> str:
        """The last calls, the oldest first, and the plans that they were of, in lines.

        Args:
            bound: the plans that there are, by their tags.
        """
        last = [*self._last]
        tags = Counter(one for one in last if isinstance(one, int))
        plans = {tag: plan.called() for tag in tags if (plan := bound.get(tag)) is not None}
        lines = [*_in_order(last, plans, tags), *(called.words() for called in plans.values())]
        return "".join(f"  {line}\n" for line in lines or ["none"])


def _in_order(
    last: list[int | Met], plans: Mapping[int, Called], left: Counter[int]
) -> Iterator[str]:
    """Lines for the last calls; for those of plans, no more than numbers.

    Args:
        left: how many of each plan there are.
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


# Where a worker is

namers: list[Callable[[FrameType], str]] = []
"""Functions that give a call on the stack in the user's words, such as the layer; empty if unknown
to them."""


def users_line() -> str:
    """The line where this thread's program has called linop, or torch that does; empty if none."""
    return _line(_outside(sys._getframe(1)))


def at_place(words: str, thread: int | None = None) -> str:
    """Words about what a thread does, with its line, and the layer that it is in.

    Args:
        thread: another one than this.
    """
    place = _place(sys._getframe(1) if thread is None else sys._current_frames().get(thread))
    return f"{words} ({place})" if place else words


def _place(top: FrameType | None) -> str:
    end, frame, name = _outside(top), top, ""
    while frame is not end and not name:
        assert frame is not None
        name = next(filter(None, (namer(frame) for namer in namers)), "")
        frame = frame.f_back
    return ", ".join(filter(None, [name and f"in {name}", _line(end)]))


def _outside(frame: FrameType | None) -> FrameType | None:
    """The innermost call that is the user's."""
    while frame is not None and _is_ours(frame.f_globals):
        frame = frame.f_back
    return frame


def _line(frame: FrameType | None) -> str:
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _is_ours(names: dict[str, Any]) -> bool:
    module = str(names.get("__name__", ""))
    return not module or module.partition(".")[0] in _OURS
