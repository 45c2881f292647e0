"""The checks of ``linop verify``, run from this process or on ranks. Its options are in
`linop.tools.cli`, its tables in `linop.tools.reporting` and `linop.tools.parallel_checking`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import typer
from rich.progress import Progress

from linop import backends
from linop.backends import Backend
from linop.errors import ArgumentError
from linop.testing import verify_command
from linop.testing.parallel.check import check_parallel
from linop.testing.parallel.findings import ParallelReport
from linop.testing.parallel.mpi import check_mpi
from linop.testing.parallel.mpi.report import PairReport
from linop.testing.verify_command import Case, Result, verified, verified_by_ranks
from linop.tools import parallel_checking, terminal
from linop.tools.samples import samples

console = terminal.console()


def verify_parallel(
    program: str,
    by_mpi: bool,
    workers: int | None,
    dtype: str,
    seconds: float,
    json: Path | None,
    junit: Path | None,
) -> NoReturn:
    check: Callable[..., ParallelReport | PairReport | None] = (
        check_mpi if by_mpi else check_parallel
    )
    try:
        report = check(program, workers=workers, dtype=dtype, seconds=seconds)
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from None
    if report is None:  # rank 0 has it
        raise typer.Exit
    parallel_checking.show(report, console)
    parallel_checking.write(report, json, junit)
    raise typer.Exit(0 if report else 1)


def verified_here(
    target: str | None, names: list[str], workers: int, seed: int, examples: int
) -> list[Result]:
    """Run all checks from this process, on MPI jobs that it starts where the backend needs one."""
    every = cases(target, workers)
    todo = [
        (case, on, checked)
        for case in every
        for on in names
        for checked in case.properties(matrix=on == names[0] and on not in backends.RANKS)
    ]
    results = []
    with Progress(console=console, transient=True) as progress:
        for case, on, checked in progress.track(todo, description="checking"):
            if on in backends.RANKS:
                found = verified_by_ranks(case, target, on, workers, checked, seed, examples)
            else:
                found = verified(case, on, checked, seed, examples)
            results.append(found)
    return results


def verified_by_rank(
    target: str | None, workers: int, seed: int, examples: int, backend: Backend
) -> list[Result]:
    """Run all checks but that of matrices on this rank. Collective; the results are the same on
    every rank, except for the seconds."""
    return [
        verified(case, backend, checked, seed, examples)
        for case in cases(target, workers)
        for checked in case.properties(matrix=False)
    ]


def cases(target: str | None, workers: int) -> list[Case]:
    if target is None:
        return [Case(name, op) for name, op in samples(workers)]
    try:
        return verify_command.cases(target, workers)
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from None
