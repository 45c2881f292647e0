"""Draw the pictures of docs/pictures.md and of README: ``python docs/pictures/draw.py`` writes the
``*.svg`` beside this file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import linop
from linop import COPIES, REPLICATED, LinearOperator, Partition, TensorSpace, pictures
from linop.pictures import Picture

FOLDER = Path(__file__).parent
LINE = TensorSpace(12, Partition(4))


def convolution() -> LinearOperator:
    """A second difference on three workers: a halo exchange, and a local convolution on each."""
    X = TensorSpace(9, Partition(3))
    needed = linop.halo_exchange(X, 3)
    Y = TensorSpace(7, Partition(3), name="y")
    ends = zip(needed.codomain.regions, Y.regions, strict=True)
    kernel = [1.0, -2.0, 1.0]
    maps = [linop.local_operators.convolution(kernel, a, b) for a, b in ends]
    return linop.direct_sum(*maps) @ needed


def embedding() -> LinearOperator:
    """From one replicated tensor to copies of it."""
    V = TensorSpace(3, Partition(3), axes=(REPLICATED,), name="v")
    return linop.repartition(V, TensorSpace(3, Partition(3), axes=(COPIES,), name="x"))


PICTURES: dict[str, Callable[[], Picture]] = {
    "halo_exchange": lambda: linop.halo_exchange(LINE, widths=1).draw(),
    "broadcast": lambda: linop.broadcast(TensorSpace(3, Partition(1)), Partition(3)).draw(),
    "embedding": lambda: embedding().draw(),
    "convolution": lambda: convolution().draw(),
    "many": lambda: linop.all_reduce(TensorSpace(4, Partition(10_000), axes=(COPIES,))).draw(
        adjoint=False
    ),
    "plane": lambda: TensorSpace((12, 20), Partition((2, 3))).draw(),
    "volume": lambda: TensorSpace((6, 8, 10), Partition((2, 2, 2))).draw(),
    "halos_plane": lambda: pictures.halos(
        linop.halo_exchange(TensorSpace((12, 18), Partition((2, 3))), widths=2)
    ),
    "halos_volume": lambda: pictures.halos(
        linop.halo_exchange(TensorSpace((6, 8, 10), Partition((2, 2, 2))), widths=1)
    ),
    "timeline": lambda: linop.planning.timeline(
        linop.halo_exchange(TensorSpace(80_000, Partition(4)), widths=10_000)
    ).draw(),
}
"""The pictures, by the names of their files."""


def main() -> None:
    """Write all pictures."""
    for name, draw in PICTURES.items():
        draw().save(FOLDER / f"{name}.svg")


if __name__ == "__main__":
    main()
