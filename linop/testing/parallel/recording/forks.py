"""Processes of a checked file, forked by one that has imported torch, and has computed nothing.

Each process would import torch by itself, which takes seconds, and again whenever the step is
repeated. The one that forks (``python -m``, this module) is started by the first check of a process
and serves its later ones, until that process ends.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from linop.errors import BackendError

_IMPORTED = "CUDA", "KMP", "LD_", "MKL", "OMP", "PYTHON", "TORCH"
"""Beginnings of variables that are read where Python starts or torch is imported."""
_OF_RANKS = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"


def _environment() -> dict[str, str]:
    """The environment of processes: this one's, without another job."""
    kept = {name: text for name, text in os.environ.items() if name not in _OF_RANKS}
    return {**kept, "OMP_NUM_THREADS": "1"}


def _read_early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environment.items() if name.startswith(_IMPORTED)}


class Nursery:
    """A process that forks others."""

    def __init__(self) -> None:
        self.process = os.getpid()
        """The one that it serves: forks of that have another."""
        environment = _environment()
        self.early = _read_early(environment)
        self._turn = threading.Lock()
        self._link, theirs = Pipe()
        with theirs:
            self._job = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self.close)

    def is_of_use(self) -> bool:
        """True if it runs, is of this process, and would begin alike."""
        mine = self.process == os.getpid() and self._job.poll() is None
        return mine and self.early == _read_early(_environment())

    def ask(self, order: tuple[str, Any], file: int | None = None) -> Any:
        """The answer to an order.

        Raises:
            BackendError: the process has ended.
        """
        with self._turn:
            try:
                self._link.send(order)
                if file is not None:
                    send_handle(self._link, file, self._job.pid)
                return self._link.recv()
            except (EOFError, OSError):
                raise BackendError("the process that starts others has ended") from None

    def close(self) -> None:
        """End it, and its forks."""
        if self.process == os.getpid():
            self._link.close()
            self._job.wait()


_NURSERIES: list[Nursery] = []
_LOCK = threading.Lock()


def _nursery() -> Nursery:
    with _LOCK:
        if not (_NURSERIES and _NURSERIES[0].is_of_use()):
            for old in _NURSERIES:
                atexit.unregister(old.close)
                old.close()
            _NURSERIES[:] = [Nursery()]
        return _NURSERIES[0]


class Fork:
    """A process with the interface of `multiprocessing.Process`, which calls `take_part`."""

    def __init__(self, *args: Any) -> None:
        self._args = args
        self._nursery = _nursery()
        self.pid = 0
        self._status: int | None = None

    def start(self) -> None:
        order = self._args, _environment(), os.getcwd()
        self.pid = self._nursery.ask(("fork", order), file=2)

    @property
    def exitcode(self) -> int | None:
        if self._status is None:
            self._status = self._nursery.ask(("status", self.pid))
        return self._status

    def is_alive(self) -> bool:
        return self.pid > 0 and self.exitcode is None

    def kill(self) -> None:
        if self.is_alive():
            os.kill(self.pid, signal.SIGKILL)

    def join(self) -> None:
        if self.pid and self._status is None:
            self._status = self._nursery.ask(("wait", self.pid))


def _serve(link: Connection) -> tuple[Any, ...]:
    """Fork, and tell of forks; returns in a fork alone, with the arguments of `take_part`."""
    running: set[int] = set()
    while True:
        try:
            kind, about = link.recv()
        except (EOFError, OSError):
            for process in running:
                os.kill(process, signal.SIGKILL)
            os._exit(0)
        if kind == "fork":
            output = recv_handle(link)
            if not (process := os.fork()):
                link.close()
                os.dup2(output, 1)  # the output of a check is its report
                os.dup2(output, 2)
                os.close(output)
                args: tuple[Any, ...]
                args, environment, folder = about
                os.environ.clear()
                os.environ.update(environment)
                os.chdir(folder)
                if not sys.flags.safe_path:
                    sys.path[0] = folder  # as for every ``python -m``
                signal.signal(signal.SIGINT, signal.default_int_handler)
                return args
            os.close(output)
            running.add(process)
            link.send(process)
            continue
        found, status = os.waitpid(about, os.WNOHANG if kind == "status" else 0)
        running.discard(found)
        link.send(os.waitstatus_to_exitcode(status) if found else None)


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that is served
    importlib.import_module("torch._dynamo")  # which the first optimizer imports
    from linop.testing.parallel.recording import processes, steps, tensors

    del steps, tensors
    gc.collect()
    gc.freeze()  # forks share the memory of what no collection visits
    processes.in_fork(*_serve(Connection(int(sys.argv[1]))))


if __name__ == "__main__":
    _main()
