"""Distributed padding: torch.nn's modules. The output is in balanced blocks in space, which one
movement fills; constant edges are added locally."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from linop.backends.autograd.functions import apply
from linop.errors import ArgumentError, ShapeError
from linop.layers.layer import Function, Layer
from linop.layers.sliding import check_dimensions, spatial
from linop.operators.named_movement import collective
from linop.operators.padding import PaddingMode, edges, padded_shape
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace


class _Pad(Layer):
    """Padding of (batch, channels, space) in space, as in torch.nn: copies of what is inside.

    Args:
        P_x: the partition of input and output.
        padding: as in torch.nn: one number, or (left, right) of the last dimension, then of those
            before it. Negative ones cut off.

    Raises:
        PartitionError: a grid of another number of axes. ArgumentError, ShapeError: not so many
            whole numbers; or, from a call, they do not fit the input.
    """

    ndim = 0
    mode: ClassVar[PaddingMode] = "zeros"

    def __init__(self, P_x: Partition, padding: int | Sequence[int]) -> None:
        super().__init__([P_x], P_x)
        spatial(self._name, P_x, self.ndim)
        flat = (padding,) * 2 * self.ndim if isinstance(padding, int) else tuple(padding)
        if len(flat) != 2 * self.ndim or any(not isinstance(n, int) for n in flat):
            raise ArgumentError(
                f"{self._name}: padding {padding!r} given; a whole number expected, or "
                f"{2 * self.ndim}: (left, right) of each dimension, the last one first"
            )
        self.padding = flat
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        self.widths = ((0, 0), (0, 0), *reversed(pairs))

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        check_dimensions(self._name, X, self.ndim)
        try:
            shape = padded_shape(X, self.widths)
            edges(X.global_shape, self.widths, self.mode)
        except ShapeError as error:
            raise ShapeError(f"{self._name}: {error}") from None
        kept = {d: X.bounds[d] for d in (0, 1)}
        return self.padded(X, TensorSpace(shape, X.partition, X.dtype, X.axes, bounds=kept))

    def padded(self, X: TensorSpace, Y: TensorSpace) -> Function:
        """Function from this worker's block of X to its block of the padded tensor Y."""
        segments = edges(X.global_shape, self.widths, self.mode)
        op = collective("Pad", self.mode, X, Y, segments=segments)
        # Not `moved`: as in torch, the result is new memory even where the padding is 0.
        return partial(apply, op, backend=self.backend)

    def extra_repr(self) -> str:
        return f"{self.inputs[0]}, padding={self.padding}"


class _ConstantPad(_Pad):
    """Padding of (batch, channels, space) in space with one value, as in torch.nn.

    Args:
        P_x: the partition of input and output.
        padding: as in torch.nn: one number, or (left, right) of the last dimension, then of those
            before it. Negative ones cut off.
        value: of the edges.

    Raises:
        PartitionError: a grid of another number of axes. ArgumentError, ShapeError: not so many
            whole numbers, or the value is no number; or, from a call, they do not fit the input.
    """

    def __init__(self, P_x: Partition, padding: int | Sequence[int], value: float) -> None:
        super().__init__(P_x, padding)
        if not isinstance(value, int | float):
            raise ArgumentError(f"{self._name}: value {value!r} given; a number expected")
        self.value = value

    def padded(self, X: TensorSpace, Y: TensorSpace) -> Function:
        # Only elements of x travel; each worker adds the edges of its own block of Y.
        bounds = dict(enumerate(X.bounds))
        for d in range(2, X.ndim):
            n, left = X.global_shape[d], self.widths[d][0]
            starts = [min(max(a - left, 0), n) for a, _ in Y.bounds[d]]
            stops = [min(max(b - left, 0), n) for _, b in Y.bounds[d]]
            bounds[d] = tuple(zip(starts, stops, strict=True))
        inside = TensorSpace(X.global_shape, X.partition, X.dtype, X.axes, bounds=bounds)
        arrive = self.moved(collective, "Pad", self.mode, X, inside)
        if self.worker not in X.partition:
            return arrive
        flat: list[int] = []
        ends = zip(inside.slices(self.worker), Y.slices(self.worker), self.widths, strict=True)
        for here, there, (left, _) in list(ends)[:1:-1]:
            before = there.stop - there.start - (here.stop - here.start)
            if here.start < here.stop:
                before = here.start + left - there.start
            flat += [before, there.stop - there.start - (here.stop - here.start) - before]
        value = self.value

        def pad(x: Tensor) -> Tensor:
            return torch.nn.functional.pad(arrive(x), flat, value=value)

        return pad

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, value={self.value}"


class _ZeroPad(_ConstantPad):
    __doc__ = _Pad.__doc__ and _Pad.__doc__.replace("copies of what is inside", "zeros")

    def __init__(self, P_x: Partition, padding: int | Sequence[int]) -> None:
        super().__init__(P_x, padding, 0.0)


class _ReflectionPad(_Pad):
    mode = "reflect"


class _ReplicationPad(_Pad):
    mode = "replicate"


class _CircularPad(_Pad):
    mode = "circular"


class ConstantPad1d(_ConstantPad):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2)), torch.arange(1.0, 5.0).view(1, 1, 4)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.ConstantPad1d(P, 1, 9)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[9.0, 1.0, 2.0], [3.0, 4.0, 9.0]]
        >>> torch.nn.ConstantPad1d(1, 9)(whole).flatten().tolist()
        [9.0, 1.0, 2.0, 3.0, 4.0, 9.0]
    """

    ndim = 1


class ConstantPad2d(_ConstantPad):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1)), torch.arange(1.0, 5.0).view(1, 1, 4, 1)
        >>> x, pad = whole.chunk(2, dim=2), (0, 0, 1, 1)  # the last dimension first
        >>> parts = linop.launch(lambda b: layers.ConstantPad2d(P, pad, 9)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[9.0, 1.0, 2.0], [3.0, 4.0, 9.0]]
        >>> torch.nn.ConstantPad2d(pad, 9)(whole).flatten().tolist()
        [9.0, 1.0, 2.0, 3.0, 4.0, 9.0]
    """

    ndim = 2


class ConstantPad3d(_ConstantPad):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1, 1)), torch.arange(1.0, 5.0).view(1, 1, 4, 1, 1)
        >>> x, pad = whole.chunk(2, dim=2), (0, 0, 0, 0, 1, 1)  # the last dimension first
        >>> parts = linop.launch(lambda b: layers.ConstantPad3d(P, pad, 9)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[9.0, 1.0, 2.0], [3.0, 4.0, 9.0]]
        >>> torch.nn.ConstantPad3d(pad, 9)(whole).flatten().tolist()
        [9.0, 1.0, 2.0, 3.0, 4.0, 9.0]
    """

    ndim = 3


class ZeroPad1d(_ZeroPad):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2)), torch.arange(1.0, 5.0).view(1, 1, 4)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.ZeroPad1d(P, 1)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[0.0, 1.0, 2.0], [3.0, 4.0, 0.0]]
        >>> torch.nn.ZeroPad1d(1)(whole).flatten().tolist()
        [0.0, 1.0, 2.0, 3.0, 4.0, 0.0]
    """

    ndim = 1


class ZeroPad2d(_ZeroPad):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1)), torch.arange(1.0, 5.0).view(1, 1, 4, 1)
        >>> x, pad = whole.chunk(2, dim=2), (0, 0, 1, 1)  # the last dimension first
        >>> parts = linop.launch(lambda b: layers.ZeroPad2d(P, pad)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[0.0, 1.0, 2.0], [3.0, 4.0, 0.0]]
        >>> torch.nn.ZeroPad2d(pad)(whole).flatten().tolist()
        [0.0, 1.0, 2.0, 3.0, 4.0, 0.0]
    """

    ndim = 2


class ZeroPad3d(_ZeroPad):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1, 1)), torch.arange(1.0, 5.0).view(1, 1, 4, 1, 1)
        >>> x, pad = whole.chunk(2, dim=2), (0, 0, 0, 0, 1, 1)  # the last dimension first
        >>> parts = linop.launch(lambda b: layers.ZeroPad3d(P, pad)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[0.0, 1.0, 2.0], [3.0, 4.0, 0.0]]
        >>> torch.nn.ZeroPad3d(pad)(whole).flatten().tolist()
        [0.0, 1.0, 2.0, 3.0, 4.0, 0.0]
    """

    ndim = 3


class ReflectionPad1d(_ReflectionPad):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2)), torch.arange(1.0, 5.0).view(1, 1, 4)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.ReflectionPad1d(P, 1)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[2.0, 1.0, 2.0], [3.0, 4.0, 3.0]]
        >>> torch.nn.ReflectionPad1d(1)(whole).flatten().tolist()
        [2.0, 1.0, 2.0, 3.0, 4.0, 3.0]
    """

    ndim = 1


class ReflectionPad2d(_ReflectionPad):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1)), torch.arange(1.0, 5.0).view(1, 1, 4, 1)
        >>> x, pad = whole.chunk(2, dim=2), (0, 0, 1, 1)  # the last dimension first
        >>> parts = linop.launch(lambda b: layers.ReflectionPad2d(P, pad)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[2.0, 1.0, 2.0], [3.0, 4.0, 3.0]]
        >>> torch.nn.ReflectionPad2d(pad)(whole).flatten().tolist()
        [2.0, 1.0, 2.0, 3.0, 4.0, 3.0]
    """

    ndim = 2


class ReflectionPad3d(_ReflectionPad):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1, 1)), torch.arange(1.0, 5.0).view(1, 1, 4, 1, 1)
        >>> x, pad = whole.chunk(2, dim=2), (0, 0, 0, 0, 1, 1)  # the last dimension first
        >>> parts = linop.launch(lambda b: layers.ReflectionPad3d(P, pad)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[2.0, 1.0, 2.0], [3.0, 4.0, 3.0]]
        >>> torch.nn.ReflectionPad3d(pad)(whole).flatten().tolist()
        [2.0, 1.0, 2.0, 3.0, 4.0, 3.0]
    """

    ndim = 3


class ReplicationPad1d(_ReplicationPad):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2)), torch.arange(1.0, 5.0).view(1, 1, 4)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.ReplicationPad1d(P, 1)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[1.0, 1.0, 2.0], [3.0, 4.0, 4.0]]
        >>> torch.nn.ReplicationPad1d(1)(whole).flatten().tolist()
        [1.0, 1.0, 2.0, 3.0, 4.0, 4.0]
    """

    ndim = 1


class ReplicationPad2d(_ReplicationPad):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1)), torch.arange(1.0, 5.0).view(1, 1, 4, 1)
        >>> x, pad = whole.chunk(2, dim=2), (0, 0, 1, 1)  # the last dimension first
        >>> parts = linop.launch(lambda b: layers.ReplicationPad2d(P, pad)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[1.0, 1.0, 2.0], [3.0, 4.0, 4.0]]
        >>> torch.nn.ReplicationPad2d(pad)(whole).flatten().tolist()
        [1.0, 1.0, 2.0, 3.0, 4.0, 4.0]
    """

    ndim = 2


class ReplicationPad3d(_ReplicationPad):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1, 1)), torch.arange(1.0, 5.0).view(1, 1, 4, 1, 1)
        >>> x, pad = whole.chunk(2, dim=2), (0, 0, 0, 0, 1, 1)  # the last dimension first
        >>> parts = linop.launch(lambda b: layers.ReplicationPad3d(P, pad)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[1.0, 1.0, 2.0], [3.0, 4.0, 4.0]]
        >>> torch.nn.ReplicationPad3d(pad)(whole).flatten().tolist()
        [1.0, 1.0, 2.0, 3.0, 4.0, 4.0]
    """

    ndim = 3


class CircularPad1d(_CircularPad):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2)), torch.arange(1.0, 5.0).view(1, 1, 4)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.CircularPad1d(P, 1)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[4.0, 1.0, 2.0], [3.0, 4.0, 1.0]]
        >>> torch.nn.CircularPad1d(1)(whole).flatten().tolist()
        [4.0, 1.0, 2.0, 3.0, 4.0, 1.0]
    """

    ndim = 1


class CircularPad2d(_CircularPad):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1)), torch.arange(1.0, 5.0).view(1, 1, 4, 1)
        >>> x, pad = whole.chunk(2, dim=2), (0, 0, 1, 1)  # the last dimension first
        >>> parts = linop.launch(lambda b: layers.CircularPad2d(P, pad)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[4.0, 1.0, 2.0], [3.0, 4.0, 1.0]]
        >>> torch.nn.CircularPad2d(pad)(whole).flatten().tolist()
        [4.0, 1.0, 2.0, 3.0, 4.0, 1.0]
    """

    ndim = 2


class CircularPad3d(_CircularPad):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1, 1)), torch.arange(1.0, 5.0).view(1, 1, 4, 1, 1)
        >>> x, pad = whole.chunk(2, dim=2), (0, 0, 0, 0, 1, 1)  # the last dimension first
        >>> parts = linop.launch(lambda b: layers.CircularPad3d(P, pad)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[4.0, 1.0, 2.0], [3.0, 4.0, 1.0]]
        >>> torch.nn.CircularPad3d(pad)(whole).flatten().tolist()
        [4.0, 1.0, 2.0, 3.0, 4.0, 1.0]
    """

    ndim = 3
