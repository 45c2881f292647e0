"""How a rank that ends with an error, or a status, takes the whole MPI job with it.

Installed when linop is imported in a job. It imports no MPI: where the program has not done so, and
started it, nobody waits for this rank.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import TracebackType
from typing import Any, NoReturn

_PASSING_ON = 0.5
"""Seconds that mpiexec has to pass on the last words of a rank: MPICH's may lose, once a rank
aborts, what it has not read by then."""


def _mpi() -> Any:
    """MPI, if it is running, with other ranks."""
    MPI = getattr(sys.modules.get("mpi4py"), "MPI", None)
    if MPI is None or not MPI.Is_initialized() or MPI.Is_finalized():
        return None
    return MPI if MPI.COMM_WORLD.size > 1 else None


def _abort(error: BaseException, trace: TracebackType | None) -> None:
    MPI = _mpi()
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
    would wait for it for ever. An exception that ends another thread than the main one does so at
    once if it came through linop, for then others may wait for that thread, and else when the rank
    ends."""

    def __init__(self) -> None:
        self.status: object = None
        self.failed: threading.ExceptHookArgs | None = None
        self._process = os.getpid()
        self._before = sys.excepthook, threading.excepthook
        sys.excepthook = self.hook
        threading.excepthook = self.thread_hook
        # No hook runs for a SystemExit, so the status is kept until MPI is about to be finalized.
        sys.exit = self.exit
        atexit.register(self.at_exit)

    @property
    def _matters(self) -> bool:
        return os.getpid() == self._process and _mpi() is not None

    def hook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if self._matters:
            _abort(error, trace)
        self.status = 1  # of a fork
        self._before[0](kind, error, trace)

    def thread_hook(self, arguments: threading.ExceptHookArgs) -> None:
        error, trace = arguments.exc_value, arguments.exc_traceback
        if error is not None and not isinstance(error, SystemExit) and self._matters:
            if _came_through_linop(trace):
                _abort(error, trace)
            self.failed = self.failed or arguments
        self._before[1](arguments)

    def exit(self, status: Any = None, /) -> NoReturn:
        self.status = status
        raise SystemExit(status)

    def at_exit(self) -> None:
        """Before MPI is finalized, which waits for the other ranks."""
        if _mpi() is None:
            return
        if self._process != os.getpid():
            # A fork: it must not finalize MPI, as mpi4py would, for the job goes on without it.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.status if isinstance(self.status, int) else int(self.status is not None))
        if self.status not in (None, 0):
            _abort(SystemExit(self.status), None)
        if self.failed is not None and self.failed.exc_value is not None:
            _abort(self.failed.exc_value, self.failed.exc_traceback)
        end_well()


at_end: list[Callable[[], None]] = []
"""The last actions of a rank that ends well."""


def end_well() -> None:
    """Say that this rank ends, and do what is to be done then; once, before MPI is finalized."""
    MPI = _mpi()
    if MPI is None or _ended:
        return
    _ended.append(True)
    with _told(MPI):  # where names cannot be published, others wait to the limit
        MPI.Publish_name(_name(MPI.COMM_WORLD.rank), "ended")
    for end in at_end:
        end()


def has_ended(rank: int) -> bool:
    """True if a rank of COMM_WORLD has said that it ends: by a name that it has published, not by a
    message, for MPICH fails where one is never received, and who did not import linop receives
    none."""
    MPI = _mpi()
    with _told(MPI):
        return bool(MPI.Lookup_name(_name(rank)) == "ended")
    return False


@contextmanager
def _told(MPI: Any) -> Iterator[None]:
    """Inside, an error of MPI ends the block, and not the job, as users may have wanted of errors:
    a name that is not there is one."""
    comms = MPI.COMM_WORLD, MPI.COMM_SELF
    before = [comm.Get_errhandler() for comm in comms]
    for comm in comms:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
    try:
        with suppress(MPI.Exception):
            yield
    finally:
        for comm, handler in zip(comms, before, strict=True):
            comm.Set_errhandler(handler)
            handler.Free()


_ended: list[bool] = []


def _name(rank: int) -> str:
    return f"linop/{os.environ.get('PMIX_NAMESPACE', '')}/{rank}"


@cache
def install() -> EndsJob:
    """Install the hooks, once."""
    return EndsJob()


def _came_through_linop(trace: TracebackType | None) -> bool:
    frames = (frame for frame, _ in traceback.walk_tb(trace))
    return any(str(f.f_globals.get("__name__", "")).startswith("linop.") for f in frames)
