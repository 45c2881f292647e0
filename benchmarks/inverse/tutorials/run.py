"""PyLops-MPI's tutorials beside the same programs in linop (`examples/inverse`), on two ranks.

    pip install pylops-mpi pyproximal numba
    python benchmarks/inverse/tutorials/run.py [--only WORD] [--rounds 5] [--full] [--coarse 2]

prints two tables in Markdown: milliseconds an iteration; lines of both programs and the floor, the
calls of PyLops' local operators that an iteration makes, on arrays of NumPy alone. Set-up is left
out: a time is the difference of two runs, of n and of 2 n iterations, each the least of interleaved
rounds. Beside the time of the clock is that of the processor in the program, without the system's,
which depends less on what else runs on the machine. Errors are ‖x - m‖ / ‖m‖ of both after 2 n
iterations, with --full after those of the tutorial. PyLops-MPI's programs are those of its wheel
(``tutorials/``), without pictures.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from benchmarks.harness.jobs import ROOT, markdown_lines, rows
from benchmarks.inverse.tutorials.programs import Program

TIMES = (
    *("tutorial", "form", "ms an iteration: theirs", "linop", "ratio"),
    *("processor ms: theirs", "linop", "ratio"),
)
FLOORS = (
    *("tutorial", "form", "lines: theirs", "linop", "floor, ms", "linop's of it"),
    *("processor's floor", "linop's of it", "error: theirs", "linop"),
)
TABLES = (TIMES, (0, 1, 4, 5, 6, 9, 10, 11)), (FLOORS, (0, 1, 2, 3, 7, 8, 12, 13, 14, 15))
"""Headers, and the cells of `compared` that are below them: together they are wider than a page."""


Given = tuple[dict[str, Any], dict[str, Any]]
"""Values of names in their program, and in ours."""


@dataclass(frozen=True)
class Form:
    """A call of a solver, in both programs.

    Attributes:
        theirs, ours: names that the result is assigned to.
        n: iterations of the shorter run.
        whole: those of the tutorial.
        anew: statement of their program before every run, where an object has kept what the run
            before it found.
    """

    name: str
    theirs: str
    ours: str
    n: int
    whole: int
    anew: str = ""


@dataclass(frozen=True)
class Tutorial:
    """A tutorial of PyLops-MPI's, and an example of linop's.

    Attributes:
        truth: expression for this rank's part of the model, in their program.
        given: values of names in both programs; of the folder of the tutorials, and `coarse`.
        floor: whose calls of local operators are the floor.
    """

    name: str
    ours: str
    truth: str
    forms: Sequence[Form]
    given: Callable[[Path, int], Given]
    floor: str = "theirs"


def _impedance(folder: Path, coarse: int) -> Given:
    """The model of the wheel, every third trace of it; or, by `coarse`, fewer."""
    with np.load(folder.parent / "testdata" / "avo" / "poststack_model.npz") as data:
        m, z = np.log(data["model"])[:, :: 3 * coarse], data["z"]
    ny = max(20 // coarse, 16)
    return {"m": m, "x": np.arange(m.shape[1]), "z": z, "ny_i": ny}, {"model": m.T, "ny": ny}


TUTORIALS = [
    Tutorial(
        "poststack",
        "poststack",
        "m3d_i",
        [
            Form("CGLS", "minv3d_iter_dist", "plain", 4, 100),
            Form("normal equations", "minv3d_ne_dist", "normal", 4, 100),
            Form("regularized", "minv3d_reg_dist", "stacked", 4, 100),
            Form("total variation, ADMM", "minv3d_tv_dist", "split", 1, 40),
            Form(
                "total variation, primal-dual",
                "minv3d_tv1_dist",
                "dual",
                4,
                40,
                "l2d.x0 = mback3d_dist.copy()",
            ),
        ],
        _impedance,
    ),
    Tutorial(
        "reflectivity",
        "reflectivity",
        "r_local",
        [
            Form("FISTA", "rfista3d_dist", "found", 15, 200),
            Form("proximal gradient", "rpg3d_dist", "found", 15, 200),
        ],
        _impedance,
    ),
    Tutorial(
        "lsm",
        "migration",
        "refl",
        [Form("CGLS", "minv_dist", "found", 30, 100)],
        lambda *_: (
            {},
            {"nx": 81, "nz": 60, "nr": 11, "ns": 10, "nt": 651, "engine": "numba"},
        ),
    ),
    Tutorial(
        "mdd",
        "mdd",
        "mrefl",
        [Form("CGLS", "minv", "found", 5, 50)],
        lambda *_: ({}, {"nx": 121, "ny": 201, "nt": 800, "nf": 400, "first": 0.2}),
        "ours",
    ),
]


class Calls:
    """The calls of PyLops' operators that are not inside another one."""

    def __init__(self) -> None:
        import pylops

        self.found: list[tuple[Any, str]] = []
        self._depth, self._on = 0, False
        for name in ("matvec", "rmatvec"):
            self._watch(pylops.LinearOperator, name)

    def _watch(self, kind: Any, name: str) -> None:
        function = getattr(kind, name)

        def watched(op: Any, x: Any) -> Any:
            if self._on and not self._depth:
                self.found.append((op, name))
            self._depth += 1
            try:
                return function(op, x)
            finally:
                self._depth -= 1

        setattr(kind, name, watched)

    def during(self, run: Callable[[], Any]) -> list[tuple[Any, str]]:
        self.found, self._on = [], True
        try:
            run()
        finally:
            self._on = False
        return self.found


def more(many: Sequence[tuple[Any, str]], few: Sequence[tuple[Any, str]]) -> list[tuple[Any, str]]:
    """The calls of a longer run that a shorter one does not make."""
    left = [(id(op), name) for op, name in few]
    found = []
    for op, name in many:
        if (id(op), name) in left:
            left.remove((id(op), name))
        else:
            found.append((op, name))
    return found


def replay(calls: Sequence[tuple[Any, str]]) -> Callable[[], None]:
    """The calls, on arrays that exist."""
    sizes = {(op.shape[name == "matvec"], np.dtype(op.dtype)) for op, name in calls}
    rng = np.random.default_rng(0)
    arrays = {(n, dtype): rng.standard_normal(n).astype(dtype) for n, dtype in sizes}
    bound = [
        (getattr(op, name), arrays[op.shape[name == "matvec"], np.dtype(op.dtype)])
        for op, name in calls
    ]

    def run() -> None:
        for function, x in bound:
            function(x)

    return run


def compared(comm: Any, only: str, rounds: int, full: bool, coarse: int) -> Iterator[list[str]]:
    """Rows of the table. Collective."""
    warnings.simplefilter("ignore")
    import matplotlib

    matplotlib.use("agg")
    import pylops_mpi

    import linop

    folder = Path(pylops_mpi.__file__).parents[1] / "tutorials"
    backend = linop.backends.get("mpi", comm=comm)
    calls = Calls()
    for tutorial in TUTORIALS:
        forms = [f for f in tutorial.forms if only in f"{tutorial.name} {f.name}"]
        if not forms:
            continue
        both = {
            "theirs": Program(folder / f"{tutorial.name}.py", [f.theirs for f in tutorial.forms]),
            "linop": Program(
                ROOT / "examples" / "inverse" / f"{tutorial.ours}.py",
                [f.ours for f in tutorial.forms],
                "main",
            ),
        }
        os.chdir(folder)
        with quiet():
            theirs, ours = tutorial.given(folder, coarse)
            both["theirs"].prepare(**theirs)
            both["linop"].prepare(backend=backend, **ours)
        for form in forms:
            yield _row(comm, tutorial, form, both, calls, rounds, full)


def _row(
    comm: Any,
    tutorial: Tutorial,
    form: Form,
    both: dict[str, Program],
    calls: Calls,
    rounds: int,
    full: bool,
) -> list[str]:
    def solver(side: str, n: int) -> Callable[[], Any]:
        name = form.theirs if side == "theirs" else form.ours

        return lambda: both[side].solve(name, niter=n, maxiter=n, show=False)

    made, space = {}, both["theirs"].namespace
    watched = "theirs" if tutorial.floor == "theirs" else "linop"
    few, many = (
        calls.during(lambda k=k: (exec(form.anew, space), solver(watched, k * form.n)()))
        for k in (1, 2)
    )
    floor = replay(more(many, few))
    sides: dict[str, Callable[[], Any]] = {"floor": floor}
    for side in both:
        sides |= {f"{side} {k}": solver(side, k * form.n) for k in (1, 2)}
    times: dict[str, list[Any]] = {side: [] for side in sides}
    with quiet():
        for _ in range(rounds):
            for side, run in sides.items():
                exec(form.anew, space)
                comm.Barrier()
                begun = _clocks()
                made[side] = run()
                times[side].append(np.max(comm.allgather(_clocks() - begun), axis=0))
        if full:
            exec(form.anew, space)
            made |= {f"{side} 2": solver(side, form.whole)() for side in both}
    least = {side: 1e3 * np.min(taken, axis=0) / form.n for side, taken in times.items()}
    of = {side: least[f"{side} 2"] - least[f"{side} 1"] for side in both}
    truth = np.asarray(eval(tutorial.truth, both["theirs"].namespace)).ravel()
    errors = [_error(comm, made[f"{side} 2"], truth) for side in both]
    cells = [
        cell
        for theirs, ours, floor in zip(of["theirs"], of["linop"], least["floor"], strict=True)
        for cell in (
            *(f"{theirs:.1f}", f"{ours:.1f}", f"{ours / theirs:.2f}"),
            *(f"{floor:.1f}", f"{ours / floor:.2f}"),
        )
    ]
    return [
        *(tutorial.name, form.name, *(str(program.lines()) for program in both.values())),
        *cells,
        *(f"{error:.4f}" for error in errors),
    ]


def _clocks() -> Any:
    """Seconds of the clock, and of the processor in this program."""
    return np.array([time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime])


def _error(comm: Any, x: Any, truth: Any) -> float:
    """‖x - m‖ / ‖m‖; of parts of ranks, or of copies that all have."""
    array = x.local_array if hasattr(x, "local_array") else next(iter(x.arrays.values()))
    array = np.asarray(array).ravel()
    squares = np.array([np.linalg.norm(array - truth) ** 2, np.linalg.norm(truth) ** 2])
    gap, whole = comm.allreduce(squares)
    return float(np.sqrt(gap / whole))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        yield


def main(
    only: Annotated[str, typer.Option(help="Part of a tutorial's name and a form's.")] = "",
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    full: Annotated[bool, typer.Option(help="Errors after the tutorial's iterations.")] = False,
    coarse: Annotated[int, typer.Option(help="2: fewer traces of the post-stack model.")] = 1,
    ranks: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Print the tables, and where they are from."""
    found = list(rows(ranks, compared, only, rounds, full, coarse))
    for header, columns in TABLES:
        print(*markdown_lines(header, [[row[k] for k in columns] for row in found]), "", sep="\n")
    from importlib.metadata import version

    said = ", ".join(f"{name} {version(name)}" for name in ("pylops-mpi", "pylops", "numpy"))
    print(
        f"{ranks} ranks, {os.cpu_count()} cores ({platform.machine()}), Python "
        f"{platform.python_version()}, {said}, {date.today()}"
    )


if __name__ == "__main__":
    typer.run(main)
