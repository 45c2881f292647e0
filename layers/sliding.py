"""Geometry of sliding kernels over blocks, for convolution, pooling and resampling (paper, section
4, sparse layers, and appendix B): which input a range of outputs needs; reductions of windows of
any lengths; and the checks of arguments that these layers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from linop.errors import ArgumentError, PartitionError, ShapeError
from linop.operators.halo import per_dim
from linop.spaces.decomposition import Bounds, even
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace

Pads = tuple[tuple[int, int], ...]


class Sliding:
    """Base class of kernels that slide over the last dimensions of a tensor; the output is cut into
    balanced blocks."""

    def output(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Extents of the output for a tensor of a shape, both in the kernel's dimensions; below 1
        where there is none."""
        raise NotImplementedError

    def inputs(self, d: int, n: int, first: int, last: int) -> tuple[int, int]:
        """Range of a tensor of extent n along d, with its padding, that the outputs first:last
        need; an empty one for no outputs."""
        raise NotImplementedError

    def blocks(self, shape: Sequence[int], grid: Partition) -> list[Bounds]:
        """Blocks of the output: for each dimension, (start, stop) by grid coordinate.

        Args:
            shape: of the tensor in these dimensions, without padding.
            grid: the workers in these dimensions.

        Raises:
            ShapeError: the output would be empty.
        """
        outputs = self.output(shape)
        if min(outputs) < 1:
            raise ShapeError(f"{self!r} on a tensor of shape {tuple(shape)}: there is no output")
        return [even(m, parts) for m, parts in zip(outputs, grid.shape, strict=True)]

    def needed(self, shape: Sequence[int], grid: Partition) -> list[Bounds]:
        """Index ranges of the tensor, with its padding, that `blocks` need; arguments and errors
        are theirs."""
        each = enumerate(zip(shape, self.blocks(shape, grid), strict=True))
        return [tuple(self.inputs(d, n, *cut) for cut in cuts) for d, (n, cuts) in each]


@dataclass(frozen=True)
class Window(Sliding):
    """A kernel of a convolution or a pool.

    Args:
        size, stride, dilation: one number for each of the last dimensions.
        pads: (left, right) of each.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    pads: Pads
    dilation: tuple[int, ...]

    def output(self, shape: Sequence[int]) -> tuple[int, ...]:
        rows = zip(shape, self.size, self.stride, self.pads, self.dilation, strict=True)
        return tuple((n + a + b - d * (k - 1) - 1) // s + 1 for n, k, s, (a, b), d in rows)

    def inputs(self, d: int, n: int, first: int, last: int) -> tuple[int, int]:
        if first == last:
            return 0, 0
        reach = self.dilation[d] * (self.size[d] - 1)
        return first * self.stride[d], (last - 1) * self.stride[d] + reach + 1

    def inside(self, d: int, n: int, first: int, last: int) -> Pads:
        """The range without padding, and the (left, right) padding that belongs to it."""
        start, stop = (k - self.pads[d][0] for k in self.inputs(d, n, first, last))
        if start == stop:
            return (0, 0), (0, 0)
        low = min(max(start, 0), n)
        high = max(min(stop, n), low)
        return (low, high), (low - start, stop - high)


@dataclass(frozen=True)
class TransposedWindow(Sliding):
    """A kernel of a transposed convolution: output o gets input i by the kernel's element j, where
    o = i·stride − padding + j·dilation.

    Args:
        size, stride, padding, output_padding, dilation: one number for each of the last dimensions,
            as in torch.nn.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def reach(self, d: int) -> int:
        """Distance of the first and the last output that one input is added to, along d."""
        return self.dilation[d] * (self.size[d] - 1)

    def output(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(
            (n - 1) * self.stride[d] - 2 * self.padding[d] + self.reach(d) + more + 1 if n else 0
            for d, (n, more) in enumerate(zip(shape, self.output_padding, strict=True))
        )

    def inputs(self, d: int, n: int, first: int, last: int) -> tuple[int, int]:
        if first == last:
            return 0, 0
        low = max((first + self.padding[d] - self.reach(d)) // self.stride[d], 0)
        high = min((last - 1 + self.padding[d]) // self.stride[d], n - 1)
        return min(low, high), high + 1  # one input at least

    def crop(self, d: int, begin: int, n: int, first: int, last: int) -> tuple[int, slice]:
        """The output padding with which inputs begin:begin + n, transposed without padding, cover
        the outputs first:last along d; and the place of these in the result."""
        at = begin * self.stride[d] - self.padding[d]
        end = at + (n - 1) * self.stride[d] + self.reach(d) + 1
        return max(0, last - end), slice(first - at, last - at)


def cropped(x: Tensor, where: Sequence[slice]) -> Tensor:
    """Ranges of the last dimensions; the tensor itself, where they are all of it."""
    for d, part in enumerate(where, start=x.ndim - len(where)):
        length = part.stop - part.start
        x = x if length == x.shape[d] else x.narrow(d, part.start, length)
    return x


def conv_padding(name: str, padding: Any, size: Sequence[int], dilation: Sequence[int]) -> Pads:
    """(left, right) padding of a convolution for each dimension, as torch has it.

    Args:
        name: of layer or function, for errors.
        padding: numbers, "valid" or "same".
        size, dilation: one number for each dimension.

    Raises:
        ShapeError, ArgumentError: as of `numbers`.
    """
    if padding == "same":
        reach = [d * (k - 1) for d, k in zip(dilation, size, strict=True)]
        return tuple((r // 2, r - r // 2) for r in reach)
    given = numbers(name, "padding", 0 if padding == "valid" else padding, len(size), 0)
    return tuple((p, p) for p in given)


def pool_window(
    extents: Sequence[int],
    size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: Sequence[int],
    dilation: tuple[int, ...],
    ceil_mode: bool,
) -> Window:
    """The window of a pool over a tensor of some extents. With `ceil_mode` its right padding is
    enlarged, for a last kernel that begins in the tensor or in the left padding.

    Args:
        size, stride, padding, dilation: one number for each dimension of space.
    """
    pads = []
    for n, k, s, p, d in zip(extents, size, stride, padding, dilation, strict=True):
        reach = d * (k - 1) + 1
        outputs = -(-(n + 2 * p - reach) // s) + 1
        if (outputs - 1) * s >= n + p:
            outputs -= 1
        more = (outputs - 1) * s + reach - (n + 2 * p)
        pads.append((p, p + max(0, more) if ceil_mode else p))
    return Window(size, stride, tuple(pads), dilation)


def average(
    pool: Callable[..., Tensor],
    window: Window,
    where: Sequence[tuple[int, int]],
    extents: Sequence[int],
    include_pad: bool,
    divisor: int | None,
) -> Callable[[Tensor], Tensor]:
    """Function of a padded block: torch's average pool without padding, corrected for the number of
    elements that torch divides by. Padding counts, with `include_pad`; elements beyond it, which
    `ceil_mode` adds, do not.

    Args:
        pool: torch's function.
        where: (start, stop) of the block's outputs, in each dimension of space.
        extents: of the global tensor in space, without padding.
        divisor: of all sums, instead of that number.
    """
    size = prod(window.size)
    counts = torch.ones((), dtype=torch.float64)
    for d, (n, (first, last)) in enumerate(zip(extents, where, strict=True)):
        pad = window.pads[d][0]
        start = torch.arange(first, last) * window.stride[d] - pad
        stop = (start + window.size[d]).clamp(max=n + pad)
        if not include_pad:
            start, stop = start.clamp(min=0), stop.clamp(max=n)
        counts = counts[..., None] * (stop - start)
    if divisor is not None:
        counts = torch.tensor(divisor, dtype=torch.float64)
    if bool((counts == size).all()):
        return lambda x: pool(x, window.size, window.stride)
    return lambda x: pool(x, window.size, window.stride) * (size / counts).to(x)


def adaptive_range(n: int, m: int, first: int, last: int) -> tuple[int, int]:
    """Range of n inputs of an adaptive pool that its outputs first:last of m are of, as torch has
    it. Likewise, with n and m exchanged, the outputs that a range of inputs is part of."""
    return first * n // m, -(-last * n // m)


def of_windows(
    x: Tensor, d: int, windows: Sequence[tuple[int, int]], reduce: Callable[..., Tensor]
) -> Tensor:
    """Reductions of ranges along a dimension, side by side along it.

    Args:
        windows: (start, stop) of each range.
        reduce: takes a tensor, a dimension and `True`, and reduces the tensor along it to extent 1.
    """
    if all(b - a == 1 for a, b in windows) and windows == [(k, k + 1) for k in range(x.shape[d])]:
        return x
    if not windows:
        return x.narrow(d, 0, 0)
    return torch.cat([reduce(x.narrow(d, a, b - a), d, True) for a, b in windows], d)


def largest(x: Tensor, d: int, keep: bool) -> Tensor:
    """Maxima along a dimension; of equal ones the first gets the gradient."""
    return x.max(d, keep)[0]


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
