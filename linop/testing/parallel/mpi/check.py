"""`check_mpi`: programs that communicate by mpi4py, beside their sequential twins, or as pairs of a
forward function and its adjoint."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from linop.backends.mpi import mpirun
from linop.backends.together.messages import allow, decoded
from linop.errors import ArgumentError, BackendError, MissingExtraError
from linop.testing.parallel.findings import ParallelReport, Place
from linop.testing.parallel.mpi.report import Movement, PairReport, Trial
from linop.testing.parallel.recording.programs import world_of

allow(Movement, Trial, PairReport)

SECONDS = 120.0
OVERWRITES = "overwrites the tensor that it is given"
"""Words of notes of recorders."""
_RANKS = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"}
"""Variables that ranks of a job have."""
_LEFT = 10.0
"""Seconds that a job has beyond its limit, to write stacks."""


def check_mpi(
    target: str | os.PathLike[str],
    workers: int | None = None,
    seconds: float = SECONDS,
    *,
    dtype: str = "float64",
) -> ParallelReport | PairReport | None:
    """Check a program of mpi4py on several ranks, started here by ``mpiexec``.

    The file is a parallel torch program with its twin, as for `check_parallel`, that communicates
    by buffer calls of mpi4py: inside of `autograd.Function`s, or between backward pass and
    optimizer.
    Or it has a pair of functions ``forward(x, comm)`` and ``adjoint(y, comm)`` of the arrays that
    a rank holds, with ``domain(rank, world)`` and ``codomain(rank, world)``: each the shape of that
    array (None if the rank has none), or the shape and a dtype, or an array that is like it. The
    pair is right if ``<forward(x), y> = <x, adjoint(y)>``, where the arrays of the ranks are one
    vector each, or copies of one that is replicated: the report says which.
    ``DOMAIN = "replicated"`` or ``"copies"`` in the file, and ``CODOMAIN``, leave no choice.

    Args:
        target: ``FILE.py``, or ``FILE.py:NAME`` for an object in it that has these functions.
        workers: the number of ranks; by default the file's ``WORLD``, or 2. In a job that is
            running (``mpiexec`` has started this process) it is the job's, and each rank calls this
            function.
        seconds: the longest time.
        dtype: torch's name of the dtype in which a torch program runs.

    Returns:
        A report, true if nothing is wrong; None on ranks other than 0 of a job that was running.

    Raises:
        ArgumentError: the file lacks a function. BackendError: the program fails, or does not end
            in time; with the stacks of all ranks. MissingExtraError: mpi4py or ``mpiexec`` is
            missing.

    Example:
        A shift to the next rank, and its adjoint, in ``shift.py``::

            def forward(x, comm):
                y = np.empty_like(x)
                after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
                comm.Sendrecv(x, after, recvbuf=y, source=before)
                return y

            def adjoint(y, comm):
                x = np.empty_like(y)
                after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
                comm.Sendrecv(y, before, recvbuf=x, source=after)
                return x

            def domain(rank, world):
                return (3,)

            codomain = domain

        and ``bool(linop.testing.check_mpi("shift.py", workers=3))`` is True.
    """
    begun = time.monotonic()
    if importlib.util.find_spec("mpi4py") is None:
        raise MissingExtraError("check_mpi needs mpi4py: pip install 'linop-algebra[mpi]'")
    name = str(target)
    world = workers or world_of(name) or 2
    if world < 1:
        raise ArgumentError(f"workers: {workers} given, 1 or more expected")
    if _RANKS.intersection(os.environ):
        return _inside(name, dtype, begun)
    found, failed = _run(name, world, dtype, seconds)
    first = found[0]
    if isinstance(first, PairReport):
        return replace(first, program=name, seconds=time.monotonic() - begun)
    made = _of_steps(name, found, begun)
    return replace(made, notes=(*made.notes, failed)) if failed else made


def _overwriting(made: ParallelReport) -> ParallelReport:
    """With the place of a function that overwrites its argument, if losses differ by it."""
    notes = [one for one in made.notes if "forward of" in one and OVERWRITES in one]
    if made.loss_is_equal or not notes or not made.findings:
        return made
    first, *others = made.findings
    line, _, what = notes[0].partition(": ")
    called = what.removeprefix("the forward of ").partition(" ")[0]
    place = Place(first.place.module, line, f"the call of {called}", (str(first.place),))
    operator = "a copy of the argument, before it is reduced in place"
    why = f"{what[0].upper()}{what[1:]}: what uses that tensor afterwards gets the result instead."
    found = replace(first, place=place, operator=operator, explanation=why)
    return replace(made, findings=(found, *others))


def _inside(target: str, dtype: str, begun: float) -> ParallelReport | PairReport | None:
    """The report of a job that this process belongs to, on rank 0."""
    from linop.backends.together.messages import encoded
    from linop.testing.parallel.mpi import interception
    from linop.testing.parallel.mpi.rank import found_on

    mine = found_on(target, interception.install(), dtype, True)
    everyone = interception.plain_world()
    if isinstance(mine, PairReport):
        report = replace(mine, program=target, seconds=time.monotonic() - begun)
        return None if everyone.Get_rank() else report
    parts = everyone.gather(encoded(mine), root=0)
    if parts is None:
        return None
    return _of_steps(target, [decoded(one) for one in parts], begun)


def _of_steps(target: str, found: list[Any], begun: float) -> ParallelReport:
    from linop.testing.parallel.check import report

    records, twin = [one for one, _ in found], found[0][1]
    return _overwriting(report(target, records, twin, time.monotonic() - begun))


def _run(target: str, workers: int, dtype: str, seconds: float) -> tuple[list[Any], str]:
    """Findings of all ranks of a job, and a note if a program ends without being looked at alone.

    Raises:
        ArgumentError, BackendError: a rank found nothing.
    """
    first = None
    end = time.monotonic() + seconds
    for way in ("trace", "results"):
        if first is not None and end <= time.monotonic():
            break
        left = max(end - time.monotonic(), 0.1)
        found = _tried(target, workers, dtype, left, way)
        if isinstance(found, list):
            told = str(first).strip().splitlines()[-1] if first else ""
            note = f"no places are given: the program cannot be looked at while it runs ({told})"
            return found, note if first else ""
        error, is_final = found
        if is_final or isinstance(error, ArgumentError):
            raise error
        first = first or error
    assert first is not None
    raise first


def _tried(
    target: str, workers: int, dtype: str, seconds: float, way: str
) -> list[Any] | tuple[Exception, bool]:
    """Findings of all ranks of a job; or an error and True if another try is of no use: a pair of
    functions fails, or a program waits."""
    with tempfile.TemporaryDirectory(prefix="linop-") as place:
        folder = Path(place)
        module = "linop.testing.parallel.mpi.rank"
        arguments = [sys.executable, "-m", module, target, place, dtype, str(seconds), way]
        for _ in range(mpirun.STARTS):
            said = _job(workers, arguments, folder, seconds)
            if not mpirun.by_chance(said):
                break
        records = [folder / f"{rank}.record" for rank in range(workers)]
        is_pair = any(folder.glob("*.pair"))
        if not all(one.exists() for one in records):
            waits = any(one.stat().st_size for one in folder.glob("*.stack"))
            seen = any(folder.glob("*.following")) and way == "trace"
            is_final = (is_pair and not seen) or (waits and not any(folder.glob("*.error")))
            return _failure(folder, workers, seconds, said), is_final
        if not is_pair:
            from linop.testing.parallel.recording import processes  # its records may be read

            del processes
        return [decoded(one.read_bytes()) for one in records]


def _job(workers: int, arguments: list[str], folder: Path, seconds: float) -> str:
    """Run a job to its end; returns what it has printed."""
    output = folder / "output"
    with output.open("w") as file:
        job = mpirun.Job(
            workers, arguments, env={"OMP_NUM_THREADS": "1"}, stdout=file, stderr=subprocess.STDOUT
        )
        end = time.monotonic() + seconds + _LEFT
        try:
            while time.monotonic() < end and not _all_are_late(folder, workers):
                try:
                    job.wait(0.2)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            job.end(0.5)
    return output.read_text(errors="replace")


def _all_are_late(folder: Path, workers: int) -> bool:
    """True once every rank has written its stacks."""
    paths = [folder / f"{rank}.stack" for rank in range(workers)]
    return all(path.exists() and path.stat().st_size for path in paths)


def _failure(folder: Path, workers: int, seconds: float, said: str) -> Exception:
    from linop.testing.parallel.recording.failures import failure

    written = [folder / f"{r}.{kind}" for r in range(workers) for kind in ("error", "stack")]
    if any(one.exists() and one.stat().st_size for one in written):
        return failure(folder, workers, seconds)
    return BackendError(f"the job ended before all ranks were done. It said:\n{said.strip()}")


__all__ = ["PairReport", "ParallelReport", "check_mpi"]
