"""Output of ``linop show --schedule``: a schedule's table, checks, times, memory and picture."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from linop.errors import ArgumentError
from linop.schedules import GENERATORS, Schedule, Simulation, check, pictures, simulate
from linop.schedules.costs import USUAL, Number
from linop.schedules.message_flow import data_edges
from linop.text import read_text

_LEAST = 40
"""Fewest characters of a drawn line, on narrow terminals, too."""
_MOST = 4000
"""Most characters of a worker's whole picture: longer ones are drawn to a smaller scale."""


def chosen(
    name: str | None,
    stages: int | None,
    micro_batches: int | None,
    chunks: int | None,
    file: Path | None,
) -> Schedule:
    """The schedule in a file, or the one that a generator makes.

    Raises:
        ArgumentError: both are given or none, there is no such generator, a number is missing, not
            taken or does not fit, or the file cannot be read, is empty, or has a cell that is no
            action.
    """
    numbers = {"--stages": stages, "--micro-batches": micro_batches, "--chunks": chunks}
    if file is not None:
        if name is not None:
            raise ArgumentError("give --schedule or --file, not both")
        if alone := [option for option, number in numbers.items() if number is not None]:
            raise ArgumentError(f"{', '.join(alone)}: leave out, the file has its own")
        return _read(file)
    if name not in GENERATORS:
        raise ArgumentError(f"--schedule {name}: expected one of {', '.join(GENERATORS)}")
    if stages is None or micro_batches is None:
        raise ArgumentError(f"--schedule {name}: give --stages and --micro-batches, too")
    generator = GENERATORS[name]
    if chunks is None:
        return generator(stages, micro_batches)
    if "chunks" not in inspect.signature(generator).parameters:
        raise ArgumentError(f"--chunks: {name} has one stage on each worker; leave it out")
    return generator(stages, micro_batches, chunks=chunks)


def _read(path: Path) -> Schedule:
    try:
        schedule = Schedule.from_csv(read_text(path), path.stem)
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"--file {path}: cannot be read: {error}") from None
    except ArgumentError as error:
        raise ArgumentError(f"--file {path}: {error}") from None
    if not schedule.stages:
        raise ArgumentError(f"--file {path}: no actions; expected a line a worker, as 0F0,0B0,0U")
    return schedule


def show(schedule: Schedule, console: Console, svg: Path | None, trace: Path | None) -> None:
    """Print everything about a schedule, and write its picture and its trace.

    Raises:
        ScheduleError: the schedule is wrong; its table is printed before.
        ArgumentError: a file cannot be written.
    """
    table = Table("worker", "actions")
    for worker, row in enumerate(schedule.workers):
        table.add_row(str(worker), " ".join(map(str, row)))
    console.print(table, highlight=False, markup=False)
    checked = check(schedule, edges=data_edges(schedule))
    for proven in checked.proven:
        console.print(Text("✓ ", "green") + Text(proven))
    if checked.slots:
        slots = ", ".join(f"{a}→{b}: {number}" for (a, b), number in checked.slots.items())
        text = f"slots of edges with which no send waits: {slots}"
        console.print(text, highlight=False, soft_wrap=True)
    simulation = simulate(schedule)
    costs = ", ".join(f"{kind} = {cost}" for kind, cost in USUAL.items() if _has(schedule, kind))
    console.print(f"time {_exact(simulation.time)} ({costs}; messages take none)", highlight=False)
    for convention, share in (
        ("the total", simulation.bubble_of_total),
        ("the ideal", simulation.bubble_of_ideal),
    ):
        text = f"bubble {_exact(share)} of {convention} ({float(share):.1%})"
        console.print(text, highlight=False)
    _memory(simulation, checked.versions, console)
    _draw(simulation, console)
    for path, write in ((svg, simulation.to_svg), (trace, simulation.to_trace)):
        if path is not None:
            write(path)
            console.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)


def _memory(simulation: Simulation, versions: Mapping[int, int], console: Console) -> None:
    table = Table("worker", "stages", "work", "idle", "peak activations", "versions of parameters")
    activations = simulation.peak_activations
    for worker, row in enumerate(simulation.workers):
        own = sorted({timed.action.stage for timed in row})
        numbers = simulation.busy[worker], simulation.idle[worker]
        counts = activations[worker], max((versions[s] for s in own), default=0)
        cells = (_exact(number) for number in (*numbers, *counts))
        table.add_row(str(worker), ", ".join(map(str, own)), *cells)
    console.print(table, highlight=False)


def _draw(simulation: Simulation, console: Console) -> None:
    """A line for each worker, in as many parts as the terminal needs: kind and micro-batch where an
    action begins, dots while the worker is idle."""
    name = len(f"worker {len(simulation.workers) - 1}  ")
    lines = []
    for pieces in pictures.lines(simulation, pictures.fitting(simulation, _MOST)):
        line = Text()
        for text, kind, _ in pieces:
            line.append(text, f"white on {pictures.colour(kind)}" if kind else "dim")
        lines.append(line)
    wide = max(console.width - name, _LEAST)
    for at in range(0, max(map(len, lines), default=0), wide):
        if at:
            console.print()
        for worker, line in enumerate(lines):
            head = Text(f"worker {worker}".ljust(name))
            console.print(head + line[at : at + wide], soft_wrap=True)


def _has(schedule: Schedule, kind: str) -> bool:
    return any(action.kind == kind for row in schedule.workers for action in row)


def _exact(number: Number) -> str:
    return str(number) if isinstance(number, int | Fraction) else f"{number:.6g}"
