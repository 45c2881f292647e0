"""Distributed convolutions: the paper's general algorithm (section 4), which includes splitting
over space alone and over channels alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linop.errors import PartitionError, ShapeError
from linop.layers.layer import Function, Layer, empty_block
from linop.layers.parameters.weights import drawn, hold
from linop.layers.sliding import Window, numbers, spatial
from linop.operators.collectives import repartition
from linop.operators.named_movement import collective
from linop.operators.padding import PaddingMode, edges
from linop.spaces.decomposition import COPIES, Axis, Bounds
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace


class _Conv(Layer):
    """Convolution over blocks of (batch, channels, space), as in torch.nn.

    Every worker of `P_W` gets the input that its block of the output needs, edges and halos
    included, for its channels; convolves it with its block of the weight; and the results are
    summed over the input channels. A block of the weight is held by one worker, at coordinate 0 of
    the axes of batch and space, and broadcast from there; a block of the bias likewise, at
    coordinate 0 of the axis of input channels too.

    Args:
        P_x: the partition of the input: batch, channels, space.
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            padding_mode, device, dtype: as in torch.nn.
        P_y: the partition of the output; by default `P_x`.
        P_W: the workers that compute: a grid over output channels, input channels and space, or
            over batch, output channels, input channels and space. By default those of `P_x`, where
            a channel axis splits the input channels or, with groups, the output channels.

    Raises:
        PartitionError: a grid has another number of axes; or it cuts groups.
    """

    ndim = 0
    weight: Tensor | None
    bias: Tensor | None

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
        P_y = P_x if P_y is None else P_y
        super().__init__([P_x], P_y, *([] if P_W is None else [P_W]))
        for grid in (P_x, P_y):
            spatial(self._name, grid, self.ndim)
        self.P_W = self._work_partition(P_x, P_W, groups)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        kind = getattr(torch.nn, f"Conv{self.ndim}d")
        whole = drawn(
            self,
            lambda: kind(
                in_channels,
                out_channels,
                kernel_size,
                stride,
                padding,
                dilation,
                groups,
                bias,
                padding_mode,
                device,
                dtype,
            ),
        )
        self.padding_mode = padding_mode
        self.window = Window(
            numbers(self._name, "kernel_size", kernel_size, self.ndim, 1),
            numbers(self._name, "stride", stride, self.ndim, 1),
            self._pads(whole),
            numbers(self._name, "dilation", dilation, self.ndim, 1),
        )
        self._groups = [self._group(*cut) for cut in _cuts(out_channels, self.P_W.shape[1])]
        root = (slice(0, 1), slice(None), slice(None), *[slice(0, 1)] * self.ndim)
        self._weight_axes: list[Axis] = [COPIES, 0, 1, *[COPIES] * self.ndim]
        owners = self.P_W[root]
        hold(
            self,
            "weight",
            TensorSpace(whole.weight.shape, owners, axes=self._weight_axes),
            whole.weight,
        )
        if bias:
            self._bias_axes: list[Axis] = [COPIES, 0, *[COPIES] * self.ndim]
            owners = owners[:, :, 0]
            hold(
                self, "bias", TensorSpace((out_channels,), owners, axes=self._bias_axes), whole.bias
            )
        else:
            self.register_parameter("bias", None)

    def _work_partition(self, P_x: Partition, P_W: Partition | None, groups: int) -> Partition:
        """The grid over batch, output channels, input channels and space."""
        if P_W is None:
            batch, channels, *space = P_x.shape
            split = (1, channels) if groups == 1 else (channels, 1)
            return Partition((batch, *split, *space), P_x.workers)
        if P_W.ndim == self.ndim + 2:
            P_W = P_W.extend(self.ndim + 3)
        if P_W.ndim != self.ndim + 3:
            raise PartitionError(
                f"{self._name}: {P_W!r} given as P_W; a grid of {self.ndim + 2} axes expected "
                f"(output channels, input channels, space), or of {self.ndim + 3} (batch first)"
            )
        if groups > 1 and P_W.shape[2] > 1:
            raise PartitionError(
                f"{self._name}: {P_W!r} splits the input channels of {groups} groups; split the "
                f"output channels, whose input channels follow"
            )
        return P_W

    def _pads(self, whole: Any) -> tuple[tuple[int, int], ...]:
        # torch has resolved "same" and "valid" here; last dimension first.
        flat = whole._reversed_padding_repeated_twice
        return tuple((flat[2 * k], flat[2 * k + 1]) for k in reversed(range(self.ndim)))

    def _group(self, first: int, last: int) -> tuple[int, tuple[int, int]]:
        """The number of groups that output channels first:last are in, and the range of their input
        channels.

        Raises:
            PartitionError: the range neither consists of whole groups nor lies within one.
        """
        each_out, each_in = self.out_channels // self.groups, self.in_channels // self.groups
        whole = first % each_out == 0 and last % each_out == 0
        if not whole and first // each_out != (last - 1) // each_out:
            raise PartitionError(
                f"{self._name}: {self.P_W!r} cuts {self.out_channels} output channels at {first} "
                f"and {last}, in the middle of {self.groups} groups; blocks of whole groups, or "
                f"within one, expected"
            )
        inputs = first // each_out * each_in, -(-last // each_out) * each_in
        return max(1, (last - first) // each_out), inputs

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        if X.ndim != self.ndim + 2 or X.global_shape[1] != self.in_channels:
            raise ShapeError(
                f"{self._name}: an input of shape {X.global_shape}; (batch, {self.in_channels}, …) "
                f"of {self.ndim + 2} dimensions expected"
            )
        arrive = self._input(X)
        space = range(2, X.ndim)
        shape = (X.global_shape[0], self.out_channels, *self.window.output(X.global_shape[2:]))
        assert self.output is not None
        products = TensorSpace(shape, self.P_W, X.dtype, [0, 1, COPIES, *space])
        summed = self.moved(
            collective,
            "R",
            f"{self.P_W}→{self.output}",
            products,
            TensorSpace(shape, self.output, X.dtype),
        )
        spread = self._spread("weight", self.P_W, self._weight_axes)
        add = self._spread("bias", self.P_W[:, :, 0], getattr(self, "_bias_axes", []))
        if self.worker not in self.P_W:
            return lambda x: summed(arrive(x))
        at = self.P_W.coordinates(self.worker)
        mine, groups = products.local_shape(self.worker), self._groups[at[1]][0]
        biased = at[2] == 0 and "bias" in self.spaces
        conv = getattr(torch.nn.functional, f"conv{self.ndim}d")
        stride, dilation = self.window.stride, self.window.dilation

        def convolve(x: Tensor) -> Tensor:
            weight = spread(self.weight)
            bias = add(self.bias) if biased else None
            x = arrive(x)
            if 0 in mine or 0 in weight.shape:
                tied = [p for p in (x, weight, bias) if p is not None]
                return summed(empty_block(mine, *tied))
            return summed(conv(x, weight, bias, stride, 0, dilation, groups))

        return convolve

    def _input(self, X: TensorSpace) -> Function:
        """Movement from blocks of X to the padded input of each worker: boundary padding, halos and
        copies in one operator."""
        widths = ((0, 0), (0, 0), *self.window.pads)
        padded = tuple(n + a + b for n, (a, b) in zip(X.global_shape, widths, strict=True))
        grid = self.P_W[0, 0, 0]
        needed = self.window.needed(X.global_shape[2:], grid)
        bounds: dict[int, Bounds] = dict(enumerate(needed, start=2))
        axes: list[Axis] = [0, COPIES, 1, *range(2, X.ndim)]
        if self.groups > 1:
            axes[1:3] = 1, COPIES
            bounds[1] = tuple(channels for _, channels in self._groups)
        wanted = TensorSpace(padded, self.P_W, X.dtype, axes, bounds=bounds)
        segments = edges(X.global_shape, widths, self.padding_mode)
        return self.moved(collective, "H", "", X, wanted, segments=segments, of=0)

    def _spread(self, name: str, workers: Partition, axes: list[Axis]) -> Function:
        """Broadcast of a parameter's blocks to all workers that compute with them."""
        if name not in self.spaces:
            return lambda none: none
        held = self.spaces[name]
        here = TensorSpace(held.global_shape, held.partition, self.dtype_of(name), axes)
        return self.moved(repartition, here, here.like(workers, axes))

    def extra_repr(self) -> str:
        w = self.window
        return (
            f"{self.inputs[0]} → {self.P_W} → {self.output}, {self.in_channels}, "
            f"{self.out_channels}, kernel_size={w.size}, stride={w.stride}, padding={w.pads}, "
            f"dilation={w.dilation}, groups={self.groups}, bias={'bias' in self.spaces}, "
            f"padding_mode={self.padding_mode!r}"
        )


def _cuts(n: int, parts: int) -> Bounds:
    return TensorSpace((n,), Partition((parts,))).bounds[0]


class Conv1d(_Conv):
    __doc__ = _Conv.__doc__
    ndim = 1


class Conv2d(_Conv):
    __doc__ = _Conv.__doc__
    ndim = 2


class Conv3d(_Conv):
    __doc__ = _Conv.__doc__
    ndim = 3
