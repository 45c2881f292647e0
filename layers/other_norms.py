"""Normalisations over the last dimensions, over groups of channels, and over neighbouring channels,
on any partition. The reductions are in `linop.layers.moments`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linop.backends.autograd.dtypes import torch_dtype
from linop.errors import ArgumentError, ShapeError
from linop.layers.layer import Function, Layer, zero_volume_result
from linop.layers.linear import dense_axes
from linop.layers.moments import Moments, Sums, wide
from linop.layers.norm import Norm, scaled
from linop.operators.named_movement import collective
from linop.spaces.decomposition import COPIES, Axis
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace


class _LastNorm(Norm):
    """Base class of normalisations over the last dimensions.

    Args:
        whole: the sequential layer.
    """

    def __init__(
        self, P_x: Partition, whole: Any, bias: bool, x_axes: Sequence[Axis] | None
    ) -> None:
        super().__init__([P_x], P_x)
        self.eps, self.elementwise_affine, self.x_axes = whole.eps, whole.elementwise_affine, x_axes
        self.normalized_shape: tuple[int, ...] = whole.normalized_shape
        dims = len(self.normalized_shape)
        # Parameters are laid out for an input with as many dimensions as the grid has axes; for
        # any other they are repartitioned at a call.
        known = [axis for axis in x_axes or () if isinstance(axis, int)]
        ndim = max(P_x.ndim, dims, *(1 + axis for axis in known), *(-axis for axis in known))
        split = [
            axis % ndim - (ndim - dims) if isinstance(axis, int) else -1
            for axis in dense_axes(self._name, P_x, ndim, x_axes)
        ]
        self._hold_affine(whole, [d if d >= 0 else COPIES for d in split], bias)

    def axes(self, number: int, ndim: int) -> Sequence[Axis]:
        return dense_axes(self._name, self.inputs[0], ndim, self.x_axes)

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        dims = len(self.normalized_shape)
        first = X.ndim - dims
        if X.global_shape[max(first, 0) :] != self.normalized_shape:
            raise ShapeError(
                f"{self._name}: an input of shape {X.global_shape}; (…, "
                f"{', '.join(map(str, self.normalized_shape))}) expected"
            )
        scale = self.normaliser(X, range(first, X.ndim))
        parameters = self._affine(X, first, dims)
        dtype, result = torch_dtype(wide(self, X)), torch_dtype(X.dtype)
        if self.worker not in X.partition:
            return lambda x: zero_volume_result(X, x)
        return lambda x: scaled(scale(x.to(dtype)), *parameters()).to(result)

    def normaliser(self, X: TensorSpace, dims: Sequence[int]) -> Function:
        """Function from a block of X to the block that is normalised over some dimensions."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return (
            f"{self.inputs[0]}, {self.normalized_shape}, eps={self.eps}, "
            f"elementwise_affine={self.elementwise_affine}, bias={'bias' in self.spaces}"
        )


class LayerNorm(_LastNorm):
    """Normalisation over the last dimensions, which may be split: then sums over them are two
    all-reduces among the workers that share them.

    Weight and bias are split as the last dimensions are, and held at coordinate 0 of the other grid
    axes.

    Args:
        P_x: the partition of input and output. A grid of two axes splits the first and the last
            dimension, as for `Linear`; any other, axis k dimension k.
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as in torch.nn.
        x_axes: roles of the grid axes, where they are others, as in `linop.TensorSpace`.

    Raises:
        ShapeError: from a call, the input has other last dimensions; on every worker.
    """

    def __init__(
        self,
        P_x: Partition,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        x_axes: Sequence[Axis] | None = None,
    ) -> None:
        whole = torch.nn.LayerNorm(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        super().__init__(P_x, whole, bias, x_axes)

    def normaliser(self, X: TensorSpace, dims: Sequence[int]) -> Function:
        moments = Moments(self, X, dims)

        def normalise(x: Tensor) -> Tensor:
            _, centered, variance = moments(x)
            result: Tensor = centered * (variance + self.eps).rsqrt()
            return result

        return normalise


class RMSNorm(_LastNorm):
    """Division by the root of the mean square over the last dimensions, which may be split: then
    the sum over them is an all-reduce among the workers that share them.

    The weight is split as the last dimensions are, and held at coordinate 0 of the other grid axes.

    Args:
        P_x: the partition of input and output. A grid of two axes splits the first and the last
            dimension, as for `Linear`; any other, axis k dimension k.
        normalized_shape, eps, elementwise_affine, device, dtype: as in torch.nn.
        x_axes: roles of the grid axes, where they are others, as in `linop.TensorSpace`.

    Raises:
        ShapeError: from a call, the input has other last dimensions; on every worker.
    """

    def __init__(
        self,
        P_x: Partition,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        x_axes: Sequence[Axis] | None = None,
    ) -> None:
        shape: Any = normalized_shape
        whole = torch.nn.RMSNorm(shape, eps, elementwise_affine, device, dtype)
        super().__init__(P_x, whole, False, x_axes)

    def normaliser(self, X: TensorSpace, dims: Sequence[int]) -> Function:
        sums = Sums(self, X, dims)
        # torch's default is that of the dtype in which it computes.
        eps = torch.finfo(torch_dtype(wide(self, X))).eps if self.eps is None else self.eps
        return lambda x: x * (sums(x.square()) / max(sums.count, 1) + eps).rsqrt()


class GroupNorm(Norm):
    """Normalisation of each group of channels of each sample over its channels and space, by two
    all-reduces among the workers that share a sample. Blocks of channels may cut groups anywhere.

    Weight and bias are split along the channel axis of `P_x`, and held at coordinate 0 of its other
    axes.

    Args:
        P_x: the partition of input and output: batch, channels, space. A grid with fewer axes does
            not split the last dimensions.
        num_groups, num_channels, eps, affine, device, dtype, bias: as in torch.nn.

    Raises:
        ArgumentError: groups do not divide the channels. ShapeError: from a call, the input has
            other channels, or one value for each group; on every worker.
    """

    def __init__(
        self,
        P_x: Partition,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__([P_x], P_x)
        try:
            whole = torch.nn.GroupNorm(num_groups, num_channels, eps, affine, device, dtype)
        except ValueError:
            raise ArgumentError(
                f"{self._name}: {num_channels} channels in {num_groups} groups; a number of groups "
                f"that divides that of the channels expected"
            ) from None
        self.num_groups, self.num_channels = num_groups, num_channels
        self.eps, self.affine = eps, affine
        self._hold_affine(whole, [0 if k == 1 else COPIES for k in range(P_x.ndim)], bias)

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        if X.ndim < 2 or X.global_shape[1] != self.num_channels:
            raise ShapeError(
                f"{self._name}: an input of shape {X.global_shape}; (batch, {self.num_channels}, …)"
                f" expected"
            )
        moments = Moments(self, X, range(2, X.ndim), self.num_groups)
        if moments.count * X.global_shape[0] == 1:
            raise ShapeError(
                f"{self._name}: Expected more than 1 value per channel when training, got input "
                f"size {X.global_shape}"
            )
        parameters = self._affine(X, 1, 1)
        dtype, result = torch_dtype(wide(self, X)), torch_dtype(X.dtype)
        shape = 1, -1, *[1] * (X.ndim - 2)
        if self.worker not in X.partition:
            return lambda x: zero_volume_result(X, x)

        def normalise(x: Tensor) -> Tensor:
            _, centered, variance = moments(x.to(dtype))
            scale = (variance + self.eps).rsqrt()
            weight, bias = (p if p is None else p.view(shape) for p in parameters())
            return scaled(centered, scale if weight is None else scale * weight, bias).to(result)

        return normalise

    def extra_repr(self) -> str:
        return (
            f"{self.inputs[0]}, {self.num_groups}, {self.num_channels}, eps={self.eps}, "
            f"affine={self.affine}"
        )


class LocalResponseNorm(Layer):
    """Division by a power of the mean square of neighbouring channels. Where channels are split,
    workers get those that their own need.

    Args:
        P_x: the partition of input and output: batch, channels, space. A grid with fewer axes does
            not split the last dimensions.
        size, alpha, beta, k: as in torch.nn.

    Raises:
        ArgumentError: the size is no whole number from 1. ShapeError: from a call, the input has
            less than three dimensions; on every worker.
    """

    def __init__(
        self, P_x: Partition, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
    ) -> None:
        super().__init__([P_x], P_x)
        if not isinstance(size, int) or size < 1:
            raise ArgumentError(f"{self._name}: size={size!r}; a whole number from 1 expected")
        self.size, self.alpha, self.beta, self.k = size, alpha, beta, k

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        if X.ndim < 3:
            raise ShapeError(
                f"{self._name}: an input of shape {X.global_shape}; 3 dimensions or more expected: "
                f"batch, channels, space"
            )
        channels = X.global_shape[1]
        before, after = self.size // 2, (self.size - 1) // 2
        bounds = dict(enumerate(X.bounds))
        bounds[1] = tuple(
            (max(a - before, 0), min(b + after, channels)) if a < b else (a, a)
            for a, b in X.bounds[1]
        )
        needed = TensorSpace(X.global_shape, X.partition, X.dtype, X.axes, bounds=bounds)
        arrive = self.moved(collective, "H", "", X, needed, of=0)
        if self.worker not in X.partition:
            return arrive
        mine = X.slices(self.worker)[1]
        start, length = mine.start - needed.slices(self.worker)[1].start, mine.stop - mine.start

        def normalise(x: Tensor) -> Tensor:
            x = arrive(x).contiguous()
            y = torch.nn.functional.local_response_norm(x, self.size, self.alpha, self.beta, self.k)
            return y if length == y.shape[1] else y.narrow(1, start, length)

        return normalise

    def extra_repr(self) -> str:
        return f"{self.inputs[0]}, {self.size}, alpha={self.alpha}, beta={self.beta}, k={self.k}"
