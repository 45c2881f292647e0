"""The paper's general algorithm of distributed convolution (section 4), which includes splitting
over space alone and over channels alone; also of transposed ones, and of those with groups.
`linop.layers.convolutions.conv` has the layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linop.errors import PartitionError, ShapeError
from linop.layers.layer import Function, Layer
from linop.layers.parameters.weights import drawn, hold
from linop.layers.sliding import Sliding, TransposedWindow, Window, spatial
from linop.layers.zero_volume import empty_block
from linop.normal_form.matching import Segment
from linop.operators.collectives import repartition
from linop.operators.named_movement import collective
from linop.operators.padding import PaddingMode, edges
from linop.spaces.decomposition import COPIES, Axis, Bounds, even
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace


class _Piece(NamedTuple):
    """Output channels of a worker that one call of torch computes: whole groups, or channels of one
    group. Ranges are local: (start, stop).

    Args:
        outputs, inputs: channels of this worker's output and input.
        columns: of the output channels of its groups, those that are computed.
        groups: their number.
    """

    outputs: tuple[int, int]
    inputs: tuple[int, int]
    columns: tuple[int, int]
    groups: int


class Kernels(Layer):
    """Base class of convolutions and transposed ones.

    Every worker of `P_W` gets the input that its block of the output needs, for its channels;
    convolves it with its block of the weight; and the results are summed over the input channels.
    A block of the weight is held by one worker, at coordinate 0 of the axes of batch and space, and
    broadcast from there; a block of the bias likewise, at coordinate 0 of the axis of input
    channels too.

    Of a convolution with groups, a worker's outputs may be of several groups, and not all of any:
    the output channels first:last; and its inputs a part of the channels of each of them. These are
    gathered, group after group, by an index map of the channels.

    Args:
        P_x, P_y, P_W, groups: as of the layers.
        window: the kernel's geometry.
        arguments: of torch's layer.
    """

    ndim = 0
    transposed = False
    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition | None,
        P_W: Partition | None,
        groups: int,
        window: Window | TransposedWindow,
        arguments: Sequence[Any],
    ) -> None:
        P_y = P_x if P_y is None else P_y
        super().__init__([P_x], P_y, *([] if P_W is None else [P_W]))
        for grid in (P_x, P_y):
            spatial(self._name, grid, self.ndim)
        self.P_W = self._work_partition(P_x, P_W, groups)
        kind = getattr(torch.nn, f"Conv{'Transpose' * self.transposed}{self.ndim}d")
        whole = drawn(self, lambda: kind(*arguments))
        self.in_channels, self.out_channels = whole.in_channels, whole.out_channels
        self.groups, self.window = groups, window
        self._outputs = even(self.out_channels, self.P_W.shape[1])
        root = (slice(0, 1), slice(None), slice(None), *[slice(0, 1)] * self.ndim)
        self._hold("weight", self.P_W[root], whole.weight)
        if whole.bias is None:
            self.register_parameter("bias", None)
        else:
            self._hold("bias", self.P_W[root][:, :, 0], whole.bias)

    def _hold(self, name: str, owners: Partition, whole: Any) -> None:
        """Register this worker's block of a parameter; of the weight of a transposed convolution
        with groups, rows, which are the input channels."""
        space: list[Axis] = [COPIES] * self.ndim
        if name == "bias":
            axes = [COPIES, 0, *space]
        elif self._by_rows:
            owners, axes = _merged(owners), [COPIES, 0, *space]
        else:
            axes = [COPIES, *((1, 0) if self.transposed else (0, 1)), *space]
        hold(self, name, TensorSpace(whole.shape, owners, axes=axes), whole)

    @property
    def _by_rows(self) -> bool:
        return self.transposed and self.groups > 1

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
        return P_W

    # Channels

    def _pieces(self, at: tuple[int, ...]) -> list[_Piece]:
        """The part that a worker computes, by its coordinates in `P_W`."""
        first, last = self._outputs[at[1]]
        if self.groups == 1:
            inputs = even(self.in_channels, self.P_W.shape[2])[at[2]]
            return [_Piece((0, last - first), (0, inputs[1] - inputs[0]), (0, last - first), 1)]
        each = self.out_channels // self.groups
        start, stop = even(self.in_channels // self.groups, self.P_W.shape[2])[at[2]]
        cuts = {first, last, min(last, -(-first // each) * each), max(first, last // each * each)}
        found = []
        for a, b in pairwise(sorted(cuts)):
            group, count = a // each, max(1, (b - a) // each)
            row = (group - first // each) * (stop - start)
            columns = (a - group * each, min(b - group * each, each))
            inputs = row, row + count * (stop - start)
            found.append(_Piece((a - first, b - first), inputs, columns, count))
        return found

    def _channels(self) -> tuple[Bounds, tuple[Segment, ...]]:
        """Input channels of every worker, along the merged axis of output and input channels of
        `P_W`: blocks of an index range, and the index map from it to the channels."""
        each = self.out_channels // self.groups
        rows = self.in_channels // self.groups
        bounds, segments, end = [], [], 0
        for first, last in self._outputs:
            groups = range(first // each, -(-last // each)) if first < last else range(0)
            for start, stop in even(rows, self.P_W.shape[2]):
                begin = end
                for group in groups if start < stop else ():
                    segments.append(Segment(end, group * rows + start, stop - start))
                    end += stop - start
                bounds.append((begin, end))
        return tuple(bounds), tuple(segments)

    # Calls

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        if X.ndim != self.ndim + 2 or X.global_shape[1] != self.in_channels:
            raise ShapeError(
                f"{self._name}: an input of shape {X.global_shape}; (batch, {self.in_channels}, …) "
                f"of {self.ndim + 2} dimensions expected"
            )
        window = self.fitted(X)
        arrive = self._input(X, window)
        space = range(2, X.ndim)
        shape = (X.global_shape[0], self.out_channels, *window.output(X.global_shape[2:]))
        assert self.output is not None
        products = TensorSpace(shape, self.P_W, X.dtype, [0, 1, COPIES, *space])
        summed = self.moved(
            collective,
            "R",
            f"{self.P_W}→{self.output}",
            products,
            TensorSpace(shape, self.output, X.dtype),
        )
        spread = self._spread_rows() if self._by_rows else self._spread("weight", self.P_W)
        add = self._spread("bias", self.P_W[:, :, 0])
        if self.worker not in self.P_W:
            return lambda x: summed(arrive(x))
        at = self.P_W.coordinates(self.worker)
        mine, pieces = products.local_shape(self.worker), self._pieces(at)
        biased = at[2] == 0 and "bias" in self.spaces
        kernel = self.kernel(X, products, window)

        def convolve(x: Tensor) -> Tensor:
            weight = spread(self.weight)
            bias = add(self.bias) if biased else None
            x = arrive(x)
            if 0 in mine or 0 in weight.shape:
                tied = [p for p in (x, weight, bias) if p is not None]
                return summed(empty_block(mine, *tied))
            parts = []
            for outputs, inputs, columns, groups in pieces:
                rows = (inputs, columns) if self.transposed else (outputs,)
                w, b = weight, bias
                for d, part in enumerate(rows):
                    w = _range(w, d, part)
                b = None if b is None else _range(b, 0, outputs)
                parts.append(kernel(_range(x, 1, inputs), w, b, groups))
            return summed(parts[0] if len(parts) == 1 else torch.cat(parts, 1))

        return convolve

    def fitted(self, X: TensorSpace) -> Window | TransposedWindow:
        """The kernel's geometry in this call."""
        del X
        return self.window

    def kernel(self, X: TensorSpace, products: TensorSpace, window: Any) -> Function:
        """torch's function of this worker's input, weight, bias, and number of groups."""
        raise NotImplementedError

    def needed(self, X: TensorSpace, window: Sliding) -> list[Bounds]:
        """Ranges of the input that the workers' blocks of the output need, by dimension of space
        and coordinate."""
        return window.needed(X.global_shape[2:], self.P_W[0, 0, 0])

    def _input(self, X: TensorSpace, window: Window | TransposedWindow) -> Function:
        """Movement from blocks of X to the padded input of each worker: boundary padding, halos,
        selections and copies of channels in one operator."""
        pads = window.pads if isinstance(window, Window) else ((0, 0),) * self.ndim
        widths = ((0, 0), (0, 0), *pads)
        shape = [n + a + b for n, (a, b) in zip(X.global_shape, widths, strict=True)]
        segments = edges(X.global_shape, widths, self.padding_mode)
        bounds: dict[int, Bounds] = dict(enumerate(self.needed(X, window), start=2))
        grid, axes = self.P_W, [0, COPIES, 1, *range(2, X.ndim)]
        if self.groups > 1:
            grid, axes = _merged(grid), [0, 1, *range(2, X.ndim)]
            bounds[1], segments[1] = self._channels()
            shape[1] = bounds[1][-1][1]
        wanted = TensorSpace(shape, grid, X.dtype, axes, bounds=bounds)
        return self.moved(collective, "H", "", X, wanted, segments=segments, of=0)

    def _spread(self, name: str, workers: Partition) -> Function:
        """Broadcast of a parameter's blocks to all workers that compute with them."""
        if name not in self.spaces:
            return lambda none: none
        here = self.spaces[name].with_dtype(self.dtype_of(name))
        return self.moved(repartition, here, here.like(workers, here.axes))

    def _spread_rows(self) -> Function:
        """Movement of the rows of a transposed convolution's weight to the workers of these input
        channels."""
        here = self.spaces["weight"].with_dtype(self.dtype_of("weight"))
        bounds, segments = self._channels()
        shape = (bounds[-1][1], *here.global_shape[1:])
        wanted = TensorSpace(shape, _merged(self.P_W), here.dtype, here.axes, bounds={0: bounds})
        return self.moved(collective, "P", "", here, wanted, segments={0: segments})

    padding_mode: PaddingMode = "zeros"

    def extra_repr(self) -> str:
        rows = [f"{name}={value}" for name, value in vars(self.window).items()]
        return (
            f"{self.inputs[0]} → {self.P_W} → {self.output}, {self.in_channels}, "
            f"{self.out_channels}, {', '.join(rows)}, groups={self.groups}, "
            f"bias={'bias' in self.spaces}, padding_mode={self.padding_mode!r}"
        )


def _merged(P: Partition) -> Partition:
    """The grid over batch, output channels, input channels and space, with both axes of channels in
    one."""
    batch, outputs, inputs, *space = P.shape
    return Partition((batch, outputs * inputs, *space), P.workers)


def _range(x: Tensor, d: int, part: tuple[int, int]) -> Tensor:
    return x if part == (0, x.shape[d]) else x.narrow(d, part[0], part[1] - part[0])
