"""A pipeline of two stages beside the same micro-batches in one process, and the same pipeline by
hand in mpi4py.

    python benchmarks/strategies/pipelines/pipeline.py [--micro-batches 8] [--seconds 2.0]

It starts an MPI job of two ranks itself, and prints a Markdown table: medians of interleaved
rounds, of the slower rank. The model is eight linear layers with tanh; a step has no update.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # this checkout is measured, whatever is installed

import linop  # noqa: E402
from benchmarks.harness.jobs import show  # noqa: E402
from linop.schedules import GENERATORS  # noqa: E402

LAYERS = 8
SIZES = ((64, 64), (256, 256), (512, 256), (1024, 512))
"""Width of the layers, and rows of the batch."""
SCHEDULES = "gpipe", "1f1b", "zb-h1"
TIMES = "one process µs", "by hand", "linop"
TITLES = "schedule", "width", "batch", *TIMES, "to one", "to hand"
Step = Callable[[], Any]


def main(
    micro_batches: Annotated[int, typer.Option(help="number")] = 8,
    seconds: Annotated[float, typer.Option(help="for each comparison")] = 2.0,
) -> None:
    """Measure in an MPI job."""
    show(2, TITLES, measure, micro_batches, seconds)


def measure(comm: Any, count: int, seconds: float) -> Iterator[Sequence[Any]]:
    """Program of a rank: rows of the table."""
    import torch

    from benchmarks.harness.measure import interleaved

    torch.set_num_threads(1)
    backend: Any = linop.backends.get("mpi")
    for width, rows in SIZES:
        for schedule in SCHEDULES:
            torch.manual_seed(0)
            layers = [
                torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh())
                for _ in range(LAYERS)
            ]
            x, target = torch.randn(rows, width), torch.randn(rows, width)
            stages = [torch.nn.Sequential(*half) for half in (layers[:4], layers[4:])]
            sides = {
                "one": one_process(comm.rank, stages, x, target, count),
                "linop": ours(backend, stages, schedule, x, target, count),
            }
            by_hand = schedule != "zb-h1"
            if by_hand:
                sides["hand"] = hand(comm, stages, schedule, x, target, count)
            times = interleaved(comm, sides, seconds).medians
            one, own, other = times["one"], times["linop"], times.get("hand", float("nan"))
            figures = (f"{t:.0f}" for t in (one, other, own))
            yield schedule, width, rows, *figures, f"{own / one:.2f}", f"{own / other:.2f}"


def squares(y: Any, target: Any) -> Any:
    """Sum of squared differences."""
    return ((y - target) ** 2).sum()


def forget(stages: Sequence[Any]) -> None:
    for stage in stages:
        for p in stage.parameters():
            p.grad = None


def one_process(rank: int, stages: Sequence[Any], x: Any, target: Any, count: int) -> Step:
    """The micro-batches in order, on rank 0."""

    def step() -> None:
        if rank:
            return
        forget(stages)
        for one, wanted in zip(x.chunk(count), target.chunk(count), strict=True):
            squares(stages[1](stages[0](one)), wanted).backward()

    return step


def ours(backend: Any, stages: Sequence[Any], name: str, x: Any, target: Any, count: int) -> Step:
    """Our step."""
    from linop.strategies import Pipeline

    pipe = Pipeline(stages, GENERATORS[name](2, count), squares, backend=backend)

    def step() -> None:
        pipe.zero_grad()
        pipe.step(x, target)

    return step


def hand(comm: Any, stages: Sequence[Any], name: str, x: Any, target: Any, count: int) -> Step:
    """The same schedule written for two ranks: buffered sends, and receives where data are used."""
    import torch

    stage, first = stages[comm.rank], comm.rank == 0
    xs, targets = x.chunk(count), target.chunk(count)
    rows, width = xs[0].shape
    warm_up = count if name == "gpipe" else 1 - comm.rank

    def step() -> None:
        forget([stage])
        held: dict[int, Any] = {}
        sending = []

        def forward(m: int) -> None:
            if first:
                held[m] = stage(xs[m])
                sending.append(comm.Isend(held[m].detach().numpy(), 1, m))
                return
            one = torch.empty(rows, width)
            comm.Recv(one.numpy(), 0, m)
            one.requires_grad_()
            held[m] = one, squares(stage(one), targets[m])

        def backward(m: int) -> None:
            if first:
                gradient = torch.empty(rows, width)
                comm.Recv(gradient.numpy(), 1, m)
                held.pop(m).backward(gradient)
                return
            one, loss = held.pop(m)
            loss.backward()
            sending.append(comm.Isend(one.grad.numpy(), 0, m))

        for m in range(warm_up):
            forward(m)
        for m in range(count):
            if m + warm_up < count:
                forward(m + warm_up)
            backward(m)
        for one in sending:
            one.Wait()

    return step


if __name__ == "__main__":
    typer.run(main)
