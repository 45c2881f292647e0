"""The command line: ``linop doctor``, ``verify``, ``show`` and ``demo``. Options, tables and exit
status are here; the work of a command is in a module of its own."""

from __future__ import annotations

import dataclasses
import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

import linop
from linop import LinearOperator, backends
from linop.backends import Backend, in_mpi_job
from linop.backends.execution.arrays import NUMPY
from linop.errors import ArgumentError, LinopError, MissingExtraError
from linop.operators.algebra import expanded
from linop.planning.collective_selection import Choice, selected
from linop.planning.cost import Traffic
from linop.planning.lowering import lower, workers_of
from linop.planning.pipeline import Options, shown
from linop.planning.plan import Plan
from linop.planning.traffic import traffic_matrix
from linop.testing.verification import Case, Result, cases, verified, verified_by_ranks
from linop.tools import doctor, reporting
from linop.tools.samples import samples

app = typer.Typer(
    help="Linear-operator algebra for data movement.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(emoji=False)
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


@app.command("doctor")
def doctor_command() -> None:
    """Report which packages are installed, and what each missing extra would enable."""
    table = Table("part", "found", "what it gives")
    for component in doctor.examine():
        found = Text(component.found, style="green" if component.present else "yellow")
        table.add_row(component.name, found, component.purpose)
    console.print(table)


@app.command()
def show(
    target: Target,
    plan: Annotated[
        bool, typer.Option("--plan", help="print the workers' plans, and the predicted time, too")
    ] = False,
    passes: Annotated[
        bool, typer.Option("--passes", help="print the workers' plans before and after each pass")
    ] = False,
    worker: Annotated[
        int | None, typer.Option(min=0, help="with --plan and --passes: of this worker alone")
    ] = None,
    traffic: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="draw who sends how much to whom")
    ] = None,
) -> None:
    """Print an operator and its adjoint in mathematical notation, and the messages and bytes of
    every worker; for up to 16 workers, also bytes between each two of them."""
    for name, op in _operators(target, workers=4):
        console.print(Text.assemble((name, "bold"), f": {op.domain} -> {op.codomain}"))
        table = Table("", "operator", "adjoint", title=None)
        back = op.H
        table.add_row("named", str(op), str(back))
        table.add_row("expanded", str(expanded(op)), str(expanded(back)))
        table.add_row("simplified", str(op.simplify()), str(back.simplify()))
        costs = op.cost(), back.cost()
        table.add_row("messages", *(str(c.messages) for c in costs))
        table.add_row("bytes", *(str(c.bytes) for c in costs))
        console.print(table, highlight=False, markup=False)
        sides = ("sends", "bytes", "receives", "bytes")
        every = Table("worker", *sides, *(f"{side}, adjoint" for side in sides))
        for number in sorted({w for c in costs for w in c.workers}):
            both = [c.workers.get(number, Traffic()) for c in costs]
            numbers = (n for t in both for n in dataclasses.astuple(t))
            every.add_row(str(number), *map(str, numbers))
        console.print(every)
        matrix = traffic_matrix(op)
        if 1 < len(matrix.workers) <= _MATRIX:
            _print_as_it_is(matrix)
        for side, which in (("operator", op), ("adjoint", back)):
            if plan:
                _show_plans(f"{name}, {side}", which, worker)
            if passes:
                _show_passes(f"{name}, {side}", which, worker)
        if traffic is not None:
            _draw_traffic(traffic, op)


def _show_plans(name: str, op: LinearOperator, worker: int | None) -> None:
    """Print the plans of all workers, or of one, and their predicted time."""
    workers = _chosen(op, worker)
    console.print(Text(f"\n{name}", "bold"))
    for one in workers:
        _print_as_it_is(lower(op.stages, one).describe())
    _print_as_it_is(f"predicted: {linop.simulate(op)}")


def _show_passes(name: str, op: LinearOperator, worker: int | None) -> None:
    """Print the plans of all workers, or of one, after each step of the pipeline, with collectives
    as they are selected for ranks without shared memory."""
    options = Options(lambda plan: selected(plan, Choice()), NUMPY.small)
    for one in _chosen(op, worker):
        before: Plan | None = None
        for what, plan in shown(op.stages, one, options):
            console.print(Text(f"\n{name}, worker {one}: {what}", "bold"))
            _print_as_it_is("the same" if plan == before else plan.describe())
            before = plan


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


@app.command()
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
    workers: Annotated[int, typer.Option(min=1, help="how many workers")] = 4,
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
    or samples of every kind in linop. The exit status is 1 if a check failed."""
    chosen = backend or ["reference", "threads"]
    for name in chosen:
        if name not in backends.BACKENDS:
            raise typer.BadParameter(f"{name!r}; there are {', '.join(backends.BACKENDS)}")
    if junit:
        reporting.need_junit()
    if in_mpi_job():
        results: list[Result] = []
        work = partial(_verified_by_rank, target, workers, seed, examples)
        for name in [name for name in chosen if name in backends.RANKS] or ["mpi"]:
            results += next(filter(None, linop.launch(work, workers, name)), [])
    else:
        results = _verified_here(target, chosen, workers, seed, examples)
    if not in_mpi_job() or linop.backends.current().worker == 0:
        reporting.show(results, console)
        reporting.write(results, json, junit)
    raise typer.Exit(1 if any(result.failed for result in results) else 0)


def _verified_here(
    target: str | None, names: list[str], workers: int, seed: int, examples: int
) -> list[Result]:
    """Run all checks from this process, on MPI jobs that it starts where the backend needs one."""
    every = _cases(target, workers)
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


def _verified_by_rank(
    target: str | None, workers: int, seed: int, examples: int, backend: Backend
) -> list[Result]:
    """Run all checks but that of matrices on this rank. Collective; the results are the same on
    every rank, except for the seconds."""
    return [
        verified(case, backend, checked, seed, examples)
        for case in _cases(target, workers)
        for checked in case.properties(matrix=False)
    ]


def _cases(target: str | None, workers: int) -> list[Case]:
    if target is None:
        return [Case(name, op) for name, op in samples(workers)]
    try:
        return cases(target, workers)
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from None


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="where to write the picture")] = Path(
        "linop-demo.png"
    ),
) -> None:
    """Blur a photograph over a 2x2 grid of workers, and restore it, on every backend."""
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
    for case in _cases(target, workers):
        if not isinstance(case.what, LinearOperator):
            raise typer.BadParameter(f"{case.name!r} is {type(case.what).__name__}, not linop's")
        yield case.name, case.what


def main() -> None:
    """Run the command line. A `LinopError` prints as one line, with exit status 1."""
    try:
        app()
    except LinopError as error:
        if in_mpi_job():
            raise
        Console(stderr=True).print(Text.assemble(("error: ", "red"), str(error)))
        raise SystemExit(1) from None
