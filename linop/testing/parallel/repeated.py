"""Records of a program's step, and its report: in new processes or in those of a job that is
running, and again where that is needed. A program that fails while it is looked at runs once more
without that; functions that a report is not sure of are looked at alone in a repetition."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from linop.errors import BackendError, LinopError
from linop.testing.parallel.findings import ParallelReport
from linop.testing.parallel.recording.programs import Program, of_file
from linop.testing.parallel.recording.records import Probe, Record

Records: TypeAlias = tuple[list[Record], Record]
"""Of all ranks, and of the twin."""
Judge: TypeAlias = Callable[[Records, float], tuple[ParallelReport, list[Probe]]]
"""From records and seconds to a report, and functions that it wants to be looked at alone."""


def in_new_processes(
    judge: Judge, program: Program | str, workers: int, dtype: str, seconds: float, forks: bool
) -> ParallelReport:
    """The report of a program that new processes run.

    Raises:
        ArgumentError, BackendError: see `linop.testing.parallel.recording.processes.run`.
    """
    from linop.testing.parallel.recording import processes

    begun = time.monotonic()

    def took() -> float:
        return time.monotonic() - begun

    try:
        found = processes.run(program, workers, dtype, seconds, True, forks)
    except BackendError as error:
        if took() >= seconds:
            raise
        try:
            found = processes.run(program, workers, dtype, seconds - took(), False, forks)
        except BackendError:
            raise error from None
        return _with(judge(found, took())[0], _unseen(str(error)))
    made, wanted = judge(found, took())
    if not wanted or took() >= seconds:
        return made
    try:
        left = seconds - took()
        found = processes.run(program, workers, dtype, left, True, forks, wanted)
        return judge(found, took())[0]
    except LinopError as error:
        return _with(made, _not_again(str(error)))


def in_job(
    judge: Judge, program: Program | str, dtype: Any, seconds: float
) -> ParallelReport | None:
    """The report of a program that the ranks of a running job run, on rank 0; None on others.
    Collective. Random numbers, and the modules and optimizers that the program's functions return,
    are left as they were.

    Args:
        dtype: torch's.

    Raises:
        ArgumentError, BackendError: the program fails; the same on all ranks that come back.
    """
    from linop.testing.parallel.recording import jobs, processes

    job = jobs.Job(seconds)
    with processes.ending_after(seconds):
        loaded = program
        if isinstance(program, str):
            target = program
            loaded, outcome = job.tried(lambda: of_file(target))
            if outcome.failed:
                raise outcome.error()
        assert isinstance(loaded, Program)
        state = jobs.State(loaded)
        try:
            return _in_job(judge, job, state, dtype)
        finally:
            state.restore()


def _in_job(judge: Judge, job: Any, state: Any, dtype: Any) -> ParallelReport | None:
    from linop.testing.parallel.recording import processes, steps

    begun = time.monotonic()

    def step(trace: bool, probes: Any = ()) -> Any:
        def taken() -> Any:
            return steps.recorded(state.program, dtype, trace, make=job.recorder, probes=probes)

        return job.tried(taken)

    found, outcome = step(True)
    if outcome.failed:
        if outcome.told or outcome.late or outcome.apart:
            raise outcome.error()
        state.restore()
        found, second = step(False)
        if second.failed:
            raise outcome.error(f"It fails without being looked at, too: {_last(second)}")
        ranks = processes.gathered(found)
        return None if ranks is None else _with(
            judge(ranks, time.monotonic() - begun)[0], _unseen(_last(outcome)))  # fmt: skip
    ranks = processes.gathered(found)
    made: ParallelReport | None = None
    wanted: list[Probe] = []
    try:
        if ranks is not None:
            made, wanted = judge(ranks, time.monotonic() - begun)
            wanted = wanted if job.left > 0 else []
    finally:
        wanted = job.of_first("wanted", wanted)
    if not wanted:
        return made
    state.restore()
    found, outcome = step(True, wanted)
    if outcome.late:
        raise outcome.error()
    if outcome.failed:
        return made and _with(made, _not_again(_last(outcome)))
    ranks = processes.gathered(found)
    return None if ranks is None else judge(ranks, time.monotonic() - begun)[0]


def _last(outcome: Any) -> str:
    """Words of one of the ranks that failed."""
    return next(iter(outcome.errors.values()), "") or "some ranks do not come back"


def _with(made: ParallelReport, note: str) -> ParallelReport:
    return replace(made, notes=(*made.notes, note))


def _unseen(text: str) -> str:
    """The note about a program that ends only without being looked at."""
    last = text.strip().splitlines()[-1]
    return f"no places are given: the program cannot be looked at while it runs ({last})"


def _not_again(text: str) -> str:
    """The note about a step that cannot be repeated."""
    last = text.strip().splitlines()[-1]
    return f"functions were not looked at alone: the step could not be repeated ({last})"
