"""One rank of a persistent MPI job for property tests: runs examples that its parent sends.

`linop.testing.workers.jobs` starts this file as a script. It imports only the standard library
until the parent has sent its `sys.path`, so linop need not be installed. Threads and the ranks of
``mpiexec pytest`` use its functions, too.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import sys
import threading
import traceback
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

SOCKET = "parent"
KEY = "key"
OUTPUT = "rank-{}"
"""Files of a job's folder: the parent's socket, the key by which it and its ranks know each other,
and the output of each rank."""

FINISH = "finish"
"""Order of the parent once no rank has failed: look for messages and threads left behind."""

_LINGER = 0.5
"""Seconds that a thread may outlive its example."""
_OURS = (
    "linop.testing.workers.rank",
    "linop.testing.workers.located",
    "linop.testing.workers.threaded",
)
"""Modules whose frames are left out of tracebacks."""
_LONGEST = 20_000
"""Largest number of characters of a traceback."""
_PROBES = 5
"""Number of probes for a message; the first ones may only progress its arrival in MPI."""


@dataclass(frozen=True)
class Answer:
    """A rank's answer to an example."""

    kind: str = "passed"
    """"passed", "failed", "rejected" (by `assume`), "skipped" (by `pytest.skip`), or "stuck"."""
    text: str = ""
    """The traceback, or the reason."""
    usable: bool = True
    """True if the rank can run another example."""

    @property
    def passed(self) -> bool:
        return self.kind == "passed"


@contextmanager
def socket_in(folder: Path) -> Iterator[str]:
    """The address of the parent's socket, through the folder's file descriptor, since a socket's
    path is limited to 107 bytes, and a temporary folder's may be longer."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{opened}/{SOCKET}"
    finally:
        os.close(opened)


def connect(folder: Path) -> Connection:
    """Connect to the parent, and set `sys.path` to the one that it sends."""
    with socket_in(folder) as address:
        parent = Client(address, "AF_UNIX", (folder / KEY).read_bytes())
    sys.path[:] = parent.recv()
    return parent


def live(parent: Connection, folder: Path) -> None:
    """Main function of a rank: redirect output to a file, report the rank, and serve examples."""
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    # One file per rank: mpiexec forwards output late, and mixes the stacks of all ranks.
    with (folder / OUTPUT.format(rank)).open("wb") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    faulthandler.enable()
    quiet_assume()
    parent.send(rank)
    serve(parent, MPI.COMM_WORLD)


def serve(parent: Connection, world: Any) -> None:
    """Run the examples that the parent sends, until it sends None."""
    comm: Any = None
    before: set[threading.Thread] = set()
    while True:
        try:
            order = parent.recv()
        except (EOFError, OSError):
            os._exit(1)  # the parent is gone; mpiexec ends the others, whatever they wait for
        if order is None:
            return
        if order == FINISH:
            said = finish(comm, before)
        else:
            try:
                sys.path[:] = order[0]
                check, arguments = pickle.loads(order[1])
                if "torch" in sys.modules and "torch._dynamo" not in sys.modules:
                    # The first optimizer or layer would, in seconds that count.
                    importlib.import_module("torch._dynamo")
                    gc.freeze()  # its million objects: each collection would visit them
                    gc.collect()  # full ones follow after a quarter of what the last one left
            except BaseException as error:
                parent.send(Answer("failed", words(error), usable=False))
                continue
            # All is imported by now, which may take longer than the timeout.
            parent.send(Answer())
            before = set(threading.enumerate())
            comm, said = play(world, check, arguments)
        flush()
        parent.send(said)


def flush() -> None:
    """Flush stdout and stderr, which a check may have closed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue


def play(world: Any, check: Any, arguments: tuple[Any, ...]) -> tuple[Any, Answer]:
    """Run one example on a new communicator. Collective.

    Returns:
        The communicator (None if it could not be made), and the answer.
    """
    comm = None
    try:
        comm = world.Dup()
        check(comm, *arguments)
    except BaseException as error:
        return comm, verdict(error)
    return comm, Answer()


def verdict(error: BaseException) -> Answer:
    """The answer for an exception raised by an example: rejected, skipped or failed."""
    from linop.errors import has_interrupted

    if isinstance(error, _loaded("hypothesis.errors", "UnsatisfiedAssumption")):
        return Answer("rejected", words(error))
    if isinstance(error, _loaded("_pytest.outcomes", "Skipped")) or isinstance(
        error, _loaded("unittest", "SkipTest")
    ):
        return Answer("skipped", str(error))
    # After an interrupt, a receive may be pending into a buffer that was freed.
    return Answer("failed", words(error), usable=not has_interrupted(error))


def _loaded(module: str, name: str) -> Any:
    """A class of a module that was imported; otherwise (), of which nothing is an instance."""
    return getattr(sys.modules.get(module), name, ())


def is_strategy(given: Any) -> bool:
    """True for a strategy of Hypothesis, which is not imported to tell."""
    return isinstance(given, _loaded("hypothesis.strategies", "SearchStrategy"))


def words(error: BaseException) -> str:
    """The traceback of an exception as text, from the first frame that is not in `_OURS`."""
    try:
        trace = error.__traceback__
        while trace is not None and _ours(trace.tb_frame.f_globals):
            trace = trace.tb_next
        lines = traceback.format_exception(type(error), error, trace or error.__traceback__)
        text = "".join(lines).encode(errors="backslashreplace").decode()
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}[... {len(text)} characters]\n"
    except BaseException as unprintable:
        return f"{type(error).__name__}, which cannot be printed: {type(unprintable).__name__}\n"


def _ours(names: dict[str, Any]) -> bool:
    return str(names.get("__name__")) in _OURS


def finish(comm: Any, before: Collection[threading.Thread]) -> Answer:
    """After an example that failed on no rank: check that it left no message and no thread behind,
    and free its communicator. Collective.

    Args:
        before: the threads that were running before the example.
    """
    left = stray_message(comm) or lingering_thread(before)
    if left:
        return Answer("failed", left, usable=False)
    if comm:
        comm.Free()
    return Answer()


def stray_message(comm: Any) -> str:
    """Description of a message to this rank that was never received; empty if there is none."""
    if not comm:  # freed by the example, or never made
        return ""
    from mpi4py import MPI

    status = MPI.Status()
    for _ in range(_PROBES):
        if comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            return (
                f"a message was never received: {status.Get_count(MPI.BYTE)} bytes from rank "
                f"{status.source} with tag {status.tag}\n"
            )
    return ""


def lingering_thread(before: Collection[threading.Thread]) -> str:
    """Description of a non-daemon thread that an example left running; empty if there is none.
    Threads of executors are ignored, since idle ones end when the process exits."""
    for thread in threading.enumerate():
        if thread in before or thread.daemon or thread.name.startswith("ThreadPoolExecutor"):
            continue
        thread.join(_LINGER)
        if thread.is_alive():
            return f"a thread was left running: {thread.name}\n"
    return ""


def quiet_assume() -> None:
    """Suppress Hypothesis's warning about `assume` outside of a property test, since Hypothesis
    runs in another process."""
    warnings.filterwarnings("ignore", message="Using `assume` outside")


if __name__ == "__main__":
    HERE = Path(sys.argv[1])
    PARENT = connect(HERE)
    # Imported by name, so that the parent unpickles the same classes.
    from linop.testing.workers.rank import live as _live

    _live(PARENT, HERE)
