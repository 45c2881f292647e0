"""The command line: ``linop doctor``, ``verify``, ``show``, ``simulate``, ``explain`` and ``demo``.
Options, tables and exit status are here; the work of a command is in a module of its own."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

import linop
from linop import LinearOperator, backends
from linop.backends import in_mpi_job
from linop.backends.mpi import mpirun
from linop.errors import ArgumentError, LinopError, MissingExtraError
from linop.operators.algebra import expanded
from linop.planning.lowering import workers_of
from linop.planning.placement import Placement
from linop.planning.prediction.cost import Traffic
from linop.planning.prediction.traffic import traffic_matrix
from linop.schedules import GENERATORS
from linop.testing.verify_command import Result
from linop.tools import (
    doctor,
    explaining,
    mpi_links,
    reporting,
    schedule_showing,
    showing,
    slots,
    terminal,
    verifying,
)

app = typer.Typer(
    help="Linear-operator algebra for data movement.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
console = terminal.console()
_MATRIX = 16
"""Largest number of workers for which `show` prints the traffic matrix."""

Target = Annotated[
    str | None,
    typer.Argument(
        metavar="MODULE:OPERATOR",
        help="an operator, or a function that returns one (given the number of workers if it takes "
        "an argument called workers)",
    ),
]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"linop {linop.__version__}")
        raise typer.Exit


@app.callback()
def linop_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="print the version, and exit", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    del version


@app.command("doctor", short_help="Report what is installed, and what each missing extra gives.")
def doctor_command(
    mpi: Annotated[
        bool,
        typer.Option(
            "--mpi",
            help="measure MPI's latency and bandwidth between the ranks of this job (mpiexec -n 4 "
            "linop doctor --mpi), or between two ranks here; look at their binding, and say how "
            "many slots for ranks there are",
        ),
    ] = False,
) -> None:
    """Report which packages are installed, and what each missing extra would enable."""
    if mpi:
        _mpi_links()
        return
    table = Table("part", "found", "what it gives")
    for component in doctor.examine():
        found = Text(component.found, style="green" if component.present else "yellow")
        table.add_row(component.name, found, component.purpose)
    console.print(table)
    _print_as_it_is("In a clone of linop, write '.[extra]' for 'linop-algebra[extra]'.")


def _mpi_links() -> None:
    """Print the links of this job, or of a job of two ranks."""
    if not in_mpi_job():
        command = [sys.executable, "-m", "linop", "doctor", "--mpi"]
        done = mpirun.mpiexec(2, command, timeout=60, env={"COLUMNS": str(console.width)})
        sys.stdout.write(done.stdout)
        sys.stderr.write(done.stderr)
        _print_as_it_is(slots.report())
        raise typer.Exit(done.returncode)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    ranks = mpi_links.facts(comm)
    table = Table("ranks", "machines", "latency µs", "bandwidth GB/s")
    for link in mpi_links.links(comm, ranks):
        one, other = link.hosts
        where = one if one == other else f"{one}, {other}"
        numbers = f"{link.latency * 1e6:.3g}", f"{link.bandwidth * 1e-9:.3g}"
        table.add_row(", ".join(map(str, link.ranks)), where, *numbers)
    if comm.rank == 0:
        console.print(table)
        for fault in mpi_links.faults(ranks):
            console.print(Text(fault, style="yellow"))
    comm.Free()


@app.command(short_help="Print an operator, its adjoint and what they send; or a schedule.")
def show(
    target: Target = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="print the workers' plans, and the predicted time, too")
    ] = False,
    passes: Annotated[
        bool,
        typer.Option(
            "--passes", help="print plans before and after each pass, and the instructions"
        ),
    ] = False,
    worker: Annotated[
        int | None, typer.Option(min=0, help="with --plan and --passes: of this worker alone")
    ] = None,
    traffic: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="draw who sends how much to whom")
    ] = None,
    ranks_per_machine: Annotated[
        int | None, typer.Option(min=1, help="place this many consecutive workers on each machine")
    ] = None,
    machines: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="place workers as MPI's machine file does, in its order"),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help=f"a pipeline's schedule, no operator: {', '.join(GENERATORS)}"
        ),
    ] = None,
    stages: Annotated[
        int | None, typer.Option(min=1, help="with --schedule: of the pipeline, all chunks counted")
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(min=1, help="with --schedule: of a batch")
    ] = None,
    chunks: Annotated[
        int | None, typer.Option(min=1, help="with --schedule: stages of each worker")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="a schedule of your own, in torch's form"),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="draw the operator, or the schedule")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="write its predicted times, as a trace has them"),
    ] = None,
) -> None:
    """Print an operator and its adjoint in mathematical notation, and the messages and bytes of
    every worker; for up to 16 workers, also bytes between each two of them. With workers placed on
    machines, also bytes between machines, and whether another order of the workers saves any.

    With --schedule or --file, print and draw the schedule of a pipeline: its table, its checks, and
    its predicted time, bubble and memory."""
    if schedule is not None or file is not None:
        if (
            target
            or plan
            or passes
            or worker is not None
            or traffic
            or ranks_per_machine
            or machines
        ):
            raise typer.BadParameter("an operator and its options do not go with a schedule")
        try:
            chosen = schedule_showing.chosen(schedule, stages, micro_batches, chunks, file)
        except ArgumentError as error:
            raise typer.BadParameter(str(error)) from None
        schedule_showing.show(chosen, console, svg, trace)
        return
    if stages or micro_batches or chunks:
        raise typer.BadParameter("options of a schedule: give --schedule or --file, too")
    if target is None:
        raise typer.BadParameter("give MODULE:OPERATOR, --schedule or --file")
    if ranks_per_machine and machines:
        raise typer.BadParameter("give --ranks-per-machine or --machines, not both")
    for name, op in _operators(target, workers=4):
        placement = Placement.read(machines) if machines else None
        placement = showing.in_blocks(op, ranks_per_machine) or placement
        console.print(Text.assemble((name, "bold"), f": {op.domain} -> {op.codomain}"))
        table = Table("", "operator", "adjoint", title=None)
        back = op.H
        table.add_row("named", str(op), str(back))
        table.add_row("expanded", str(expanded(op)), str(expanded(back)))
        table.add_row("simplified", str(op.simplify()), str(back.simplify()))
        costs = op.cost(placement=placement), back.cost(placement=placement)
        table.add_row("messages", *(str(c.messages) for c in costs))
        table.add_row("bytes", *(str(c.bytes) for c in costs))
        if placement is not None:
            between = (str(c.bytes_between_machines) for c in costs)
            table.add_row("bytes between machines", *between)
        console.print(table, highlight=False, markup=False)
        every = Table("worker", "", "sends", "bytes", "receives", "bytes")
        for number in sorted({w for c in costs for w in c.workers}):
            for side, c in zip(("operator", "adjoint"), costs, strict=True):
                numbers = dataclasses.astuple(c.workers.get(number, Traffic()))
                every.add_row(str(number), side, *map(str, numbers))
        console.print(every)
        matrix = traffic_matrix(op, placement)
        if 1 < len(matrix.workers) <= _MATRIX:
            _print_as_it_is(matrix)
        if placement is not None:
            _print_as_it_is(matrix.by_machine(placement))
            _print_as_it_is(showing.another_order(op, placement))
        for side, which in (("operator", op), ("adjoint", back)):
            workers = _chosen(which, worker) if plan or passes else ()
            if plan:
                console.print(Text(f"\n{name}, {side}", "bold"))
                for text in showing.plans(which, workers, placement):
                    _print_as_it_is(text)
            if passes:
                for step, text in showing.passes(which, workers, placement):
                    console.print(Text(f"\n{name}, {side}, {step}", "bold"))
                    _print_as_it_is(text)
        if traffic is not None:
            _draw_traffic(traffic, op)
        for path in showing.written(op, svg, trace, placement):
            _print_as_it_is(f"written: {path}")


def _chosen(op: LinearOperator, worker: int | None) -> Sequence[int]:
    """The workers whose plans are printed: all, or the given one.

    Raises:
        typer.BadParameter: the operator has no such worker.
    """
    workers = workers_of(op.stages)
    if worker is not None and worker not in workers:
        raise typer.BadParameter(f"{worker}; there are {_few(workers)}", param_hint="--worker")
    return workers if worker is None else (worker,)


def _draw_traffic(path: Path, op: LinearOperator) -> None:
    """Draw the traffic matrix to a file.

    Raises:
        MissingExtraError: Matplotlib is not installed.
        typer.BadParameter: the file cannot be written, or is of an unknown format.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("show --traffic draws: pip install 'linop-algebra[plot]'")
    from linop.tools import drawing

    try:
        drawing.traffic(path, op)
    except (OSError, ValueError) as error:  # ValueError: an unknown file format
        raise typer.BadParameter(f"{path}: {error}", param_hint="--traffic") from None
    _print_as_it_is(f"picture: {path}")


def _print_as_it_is(what: object) -> None:
    console.print(str(what), markup=False, highlight=False, soft_wrap=True)


def _few(workers: Sequence[int]) -> str:
    shown = ", ".join(map(str, workers[:8]))
    return f"{shown}, … {workers[-1]}" if len(workers) > 8 else shown


@app.command(short_help="Predict messages, bytes and time, without running.")
def simulate(
    target: Target,
    workers: Annotated[
        int | None, typer.Option(min=1, help="of a function that takes their number; else 4")
    ] = None,
    ranks_per_machine: Annotated[
        int | None, typer.Option(min=1, help="place this many consecutive workers on each machine")
    ] = None,
) -> None:
    """Predict messages, bytes and time of an operator and of its adjoint on every worker, without
    running them: in seconds for 100000 workers that only move data."""
    for name, op in _operators(target, workers or 4):
        for side, text in showing.predictions(op, workers, ranks_per_machine):
            console.print(Text(f"{name}, {side}", "bold"))
            _print_as_it_is(text)


@app.command(short_help="Check adjoints of operators, or gradients of a parallel model.")
def verify(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="MODULE[:NAME]",
            help="an operator (linop's, SciPy's, PyLops', a pair of functions), a function that "
            "returns one (given the number of workers if it takes an argument called workers), a "
            "Hypothesis strategy of them, or a module: all of its operators",
        ),
    ] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="which backends; by default reference and threads")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="how many workers; by default 4, or what a program's WORLD says"),
    ] = None,
    torch: Annotated[
        str | None,
        typer.Option(
            metavar="FILE[:NAME]",
            help="a parallel torch program and its sequential twin: compare one step of both on "
            "WORKERS processes, and say what differs and where (see the page on parallel models)",
        ),
    ] = None,
    mpi: Annotated[
        str | None,
        typer.Option(
            metavar="FILE[:NAME]",
            help="the same of a program that communicates by mpi4py; or a pair of functions "
            "forward(x, comm) and adjoint(y, comm)",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="of the numbers of a torch program")] = "float64",
    seconds: Annotated[float, typer.Option(min=1, help="the longest time of a program")] = 120.0,
    examples: Annotated[
        int, typer.Option(min=1, help="random vectors of each check; operators of a strategy")
    ] = 3,
    seed: Annotated[int, typer.Option(min=0, help="of all that is random")] = 0,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write everything that was found")
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE.xml", help="write it as JUnit's XML, for CI")
    ] = None,
) -> None:
    """Check that operators are linear, and that their adjoints are correct: operators of a target,
    or samples of every kind in linop. Or, with --torch, that a parallel program does what its
    sequential twin does. The exit status is 1 if a check failed."""
    chosen = backend or ["reference", "threads"]
    for name in chosen:
        if name not in (known := backends.names()):
            raise typer.BadParameter(f"{name!r}; there are {', '.join(known)}")
    if junit:
        reporting.need_junit()
    programs = {"--torch": torch, "--mpi": mpi}
    given = [f"{name} {one}" for name, one in programs.items() if one is not None]
    if given:
        if target is not None or len(given) > 1:
            raise typer.BadParameter(f"{[target, *given]} given: give one of them")
        program = torch if torch is not None else str(mpi)
        how = workers, dtype, seconds
        verifying.verify_parallel(program, mpi is not None, *how, json, junit)
    workers = workers or 4
    if in_mpi_job():
        results: list[Result] = []
        work = partial(verifying.verified_by_rank, target, workers, seed, examples)
        for name in [name for name in chosen if name in backends.RANKS] or ["mpi"]:
            results += next(filter(None, linop.launch(work, workers, name)), [])
    else:
        results = verifying.verified_here(target, chosen, workers, seed, examples)
    if not in_mpi_job() or linop.backends.current().worker == 0:
        reporting.show(results, console)
        reporting.write(results, json, junit)
    raise typer.Exit(1 if any(result.failed for result in results) else 0)


@app.command(short_help="Say why an error happens, and what to do.")
def explain(
    error: Annotated[str | None, typer.Argument(metavar="CLASS", help="as DeadlockError")] = None,
) -> None:
    """Say why an error of linop happens, and what to do; without a class, list all of them."""
    try:
        shown = explaining.table() if error is None else explaining.explanation(error)
    except ArgumentError as unknown:
        raise typer.BadParameter(f"{unknown} `linop explain` lists all") from None
    console.print(shown, markup=False)


@app.command(short_help="Blur a photograph over four workers, and restore it.")
def demo(
    output: Annotated[Path, typer.Option(help="where to write the picture")] = Path(
        "linop-demo.png"
    ),
) -> None:
    """Blur a photograph over a 2x2 grid of workers, and restore it, in one process, on threads and
    on ranks."""
    from linop.tools import demo as photo_demo
    from linop.tools import drawing

    photo = photo_demo.photograph()
    A = photo_demo.blur(photo.shape, linop.Partition(photo_demo.GRID), photo_demo.gaussian())
    one = photo_demo.blur(photo.shape, linop.Partition((1, 1)), photo_demo.gaussian())
    height, width = photo.shape
    console.print(f"A photograph of {height}×{width} pixels over a {A.X.partition} grid of workers")
    for name, op in (("A", A.op), ("A*", A.op.H), ("H", expanded(A.exchange))):
        console.print(f"  {name:<2} = {op}", highlight=False, markup=False, soft_wrap=True)
    data = photo_demo.degraded(photo)
    answers: dict[str, Any] = {}

    def solved(name: str) -> Any:
        def run() -> tuple[str, bool]:
            if name == "mpi":
                with tempfile.TemporaryDirectory() as folder:
                    answers[name], good = photo_demo.restored_by_mpi(data, Path(folder))
            else:
                answers[name], good = photo_demo.restored_here(name, A, data)
            return _difference(answers[name], answers["one"], good)

        return run

    def solved_by_one() -> tuple[str, bool]:
        answers["one"], good = photo_demo.restored_here("reference", one, data)
        return f"error {_error(answers['one'], photo):.4f}, data {_error(data, photo):.4f}", good

    def solved_by_scipy() -> tuple[str, bool]:
        answers["scipy"] = photo_demo.restored_by_scipy(A, data)
        return _difference(answers["scipy"], answers["one"], True)

    table = Table("what", "backend", "workers", "seconds", "found", "")
    rows = [*photo_demo.proofs(photo.shape)]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("restoring", total=5)
        for what, name, workers, run in (
            ("cgls on one worker", "reference", 1, solved_by_one),
            ("SciPy's lsqr", "to_scipy()", 4, solved_by_scipy),
            ("A* passes; cgls", "reference", 4, solved("reference")),
            ("A* passes; cgls", "threads", 4, solved("threads")),
            ("A* passes; cgls", "mpi", 4, solved("mpi")),
        ):
            rows.append(photo_demo.timed(what, name, workers, run))
            progress.advance(task)
    for row in rows:
        mark = "[green]yes[/green]" if row.good else "[red]NO[/red]"
        seconds = f"{row.seconds:.2f}"
        table.add_row(row.what, row.backend, str(row.workers), seconds, row.found, mark)
    console.print(table)
    drawing.restoration(output, photo, data, answers["mpi"], A)
    console.print(f"picture: {output}")
    raise typer.Exit(0 if all(row.good for row in rows) else 1)


def _difference(answer: Any, other: Any, adjoint_passed: bool) -> tuple[str, bool]:
    """The largest difference from the solution on one worker, as text, and True if it is below 1e-9
    (rounding errors, amplified by the iterations) and the adjoint passed its test."""
    worst = float(abs(answer - other).max())
    return f"differs from one worker's by {worst:.1e}", adjoint_passed and worst < 1e-9


def _error(image: Any, photo: Any) -> float:
    return float(((image - photo) ** 2).mean() ** 0.5)


def _operators(target: str | None, workers: int) -> Iterator[tuple[str, LinearOperator]]:
    """The names and operators of a target, which must be linop's.

    Raises:
        typer.BadParameter: one is not.
    """
    for case in verifying.cases(target, workers):
        if not isinstance(case.what, LinearOperator):
            raise typer.BadParameter(f"{case.name!r} is {type(case.what).__name__}, not linop's")
        yield case.name, case.what


def main() -> None:
    """Run the command line. A `LinopError` prints without its traceback, with exit status 1."""
    terminal.settle_help()
    try:
        app()
    except LinopError as error:
        if in_mpi_job():
            raise
        said = Text.assemble(("error: ", "red"), "\n".join([str(error), *error.__notes__]))
        terminal.console(stderr=True).print(said, soft_wrap=True)
        raise SystemExit(1) from None
