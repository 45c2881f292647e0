"""Overlap of communication with local work: `plan.start(x)`, work, `plan.finish()`.

    python benchmarks/movement/overlap.py [--ranks 2] [--seconds 1.0]

It starts the MPI job itself, and prints a Markdown table. The work is multiplications of small
matrices, as many as take as long as the movement. Overlap is the time saved against one after the
other, as a part of the shorter of the two: 0 where nothing overlaps, 1 where all of it does. Beside
it stands the same by hand: nonblocking messages, work, a wait for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout is measured, whatever is installed

import linop  # noqa: E402
from benchmarks.harness.jobs import show  # noqa: E402
from linop import COPIES, Partition, TensorSpace  # noqa: E402

SIZES = {"16 KiB": 1 << 14, "128 KiB": 1 << 17, "1 MiB": 1 << 20, "16 MiB": 1 << 24}
"""Bytes of a worker's block."""
SIDE = 64
"""Of the matrices of the work."""
TITLES = "movement", "a worker", "movement µs", "work µs", "one after the other", "overlapped"


def main(
    ranks: Annotated[int, typer.Option(min=2, help="how many")] = 2,
    seconds: Annotated[float, typer.Option(help="for each movement and size")] = 1.0,
) -> None:
    """Measure in an MPI job."""
    show(ranks, TITLES, measure, seconds)


def measure(comm: Any, seconds: float) -> Iterator[Sequence[str]]:
    """Program of a rank: rows of the table."""
    from benchmarks.harness.measure import interleaved

    backend: Any = linop.backends.get("mpi")
    for name, size in SIZES.items():
        n = size // 4
        line = TensorSpace((n * comm.size,), Partition((comm.size,)), np.float32)
        copies = TensorSpace((n,), Partition((comm.size,)), np.float32, axes=[COPIES])
        x = np.ones(n, np.float32)
        by_hand = ByHand(comm, x)
        with (
            linop.shift(line, 1, periodic=True).compile(backend) as shift,
            linop.all_reduce(copies).compile(backend) as all_reduce,
        ):
            movements: dict[str, tuple[Callable[[], Any], ...]] = {
                "shift": (partial(shift, x), partial(shift.start, x), shift.finish),
                "shift by hand": (by_hand.run, by_hand.start, by_hand.finish),
                "all-reduce": (
                    partial(all_reduce, x),
                    partial(all_reduce.start, x),
                    all_reduce.finish,
                ),
            }
            for what, (run, start, finish) in movements.items():
                alone = interleaved(comm, {"movement": run}, seconds / 8).medians["movement"]
                work = work_of(comm, alone)

                def apart(run: Any = run, work: Any = work) -> None:
                    run()
                    work()

                def overlapped(start: Any = start, work: Any = work, finish: Any = finish) -> None:
                    start()
                    work()
                    finish()

                sides = {"movement": run, "work": work, "apart": apart, "overlapped": overlapped}
                a, b, c, d = interleaved(comm, sides, seconds).medians.values()
                share = (c - d) / min(a, b)
                times = (f"{t:.0f}" for t in (a, b, c))
                yield what, name, *times, f"{d:.0f}, overlap {share:.2f}"


class ByHand:
    """A shift by one, around, in raw mpi4py."""

    def __init__(self, comm: Any, x: Any) -> None:
        self.comm, self.x, self.y = comm, x, np.empty_like(x)
        self.requests: list[Any] = []

    def start(self) -> None:
        comm = self.comm
        receive = comm.Irecv(self.y, (comm.rank - 1) % comm.size)
        self.requests = [receive, comm.Isend(self.x, (comm.rank + 1) % comm.size)]

    def finish(self) -> Any:
        for request in self.requests:
            request.Wait()
        return self.y

    def run(self) -> Any:
        self.start()
        return self.finish()


def work_of(comm: Any, micro: float) -> Callable[[], None]:
    """Work of about so many microseconds, the same on every rank."""
    from benchmarks.harness.measure import interleaved

    a = np.full((SIDE, SIDE), 0.5, np.float32)
    out = np.empty_like(a)
    one = interleaved(comm, {"one": lambda: np.matmul(a, a, out=out)}, 0.05).medians["one"]
    times = range(max(round(micro / one), 1))

    def work() -> None:
        for _ in times:
            np.matmul(a, a, out=out)

    return work


if __name__ == "__main__":
    typer.run(main)
