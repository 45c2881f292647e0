"""One rank of a checked MPI program: ``mpiexec -n N python -m linop.testing.parallel.mpi.rank``. It
records one step, or checks a pair of functions, and writes what it found to a file."""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from linop.errors import LinopError
from linop.testing.parallel.mpi import interception


def take_part(target: str, folder: str, dtype: str, seconds: float, way: str) -> int:
    """Record a step of a program as one rank of several; returns a status.

    Args:
        target: ``FILE.py`` or ``FILE.py:NAME``.
        folder: for the record, or the error.
        dtype: the name of a dtype of torch's.
        seconds: after which all threads' stacks are written to the folder.
        way: "trace", or "results" for results alone.
    """
    place = Path(folder)
    comm = interception.install()
    rank = comm.Get_rank()
    warnings.simplefilter("ignore")
    faulthandler.enable()
    stack = (place / f"{rank}.stack").open("w")
    faulthandler.dump_traceback_later(seconds, file=stack)
    try:
        from linop.backends.together.messages import encoded

        marks = [(place / f"{rank}.{kind}").touch for kind in ("pair", "following")]
        found = found_on(target, comm, dtype, way == "trace", *marks)
        (place / f"{rank}.part").write_bytes(encoded(found))
        (place / f"{rank}.part").rename(place / f"{rank}.record")
    except BaseException as error:
        told = isinstance(error, LinopError)
        text = str(error) if told else traceback.format_exc()
        (place / f"{rank}.error").write_text(text)
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0


def found_on(
    target: str,
    comm: Any,
    dtype: str,
    trace: bool,
    is_pair: Callable[[], None] | None = None,
    following: Callable[[], None] | None = None,
) -> Any:
    """A rank's finding: the report of a pair of functions, or records of a step. Collective.

    Args:
        comm: the communicator of all ranks, with listeners.
        trace: False to record results alone.
        is_pair: called if it is a pair of functions, before they are.
        following: called before a pair is looked at while it runs.
    """
    from linop.testing.parallel.mpi.functions import pair_of

    parts = pair_of(target)
    if parts is not None:
        from linop.testing.parallel.mpi.pairs import checked

        if is_pair is not None:
            is_pair()
        return checked(parts, comm, trace, following)
    import torch

    from linop.testing.parallel.mpi.recorder import MPIRecorder
    from linop.testing.parallel.recording import processes, steps, tensors
    from linop.testing.parallel.recording.programs import of_file

    del processes  # which names the records that may be written
    torch.set_num_threads(1)
    kind = getattr(torch, dtype)
    torch.set_default_dtype(kind)
    tensors.own_file(__file__)
    place = comm.Get_rank(), comm.Get_size()
    return steps.recorded(of_file(target), kind, trace, place, MPIRecorder)


if __name__ == "__main__":
    name, place, kind, limit, manner = sys.argv[1:]
    status = take_part(name, place, kind, float(limit), manner)
    sys.stdout.flush()
    if status:
        os._exit(status)  # the launcher then ends the others
