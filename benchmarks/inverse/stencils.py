"""Times of stencils beside NumPy's slices by hand with mpi4py's halos.

    python benchmarks/inverse/stencils.py [--side N] [--seconds S]

prints minimum, median and maximum microseconds of a call, in Markdown: blocks of N x N in float64
on one and on two ranks, one above the other. By hand: the block is copied into the middle of a
padded one, rows are exchanged by `Irecv` and `Isend`, and there is a sum of slices for each tap and
a product for each weight, into memory that exists; no product for ones. The adjoint by hand goes
through the same taps backwards. Results are compared before they are timed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.harness.jobs import rows
from benchmarks.harness.report import markdown_lines

HEADER = ("stencil", "ranks", "direction", "by hand", "linop", "ratio")
FIVE = {(0, 0): -4.0, (1, 0): 1.0, (-1, 0): 1.0, (0, 1): 1.0, (0, -1): 1.0}
NINE = {
    (a, b): -20 / 6 if a == b == 0 else 4 / 6 if a * b == 0 else 1 / 6
    for a in (-1, 0, 1)
    for b in (-1, 0, 1)
}
STAR = [(0, 0), *((k, 0) for k in range(-4, 5) if k), *((0, k) for k in range(-4, 5) if k)]


class ByHand:
    """A stencil on this rank's rows: NumPy and mpi4py.

    Args:
        weights: by offset; numbers, or arrays of the block.
    """

    def __init__(self, comm: Any, side: int, weights: dict[tuple[int, int], Any]) -> None:
        self.comm, self.side = comm, side
        self.width = r = max(max(map(abs, offset)) for offset in weights)
        self.padded = np.zeros((side + 2 * r, side + 2 * r))
        self.y, self.scratch = np.empty((side, side)), np.empty((side, side))
        self.groups = grouped(weights)
        self.up = comm.rank - 1 if comm.rank else None
        self.down = comm.rank + 1 if comm.rank + 1 < comm.size else None
        self.inside = slice(r, r + side)
        self.views = {at: self.padded[self._from(at[0]), self._from(at[1])] for at in weights}
        self.bulk = self.padded[self.inside, self.inside]

    def _from(self, k: int) -> slice:
        return slice(self.width + k, self.width + k + self.side)

    def forward(self, x: Any) -> Any:
        np.copyto(self.bulk, x)
        self._exchange()
        y, scratch, first = self.y, self.scratch, True
        for weight, offsets in self.groups:
            if np.ndim(weight) == 0 and weight == 1 and not first:
                for offset in offsets:
                    np.add(y, self.views[offset], out=y)
                continue
            into = y if first else scratch
            total = self.views[offsets[0]]
            for offset in offsets[1:]:
                total = np.add(total, self.views[offset], out=into)
            np.multiply(total, weight, out=into)
            if not first:
                np.add(y, scratch, out=y)
            first = False
        return y

    def adjoint(self, y: Any) -> Any:
        self.padded.fill(0)
        for weight, offsets in self.groups:
            given = y if np.ndim(weight) == 0 and weight == 1 else self.scratch
            if given is self.scratch:
                np.multiply(y, weight, out=given)
            for offset in offsets:
                view = self.views[offset]
                np.add(view, given, out=view)
        self._fold()
        np.copyto(self.y, self.bulk)
        return self.y

    def _exchange(self) -> None:
        r, n, rows = self.width, self.side, self.padded
        pairs = [(self.up, rows[r : 2 * r], rows[:r]), (self.down, rows[n : n + r], rows[n + r :])]
        self._swap([(peer, out, into) for peer, out, into in pairs if peer is not None])

    def _fold(self) -> None:
        r, n, rows = self.width, self.side, self.padded
        pairs = [(self.up, rows[:r], rows[r : 2 * r]), (self.down, rows[n + r :], rows[n : n + r])]
        found = [(peer, out, np.empty_like(out), to) for peer, out, to in pairs if peer is not None]
        self._swap([(peer, out, into) for peer, out, into, _ in found])
        for _, _, into, to in found:
            np.add(to, into, out=to)

    def _swap(self, messages: list[tuple[int, Any, Any]]) -> None:
        requests = [self.comm.Irecv(into, peer) for peer, _, into in messages]
        requests += [self.comm.Isend(out, peer) for peer, out, _ in messages]
        for request in requests:
            request.Wait()


def grouped(weights: dict[tuple[int, int], Any]) -> list[tuple[Any, list[tuple[int, int]]]]:
    """Offsets of equal numbers together, ones last."""
    alike: dict[Any, list[tuple[int, int]]] = {}
    for offset, weight in weights.items():
        alike.setdefault(offset if np.ndim(weight) else weight, []).append(offset)
    groups = [(weights[offsets[0]], offsets) for offsets in alike.values()]
    return sorted(groups, key=lambda group: np.ndim(group[0]) == 0 and group[0] == 1)


def cases(comm: Any, side: int) -> Iterator[tuple[str, dict[Any, Any], dict[Any, Any]]]:
    """Name, weights for linop, and those of this rank's block."""
    yield "5 points", FIVE, FIVE
    yield "9 points", NINE, NINE
    blocks = {
        at: np.random.default_rng([comm.rank, *np.add(at, 4)]).random((side, side)) for at in STAR
    }
    varying = {at: (lambda _, block=block: block) for at, block in blocks.items()}
    yield "star of radius 4, varying", varying, blocks


def program(comm: Any, side: int, seconds: float) -> Iterator[list[str]]:
    """Rows of the table. Collective."""
    import linop
    from benchmarks.harness.measure import interleaved
    from linop import Partition, TensorSpace

    backend = linop.backends.get("mpi", comm=comm)
    X = TensorSpace((comm.size * side, side), Partition((comm.size, 1)))
    x, y = np.random.default_rng(comm.rank).random((2, side, side))
    for name, weights, blocks in cases(comm, side):
        hand, plan = ByHand(comm, side, blocks), linop.stencil(X, weights).compile(backend)
        both = [(hand.forward, plan, x, "forward"), (hand.adjoint, plan.H, y, "adjoint")]
        for theirs, ours, given, direction in both:
            assert np.allclose(theirs(given), ours(given), rtol=1e-13)
            sides = {
                "hand": lambda f=theirs, v=given: f(v),
                "linop": lambda f=ours, v=given: f(v),
            }
            times = interleaved(comm, sides, seconds).times
            cells = ["{:,.0f} · {:,.0f} · {:,.0f}".format(*times[k]) for k in sides]
            ratio = times["linop"].median / times["hand"].median
            yield [name, str(comm.size), direction, *cells, f"{ratio:.2f}"]


def main(
    side: Annotated[int, typer.Option(help="Side of each rank's block.")] = 512,
    seconds: Annotated[float, typer.Option(help="Duration of each comparison.")] = 2.0,
) -> None:
    table = chain.from_iterable(rows(ranks, program, side, seconds) for ranks in (1, 2))
    for line in markdown_lines(HEADER, table):
        print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
