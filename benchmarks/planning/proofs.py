"""Duration of exact proofs: normal forms of large operators, built, composed and compared.

    python benchmarks/planning/proofs.py [--repeats N]

prints minimum, median and maximum seconds of each, in Markdown.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import typer

import linop
from linop import COPIES, Partition, TensorSpace


def ring(workers: int) -> bool:
    """Ring all-reduce = broadcast ∘ sum-reduce."""
    Y = TensorSpace((2 * workers,), Partition((workers,)), axes=[COPIES])
    one = Partition((1,))
    R = linop.sum_reduce(Y, one)
    B = linop.broadcast(R.codomain, Y.partition)
    return linop.ring_all_reduce(Y).equals(B @ R)


def halo(grid: tuple[int, ...]) -> bool:
    """A halo exchange composed with its adjoint is self-adjoint, and its two adjoints agree."""
    X = TensorSpace(tuple(8 * n for n in grid), Partition(grid))
    H = linop.halo_exchange(X, 3, padding=1)
    normal = H.H @ H
    forward = H.movement()
    return normal.movement() == normal.movement().adjoint() and H.H.movement() == forward.adjoint()


CASES: dict[str, Callable[[], bool]] = {
    **{f"ring all-reduce = B R, {p} workers": (lambda p=p: ring(p)) for p in (8, 16, 32, 64)},
    "3-D halo, H* H and H* = Hᵀ, 4×4×4 workers": lambda: halo((4, 4, 4)),
    "3-D halo, H* H and H* = Hᵀ, 8×8×8 workers": lambda: halo((8, 8, 8)),
}


def main(repeats: Annotated[int, typer.Option(min=1)] = 5) -> None:
    """Print the table."""
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(repeats):
        for name, case in CASES.items():
            begun = time.perf_counter()
            proven = case()
            seconds[name].append(time.perf_counter() - begun)
            if not proven:
                raise SystemExit(f"not proven: {name}")
    print("| proof | min s | median s | max s |\n| --- | --- | --- | --- |")
    for name, times in seconds.items():
        numbers = min(times), statistics.median(times), max(times)
        print(f"| {name} | " + " | ".join(f"{t:.2f}" for t in numbers) + " |")


if __name__ == "__main__":
    typer.run(main)
