"""Property tests across ranks, one rank of a job: it takes examples from its parent until the end.

`linop.testing.workers.jobs` starts this file as a script. It imports nothing but the standard
library until the parent has told it the path on which modules are found, so linop need not be
installed.
"""

from __future__ import annotations

import faulthandler
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
OUTPUT = "rank-{}"
"""Files of a job's folder: the parent's socket, and what each rank prints."""

FINISH = "finish"
"""What a parent asks once no rank has failed: whether the example has left something behind."""

_LINGER = 0.5
"""Seconds that a thread may outlive its example."""
_OURS = (
    "linop.testing.workers.rank",
    "linop.testing.workers.located",
    "linop.testing.workers.threaded",
)
"""Modules whose frames say nothing about a failure."""
_LONGEST = 20_000
"""Characters of an exception's words."""
_PROBES = 5
"""Looks for a message: the first ones may only make MPI fetch it."""


@dataclass(frozen=True)
class Answer:
    """What a rank says of an example."""

    kind: str = "passed"
    """"passed", "failed", "rejected" (by `assume`), "skipped" (by `pytest.skip`), or "stuck"."""
    text: str = ""
    """The traceback, or the reason."""
    usable: bool = True
    """Whether the rank can take another example."""

    @property
    def passed(self) -> bool:
        return self.kind == "passed"


@contextmanager
def socket_in(folder: Path) -> Iterator[str]:
    """The address of the parent's socket, by an open folder: a socket's path may have 107 bytes,
    and that of a temporary folder may be longer."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{opened}/{SOCKET}"
    finally:
        os.close(opened)


def connect(folder: Path) -> Connection:
    """The connection to the parent, once the parent has said where modules are found."""
    with socket_in(folder) as address:
        parent = Client(address, "AF_UNIX")
    sys.path[:] = parent.recv()
    return parent


def live(parent: Connection, folder: Path) -> None:
    """The life of a rank."""
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    # A file of its own: through mpiexec, output comes late, and the stacks of all are mixed.
    with (folder / OUTPUT.format(rank)).open("wb") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    faulthandler.enable()
    quiet_assume()
    parent.send(rank)
    serve(parent, MPI.COMM_WORLD)


def serve(parent: Connection, world: Any) -> None:
    """Run examples until there is None."""
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
            except BaseException as error:
                parent.send(Answer("failed", words(error), usable=False))
                continue
            # The check's module is imported now, which may take longer than an example is given.
            parent.send(Answer())
            before = set(threading.enumerate())
            comm, said = play(world, check, arguments)
        flush()
        parent.send(said)


def flush() -> None:
    """Let what was printed stand before what comes next; a check may have closed its output."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue


def play(world: Any, check: Any, arguments: tuple[Any, ...]) -> tuple[Any, Answer]:
    """Run one example, on a communicator that no example before it has used."""
    comm = None
    try:
        comm = world.Dup()
        check(comm, *arguments)
    except BaseException as error:
        return comm, verdict(error)
    return comm, Answer()


def verdict(error: BaseException) -> Answer:
    """What an exception that left an example says of it."""
    from linop.errors import has_interrupted

    if isinstance(error, _loaded("hypothesis.errors", "UnsatisfiedAssumption")):
        return Answer("rejected", words(error))
    if isinstance(error, _loaded("_pytest.outcomes", "Skipped")) or isinstance(
        error, _loaded("unittest", "SkipTest")
    ):
        return Answer("skipped", str(error))
    # A receive may be left, into a buffer that is gone.
    return Answer("failed", words(error), usable=not has_interrupted(error))


def _loaded(module: str, name: str) -> Any:
    """A class, if its module was imported: else there are no objects of it."""
    return getattr(sys.modules.get(module), name, ())


def words(error: BaseException) -> str:
    """The traceback of an exception, from the first frame on that is not of this package."""
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
    """After an example that failed nowhere: it has left nothing behind, and its communicator is
    freed. Collective."""
    left = stray_message(comm) or lingering_thread(before)
    if left:
        return Answer("failed", left, usable=False)
    if comm:
        comm.Free()
    return Answer()


def stray_message(comm: Any) -> str:
    """What message was sent on a communicator to this rank, and never received; empty if none."""
    if not comm:  # it was freed, or was never made
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
    """Which thread an example has left, that the process would wait for at its end; empty if none.
    Idle threads of executors end by themselves then."""
    for thread in threading.enumerate():
        if thread in before or thread.daemon or thread.name.startswith("ThreadPoolExecutor"):
            continue
        thread.join(_LINGER)
        if thread.is_alive():
            return f"a thread was left running: {thread.name}\n"
    return ""


def quiet_assume() -> None:
    """`assume` is meant for ranks, too: no warning that Hypothesis itself runs elsewhere."""
    warnings.filterwarnings("ignore", message="Using `assume` outside")


if __name__ == "__main__":
    HERE = Path(sys.argv[1])
    PARENT = connect(HERE)
    # By its name, so that the parent unpickles the same classes.
    from linop.testing.workers.rank import live as _live

    _live(PARENT, HERE)
