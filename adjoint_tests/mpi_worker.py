"""Property tests over MPI, one rank of a job: it takes examples from the parent until the end.

`mpi_job` starts it as a script. It imports nothing but the standard library until the parent has
told it the path on which modules are found: those that the parent itself would find.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

SOCKET = "parent"
OUTPUT = "rank-{}"
"""Files of a job's folder: the parent's socket, and what each rank prints."""


@dataclass(frozen=True)
class Answer:
    """What a rank says of an example."""

    error: str = ""
    """The traceback; empty if the check passed."""
    usable: bool = True
    """Whether the rank can take another example."""


def main(folder: Path) -> None:
    """The life of a rank."""
    with Client(str(folder / SOCKET), "AF_UNIX") as parent:
        sys.path[:] = parent.recv()
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.rank
        # A file of its own: through mpiexec, output comes late, and the stacks of all are mixed.
        with (folder / OUTPUT.format(rank)).open("wb") as output:
            os.dup2(output.fileno(), sys.stdout.fileno())
            os.dup2(output.fileno(), sys.stderr.fileno())
        faulthandler.enable()
        parent.send(rank)
        serve(parent, MPI.COMM_WORLD)


def serve(parent: Connection, world: Any) -> None:
    """Run examples until there is None."""
    while True:
        try:
            example = parent.recv()
        except EOFError:
            os._exit(1)  # the parent is gone; mpiexec ends the others, whatever they wait for
        except Exception:
            parent.send(Answer(traceback.format_exc(), usable=False))
            continue
        if example is None:
            return
        # The check's module is imported now, which may take longer than an example is given.
        parent.send(Answer())
        said = answer(world, *example)
        sys.stdout.flush()
        parent.send(said)


def answer(world: Any, check: Any, arguments: tuple[Any, ...]) -> Answer:
    """Run one example, on a communicator that no example before it has used."""
    comm = world.Dup()
    try:
        check(comm, *arguments)
    except BaseException as error:
        return Answer(traceback.format_exc(), usable=not in_communication(error))
    comm.Free()
    return Answer()


def in_communication(error: BaseException) -> bool:
    """Whether a plan was interrupted: a receive may be left, into a buffer that is gone."""
    frames = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]
    return not {"linop.backends.execute", "linop.backends.mpi"}.isdisjoint(frames)


if __name__ == "__main__":
    # By its name, so that the parent unpickles the same classes.
    sys.path.insert(0, str(Path(__file__).parent))
    from mpi_worker import main as work

    work(Path(sys.argv[1]))
