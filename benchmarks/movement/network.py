"""Fit of `linop.planning.Network` to measured runs here; and the error of its predictions for
runs that are held out of the fit.

    python benchmarks/movement/network.py [--ranks 2] [--seconds 0.2]

It starts the MPI job itself, and prints the fit, which can be pasted into a program, and a table of
predicted beside measured times, in Markdown. Where ranks run on several machines, the link between
machines is fitted as well.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import scipy.optimize
import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout is measured, whatever is installed

import linop  # noqa: E402
from benchmarks.harness.jobs import rows as rows_of  # noqa: E402
from benchmarks.harness.report import markdown  # noqa: E402
from linop import COPIES, LinearOperator, Partition, TensorSpace  # noqa: E402
from linop.planning import Link, Network, Placement  # noqa: E402

Make = Callable[[int, int], LinearOperator]
"""Builds an operator for a number of workers, and of float32 elements a worker."""
ELEMENTS = (2, 256, 4096, 65536, 1 << 20)
TIMES = "measured µs", "predicted µs", "predicted / measured"
TITLES = "operator", "bytes a worker", *TIMES, ""


def line(n: int, workers: int) -> TensorSpace:
    """Blocks of n elements on a line of workers."""
    return TensorSpace((n * workers,), Partition((workers,)), np.float32)


def copies(n: int, workers: int) -> TensorSpace:
    """A copy of n elements on every worker."""
    return TensorSpace((n,), Partition((workers,)), np.float32, axes=[COPIES])


def rows(n: int, workers: int) -> TensorSpace:
    """A matrix in blocks of rows, about n elements each."""
    side = max(int(n**0.5) // workers, 1) * workers
    return TensorSpace((side * workers, side), Partition((workers, 1)), np.float32)


FITTED: dict[str, Make] = {
    "shift": lambda p, n: linop.shift(line(n, p), 1),
    "all-reduce": lambda p, n: linop.all_reduce(copies(n, p)),
    "all-gather": lambda p, n: linop.all_gather(line(n, p)),
}
HELD_OUT: dict[str, Make] = {
    "broadcast": lambda p, n: linop.sum_reduce(copies(n, p), Partition((1,))).H,
    "sum-reduce": lambda p, n: linop.sum_reduce(copies(n, p), Partition((1,))),
    "repartition": lambda p, n: linop.repartition(rows(n, p), Partition((1, p))),
    "halo 2-D": lambda p, n: linop.halo_exchange(rows(n, p), 3, padding=1),
    "halo 2-D, adjoint": lambda p, n: linop.halo_exchange(rows(n, p), 3, padding=1).H,
}


def main(
    ranks: Annotated[int, typer.Option(min=2, help="how many")] = 2,
    seconds: Annotated[float, typer.Option(help="for each operator and size")] = 0.2,
) -> None:
    """Measure, fit, compare."""
    machines, *found = rows_of(ranks, measure, seconds)
    placement = Placement(machines)
    fitted = [(FITTED[name](ranks, n), t) for name, n, t in found if name in FITTED]
    network = fit(fitted, placement)
    where = f", {len(placement.names)} machines" if placement.spans(range(ranks)) else ""
    print(f"{found_machine()}{where}\n\n    {network}\n")
    errors, table = [], []
    for name, n, t in found:
        op = (FITTED.get(name) or HELD_OUT[name])(ranks, n)
        predicted = linop.simulate(op, network, placement).time
        errors += [abs(np.log(predicted / t))] if name in HELD_OUT else []
        note = "" if name in HELD_OUT else "fitted"
        times = f"{t * 1e6:.1f}", f"{predicted * 1e6:.1f}", f"{predicted / t:.2f}"
        table.append([name, 4 * n, *times, note])
    print(markdown(TITLES, table))
    typical, worst = (float(np.exp(f(errors))) for f in (np.median, np.max))
    print(f"Of those not fitted: off by a factor of {typical:.2f} (median), {worst:.2f} (most).")


def measure(comm: Any, seconds: float) -> Iterator[Sequence[Any]]:
    """Program of a rank: the machine of each rank, then rows of operator, elements, and median
    seconds of the slowest rank."""
    from benchmarks.harness.measure import interleaved

    backend: Any = linop.backends.get("mpi")
    yield backend.machines
    for name, make in (FITTED | HELD_OUT).items():
        for n in ELEMENTS:
            with make(backend.workers or 1, n).compile(backend) as plan:
                vector = plan.domain.integers(1)
                held = [vector[r.name] for r in plan.domain.on(backend.worker or 0)]
                x: Any = held[0] if held else None
                times = interleaved(comm, {"run": lambda p=plan, x=x: p(x)}, seconds).medians
                yield name, n, times["run"] * 1e-6


def fit(measured: list[tuple[LinearOperator, float]], placement: Placement) -> Network:
    """The network whose predictions are nearest to the measured times, in seconds: robust least
    squares (soft L1) of the logarithms. A link between machines is fitted if there are several."""
    times = np.log([t for _, t in measured])

    def network(times: Any) -> Network:
        inside, between = times.tolist()[:4], times.tolist()[4:]
        return Network(*inside, between=Link(*between) if between else None)

    def misses(logarithms: Any) -> Any:
        found = network(np.exp(logarithms))
        predicted = [linop.simulate(op, found, placement).time for op, _ in measured]
        return np.log(predicted) - times

    several = placement.spans(range(len(placement)))
    guess = np.log([5e-6, 1e-10, 1e-10, 1e-10, *([3e-5, 1e-9] if several else [])])
    found = scipy.optimize.least_squares(misses, guess, loss="soft_l1", diff_step=1e-3)
    return network(np.array([float(f"{number:.2g}") for number in np.exp(found.x)]))


def found_machine() -> str:
    """Cores, MPI library and Python version, in a line."""
    import platform

    from mpi4py import MPI

    library = MPI.Get_library_version().split(",")[0].split("\n")[0].strip("\0 ")
    return f"{os.cpu_count()} cores, {library}, Python {platform.python_version()}"


if __name__ == "__main__":
    typer.run(main)
