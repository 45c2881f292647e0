"""Normalisations of channels, over batch and space, with the statistics of the global tensor on any
partition; and what all normalisation layers share. The reductions are in `linop.layers.moments`,
other normalisations in `linop.layers.other_norms`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from linop.backends.autograd.dtypes import torch_dtype
from linop.errors import ShapeError
from linop.layers.layer import Function, Layer, zero_volume_result
from linop.layers.moments import Moments, wide
from linop.layers.parameters.weights import hold, hold_buffer
from linop.operators.collectives import all_reduce, repartition
from linop.spaces.decomposition import COPIES, REPLICATED, Axis
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace


class Norm(Layer):
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
            parameter = getattr(whole, name, None)
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


class _ChannelNorm(Norm):
    """Base class of normalisations of each channel, with running statistics.

    Args:
        P_x: the partition of input and output: batch, channels, space. A grid with fewer axes does
            not split the last dimensions.
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as in
            torch.nn.
    """

    ndims: tuple[int, ...] = ()
    """Numbers of dimensions that an input may have."""
    values = "value per channel"
    """Of which there must be several, in words."""
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(
        self,
        P_x: Partition,
        num_features: int,
        eps: float,
        momentum: float | None,
        affine: bool,
        track_running_stats: bool,
        device: Any,
        dtype: Any,
        bias: bool,
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

    def averaged(self, X: TensorSpace) -> Sequence[int]:
        """The dimensions that statistics are averaged over."""
        raise NotImplementedError

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        if X.ndim not in self.ndims or X.global_shape[1] != self.num_features:
            raise ShapeError(
                f"{self._name}: an input of shape {X.global_shape}; (batch, {self.num_features}, …)"
                f" of {' or '.join(map(str, self.ndims))} dimensions expected"
            )
        moments = Moments(self, X, self.averaged(X))
        parameters = self._affine(X, 1, 1)
        store, fetch = self._running(X)
        dtype, result = torch_dtype(wide(self, X)), torch_dtype(X.dtype)
        shape = 1, -1, *[1] * (X.ndim - 2)

        def normalise(x: Tensor) -> Tensor:
            of_batch = self.training or "running_mean" not in self.spaces
            if of_batch and moments.count == 1:
                raise ShapeError(
                    f"{self._name}: Expected more than 1 {self.values} when training, got input "
                    f"size {X.global_shape}"
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
            return scaled(centered, scale if weight is None else scale * weight, bias).to(result)

        return normalise

    def _running(self, X: TensorSpace) -> tuple[Function, Function]:
        """Functions of (mean, variance): from those of this worker's block of X, of shape
        (2, samples or 1, channels, …), to its balanced block of the buffers, (2, channels); and
        from there to the channels of its block, (2, channels)."""
        if "running_mean" not in self.spaces:
            return _nothing, _nothing
        axes = [1 if axis == 1 else REPLICATED for axis in X.axes]
        shape = 2, self.num_features
        held = TensorSpace(shape, X.partition, wide(self, X), axes)
        here = held.like(X.partition, axes, {1: X.bounds[1]})
        spread, mean = self.moved(repartition, here, held), self._over_batch(X, here)
        return lambda found: spread(mean(found)), self.moved(repartition, held, here)

    def _over_batch(self, X: TensorSpace, here: TensorSpace) -> Function:
        """Function from statistics to their means over the samples: of space `here`."""
        raise NotImplementedError

    @torch.no_grad()
    def _track(self, count: int, mean: Tensor, variance: Tensor, store: Function) -> None:
        """Update the running statistics with a batch's mean and biased variance.

        Args:
            count: elements that each mean is over; mean and variance stay if it is 0.
            store: movement to the blocks of the buffers.
        """
        factor = self._factor()
        if not count:
            return
        new = store(torch.stack([mean, variance * (count / (count - 1))]))
        for running, value in zip((self.running_mean, self.running_var), new, strict=True):
            assert running is not None
            running.mul_(1 - factor).add_(value, alpha=factor)

    def _factor(self) -> float:
        """Weight of a batch in the running statistics."""
        return self.momentum or 0.0

    def extra_repr(self) -> str:
        return (
            f"{self.inputs[0]}, {self.num_features}, eps={self.eps}, momentum={self.momentum}, "
            f"affine={self.affine}, track_running_stats={self.track_running_stats}"
        )


class _BatchNorm(_ChannelNorm):
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
        rest = affine, track_running_stats, device, dtype, bias
        super().__init__(P_x, num_features, eps, momentum, *rest)

    def averaged(self, X: TensorSpace) -> Sequence[int]:
        return [d for d in range(X.ndim) if d != 1]

    def _over_batch(self, X: TensorSpace, here: TensorSpace) -> Function:
        return lambda found: found.flatten(1)

    def _factor(self) -> float:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        # Without momentum, the average over all batches.
        return 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum


class BatchNorm1d(_BatchNorm):
    __doc__ = _BatchNorm.__doc__
    ndims = (2, 3)


class BatchNorm2d(_BatchNorm):
    __doc__ = _BatchNorm.__doc__
    ndims = (4,)


class BatchNorm3d(_BatchNorm):
    __doc__ = _BatchNorm.__doc__
    ndims = (5,)


class _InstanceNorm(_ChannelNorm):
    """Normalisation of each channel of each sample over space, by two all-reduces among the workers
    that share a sample.

    Weight and bias are split along the channel axis of `P_x`, and held at coordinate 0 of its other
    axes. With `track_running_stats`, every worker of `P_x` holds the running statistics of its
    channels, which are means over the global batch; of the unbiased variance, as in torch.

    Args:
        P_x: the partition of input and output: batch, channels, space. A grid with fewer axes does
            not split the last dimensions.
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as in
            torch.nn.

    Raises:
        ShapeError: from a call: the input has another number of channels or of dimensions; or, when
            training, one element in space. On every worker.
    """

    values = "spatial element"

    def __init__(
        self,
        P_x: Partition,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        rest = affine, track_running_stats, device, dtype, bias
        super().__init__(P_x, num_features, eps, momentum, *rest)

    def averaged(self, X: TensorSpace) -> Sequence[int]:
        return range(2, X.ndim)

    def _over_batch(self, X: TensorSpace, here: TensorSpace) -> Function:
        axes = [COPIES if old == 0 else new for old, new in zip(X.axes, here.axes, strict=True)]
        sums = here.like(here.partition, axes, {1: here.bounds[1]})
        total = self.moved(all_reduce, sums, [k for k, axis in enumerate(X.axes) if axis == 0])
        samples = max(1, X.global_shape[0])
        return lambda found: total(found.sum(1).flatten(1)) / samples


class InstanceNorm1d(_InstanceNorm):
    __doc__ = _InstanceNorm.__doc__
    ndims = (3,)


class InstanceNorm2d(_InstanceNorm):
    __doc__ = _InstanceNorm.__doc__
    ndims = (4,)


class InstanceNorm3d(_InstanceNorm):
    __doc__ = _InstanceNorm.__doc__
    ndims = (5,)


def _nothing(x: Tensor) -> Tensor:
    raise AssertionError("there are no running statistics")


def scaled(x: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    if scale is None:
        return x
    return x * scale if bias is None else torch.addcmul(bias, x, scale)
