"""Stacks of a process that does not return to Python, printed by faulthandler's C code."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_LONGEST = 400
"""Approximate number of characters of a function's name that faulthandler prints."""


@dataclass
class Output:
    """The file to which stacks are printed."""

    descriptor: int = 2
    """File descriptor, by default stderr's. Since pytest captures that while a test runs, the
    plugin sets a duplicate made before."""


OUTPUT = Output()


@contextmanager
def last_resort(seconds: float, end: bool) -> Iterator[None]:
    """Watchdog of a block: after a timeout, print the stacks of all threads, even if a thread holds
    the interpreter. A process has one such watchdog, so pytest's own is off afterwards.

    Args:
        seconds: the timeout.
        end: end the process, too.
    """
    faulthandler.dump_traceback_later(seconds, exit=end, file=OUTPUT.descriptor)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def labelled(label: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of `call` whose function name is a label. faulthandler prints function names alone,
    so this is how its output names the example."""

    def frame(*arguments: Any) -> Any:
        return call(*arguments)

    name = label[:_LONGEST].encode("ascii", "backslashreplace").decode()
    frame.__code__ = frame.__code__.replace(co_name=name, co_qualname=name)
    return frame
