"""Start of MPI, in which a rank waits for all others of its job: limited, as every wait is."""

from __future__ import annotations

import faulthandler
import math
import sys
import threading
from typing import Any

from linop.backends.together import ancestry
from linop.backends.together.settings import WAIT_LIMIT
from linop.errors import BackendError


def start_mpi() -> None:
    """Start MPI, unless the program has.

    MPI waits for a rank that left before its start, with status 0, forever, and mpi4py holds the
    interpreter's lock: no other thread of Python runs. So faulthandler, which needs no lock, prints
    the stack at the limit (LINOP_WAIT_LIMIT, else 600 s), and ends the process with status 1, on
    which mpiexec ends the job.

    Raises:
        ImportError, RuntimeError: there is no mpi4py, or no MPI library. BackendError: a rank has
            started this process, which cannot be one; or the program has to start MPI itself and
            has not, or has ended it.
    """
    limit, said = WAIT_LIMIT.found().value, sys.__stderr__
    if "mpi4py.MPI" in sys.modules:
        check_running(sys.modules["mpi4py.MPI"])
        return
    if (rank := ancestry.rank_above(ancestry.MPI)) is not None:
        raise BackendError(
            f"a rank of an MPI job (process {rank}) has started this program, which has inherited "
            f"its launcher's variables, and is no rank of that job: MPI cannot start here. Start "
            f"it without them ({', '.join(ancestry.MPI[:3])}, ...), or run it on backend 'threads'"
        )
    if said is not None and limit < math.inf:
        seconds = min(limit, threading.TIMEOUT_MAX)
        faulthandler.dump_traceback_later(seconds, exit=True, file=said)
    try:
        waits_until_all_ranks_have_started_mpi()
    finally:
        faulthandler.cancel_dump_traceback_later()
    check_running(sys.modules["mpi4py.MPI"])


def check_running(MPI: Any) -> None:
    """Check that MPI can be called.

    Raises:
        BackendError: it has not been started, or has been ended.
    """
    if not MPI.Is_initialized():
        raise BackendError(
            "MPI has not been started: mpi4py.rc.initialize is False, or MPI4PY_RC_INITIALIZE=0 "
            "is set; call MPI.Init() before linop's first backend, or leave the start to mpi4py"
        )
    if MPI.Is_finalized():
        raise BackendError("MPI has been finalized: use linop's backends before MPI.Finalize()")


def waits_until_all_ranks_have_started_mpi() -> None:
    """Import mpi4py.MPI. The name is what faulthandler prints."""
    from mpi4py import MPI  # noqa: F401
