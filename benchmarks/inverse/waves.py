"""Times of a wave propagator, a time loop, beside NumPy's slices by hand with mpi4py's halos.

    python benchmarks/inverse/waves.py [--side N] [--steps N] [--seconds S]

prints minimum, median and maximum microseconds of a time step, in Markdown: the acoustic wave
equation with a velocity that varies, by leapfrog, in float64; blocks of N x N on one and on two
ranks, one above the other; with a source in the middle, and receivers in the first column. By hand:
two padded arrays that change places, rows exchanged by `Irecv` and `Isend`, and seven NumPy
operations a step into memory that exists; the adjoint is the same loop backwards, which it is for
these steps since sources and receivers change places. The last rows are the time of one step of an
empty loop (blocks of 2 x 2): the overhead of a step, beside that of calling the step's plan.
Results are compared before they are timed.
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

HEADER = ("loop", "ranks", "by hand", "linop", "ratio")


class ByHand:
    """The propagator on this rank's rows: NumPy and mpi4py.

    Args:
        c: of this block, (velocity · time step / grid spacing)².
        at: index of the source in the block; its row may be another's.
    """

    def __init__(self, comm: Any, c: Any, at: tuple[int, int]) -> None:
        self.comm, self.c, self.d = comm, c, 2 - 4 * c
        self.at = at if 0 <= at[0] < len(c) else None
        rows, columns = c.shape
        self.u, self.before = np.zeros((2, rows + 2, columns + 2))
        self.w, self.v = np.empty((2, rows, columns))
        self.peers = [
            (peer, out, into)
            for peer, out, into in ((comm.rank - 1, 1, 0), (comm.rank + 1, rows, rows + 1))
            if 0 <= peer < comm.size
        ]

    def __call__(self, signals: Any) -> Any:
        self.u[...] = self.before[...] = 0
        records = np.empty((len(signals), len(self.c)))
        for k, signal in enumerate(signals):
            self.step()
            if self.at is not None:
                self.u[1:-1, 1:-1][self.at] += signal
            records[k] = self.u[1:-1, 1]
        return records

    def step(self) -> None:
        u, b, w, v = self.u, self.before[1:-1, 1:-1], self.w, self.v
        requests = [self.comm.Irecv(u[into], peer) for peer, _, into in self.peers]
        requests += [self.comm.Isend(u[out], peer) for peer, out, _ in self.peers]
        np.multiply(u[1:-1, 1:-1], self.d, out=v)
        np.subtract(v, b, out=b)
        np.add(u[1:-1, 2:], u[1:-1, :-2], out=w)
        for request in requests:
            request.Wait()
        np.add(w, u[2:, 1:-1], out=w)
        np.add(w, u[:-2, 1:-1], out=w)
        np.multiply(w, self.c, out=w)
        np.add(b, w, out=b)
        self.u, self.before = self.before, self.u


def propagator(side: int, ranks: int, steps: int, at: tuple[int, int]) -> Any:
    """The time loop, from the signal of a source to the records of the first column."""
    import linop
    from linop import Partition, TensorSpace

    shape, grid = (ranks * side, side), Partition((ranks, 1))
    U, B = (TensorSpace(shape, grid, name=name) for name in "ub")
    c = velocities(shape)
    around = dict.fromkeys([(1, 0), (-1, 0), (0, 1), (0, -1)], c)
    ahead = linop.stencil(U, {(0, 0): 2 - 4 * c, **around})
    kept = linop.repartition(U, B)
    step = linop.vstack(linop.hstack(ahead, -1 * kept.H), linop.hstack(kept, linop.zero(B, B)))
    source = linop.pad(U, [(-k, k + 1 - n) for k, n in zip(at, shape, strict=True)]).H
    receivers = linop.pad(U, [(0, 0), (0, 1 - side)])
    return linop.timeloop(
        step,
        steps,
        linop.vstack(source, linop.zero(source.domain, B)),
        linop.hstack(receivers, linop.zero(B, receivers.codomain)),
    )


def velocities(shape: tuple[int, ...]) -> Any:
    """The coefficient, which grows with depth."""
    return 0.1 * (1 + np.linspace(0, 1, shape[0])[:, None] + np.zeros(shape))


def program(comm: Any, side: int, steps: int, seconds: float) -> Iterator[list[str]]:
    """Rows of the table. Collective."""
    import linop
    from benchmarks.harness.measure import interleaved

    backend = linop.backends.get("mpi", comm=comm)
    first = comm.rank * side
    at = comm.size * side // 2, side // 3
    plan = propagator(side, comm.size, steps, at).compile(backend)
    c = velocities((comm.size * side, side))[first : first + side]
    hand = ByHand(comm, c, (at[0] - first, at[1]))
    signals = np.sin(np.arange(steps) / 5)
    here = plan.domain.on(comm.rank)[0]
    given = signals.reshape(-1, 1, 1) * np.ones(here.shape)
    records = hand(signals)
    assert np.allclose(records, plan(given)[..., 0], rtol=1e-10)
    y = records[..., None].copy()
    products = np.vdot(records, records), np.vdot(plan.H(y), given)
    assert np.isclose(*map(comm.allreduce, products))
    for name, run in (("forward", lambda: plan(given)), ("adjoint", lambda: plan.H(y))):
        times = interleaved(comm, {"hand": lambda: hand(signals), "linop": run}, seconds).times
        cells = [
            "{:,.0f} · {:,.0f} · {:,.0f}".format(*(t / steps for t in times[k])) for k in times
        ]
        ratio = times["linop"].median / times["hand"].median
        yield [f"waves, {name}", str(comm.size), *cells, f"{ratio:.2f}"]
    yield from overhead(comm, backend, seconds)


def overhead(comm: Any, backend: Any, seconds: float) -> Iterator[list[str]]:
    """The row of steps that compute next to nothing."""
    from benchmarks.harness.measure import interleaved

    count = 200
    loop = propagator(2, comm.size, count, (0, 0))
    plan, step = loop.compile(backend), loop.body.compile(backend)
    signals = np.zeros(plan.domain.on(comm.rank)[0].shape)
    x = {region.name: np.zeros(region.shape) for region in step.domain.on(comm.rank)}

    def calls() -> None:
        for _ in range(count):
            step(x)

    times = interleaved(comm, {"calls": calls, "linop": lambda: plan(signals)}, seconds).times
    cells = ["{:,.1f} · {:,.1f} · {:,.1f}".format(*(t / count for t in times[k])) for k in times]
    ratio = times["linop"].median / times["calls"].median
    yield ["2 x 2, beside calls of the step's plan", str(comm.size), *cells, f"{ratio:.2f}"]


def main(
    side: Annotated[int, typer.Option(help="Side of each rank's block.")] = 512,
    steps: Annotated[int, typer.Option(help="Number of time steps.")] = 100,
    seconds: Annotated[float, typer.Option(help="Duration of each comparison.")] = 4.0,
) -> None:
    table = chain.from_iterable(rows(ranks, program, side, steps, seconds) for ranks in (1, 2))
    for line in markdown_lines(HEADER, table):
        print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
