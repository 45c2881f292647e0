"""Running cases, each under a time limit."""

from __future__ import annotations

import enum
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, islice
from random import Random

from linop.errors import LinopError
from oracle.cases import Case, Drawer, WrongError


class Outcome(enum.Enum):
    """Of a case."""

    RIGHT = "right"
    REFUSED = "refused"
    WRONG = "WRONG"


def run(
    drawers: Mapping[int, Sequence[Drawer]],
    seed: str,
    seconds: float,
    only: int | None = None,
    cases: int | None = None,
) -> Iterator[tuple[int, Case, Outcome, str]]:
    """Draw and check cases, of each kind in turn, until the time is over: (index, case, outcome,
    words).

    Args:
        only: this case alone.
        cases: how many, at most.
    """
    kinds, end = sorted(drawers), time.monotonic() + seconds
    for index in islice(count(), cases) if only is None else (only,):
        if time.monotonic() > end:
            return
        random = Random(f"{seed}:{index}")
        case = random.choice(drawers[kinds[index % len(kinds)]])(random)
        yield index, case, *checked(case)


def checked(case: Case) -> tuple[Outcome, str]:
    """The outcome of a case, and what was raised. Errors that are not linop's own are wrong."""
    try:
        with warnings.catch_warnings(), _limit(case.seconds):
            warnings.simplefilter("ignore")
            case.check()
    except LinopError as error:
        return Outcome.REFUSED, f"{type(error).__name__}: {_line(error)}"
    except WrongError as error:
        return Outcome.WRONG, _line(error)
    except Exception as error:
        return Outcome.WRONG, f"raw {type(error).__name__}: {_line(error)}"
    return Outcome.RIGHT, ""


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


BUSY = 3
"""How much longer a case may take: others run beside it."""


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread after so many seconds of an idle machine; elsewhere
    there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, BUSY * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
