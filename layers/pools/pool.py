"""Distributed pooling: a halo exchange, then torch's pooling (paper, section 4, sparse layers)."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from linop.errors import ArgumentError
from linop.layers.layer import Function, Layer
from linop.layers.sliding import (
    Pads,
    Window,
    average,
    check_dimensions,
    numbers,
    pool_window,
    spatial,
)
from linop.layers.zero_volume import empty_block
from linop.operators.named_movement import collective
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace


class _Pool(Layer):
    """Base class of the pooling layers: kernels over the dimensions of space; no parameters."""

    ndim = 0
    fill = 0.0
    """Value of the boundary padding."""

    def __init__(
        self,
        P_x: Partition,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__([P_x], P_x)
        self.grid = spatial(self._name, P_x, self.ndim)
        self.kernel_size = numbers(self._name, "kernel_size", kernel_size, self.ndim, 1)
        steps = kernel_size if stride is None else stride
        self.stride = numbers(self._name, "stride", steps, self.ndim, 1)
        self.padding = numbers(self._name, "padding", padding, self.ndim, 0)
        self.dilation = numbers(self._name, "dilation", dilation, self.ndim, 1)
        self.ceil_mode = ceil_mode
        if any(2 * p > k for p, k in zip(self.padding, self.kernel_size, strict=True)):
            raise ArgumentError(
                f"{self._name}: padding {self.padding} for a kernel of size {self.kernel_size}; at "
                f"most half of it, as in torch"
            )

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        check_dimensions(self._name, X, self.ndim)
        extents = X.global_shape[2:]
        settings = self.kernel_size, self.stride, self.padding, self.dilation
        window = pool_window(extents, *settings, self.ceil_mode)
        bounds, pads = dict(enumerate(X.bounds)), []
        outputs = window.blocks(extents, self.grid)
        at = X.partition.coordinates(self.worker)[2:] if self.worker in X.partition else ()
        for d, (n, cuts) in enumerate(zip(extents, outputs, strict=True)):
            each = [window.inside(d, n, *cut) for cut in cuts]
            bounds[d + 2] = tuple(inside for inside, _ in each)
            pads += [each[at[d]][1]] if at else []
        needed = TensorSpace(X.global_shape, X.partition, X.dtype, X.axes, bounds=bounds)
        arrive = self.moved(collective, "H", "", X, needed)
        if not at:
            return arrive
        where = tuple(cuts[k] for cuts, k in zip(outputs, at, strict=True))
        mine = (*needed.local_shape(self.worker)[:2], *(b - a for a, b in where))
        pool = self.pooling(window, where, extents)
        # torch wants the last dimension first.
        flat = [width for pair in reversed(pads) for width in pair]

        def pooled(x: Tensor) -> Tensor:
            x = arrive(x)
            if 0 in mine:
                return empty_block(mine, x)
            return pool(torch.nn.functional.pad(x, flat, value=self.fill) if any(flat) else x)

        return pooled

    def pooling(self, window: Window, where: Pads, extents: tuple[int, ...]) -> Function:
        """Function that pools this worker's padded block.

        Args:
            where: (start, stop) of the worker's outputs, in each dimension of space.
            extents: of the global tensor in space, without padding.
        """
        raise NotImplementedError

    def extra_repr(self) -> str:
        return (
            f"{self.inputs[0]}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, ceil_mode={self.ceil_mode}"
        )


class _MaxPool(_Pool):
    """Max pooling over blocks of (batch, channels, space).

    Args:
        P_x: the partition of input and output.
        kernel_size, stride, padding, dilation, ceil_mode: as in torch.nn.
        return_indices: not supported.

    Raises:
        ArgumentError: indices are asked for; or the padding is more than half of the kernel.
    """

    fill = -torch.inf

    def __init__(
        self,
        P_x: Partition,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
    ) -> None:
        if return_indices:
            raise ArgumentError(f"{self._name}: return_indices=True; distributed layers give none")
        super().__init__(P_x, kernel_size, stride, padding, dilation, ceil_mode)

    def pooling(self, window: Window, where: Pads, extents: tuple[int, ...]) -> Function:
        pool = getattr(torch.nn.functional, f"max_pool{self.ndim}d")
        return lambda x: pool(x, window.size, window.stride, 0, window.dilation)


class _AvgPool(_Pool):
    """Average pooling over blocks of (batch, channels, space).

    Args:
        P_x: the partition of input and output.
        kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override: as in
            torch.nn.

    Raises:
        ArgumentError: the padding is more than half of the kernel.
    """

    def __init__(
        self,
        P_x: Partition,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> None:
        super().__init__(P_x, kernel_size, stride, padding, 1, ceil_mode)
        if divisor_override == 0:
            raise ArgumentError(f"{self._name}: divisor_override is 0")
        self.count_include_pad, self.divisor_override = count_include_pad, divisor_override

    def pooling(self, window: Window, where: Pads, extents: tuple[int, ...]) -> Function:
        pool = getattr(torch.nn.functional, f"avg_pool{self.ndim}d")
        choices = self.count_include_pad, self.divisor_override
        return average(pool, window, where, extents, *choices)


class _LPPool(_AvgPool):
    """Power-average pooling over blocks of (batch, channels, space): (Σ xᵖ)^(1/p).

    Args:
        P_x: the partition of input and output.
        norm_type, kernel_size, stride, ceil_mode: as in torch.nn.
    """

    def __init__(
        self,
        P_x: Partition,
        norm_type: float,
        kernel_size: Any,
        stride: Any = None,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__(P_x, kernel_size, stride, 0, ceil_mode)
        self.norm_type = float(norm_type)

    def pooling(self, window: Window, where: Pads, extents: tuple[int, ...]) -> Function:
        mean, p, size = super().pooling(window, where, extents), self.norm_type, prod(window.size)

        def pool(x: Tensor) -> Tensor:
            y = mean(x.pow(p))
            return (y.sign() * y.abs().relu() * size).pow(1 / p)

        return pool


class MaxPool1d(_MaxPool):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2)), torch.arange(6.0).view(1, 1, 6)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.MaxPool1d(P, 2)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[1.0, 3.0], [5.0]]
        >>> torch.nn.MaxPool1d(2)(whole).flatten().tolist()
        [1.0, 3.0, 5.0]
    """

    ndim = 1


class MaxPool2d(_MaxPool):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1)), torch.arange(12.0).view(1, 1, 6, 2)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.MaxPool2d(P, 2)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[3.0, 7.0], [11.0]]
        >>> torch.nn.MaxPool2d(2)(whole).flatten().tolist()
        [3.0, 7.0, 11.0]
    """

    ndim = 2


class MaxPool3d(_MaxPool):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1, 1)), torch.arange(24.0).view(1, 1, 6, 2, 2)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.MaxPool3d(P, 2)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[7.0, 15.0], [23.0]]
        >>> torch.nn.MaxPool3d(2)(whole).flatten().tolist()
        [7.0, 15.0, 23.0]
    """

    ndim = 3


class AvgPool1d(_AvgPool):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2)), torch.arange(6.0).view(1, 1, 6)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.AvgPool1d(P, 2)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[0.5, 2.5], [4.5]]
        >>> torch.nn.AvgPool1d(2)(whole).flatten().tolist()
        [0.5, 2.5, 4.5]
    """

    ndim = 1


class AvgPool2d(_AvgPool):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1)), torch.arange(12.0).view(1, 1, 6, 2)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.AvgPool2d(P, 2)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[1.5, 5.5], [9.5]]
        >>> torch.nn.AvgPool2d(2)(whole).flatten().tolist()
        [1.5, 5.5, 9.5]
    """

    ndim = 2


class AvgPool3d(_AvgPool):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1, 1)), torch.arange(24.0).view(1, 1, 6, 2, 2)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.AvgPool3d(P, 2)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[3.5, 11.5], [19.5]]
        >>> torch.nn.AvgPool3d(2)(whole).flatten().tolist()
        [3.5, 11.5, 19.5]
    """

    ndim = 3


class LPPool1d(_LPPool):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2)), torch.tensor([[[3.0, 4.0, 6.0, 8.0]]])
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.LPPool1d(P, 2, 2)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[5.0], [10.0]]
        >>> torch.nn.LPPool1d(2, 2)(whole).flatten().tolist()
        [5.0, 10.0]
    """

    ndim = 1


class LPPool2d(_LPPool):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1)), torch.ones(1, 1, 6, 2)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.LPPool2d(P, 2, 2)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[2.0, 2.0], [2.0]]
        >>> torch.nn.LPPool2d(2, 2)(whole).flatten().tolist()
        [2.0, 2.0, 2.0]
    """

    ndim = 2


class LPPool3d(_LPPool):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1, 1)), torch.arange(24.0).view(1, 1, 6, 2, 2)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.LPPool3d(P, 1, 2)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[28.0, 92.0], [156.0]]
        >>> torch.nn.LPPool3d(1, 2)(whole).flatten().tolist()
        [28.0, 92.0, 156.0]
    """

    ndim = 3
