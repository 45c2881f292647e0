"""A process that has imported what tests use, and forks: ``server.py FOLDER NUMBER OWNER``.

A fork leaves `served` by returning from it, and runs its program at the end of this file. The
server ends with its owner, and its forks with their clients.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

MODULES = (
    "scipy.sparse.linalg",
    "linop.testing.workers.rank",
    "hypothesis.extra.numpy",
    "pytest",
    "torch.distributed",
    "torch._dynamo",
    "linop.strategies",
)
"""None of them starts MPI, threads, or a device."""
_LONGEST = 1 << 20

Order = tuple[list[str], dict[str, str], str]
"""Arguments of Python, environment and folder."""


class Server:
    def __init__(self, folder: Path, number: str, owner: int) -> None:
        self._folder = folder
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._selector = selectors.DefaultSelector()
        self._forks: dict[socket.socket, int] = {}
        """Processes by their clients."""
        self._descriptors = {owner: os.pidfd_open(owner)}
        """Of the owner and of the forks: readable once they have ended."""
        self._selector.register(self._descriptors[owner], selectors.EVENT_READ, self._end)
        self._listener.bind(str(folder / f"{number}.new"))
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        (folder / f"{number}.new").rename(folder / number)

    def served(self) -> Order:
        """In a fork: its order. The server does not return."""
        while True:
            for key, _ in self._selector.select():
                if (order := key.data()) is not None:
                    return order

    def _end(self) -> None:
        for process in self._forks.values():
            os.kill(process, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)

    def _accept(self) -> None:
        link, _ = self._listener.accept()
        self._selector.register(link, selectors.EVENT_READ, lambda: self._hear(link))

    def _hear(self, link: socket.socket) -> Order | None:
        """An order, in the fork; or the end of a client, and so of its fork."""
        data, files = b"", list[int]()
        with contextlib.suppress(OSError):  # clients are killed at any time
            data, files, _, _ = socket.recv_fds(link, _LONGEST, 3)
        if not data:
            self._selector.unregister(link)
            if link in self._forks:  # it is waited for when its descriptor says so
                os.kill(self._forks[link], signal.SIGKILL)
            else:
                link.close()
            return None
        if (process := os.fork()) == 0:
            self._leave()
            for standard, file in enumerate(files):
                os.dup2(file, standard)
                os.close(file)
            return ast.literal_eval(data.decode())
        for file in files:
            os.close(file)
        self._forks[link] = process
        self._descriptors[process] = ended = os.pidfd_open(process)
        self._selector.register(ended, selectors.EVENT_READ, lambda: self._bury(link))
        with contextlib.suppress(OSError):  # killed meanwhile, as `link` says then
            link.send(b"%d" % process)
        return None

    def _bury(self, link: socket.socket) -> None:
        process = self._forks.pop(link)
        ended = self._descriptors.pop(process)
        self._selector.unregister(ended)
        os.close(ended)
        _, status = os.waitpid(process, 0)
        with contextlib.suppress(OSError):
            link.send(b"%d" % os.waitstatus_to_exitcode(status))
        with contextlib.suppress(KeyError):
            self._selector.unregister(link)
        link.close()

    def _leave(self) -> None:
        """In a fork: close what is the server's."""
        for key in [*self._selector.get_map().values()]:
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        for link in self._forks:
            link.close()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._selector.close()


def become(order: Order, before: list[str]) -> None:
    """Be a Python that was started like that, and run its program.

    Args:
        before: the server's `sys.path` without its own PYTHONPATH.
    """
    arguments, environment, folder = order
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    safe, unbuffered = "PYTHONSAFEPATH" in environment, "PYTHONUNBUFFERED" in environment
    while arguments[0] in ("-P", "-u"):
        safe, unbuffered = safe or arguments[0] == "-P", unbuffered or arguments[0] == "-u"
        arguments = arguments[1:]
    if unbuffered:
        streams: Any = (sys.stdout, sys.stderr)
        for stream in streams:
            stream.reconfigure(write_through=True)
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *before]
    kind = arguments[0]
    if kind in ("-m", "-c"):
        sys.argv[:] = [kind, *arguments[2:]]
        sys.path[:0] = [] if safe else [folder if kind == "-m" else ""]
    else:
        sys.argv[:] = arguments
        sys.path[:0] = [] if safe else [str(Path(kind).resolve().parent)]
    if kind == "-m":
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(kind, run_name="__main__")


def ended(order: Order, before: list[str]) -> NoReturn:
    """Run the program of an order, and end as Python does, but for what it takes down: the objects
    of all modules, for as long as a short program runs."""
    status = 0
    try:
        become(order, before)
    except SystemExit as error:
        if isinstance(error.code, int) or error.code is None:
            status = error.code or 0
        else:
            print(error.code, file=sys.stderr)
            status = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    ends: Any = (threading, atexit)
    ends[0]._shutdown()
    ends[1]._run_exitfuncs()
    if (mpi := sys.modules.get("mpi4py.MPI")) and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status & 0xFF)


def imported() -> list[str]:
    """Import `MODULES`, as far as they are installed; returns `sys.path` as Python makes it."""
    own = {*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))}
    before = [entry for entry in sys.path if entry not in own]
    for name in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # forks share the memory of what no collection visits
    return before


if __name__ == "__main__":
    HERE, NUMBER, OWNER = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    try:
        BEFORE = imported()
        SERVER = Server(HERE, NUMBER, OWNER)
    except BaseException:
        (HERE / f"{NUMBER}.failed").touch()
        raise
    ended(SERVER.served(), BEFORE)
