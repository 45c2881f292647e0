"""Distributed convolutions, and transposed ones, as torch.nn has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from linop.errors import ArgumentError, ShapeError
from linop.layers.convolutions.kernels import Kernels
from linop.layers.layer import Function
from linop.layers.sliding import TransposedWindow, Window, conv_padding, cropped, numbers
from linop.operators.padding import PaddingMode
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace


class _Conv(Kernels):
    """Convolution over blocks of (batch, channels, space), as in torch.nn.

    Every worker of `P_W` gets the input that its block of the output needs, edges and halos
    included, for its channels; convolves it with its block of the weight; and the results are
    summed over the input channels. A block of the weight is held by one worker, at coordinate 0 of
    the axes of batch and space, and broadcast from there; a block of the bias likewise, at
    coordinate 0 of the axis of input channels too. Blocks of channels may cut groups anywhere.

    Args:
        P_x: the partition of the input: batch, channels, space.
        in_channels, out_channels, kernel_size, stride, padding, dilation: as in torch.nn.
        groups, bias, padding_mode, device, dtype: as in torch.nn.
        P_y: the partition of the output; by default `P_x`.
        P_W: the workers that compute: a grid over output channels, input channels (with groups,
            those of each) and space, or over batch, output channels, input channels and space. By
            default those of `P_x`, where a channel axis splits the input channels or, with groups,
            the output channels.

    Raises:
        PartitionError: a grid has another number of axes. ShapeError: from a call, the input has
            other channels or dimensions, or no output; on every worker.
    """

    def __init__(
        self,
        P_x: Partition,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        P_y: Partition | None = None,
        P_W: Partition | None = None,
    ) -> None:
        size = numbers(self._name, "kernel_size", kernel_size, self.ndim, 1)
        steps = numbers(self._name, "stride", stride, self.ndim, 1)
        spread = numbers(self._name, "dilation", dilation, self.ndim, 1)
        pads = conv_padding(self._name, padding, size, spread)
        rest = stride, padding, dilation, groups, bias, padding_mode, device, dtype
        window, channels = Window(size, steps, pads, spread), (in_channels, out_channels)
        super().__init__(P_x, P_y, P_W, groups, window, (*channels, kernel_size, *rest))
        self.padding_mode = padding_mode

    def kernel(self, X: TensorSpace, products: TensorSpace, window: Window) -> Function:
        conv = getattr(torch.nn.functional, f"conv{self.ndim}d")
        stride, dilation = window.stride, window.dilation
        return lambda x, w, b, groups: conv(x, w, b, stride, 0, dilation, groups)


class _ConvTranspose(Kernels):
    """Transposed convolution over blocks of (batch, channels, space), as in torch.nn.

    Every worker of `P_W` gets the input that its block of the output is made of, halos included,
    for its channels; torch transposes it, and what is of other blocks is cut off. Weight and bias
    are held as those of a convolution are; with groups, the weight in blocks of input channels.
    Calls take torch's `output_size`, too.

    Args:
        P_x: the partition of the input: batch, channels, space.
        in_channels, out_channels, kernel_size, stride, padding, output_padding: as in torch.nn.
        groups, bias, dilation, padding_mode, device, dtype: as in torch.nn.
        P_y: the partition of the output; by default `P_x`.
        P_W: the workers that compute: a grid over output channels, input channels (with groups,
            those of each) and space, or over batch, output channels, input channels and space. By
            default those of `P_x`, where a channel axis splits the input channels or, with groups,
            the output channels.

    Raises:
        PartitionError: a grid has another number of axes. ArgumentError: the output padding is not
            below stride or dilation. ShapeError: from a call, the input has other channels or
            dimensions, or no output; on every worker.
    """

    transposed = True

    def __init__(
        self,
        P_x: Partition,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Any = 1,
        padding_mode: PaddingMode = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        P_y: Partition | None = None,
        P_W: Partition | None = None,
    ) -> None:
        given = {
            "size": ("kernel_size", kernel_size, 1),
            "stride": ("stride", stride, 1),
            "padding": ("padding", padding, 0),
            "output_padding": ("output_padding", output_padding, 0),
            "dilation": ("dilation", dilation, 1),
        }
        window = TransposedWindow(
            **{k: numbers(self._name, n, v, self.ndim, m) for k, (n, v, m) in given.items()}
        )
        rows = zip(window.output_padding, window.stride, window.dilation, strict=True)
        if any(more >= max(s, d) for more, s, d in rows):
            raise ArgumentError(
                f"{self._name}: output_padding {window.output_padding}; less than the stride "
                f"{window.stride} or the dilation {window.dilation} expected"
            )
        rest = stride, padding, output_padding, groups, bias, dilation, padding_mode, device, dtype
        channels = in_channels, out_channels
        super().__init__(P_x, P_y, P_W, groups, window, (*channels, kernel_size, *rest))

    def forward(  # type: ignore[override]
        self, input: Tensor | None = None, output_size: Sequence[int] | None = None
    ) -> Tensor:
        """This worker's block of the output. See `Layer`.

        Args:
            input: this worker's block of the input.
            output_size: the extents in space of the whole output, or its shape, as in torch.nn; the
                same on every worker. Without it, `output_padding` says them.

        Raises:
            ShapeError: the kernel has no output of that size. BackendError: workers give different
                ones. Both on every worker.
        """
        size = None if output_size is None else " ".join([str(int(n)) for n in output_size])
        if torch.compiler.is_dynamo_compiling():
            result: Tensor = self.compiled(input, size)
            return result
        return self.recorded(input, size)

    def recorded(self, input: Tensor | None, size: str | None = None) -> Tensor:
        """As `forward`, with the size in one text, as graphs take it."""
        self.__dict__["_call_options"] = () if size is None else tuple(map(int, size.split()))
        return super().forward(input)

    def called_by_code(self, *arguments: Any) -> Any:
        return self.recorded(*arguments)

    def fitted(self, X: TensorSpace) -> TransposedWindow:
        window = self.window
        assert isinstance(window, TransposedWindow)
        if not self._call_options:
            return window
        least = replace(window, output_padding=(0,) * self.ndim).output(X.global_shape[2:])
        most = tuple(n + s - 1 for n, s in zip(least, window.stride, strict=True))
        given = self._call_options
        size = given[2:] if len(given) == self.ndim + 2 else given
        rows = list(zip(least, size, most, strict=False))
        if len(size) != self.ndim or any(not a <= n <= b for a, n, b in rows):
            raise ShapeError(
                f"{self._name}: output_size={given} for an input of shape {X.global_shape}; "
                f"from {least} to {most} expected, the extents of the whole output in space"
            )
        return replace(window, output_padding=tuple(n - a for a, n, _ in rows))

    def kernel(self, X: TensorSpace, products: TensorSpace, window: TransposedWindow) -> Function:
        conv = getattr(torch.nn.functional, f"conv_transpose{self.ndim}d")
        at = self.P_W.coordinates(self.worker)[3:]
        crops = []
        for d, cuts in enumerate(self.needed(X, window)):
            (begin, end), out = cuts[at[d]], products.bounds[2 + d][at[d]]
            crops.append(window.crop(d, begin, end - begin, *out))
        extra, where = [more for more, _ in crops], [part for _, part in crops]

        def transpose(x: Tensor, w: Tensor, b: Tensor | None, groups: int) -> Tensor:
            return cropped(conv(x, w, b, window.stride, 0, extra, groups, window.dilation), where)

        return transpose


class Conv1d(_Conv):
    """
    Example:
        >>> P, x = linop.Partition((1, 1, 2)), torch.ones(1, 1, 6)
        >>> def main(backend):
        ...     conv = layers.Conv1d(P, 1, 1, kernel_size=3, padding=1, bias=False)
        ...     layers.initialize(conv, "weight", torch.nn.init.ones_)
        ...     return conv(x.chunk(2, dim=2)[backend.worker]).flatten().tolist()
        >>> linop.launch(main, workers=2)
        [[2.0, 3.0, 3.0], [3.0, 3.0, 2.0]]
        >>> torch.nn.functional.conv1d(x, torch.ones(1, 1, 3), padding=1).flatten().tolist()
        [2.0, 3.0, 3.0, 3.0, 3.0, 2.0]
    """

    ndim = 1


class Conv2d(_Conv):
    """
    Example:
        >>> P, x = linop.Partition((1, 1, 2, 1)), torch.ones(1, 1, 6, 3)
        >>> def main(backend):
        ...     conv = layers.Conv2d(P, 1, 1, kernel_size=3, padding=(1, 0), bias=False)
        ...     layers.initialize(conv, "weight", torch.nn.init.ones_)
        ...     return conv(x.chunk(2, dim=2)[backend.worker]).flatten().tolist()
        >>> linop.launch(main, workers=2)
        [[6.0, 9.0, 9.0], [9.0, 9.0, 6.0]]
        >>> weight = torch.ones(1, 1, 3, 3)
        >>> torch.nn.functional.conv2d(x, weight, padding=(1, 0)).flatten().tolist()
        [6.0, 9.0, 9.0, 9.0, 9.0, 6.0]
    """

    ndim = 2


class Conv3d(_Conv):
    """
    Example:
        >>> P, x = linop.Partition((1, 1, 2, 1, 1)), torch.ones(1, 1, 6, 3, 3)
        >>> def main(backend):
        ...     conv = layers.Conv3d(P, 1, 1, kernel_size=3, padding=(1, 0, 0), bias=False)
        ...     layers.initialize(conv, "weight", torch.nn.init.ones_)
        ...     return conv(x.chunk(2, dim=2)[backend.worker]).flatten().tolist()
        >>> linop.launch(main, workers=2)
        [[18.0, 27.0, 27.0], [27.0, 27.0, 18.0]]
        >>> weight = torch.ones(1, 1, 3, 3, 3)
        >>> torch.nn.functional.conv3d(x, weight, padding=(1, 0, 0)).flatten().tolist()
        [18.0, 27.0, 27.0, 27.0, 27.0, 18.0]
    """

    ndim = 3


class ConvTranspose1d(_ConvTranspose):
    """
    Example:
        >>> P, x = linop.Partition((1, 1, 2)), torch.ones(1, 1, 4)
        >>> def main(backend):
        ...     conv = layers.ConvTranspose1d(P, 1, 1, kernel_size=3, stride=2, bias=False)
        ...     layers.initialize(conv, "weight", torch.nn.init.ones_)
        ...     return conv(x.chunk(2, dim=2)[backend.worker]).flatten().tolist()
        >>> linop.launch(main, workers=2)
        [[1.0, 1.0, 2.0, 1.0, 2.0], [1.0, 2.0, 1.0, 1.0]]
        >>> weight = torch.ones(1, 1, 3)
        >>> torch.nn.functional.conv_transpose1d(x, weight, stride=2).flatten().tolist()
        [1.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 1.0]
    """

    ndim = 1


class ConvTranspose2d(_ConvTranspose):
    """
    Example:
        >>> P, x = linop.Partition((1, 1, 2, 1)), torch.tensor([1.0, 2.0]).view(1, 1, 2, 1)
        >>> def main(backend):
        ...     conv = layers.ConvTranspose2d(P, 1, 1, kernel_size=2, stride=2, bias=False)
        ...     layers.initialize(conv, "weight", torch.nn.init.ones_)
        ...     return conv(x.chunk(2, dim=2)[backend.worker]).flatten().tolist()
        >>> linop.launch(main, workers=2)
        [[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]]
        >>> weight = torch.ones(1, 1, 2, 2)
        >>> torch.nn.functional.conv_transpose2d(x, weight, stride=2).flatten().tolist()
        [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    """

    ndim = 2


class ConvTranspose3d(_ConvTranspose):
    """
    Example:
        >>> P, x = linop.Partition((1, 1, 2, 1, 1)), torch.tensor([1.0, 2.0]).view(1, 1, 2, 1, 1)
        >>> def main(backend):
        ...     conv = layers.ConvTranspose3d(P, 1, 1, kernel_size=(2, 1, 1), stride=2, bias=False)
        ...     layers.initialize(conv, "weight", torch.nn.init.ones_)
        ...     return conv(x.chunk(2, dim=2)[backend.worker]).flatten().tolist()
        >>> linop.launch(main, workers=2)
        [[1.0, 1.0], [2.0, 2.0]]
        >>> weight = torch.ones(1, 1, 2, 1, 1)
        >>> torch.nn.functional.conv_transpose3d(x, weight, stride=2).flatten().tolist()
        [1.0, 1.0, 2.0, 2.0]
    """

    ndim = 3
