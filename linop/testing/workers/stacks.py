"""Stacks of a process that does not come back to Python: what C code can print by itself."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_LONGEST = 400
"""Characters of a name that faulthandler prints, about."""


@dataclass
class Output:
    """Where stacks are printed."""

    descriptor: int = 2
    """That of stderr. pytest captures it while a test runs, so its plugin keeps another one."""


OUTPUT = Output()


@contextmanager
def last_resort(seconds: float, end: bool) -> Iterator[None]:
    """If this block takes longer, the stacks of all threads are printed, whatever they do; and the
    process is ended, if wanted. A process has one such alarm: pytest's own is off afterwards."""
    faulthandler.dump_traceback_later(seconds, exit=end, file=OUTPUT.descriptor)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def labelled(label: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, with a label in its stack: faulthandler prints the names of functions, and nothing
    else could say then which example it was."""

    def frame(*arguments: Any) -> Any:
        return call(*arguments)

    name = label[:_LONGEST].encode("ascii", "backslashreplace").decode()
    frame.__code__ = frame.__code__.replace(co_name=name, co_qualname=name)
    return frame
