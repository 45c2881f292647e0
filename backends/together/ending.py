"""Hooks for the end of a rank: after an error or a nonzero status it aborts the whole MPI job;
otherwise it announces its end to the other ranks.

When linop is imported in a job, the end of the process is watched, and nothing is replaced; the
hooks come with the first backend. A rank that fails before that, by an exception and after its
program has started MPI, ends the job all the same, when it ends. This module does not import MPI: a
rank that ends before its program has started MPI is left to mpiexec; the others wait no longer than
a limit for it to start (`linop.backends.mpi.starting`).
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.machinery import ModuleSpec
from types import TracebackType
from typing import Any, NoReturn

from linop.errors import LinopError, has_interrupted

_PASSING_ON = 0.5
"""Seconds for mpiexec to forward the last output of a rank: MPICH's may lose unread output when a
rank aborts."""


def _mpi() -> Any:
    """The MPI module, if MPI is running with more than one rank; else None."""
    MPI = getattr(sys.modules.get("mpi4py"), "MPI", None)
    if MPI is None or not MPI.Is_initialized() or MPI.Is_finalized():
        return None
    return MPI if MPI.COMM_WORLD.size > 1 else None


def _abort(why: str, status: int = 1) -> None:
    MPI = _mpi()
    with suppress(Exception):  # a pipe whose reader has gone, say
        sys.stdout.flush()
    # One write, which the lines of other ranks cannot interrupt.
    sys.stderr.write(f"linop: worker {MPI.COMM_WORLD.rank} ends the job:{why}")
    sys.stderr.flush()
    time.sleep(_PASSING_ON)
    MPI.COMM_WORLD.Abort(status)


def _abort_for(error: BaseException, trace: TracebackType | None) -> None:
    _abort("\n" + "".join(traceback.format_exception(type(error), error, trace)))


class EndsJob:
    """Hooks that abort the whole job when a rank ends with an exception or a nonzero status, since
    other ranks would wait for it forever. An exception that ends another thread than the main one
    aborts at once if it interrupted communication, since others may then wait for that thread;
    otherwise when the rank ends."""

    def __init__(self) -> None:
        self.status = 0
        self.failed: threading.ExceptHookArgs | None = None
        self._process = os.getpid()
        self._program = getattr(sys.modules["__main__"], "__file__", None)
        self._before = sys.excepthook, threading.excepthook
        self._hooked = False
        atexit.register(self.at_exit)
        _watch_mpi()
        # A fork has to end with a status that only hooks tell.
        os.register_at_fork(after_in_child=self.take_hooks)

    def take_hooks(self) -> None:
        """Put the hooks in the places of Python's, once."""
        if self._hooked:
            return
        self._hooked = True
        self._before = sys.excepthook, threading.excepthook
        sys.excepthook = self.hook
        threading.excepthook = self.thread_hook
        _watch_exits(self.exits)

    @property
    def _matters(self) -> bool:
        return os.getpid() == self._process and _mpi() is not None

    def hook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if self._matters:
            _abort_for(error, trace)
        self.status = 1  # used by `at_exit` in a fork
        self._before[0](kind, error, trace)

    def thread_hook(self, arguments: threading.ExceptHookArgs) -> None:
        error, trace = arguments.exc_value, arguments.exc_traceback
        if error is not None and not isinstance(error, SystemExit):
            if has_interrupted(error) and self._matters:
                _abort_for(error, trace)
            self.failed = self.failed or arguments  # MPI may be started later
        self._before[1](arguments)

    def exits(self, code: object) -> None:
        """Record the exit status of the process, for `at_exit`."""
        self.status = int(code is not None)
        if isinstance(code, int):
            self.status = code & 0xFF if abs(code) < 2**63 else 0xFF  # as the interpreter has it

    def at_exit(self) -> None:
        """Exit hook before MPI is finalized (which waits for other ranks): abort after a failure,
        else `end_well`."""
        if _mpi() is None:
            return
        if self._process != os.getpid():
            # A fork: it must not finalize MPI, as mpi4py would, for the job goes on without it.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.status)
        if self.status:
            _abort(f" it left with exit status {self.status}\n", self.status)
        if self.failed is not None and self.failed.exc_value is not None:
            _abort_for(self.failed.exc_value, self.failed.exc_traceback)
        if not self._hooked and _has_failed(self._program):
            _abort(" its program has ended by the exception above\n")
        end_well()


def _has_failed(program: str | None) -> bool:
    """True if an exception that nobody caught has ended the program: Python keeps it. So do test
    runners, consoles and debuggers one that they have caught: it did not pass through the program's
    outermost frame. At a prompt it would be that of an earlier line.

    Args:
        program: the main module's file, which its end forgets.
    """
    trace = getattr(getattr(sys, "last_value", None), "__traceback__", None)
    if trace is None or hasattr(sys, "ps1"):
        return False
    code, main = trace.tb_frame.f_code, vars(sys.modules["__main__"])
    if code.co_name == "_run_module_as_main":  # python -m
        return True
    of_main = trace.tb_frame.f_globals is main and code.co_name == "<module>"
    return of_main and code.co_filename in (program, "<string>", "<stdin>")


def _watch_exits(hear: Callable[[object], None]) -> None:
    """Call a function with the code of the `sys.exit` that ends this process.

    The interpreter reads the attribute `code` of the exception at exit, with no Python call on the
    stack; no other access looks like this, and there is no hook for it. For a SystemExit raised
    otherwise the status is known only after MPI's end, and other ranks learn only that this rank
    ended.
    """

    known: Any = SystemExit.__dict__["code"]

    class Exit(SystemExit):
        def __reduce__(self) -> Any:
            return SystemExit, self.args

        @property
        def code(self) -> Any:
            said = known.__get__(self)
            if sys._getframe().f_back is None:
                hear(said)
            return said

        @code.setter
        def code(self, status: Any) -> None:
            known.__set__(self, status)

    Exit.__name__ = Exit.__qualname__ = "SystemExit"

    def leave(status: Any = None, /) -> NoReturn:
        raise Exit(status)

    sys.exit = leave


def _watch_mpi() -> None:
    """Watch for MPI's end, which a program may cause itself: at once if MPI is imported already,
    else after its import."""
    MPI = getattr(sys.modules.get("mpi4py"), "MPI", None)
    if MPI is None:
        sys.meta_path.insert(0, _Finder())
    else:
        _watch_finalize(MPI)


class _Finder:
    """Import hook, used once, that watches for MPI's end after mpi4py.MPI is imported."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != "mpi4py.MPI":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec and spec.loader
        execute: Any = getattr(loader, "exec_module", None)

        def watched(module: Any) -> None:
            execute(module)
            _watch_finalize(module)

        if execute is not None:
            loader.exec_module = watched
        return spec


def _watch_finalize(MPI: Any) -> None:
    """Announce this rank's end when MPI is finalized: attributes of COMM_SELF are deleted first."""
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: end_well()), True)


at_end: list[Callable[[], None]] = []
"""Final actions of a rank that ends with status 0."""


def end_well() -> None:
    """Announce this rank's end and run the final actions; once, before MPI is finalized."""
    MPI = _mpi()
    if MPI is None or _ended:
        return
    _ended.append(True)
    with _told(MPI):  # if names cannot be published, others wait until their limit
        MPI.Publish_name(_name(MPI.COMM_WORLD.rank), "ended")
    with aborting():
        for end in at_end:
            end()


@contextmanager
def aborting() -> Iterator[None]:
    """Context in which an error of linop aborts the job."""
    try:
        yield
    except LinopError as error:
        _abort(f" {type(error).__name__}: {error}\n")


def has_ended(rank: int) -> bool:
    """True if a rank of COMM_WORLD has announced its end, by a published name. A message would not
    do: MPICH fails if one is never received, and a rank that did not import linop receives none."""
    MPI = _mpi()
    with _told(MPI):
        return bool(MPI.Lookup_name(_name(rank)) == "ended")
    return False


@contextmanager
def _told(MPI: Any) -> Iterator[None]:
    """Context in which an MPI error ends the block instead of the job; the absence of a name is
    such an error."""
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
def watch() -> EndsJob:
    """Watch the end of this process; once."""
    return EndsJob()


def install() -> EndsJob:
    """Install the hooks, once."""
    ends = watch()
    ends.take_hooks()
    return ends
