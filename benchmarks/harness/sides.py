"""Sides of a comparison, on a rank of a job: their results compared, their times, and rows printed
by rank 0. It imports MPI: the commands that start jobs must not."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from typing import Any, NamedTuple

import mpi4py
import numpy as np
from mpi4py import MPI

import linop
from benchmarks.harness.measure import interleaved
from benchmarks.harness.task import MARK

Run = Callable[[], Any]


class Rival(NamedTuple):
    """One implementation of the operator: `run` returns this rank's result, or None."""

    run: Run
    tolerance: float | None = 0
    """Relative difference from linop's result that is allowed; None: results are not compared."""
    value: Callable[[Any], Any] = lambda result: result
    """Gives this rank's array from the return value of `run`."""


def add_sides(
    comm: MPI.Intracomm,
    direction: str,
    rivals: dict[str, Rival],
    sides: dict[str, Run],
    failed: dict[str, str],
) -> None:
    """Add the rivals whose result equals the first one's, linop's, on all ranks; the others go
    into `failed`. Collective."""
    expected: Any = None
    for number, (name, rival) in enumerate(rivals.items()):
        try:
            got = rival.value(rival.run())
            said = ""
        except Exception as error:  # peers raise many types for missing features
            got, said = None, f"{type(error).__name__}: {error}"
        if number == 0:
            expected = _copied(got)
        elif not said and not _agree(got, expected, rival.tolerance):
            said = "another result than linop's"
        verdicts = [v for v in comm.allgather(said) if v]
        if verdicts:
            failed[f"{direction}/{name}"] = verdicts[0]
        else:
            sides[f"{direction}/{name}"] = rival.run


def _copied(result: Any) -> Any:
    if isinstance(result, dict):
        (result,) = result.values()
    return None if result is None else np.array(result)


def _agree(got: Any, expected: Any, tolerance: float | None) -> bool:
    if tolerance is None or got is None or expected is None:
        return tolerance is None or got is expected
    a, b = np.ravel(got), np.ravel(expected)
    if tolerance == 0:
        return np.array_equal(a, b)
    return a.shape == b.shape and bool(np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b))


def timed(comm: MPI.Intracomm, sides: dict[str, Run], seconds: float) -> dict[str, Any]:
    found = interleaved(comm, sides, seconds)
    return {"times": found.times, "rounds": found.rounds, "batch": found.batch}


def software(comm: MPI.Intracomm) -> dict[str, str]:
    """Names and versions of the software."""
    return {
        "MPI": MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 "),
        "mpi4py": mpi4py.__version__,
        "NumPy": np.__version__,
        "Python": platform.python_version(),
        "linop": linop.__version__,
    }


def emit(comm: MPI.Intracomm, row: dict[str, Any]) -> None:
    if comm.rank == 0:
        print(MARK + json.dumps(row), flush=True)
