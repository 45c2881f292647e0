"""A training step of the perceptrons of examples/mlp.py beside the same step in mpi4py by hand.

    python benchmarks/strategies/perceptrons/step.py [--ranks 2] [--seconds 1.0]

It starts the MPI job itself, and prints a Markdown table: medians of interleaved rounds, of the
slower rank. The batch is of all workers together.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # this checkout is measured, whatever is installed
sys.path.insert(0, str(ROOT / "examples"))

from mlp import MLP, Strategy, initial, mlp  # noqa: E402

import linop  # noqa: E402
from benchmarks.harness.jobs import show  # noqa: E402

WIDTHS, BATCHES, RATE = (16, 128, 512), (32, 256), 0.1
TITLES = "strategy", "width", "batch", "by hand µs", "linop µs", "ratio", "memory of 300 steps, KiB"
Step = Callable[[], Any]


def main(
    ranks: Annotated[int, typer.Option(min=1, help="how many")] = 2,
    seconds: Annotated[float, typer.Option(help="for each comparison")] = 1.0,
) -> None:
    """Measure in an MPI job."""
    show(ranks, TITLES, measure, seconds)


def measure(comm: Any, seconds: float) -> Iterator[Sequence[Any]]:
    """Program of a rank: rows of the table."""
    from benchmarks.harness.measure import interleaved

    backend: Any = linop.backends.get("mpi")
    for strategy in Strategy:
        for width in WIDTHS:
            for batch in BATCHES:
                sizes = (784, width, 10)
                model = mlp(strategy, comm.size, sizes, batch)
                random = np.random.default_rng(0)
                data = random.random((batch, 784)), np.eye(10)[random.integers(0, 10, batch)]
                ours, theirs = (
                    steps(backend, model, sizes, data),
                    by_hand(comm, strategy, model, sizes, data),
                )
                for _ in range(3):
                    assert abs(float(ours()[0]) - theirs()) < 1e-9
                a, b = interleaved(comm, {"hand": theirs, "linop": ours}, seconds).medians.values()
                times = f"{a:.0f}", f"{b:.0f}", f"{b / a:.2f}"
                yield strategy, width, batch, *times, growth(ours)


def steps(backend: Any, model: MLP, sizes: tuple[int, ...], data: tuple[Any, Any]) -> Step:
    """Our step; it returns the loss."""
    program = model.map.compile(backend, model.names)
    theta = model.held(initial(sizes), backend.worker)
    rows = model.rows(*data, backend.worker)

    def step() -> Any:
        loss = program(theta | rows)
        for name, slope in program.gradient().items():
            theta[name] -= RATE * slope
        return loss

    return step


def by_hand(
    comm: Any, strategy: Strategy, model: MLP, sizes: tuple[int, ...], data: tuple[Any, Any]
) -> Step:
    """The same step as one would write it; it returns the loss."""
    from mpi4py import MPI

    in_place: Any = MPI.IN_PLACE
    whole = initial(sizes)
    batch = len(data[0])
    if strategy == Strategy.TENSOR:
        cuts = [model.parameters[k].slices(comm.rank) for k in range(4)]
        W0, b0, W1, b1 = (np.array(a[s], order="C") for a, s in zip(whole, cuts, strict=True))
        x, t = data
    else:
        W0, b0, W1, b1 = (a.copy() for a in whole)
        x, t = (np.array(a[model.x.slices(comm.rank)[:1]]) for a in data)
    theta = [W0, b0, W1, b1]
    rings = [Ring(comm, a) for a in theta] if strategy == Strategy.RING else []
    total = np.empty(1)

    def step() -> float:
        if strategy == Strategy.SERVER:
            for a in theta:
                comm.Bcast(a, 0)
        h = 0.5 + 0.5 * np.tanh(0.5 * (x @ W0 + b0))
        z = h @ W1
        if strategy == Strategy.TENSOR:
            comm.Allreduce(in_place, z)
        z += b1
        z -= z.max(1, keepdims=True)
        logs = z - np.log(np.exp(z).sum(1, keepdims=True))
        loss = np.array([-np.sum(t * logs) / batch])
        g = (np.exp(logs) - t) / batch
        gh = (g @ W1.T) * (h * (1 - h))
        gradient = [x.T @ gh, gh.sum(0), h.T @ g, g.sum(0)]
        if strategy == Strategy.TENSOR:
            total[:] = loss
        else:
            comm.Allreduce(loss, total)
        for k, (a, slope) in enumerate(zip(theta, gradient, strict=True)):
            if strategy == Strategy.ALL_REDUCE:
                comm.Allreduce(in_place, slope)
            elif strategy == Strategy.RING:
                rings[k].all_reduce(slope)
            elif strategy == Strategy.SERVER and comm.rank:
                comm.Reduce(slope, None, root=0)
                continue
            elif strategy == Strategy.SERVER:
                comm.Reduce(in_place, slope, root=0)
            a -= RATE * slope
        return float(total[0])

    return step


class Ring:
    """The ring all-reduce of an array, by hand."""

    def __init__(self, comm: Any, like: np.ndarray) -> None:
        self.comm = comm
        bounds = np.linspace(0, like.size, comm.size + 1).astype(int)
        self.cuts = [slice(a, b) for a, b in pairwise(bounds.tolist())]
        self.buffer = np.empty(max(s.stop - s.start for s in self.cuts))

    def all_reduce(self, array: np.ndarray) -> None:
        comm, flat = self.comm, array.reshape(-1)
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for adding in (True, False):
            for step in range(comm.size - 1):
                first = comm.rank + (0 if adding else 1)
                mine = self.cuts[(first - step) % comm.size]
                theirs = self.cuts[(first - step - 1) % comm.size]
                got = self.buffer[: theirs.stop - theirs.start]
                comm.Sendrecv(flat[mine], after, 0, got, before, 0)
                if adding:
                    flat[theirs] += got
                else:
                    flat[theirs] = got


def growth(step: Step) -> int:
    """KiB by which the process has grown after 300 more steps."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(300):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


if __name__ == "__main__":
    typer.run(main)
