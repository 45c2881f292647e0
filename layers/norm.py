"""Normalisation layers, with the statistics of the global tensor on any partition. The reductions
are in `linop.layers.moments`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from linop.backends.autograd.dtypes import torch_dtype
from linop.errors import ShapeError
from linop.layers.layer import Function, Layer, zero_volume_result
from linop.layers.linear import dense_axes
from linop.layers.moments import Moments, wide
from linop.layers.parameters.weights import hold, hold_buffer
from linop.operators.collectives import repartition
from linop.spaces.decomposition import COPIES, REPLICATED, Axis
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace


class _Norm(Layer):
    """Base class of normalisation layers: a weight and a bias over some dimensions of the input."""

    constants = MappingProxyType(
        {"weight": 1, "bias": 0, "running_mean": 0, "running_var": 1, "num_batches_tracked": 0}
    )
    weight: Tensor | None
    bias: Tensor | None

    def _hold_affine(self, whole: Any, axes: Sequence[Axis], bias: bool) -> None:
        """Register blocks of weight and bias, on the workers at coordinate 0 of the grid axes whose
        role is `linop.COPIES`."""
        (grid,) = self.inputs
        owners = grid[tuple(slice(0, 1) if axis is COPIES else slice(None) for axis in axes)]
        for name in ("weight", "bias"):
            parameter = getattr(whole, name)
            if parameter is None or (name == "bias" and not bias):
                self.register_parameter(name, None)
            else:
                hold(self, name, TensorSpace(parameter.shape, owners, axes=axes), parameter)

    def _affine(
        self, X: TensorSpace, first: int, dims: int
    ) -> Callable[[], Sequence[Tensor | None]]:
        """Function without arguments that gives weight and bias, or None for either, as this
        worker's block of X needs them. Both travel in one message.

        Args:
            first, dims: the parameters' dimensions are first to first + dims - 1 of X.
        """
        names = [name for name in ("weight", "bias") if name in self.spaces]
        if not names:
            return lambda: (None, None)
        held = self.spaces["weight"]
        shape = len(names), *held.global_shape
        axes = [axis + 1 if isinstance(axis, int) else axis for axis in held.axes]
        here = TensorSpace(shape, held.partition, wide(self, X), axes)
        wanted: list[Axis] = []
        for axis in X.axes:
            if isinstance(axis, int):
                own = first <= axis < first + dims
                wanted.append(axis - first + 1 if own else COPIES)
            else:
                wanted.append(axis)
        bounds = {1 + k: X.bounds[first + k] for k in range(dims)}
        spread = self.moved(repartition, here, here.like(X.partition, wanted, bounds))
        dtype = torch_dtype(here.dtype)

        def parameters() -> Sequence[Tensor | None]:
            mine = [getattr(self, name) for name in names]
            held = None if mine[0] is None else torch.stack([p.to(dtype) for p in mine])
            return (*spread(held), None)[:2]

        return parameters


class _BatchNorm(_Norm):
    """Normalisation of each channel over batch and space, by mean and variance of the global batch,
    from two all-reduces.

    Weight and bias are split along the channel axis of `P_x`, and held at coordinate 0 of its other
    axes. Every worker of `P_x` holds the running statistics of its channels, as torch defines them:
    the running variance is the unbiased one.

    Args:
        P_x: the partition of input and output: batch, channels, space. A grid with fewer axes does
            not split the last dimensions.
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as in
            torch.nn.

    Raises:
        ShapeError: from a call: the input has another number of channels or of dimensions; or, when
            training, one value per channel. On every worker.
    """

    ndims: tuple[int, ...] = ()
    """Numbers of dimensions that an input may have."""
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(
        self,
        P_x: Partition,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__([P_x], P_x)
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.affine, self.track_running_stats = affine, track_running_stats
        whole = torch.nn.BatchNorm1d(
            num_features, eps, momentum, affine, track_running_stats, device, dtype
        )
        channels = [0 if k == 1 else COPIES for k in range(P_x.ndim)]
        self._hold_affine(whole, channels, bias)
        everywhere = [REPLICATED if axis is COPIES else axis for axis in channels]
        for name, buffer in whole.named_buffers():
            axes = everywhere if buffer.ndim else [REPLICATED] * P_x.ndim
            hold_buffer(self, name, TensorSpace(buffer.shape, P_x, axes=axes), buffer)
        if not track_running_stats:
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                self.register_buffer(name, None)

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        if X.ndim not in self.ndims or X.global_shape[1] != self.num_features:
            raise ShapeError(
                f"{self._name}: an input of shape {X.global_shape}; (batch, {self.num_features}, …)"
                f" of {' or '.join(map(str, self.ndims))} dimensions expected"
            )
        moments = Moments(self, X, [d for d in range(X.ndim) if d != 1])
        parameters = self._affine(X, 1, 1)
        store, fetch = self._running(X)
        dtype, result = torch_dtype(wide(self, X)), torch_dtype(X.dtype)
        shape = 1, -1, *[1] * (X.ndim - 2)

        def normalise(x: Tensor) -> Tensor:
            of_batch = self.training or "running_mean" not in self.spaces
            if of_batch and moments.count == 1:
                raise ShapeError(
                    f"{self._name}: Expected more than 1 value per channel when training, got "
                    f"input size {X.global_shape}"
                )
            if self.worker not in X.partition:
                return zero_volume_result(X, x)
            x = x.to(dtype)
            if of_batch:
                mean, centered, variance = moments(x)
                if self.training and self.track_running_stats:
                    self._track(moments.count, mean.detach(), variance.detach(), store)
            else:
                assert self.running_mean is not None and self.running_var is not None
                mean, variance = fetch(torch.stack([self.running_mean, self.running_var]).to(dtype))
                centered, variance = x - mean.view(shape), variance.view(shape)
            scale = (variance + self.eps).rsqrt()
            weight, bias = (p if p is None else p.view(shape) for p in parameters())
            return _scaled(centered, scale if weight is None else scale * weight, bias).to(result)

        return normalise

    def _running(self, X: TensorSpace) -> tuple[Function, Function]:
        """Movements of (mean, variance), of shape (2, channels): from the channel blocks of X to
        the balanced blocks of the buffers, and back."""
        if "running_mean" not in self.spaces:
            return _nothing, _nothing
        axes = [1 if axis == 1 else REPLICATED for axis in X.axes]
        shape = 2, self.num_features
        held = TensorSpace(shape, X.partition, wide(self, X), axes)
        here = held.like(X.partition, axes, {1: X.bounds[1]})
        return self.moved(repartition, here, held), self.moved(repartition, held, here)

    @torch.no_grad()
    def _track(self, count: int, mean: Tensor, variance: Tensor, store: Function) -> None:
        """Update the running statistics with a batch's mean and biased variance.

        Args:
            count: elements that each mean is over; mean and variance stay if it is 0.
            store: movement to the blocks of the buffers.
        """
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        if not count:
            return
        new = store(torch.stack([mean.flatten(), variance.flatten() * (count / (count - 1))]))
        factor = self.momentum
        if factor is None:  # the average over all batches
            factor = 1 / float(self.num_batches_tracked)
        for running, value in zip((self.running_mean, self.running_var), new, strict=True):
            assert running is not None
            running.mul_(1 - factor).add_(value, alpha=factor)

    def extra_repr(self) -> str:
        return (
            f"{self.inputs[0]}, {self.num_features}, eps={self.eps}, momentum={self.momentum}, "
            f"affine={self.affine}, track_running_stats={self.track_running_stats}"
        )


class BatchNorm1d(_BatchNorm):
    __doc__ = _BatchNorm.__doc__
    ndims = (2, 3)


class BatchNorm2d(_BatchNorm):
    __doc__ = _BatchNorm.__doc__
    ndims = (4,)


class BatchNorm3d(_BatchNorm):
    __doc__ = _BatchNorm.__doc__
    ndims = (5,)


class LayerNorm(_Norm):
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
        super().__init__([P_x], P_x)
        self.eps, self.elementwise_affine, self.x_axes = eps, elementwise_affine, x_axes
        whole = torch.nn.LayerNorm(normalized_shape, eps, elementwise_affine, bias, device, dtype)
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
        moments = Moments(self, X, range(first, X.ndim))
        parameters = self._affine(X, first, dims)
        dtype, result = torch_dtype(wide(self, X)), torch_dtype(X.dtype)
        if self.worker not in X.partition:
            return lambda x: zero_volume_result(X, x)

        def normalise(x: Tensor) -> Tensor:
            _, centered, variance = moments(x.to(dtype))
            return _scaled(centered * (variance + self.eps).rsqrt(), *parameters()).to(result)

        return normalise

    def extra_repr(self) -> str:
        return (
            f"{self.inputs[0]}, {self.normalized_shape}, eps={self.eps}, "
            f"elementwise_affine={self.elementwise_affine}, bias={'bias' in self.spaces}"
        )


def _nothing(x: Tensor) -> Tensor:
    raise AssertionError("there are no running statistics")


def _scaled(x: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    if scale is None:
        return x
    return x * scale if bias is None else torch.addcmul(bias, x, scale)
