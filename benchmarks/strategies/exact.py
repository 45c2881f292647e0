"""Training with the same bits on 1, 2, 4 and 8 workers, and the times of such sums.

    python benchmarks/strategies/exact.py                              # 200 steps in float64
    python benchmarks/strategies/exact.py --width 256 --blocks 6 --length 64 --steps 20
    mpiexec -n 4 python benchmarks/strategies/exact.py --times

The first trains a GPT (examples/gpt.py) under data parallel training, ZeRO 3 and tensor
parallelism, on threads, and prints which runs have the losses and the last parameters of one worker
to the last bit, beside how far plain runs are from one process; the last compares sums on ranks.
Prints Markdown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "adjoint_tests")]

import gpt  # noqa: E402

import linop  # noqa: E402
from benchmarks.harness.report import markdown  # noqa: E402
from support.strategies import exact_training  # noqa: E402

WORKERS = exact_training.WORKERS


def runs(size: gpt.Size, steps: int, rows: int) -> str:
    """The table of training."""
    cells: list[list[str]] = []
    for strategy in exact_training.STRATEGIES:
        wanted: Any = None
        for workers in WORKERS:
            begun = time.perf_counter()
            every = linop.launch(
                lambda b, s=strategy: exact_training.trained(
                    b, s, steps, torch.float64, size, rows
                ),
                workers,
                "threads",
                sums="tree",
            )
            seconds = (time.perf_counter() - begun) / steps
            wanted = wanted or every[0]
            alike = sum(a == b for a, b in zip(every[0][0], wanted[0], strict=True))
            same = all(one == wanted for one in every)
            row = [strategy, str(workers), f"{alike} of {steps}", "yes" if same else "no"]
            cells.append([*row, f"{every[0][0][-1]:.17g}", every[0][1][:12], f"{seconds:.2f}"])
            print("|", " | ".join(cells[-1]), "|", file=sys.stderr, flush=True)
    header = ["strategy", "workers", "losses equal", "all bits", "last loss", "parameters"]
    return markdown([*header, "s a step"], cells)


def far(size: gpt.Size, steps: int, rows: int) -> str:
    """Distances of plain runs from one process."""
    cells = []
    (alone,) = linop.launch(lambda b: plain(b, "sequential", size, steps, rows), 1, "threads")
    for workers in WORKERS[1:]:
        found = linop.launch(lambda b: plain(b, "dp", size, steps, rows), workers, "threads")
        most = max(abs(a - b) for a, b in zip(found[0], alone, strict=True))
        cells.append(["dp", str(workers), f"{most:.1e}"])
    return markdown(["strategy", "workers", "largest distance of a loss"], cells)


def plain(backend: Any, strategy: str, size: gpt.Size, steps: int, rows: int) -> list[float]:
    train = gpt.train(strategy, backend, size, steps, rows, torch.float64)
    return [loss for *_, loss in train]


def times(repeats: int) -> str:
    """The table of sums on these ranks."""
    backend = linop.backends.get("mpi")
    workers = backend.workers or 1
    grid, cells = linop.Partition((workers,)), []
    for dtype in ("float32", "float64"):
        for size in (1_000, 100_000, 1_000_000):
            Y = linop.TensorSpace((size,), grid, dtype, axes=[linop.COPIES])
            x = np.random.default_rng(backend.worker).standard_normal(size).astype(dtype)
            for op, name in (
                (linop.all_reduce(Y, [0]), "all-reduce"),
                (
                    linop.reduce_scatter(Y),
                    "reduce-scatter",
                ),
            ):
                plans = [op.compile(backend, sums=how) for how in ("fixed", "tree", "exact")]
                taken = _interleaved(backend, plans, x, repeats)
                base, *others = map(median, taken)
                least = [min(one) / min(taken[0]) for one in taken[1:]]
                row = [name, dtype, f"{size:,}", f"{base * 1e3:.3f}"]
                row += [f"{one / base:.2f}" for one in others] + [f"{one:.2f}" for one in least]
                cells.append(row)
    header = ["", "dtype", "elements", "fixed, ms", "tree ×", "exact ×"]
    return markdown([*header, "tree ×, least", "exact ×, least"], cells)


def _interleaved(
    backend: Any, plans: Sequence[Any], x: np.ndarray, repeats: int
) -> list[list[float]]:
    """Seconds of calls, those of the slowest rank."""
    taken: list[list[float]] = [[] for _ in plans]
    for k in range(repeats + 2):
        for plan, found in zip(plans, taken, strict=True):
            backend.transport.gather_all(None)
            begun = time.perf_counter()
            plan(x)
            seconds = max(backend.transport.gather_all(time.perf_counter() - begun))
            if k >= 2:
                found.append(seconds)
    return taken


def main(
    steps: Annotated[int, typer.Option(min=1)] = 200,
    rows: Annotated[int, typer.Option(min=8, help="Of a step.")] = 8,
    width: Annotated[int, typer.Option(help="Features, a multiple of 64.")] = 64,
    blocks: Annotated[int, typer.Option(min=1)] = 2,
    length: Annotated[int, typer.Option(help="Bytes of a text, a multiple of 8.")] = 32,
    beside: Annotated[bool, typer.Option(help="Train plain data parallel runs, too.")] = True,
    time_sums: Annotated[bool, typer.Option("--times", help="On ranks: time sums.")] = False,
    repeats: Annotated[int, typer.Option(min=1)] = 31,
) -> None:
    """Train, or time sums."""
    torch.set_num_threads(1)
    if time_sums:
        found = times(repeats)
        if linop.backends.get("mpi").worker == 0:
            print(found)
        return
    size = gpt.Size(width, 8, blocks, length)
    count = sum(p.numel() for p in gpt.GPT(size).parameters())
    print(f"{count:,} parameters, {rows} rows of {length} bytes, {steps} steps, float64\n")
    print(runs(size, steps, rows))
    if beside:
        print(far(size, steps, rows))


if __name__ == "__main__":
    typer.run(main)
