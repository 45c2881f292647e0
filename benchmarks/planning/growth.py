"""Growth of proofs and plans with the number of workers: CPU seconds, and peak memory.

    python benchmarks/planning/growth.py [--repeats N] [--workers P] [--only WORDS] [--save]

Every sample is a process of its own; all cases are run in turn, `repeats` times. Prints minimum,
median and maximum CPU seconds of the question, without the construction of its operators unless
that is the question, and the largest peak of resident memory above `import linop`, in Markdown;
with ``--save`` into ``results/growth.md`` too, which docs/best.md has a plot of.
"""

from __future__ import annotations

import json
import math
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

import linop
from linop import COPIES, LinearOperator, Partition, TensorSpace
from linop.operators.algebra import expanded
from linop.planning.lowering import lower

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/growth.md"
WORKERS = (16, 64, 256, 1024, 4096)
LIMIT = 600
"""Seconds after which a sample is abandoned."""


def halo(workers: int) -> LinearOperator:
    """A 2-D halo of one element around blocks of 8 × 8, on a square grid."""
    side = math.isqrt(workers)
    return linop.halo_exchange(TensorSpace((8 * side,) * 2, Partition((side, side))), 3, padding=1)


def copies(workers: int) -> TensorSpace:
    """A vector of two elements for each worker, on every worker."""
    return TensorSpace((2 * workers,), Partition((workers,)), axes=[COPIES])


def sum_and_broadcast(Y: TensorSpace) -> LinearOperator:
    """B R, the broadcast of the sum-reduce: equal to the all-reduce."""
    R = linop.sum_reduce(Y, Partition((1,)))
    return linop.broadcast(R.codomain, Y.partition) @ R


# Each case builds operators, and returns the question about them, whose answer is true.
Question = Callable[[], Any]


def ring(workers: int) -> Question:
    Y = copies(workers)
    return lambda: linop.ring_all_reduce(Y).equals(sum_and_broadcast(Y))


def all_reduce(workers: int) -> Question:
    Y = copies(workers)
    return lambda: linop.all_reduce(Y).equals(sum_and_broadcast(Y))


def adjoint(workers: int) -> Question:
    H = halo(workers)
    return lambda: H.H.equals(expanded(H).H)


def simplified(workers: int) -> Question:
    H = halo(workers)
    return lambda: H.simplify() is not H


def simplified_alone(workers: int) -> Question:
    H = halo(workers)
    assert expanded(H)
    return lambda: H.simplify() is not H


def planned(make: Callable[[int], LinearOperator]) -> Callable[[int], Question]:
    return lambda workers: lambda: lower(make(workers).stages, workers // 2).steps


def verified(make: Callable[[int], LinearOperator]) -> Callable[[int], Question]:
    def question(workers: int) -> Question:
        op = make(workers)
        return lambda: linop.verify_plans(op) is None

    return question


def grid_broadcast(workers: int) -> LinearOperator:
    """The blocks of the first row of a square grid to all rows."""
    side = math.isqrt(workers)
    X = TensorSpace((8, 8 * side), Partition((1, side)))
    return linop.broadcast(X, Partition((side, side)))


CASES: dict[str, tuple[int, Callable[[int], Question]]] = {
    "ring all-reduce = B R": (128, ring),
    "all-reduce = B R": (4096, all_reduce),
    "halo: H* = the adjoint written out": (4096, adjoint),
    "halo: `simplify`, with writing it out": (4096, simplified),
    "halo: `simplify` alone": (4096, simplified_alone),
    "halo: one worker's plan": (4096, planned(halo)),
    "ring: one worker's plan": (128, planned(lambda p: linop.ring_all_reduce(copies(p)))),
    "all-reduce: one worker's plan": (4096, planned(lambda p: linop.all_reduce(copies(p)))),
    "halo: `verify`, all workers' plans": (4096, verified(halo)),
    "grid broadcast: `verify`": (4096, verified(grid_broadcast)),
    "all-reduce: `verify`": (128, verified(lambda p: linop.all_reduce(copies(p)))),
}
"""By name: the largest number of workers that is measured, and the case."""


def peak() -> float:
    """Peak resident memory of this process so far, in MB."""
    scale = 1e6 if sys.platform == "darwin" else 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


def sample(name: str, workers: int) -> None:
    """Answer one question in this process; prints CPU seconds and MB as JSON."""
    _, case = CASES[name]
    before = peak()
    question = case(workers)
    begun = time.process_time()
    answer = question()
    seconds = time.process_time() - begun
    assert answer, f"{name}, {workers} workers: not proven"
    print(json.dumps([seconds, peak() - before]))


def sampled(name: str, workers: int) -> tuple[float, float]:
    """CPU seconds and MB of one sample, in a process of its own; NaN beyond `LIMIT`."""
    command = [sys.executable, __file__, "--sample", name, "--workers", str(workers)]
    try:
        done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return math.nan, math.nan
    seconds, megabytes = json.loads(done.stdout)
    return seconds, megabytes


def main(
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    workers: Annotated[list[int] | None, typer.Option(help="how many; repeat it")] = None,
    only: Annotated[str, typer.Option(help="part of the names")] = "",
    save: Annotated[bool, typer.Option(help="into results/growth.md")] = False,
    sample_of: Annotated[str | None, typer.Option("--sample", hidden=True)] = None,
) -> None:
    """Print the table."""
    wanted = workers or list(WORKERS)
    if sample_of is not None:
        return sample(sample_of, wanted[0])
    rows = [
        (name, count)
        for name, (most, _) in CASES.items()
        if only in name
        for count in dict.fromkeys(min(p, most) for p in wanted)
    ]
    found: dict[tuple[str, int], list[tuple[float, float]]] = {row: [] for row in rows}
    for _ in range(repeats):
        for row in rows:
            found[row].append(sampled(*row))
    lines = ["| question | workers | min s | median s | max s | peak MB |", "| --- " * 6 + "|"]
    for (name, count), samples in found.items():
        times, megabytes = zip(*samples, strict=True)
        numbers = [f"{t:.4f}" for t in (min(times), statistics.median(times), max(times))]
        cells = [name, str(count), *numbers, f"{max(megabytes):.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    print("\n".join(lines))
    if save:
        sys.path.insert(0, str(ROOT))
        from benchmarks.harness import saving

        about = {"Python": platform.python_version(), "NumPy": version("numpy")}
        facts = saving.facts_text(saving.machine([]) | about | {"runs": str(repeats)})
        text = "\n".join(["# Growth of proofs and plans\n", facts, *lines, ""])
        RESULTS.write_text(text, encoding="utf-8")
    return None


if __name__ == "__main__":
    typer.run(main)
