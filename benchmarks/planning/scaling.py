"""Time that one worker of many takes to bind an operator; and time to simulate all workers.

    python benchmarks/planning/scaling.py [--repeats N] [--largest SIDE]

prints minimum, median and maximum seconds of each, in Markdown. Binding is a worker's work before
its first message: spaces, operator, digest, workers, plan; then the same for the adjoint, derived
from the operator.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import typer

import linop
from linop import COPIES, LinearOperator, Partition, TensorSpace
from linop.planning.lowering import lower, workers_of

Make = Callable[[int], LinearOperator]


def halo(side: int) -> LinearOperator:
    """Halo exchange of width 1 around blocks of 8 × 8."""
    X = TensorSpace((8 * side, 8 * side), Partition((side, side)))
    return linop.halo_exchange(X, 3, padding=1)


def grid_broadcast(side: int) -> LinearOperator:
    """Broadcast from the first row of a grid to all rows, in blocks of 8 × 8."""
    X = TensorSpace((8, 8 * side), Partition((1, side)))
    return linop.broadcast(X, Partition((side, side)))


def repartition(side: int) -> LinearOperator:
    """Repartition from blocks on a grid to rows."""
    X = TensorSpace((4 * side * side, 8 * side), Partition((side, side)))
    return linop.repartition(X, Partition((side * side, 1)))


def all_reduce(side: int) -> LinearOperator:
    """All-reduce of 64 elements over all workers."""
    return linop.all_reduce(TensorSpace((64,), Partition((side * side,)), axes=[COPIES]))


CASES: dict[str, Make] = {
    "halo exchange": halo,
    "grid broadcast": grid_broadcast,
    "repartition": repartition,
    "all-reduce": all_reduce,
}
SIDES = (4, 8, 16, 32, 64, 128)
SIMULATED = (10, 32, 100)


def bound(op: LinearOperator, worker: int) -> None:
    """Bind on one worker: digest, workers and plan, as compiling does."""
    assert op.stages.digest
    assert worker in workers_of(op.stages)
    lower(op.stages, worker)


def seconds_of(case: Callable[[], object]) -> float:
    """Wall-clock seconds of a call."""
    begun = time.perf_counter()
    case()
    return time.perf_counter() - begun


def bind(make: Make, side: int, repeats: int) -> list[list[float]]:
    """Seconds of binding on a worker in the middle of the grid, and of binding the adjoint then:
    two lists of `repeats` samples."""
    worker = side * side // 2 + side // 2
    runs = [_bind_once(make, side, worker) for _ in range(repeats)]
    return [list(times) for times in zip(*runs, strict=True)]


def _bind_once(make: Make, side: int, worker: int) -> tuple[float, float]:
    begun = time.perf_counter()
    op = make(side)
    bound(op, worker)
    forward = time.perf_counter() - begun
    return forward, seconds_of(lambda: bound(op.H, worker))


def row(*cells: str, times: list[list[float]]) -> str:
    """A row of the table: cells, then minimum, median and maximum of each list of seconds."""
    numbers = [f(t) for t in times for f in (min, statistics.median, max)]
    return f"| {' | '.join([*cells, *(f'{n:.4f}' for n in numbers)])} |"


def main(
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    largest: Annotated[int, typer.Option(help="side of the largest grid")] = SIDES[-1],
) -> None:
    """Print the tables."""
    print("| bind on one worker | workers | min s | median s | max s | adjoint min s", end="")
    print(" | adjoint median s | adjoint max s |\n" + "| --- " * 8 + "|")
    for name, make in CASES.items():
        for side in (s for s in SIDES if s <= largest):
            print(row(name, str(side * side), times=bind(make, side, repeats)), flush=True)
    print("\n| simulate all workers | workers | min s | median s | max s |\n" + "| --- " * 5 + "|")
    for name, make in CASES.items():
        for side in (s for s in SIMULATED if s <= largest):
            times = [
                seconds_of(lambda m=make, s=side: linop.simulate(m(s))) for _ in range(repeats)
            ]
            print(row(name, str(side * side), times=[times]), flush=True)


if __name__ == "__main__":
    typer.run(main)
