"""Cartesian grids of workers (the paper's P_x), and balanced block lengths; no tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linop.caching import cached_property
from linop.errors import PartitionError
from linop.spaces import showing
from linop.spaces.region import integer, naturals


class Partition:
    """A Cartesian grid of workers.

    Args:
        shape: the extent of each grid axis, all at least 1.
        workers: the worker at each grid point, in row-major order, each at most once; by default
            0, 1, 2, …

    ``partition[0, :]`` is the sub-grid that NumPy's indexing selects.

    Raises:
        PartitionError: the workers do not fit the shape, or one appears twice.

    Example:
        >>> P = linop.Partition((2, 3))
        >>> P.size, P.coordinates(4), P.worker((1, 1))
        (6, (1, 1), 4)
        >>> P[0, :].workers
        (0, 1, 2)
    """

    def __init__(self, shape: int | Sequence[int], workers: Iterable[int] | None = None) -> None:
        self.shape: tuple[int, ...] = naturals(shape, "shape of a partition", PartitionError)
        if 0 in self.shape:
            raise PartitionError(f"a partition's axes have at least one worker; given {self.shape}")
        size = math.prod(self.shape)
        self.workers: tuple[int, ...] = (
            tuple(range(size))
            if workers is None
            else naturals(workers, "workers of a partition", PartitionError)
        )
        if len(self.workers) != size:
            raise PartitionError(
                f"a partition of shape {self.shape} has {size} workers; {len(self.workers)} given"
            )
        if len(self._position) < size:
            raise PartitionError(f"a partition names a worker twice: {self.workers}")

    @cached_property
    def _position(self) -> dict[int, int]:
        return {worker: k for k, worker in enumerate(self.workers)}

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self.workers)

    @property
    def grid(self) -> np.ndarray:
        """The workers as an array of the partition's shape."""
        return np.array(self.workers, np.int64).reshape(self.shape)

    def __contains__(self, worker: object) -> bool:
        return worker in self._position

    def coordinates(self, worker: int) -> tuple[int, ...]:
        """The grid coordinates of a worker.

        Raises:
            PartitionError: the worker is not in the partition.
        """
        worker = integer(worker, "worker")
        if worker not in self._position:
            raise PartitionError(f"worker {worker} is not in {self!r}")
        rest, at = self._position[worker], []
        for n in reversed(self.shape):
            rest, k = divmod(rest, n)
            at.append(k)
        return tuple(reversed(at))

    def worker(self, coordinates: int | Sequence[int]) -> int:
        """The worker at grid coordinates.

        Raises:
            PartitionError: there is no such grid point.
        """
        at = naturals(coordinates, "coordinates", PartitionError)
        if len(at) != self.ndim or any(k >= n for k, n in zip(at, self.shape, strict=True)):
            raise PartitionError(f"coordinates {at} are outside of a grid of shape {self.shape}")
        return self.workers[int(np.ravel_multi_index(at, self.shape)) if at else 0]

    def transpose(self) -> Partition:
        """The grid with its axes reversed: the worker at (i, j) is then at (j, i)."""
        return Partition.of_grid(self.grid.T)

    @property
    def T(self) -> Partition:
        return self.transpose()

    def extend(self, ndim: int) -> Partition:
        """The same grid with axes of extent 1 on the left, up to `ndim` axes.

        Raises:
            PartitionError: it has more axes already.
        """
        if ndim < self.ndim:
            raise PartitionError(f"cannot extend a partition of {self.ndim} axes to {ndim}")
        return Partition((1,) * (ndim - self.ndim) + self.shape, self.workers)

    def __getitem__(self, index: Any) -> Partition:
        try:
            return Partition.of_grid(np.asarray(self.grid[index]))
        except IndexError as error:
            raise PartitionError(
                f"index {index!r} into a grid of shape {self.shape}: {error}"
            ) from None

    @staticmethod
    def of_grid(grid: np.ndarray) -> Partition:
        """The partition of an n-d integer array of workers."""
        return Partition(grid.shape, grid.ravel().tolist())

    __iter__ = None  # not a sequence: iterate over `workers` or `grid`

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Partition):
            return NotImplemented
        return self.shape == other.shape and self.workers == other.workers

    def __hash__(self) -> int:
        return hash((self.shape, self.workers))

    def __repr__(self) -> str:
        plain = self.workers == tuple(range(self.size))
        return f"Partition({self.shape}{'' if plain else f', workers={self.workers}'})"

    def _repr_html_(self) -> str:
        return showing.partition_html(self)

    def __str__(self) -> str:
        return "×".join(map(str, self.shape)) or "1"


def balanced(n: int, parts: int) -> tuple[int, ...]:
    """Lengths of `parts` blocks of n elements: the first ``n mod parts`` are one longer."""
    return tuple(n // parts + (k < n % parts) for k in range(parts))


@dataclass(frozen=True)
class GridAxis:
    """One axis of a grid of regions: its extent, and its stride in the row-major region number."""

    extent: int
    stride: int

    def of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The coordinates of regions, given by number, along this axis."""
        return numbers // self.stride % self.extent
