"""Start of MPI, in which a rank waits for all others of its job: limited, as every wait is."""

from __future__ import annotations

import faulthandler
import math
import sys
import threading

from linop.backends.settings import WAIT_LIMIT


def start_mpi() -> None:
    """Start MPI, unless the program has.

    MPI waits for a rank that left before its start, with status 0, forever, and mpi4py holds the
    interpreter's lock: no other thread of Python runs. So faulthandler, which needs no lock, prints
    the stack at the limit (LINOP_WAIT_LIMIT, else 600 s), and ends the process with status 1, on
    which mpiexec ends the job.

    Raises:
        ImportError, RuntimeError: there is no mpi4py, or no MPI library.
    """
    limit, said = WAIT_LIMIT.found().value, sys.__stderr__
    if "mpi4py.MPI" in sys.modules:
        return
    if said is not None and limit < math.inf:
        seconds = min(limit, threading.TIMEOUT_MAX)
        faulthandler.dump_traceback_later(seconds, exit=True, file=said)
    try:
        waits_until_all_ranks_have_started_mpi()
    finally:
        faulthandler.cancel_dump_traceback_later()


def waits_until_all_ranks_have_started_mpi() -> None:
    """Import mpi4py.MPI. The name is what faulthandler prints."""
    from mpi4py import MPI  # noqa: F401
