"""How a rank that ends with an error, or a status, takes the whole MPI job with it."""

from __future__ import annotations

import atexit
import sys
import time
import traceback
from types import TracebackType
from typing import Any, NoReturn

from mpi4py import MPI

_PASSING_ON = 0.5
"""Seconds that mpiexec has to pass on the last words of a rank: MPICH's may lose, once a rank
aborts, what it has not read by then."""


def _abort(error: BaseException, trace: TracebackType | None) -> None:
    sys.stdout.flush()
    lines = traceback.format_exception(type(error), error, trace)
    # One write, which the lines of other ranks cannot interrupt.
    sys.stderr.write(f"linop: worker {MPI.COMM_WORLD.rank} ends the job:\n{''.join(lines)}")
    sys.stderr.flush()
    time.sleep(_PASSING_ON)
    code = error.code if isinstance(error, SystemExit) else 1
    MPI.COMM_WORLD.Abort(code if isinstance(code, int) else 1)


class EndsJob:
    """Makes a rank that ends with an exception or a status take the whole job with it: the others
    would wait for it for ever."""

    def __init__(self) -> None:
        self.status: object = None
        sys.excepthook = self.hook
        # No hook runs for a SystemExit, so the status is kept until MPI is about to be finalized.
        sys.exit = self.exit
        atexit.register(self.at_exit)

    def hook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        del kind
        _abort(error, trace)

    def exit(self, status: Any = None, /) -> NoReturn:
        self.status = status
        raise SystemExit(status)

    def at_exit(self) -> None:
        if self.status not in (None, 0) and not MPI.Is_finalized():
            _abort(SystemExit(self.status), None)
