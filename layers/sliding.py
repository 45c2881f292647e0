"""Geometry of sliding kernels over blocks, for convolution, pooling and resampling (paper, section
4, sparse layers, and appendix B); and the checks of arguments that these layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from linop.errors import ArgumentError, PartitionError, ShapeError
from linop.operators.halo import halo_geometry, per_dim
from linop.spaces.decomposition import Bounds
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace

Pads = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Window:
    """A kernel over the last dimensions of a tensor.

    Args:
        size, stride, dilation: one number for each of these dimensions.
        pads: (left, right) of each.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    pads: Pads
    dilation: tuple[int, ...]

    def needed(self, shape: Sequence[int], grid: Partition) -> list[Bounds]:
        """Index ranges of the padded tensor that the blocks of the balanced output need: for each
        dimension, (start, stop) by grid coordinate.

        Args:
            shape: of the tensor in these dimensions, without padding.
            grid: the workers in these dimensions.

        Raises:
            ShapeError: the output would be empty.
        """
        padded = [n + a + b for n, (a, b) in zip(shape, self.pads, strict=True)]
        geometry = halo_geometry(padded, grid, self.size, self.stride, 0, self.dilation)
        needed = []
        for d in range(grid.ndim):
            line = [
                grid.worker([k * (d == e) for e in range(grid.ndim)]) for k in range(grid.shape[d])
            ]
            dims = [geometry[worker][d] for worker in line]
            needed.append(tuple((h.start, h.stop) for h in dims))
        return needed

    def output(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Extents of the output for a tensor of a shape, both in the window's dimensions."""
        rows = zip(shape, self.size, self.stride, self.pads, self.dilation, strict=True)
        return tuple((n + a + b - d * (k - 1) - 1) // s + 1 for n, k, s, (a, b), d in rows)


def numbers(name: str, what: str, value: Any, ndim: int, least: int) -> tuple[int, ...]:
    """A tuple of `ndim` whole numbers, at least `least`, from a number or from a sequence of one or
    `ndim` of them.

    Args:
        name, what: of layer and argument, for errors.

    Raises:
        ShapeError, ArgumentError: there are more or fewer, or they are not such numbers.
    """
    try:
        value = (
            tuple(value) * (ndim if len(value) == 1 else 1) if hasattr(value, "__len__") else value
        )
        return per_dim(what, value, ndim, least)
    except (ShapeError, ArgumentError) as error:
        raise type(error)(f"{name}: {error}") from None


def check_dimensions(name: str, X: TensorSpace, ndim: int) -> None:
    """Check that an input is of (batch, channels, space), with `ndim` dimensions of space.

    Raises:
        ShapeError: it is not.
    """
    if X.ndim != ndim + 2:
        raise ShapeError(
            f"{name}: an input of shape {X.global_shape}; {ndim + 2} dimensions expected: batch, "
            f"channels, and {ndim} of space"
        )


def spatial(name: str, grid: Partition, ndim: int) -> Partition:
    """The sub-grid along the axes of space of a grid over (batch, channels, space).

    Raises:
        PartitionError: the grid has another number of axes.
    """
    if grid.ndim != ndim + 2:
        raise PartitionError(
            f"{name}: {grid!r} given; a grid of {ndim + 2} axes expected: batch, channels, and "
            f"{ndim} of space"
        )
    return grid[0, 0]
