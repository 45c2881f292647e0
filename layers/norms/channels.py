"""Normalisations of channels: over the batch, each sample, groups of channels, and neighbouring
channels; with the statistics of the global tensor on any partition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from linop.backends.autograd.real_calls import is_tracing
from linop.errors import ArgumentError, ShapeError
from linop.layers.layer import Function, Layer
from linop.layers.moments import Moments, wide
from linop.layers.norms.norm import Norm, scaled
from linop.layers.parameters.weights import hold_buffer
from linop.operators.collectives import all_reduce, repartition
from linop.operators.named_movement import collective
from linop.spaces.decomposition import COPIES, REPLICATED, Axis
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace


class _ChannelNorm(Norm):
    """Base class of normalisations with a weight and a bias of each channel."""

    eps: float

    def _hold_channels(self, whole: Any, bias: bool) -> Sequence[Axis]:
        """Register blocks of weight and bias; roles of the grid axes for them."""
        channels = [0 if k == 1 else COPIES for k in range(self.inputs[0].ndim)]
        self._hold_affine(whole, channels, bias)
        return channels

    def _finish(self, X: TensorSpace) -> Callable[[Tensor, Tensor], Tensor]:
        """Function from differences from the mean, and a variance that fits them, to the result."""
        parameters, shape = self._affine(X, 1, 1), (1, -1, *[1] * (X.ndim - 2))

        def finish(centered: Tensor, variance: Tensor) -> Tensor:
            scale = (variance + self.eps).rsqrt()
            weight, bias = (p if p is None else p.view(shape) for p in parameters())
            return scaled(centered, scale if weight is None else scale * weight, bias)

        return finish


class _TrackedNorm(_ChannelNorm):
    """Base class of normalisations with running statistics, constructed as batch norms are."""

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
        channels = self._hold_channels(whole, bias)
        everywhere = [REPLICATED if axis is COPIES else axis for axis in channels]
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            buffer = getattr(whole, name)
            if buffer is None:
                self.register_buffer(name, None)
                continue
            axes = everywhere if buffer.ndim else [REPLICATED] * P_x.ndim
            hold_buffer(self, name, TensorSpace(buffer.shape, P_x, axes=axes), buffer)

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
        finish, shape = self._finish(X), (1, -1, *[1] * (X.ndim - 2))
        store, fetch = self._running(X)

        def of_batch() -> bool:
            return self.training or "running_mean" not in self.spaces

        def normalise(x: Tensor) -> Tensor:
            if of_batch():
                mean, centered, variance = moments(x)
                if self.training and self.track_running_stats:
                    self._track(moments.count, mean.detach(), variance.detach(), store)
                return finish(centered, variance)
            assert self.running_mean is not None and self.running_var is not None
            kept = torch.stack([self.running_mean, self.running_var]).to(x.dtype)
            mean, variance = (value.view(shape) for value in fetch(kept))
            return finish(x - mean, variance)

        on_blocks = self._on_blocks(X, normalise)

        def checked(x: Tensor) -> Tensor:
            if moments.count == 1 and of_batch():
                raise ShapeError(
                    f"{self._name}: Expected more than 1 {self.values} when training, got input "
                    f"size {X.global_shape}"
                )
            return on_blocks(x)

        return checked

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
            if isinstance(factor, Tensor):
                running.mul_(1 - factor).add_(value * factor)
            else:
                running.mul_(1 - factor).add_(value, alpha=factor)

    def _factor(self) -> float | Tensor:
        """Weight of a batch in the running statistics."""
        return self.momentum or 0.0

    def extra_repr(self) -> str:
        return (
            f"{self.inputs[0]}, {self.num_features}, eps={self.eps}, momentum={self.momentum}, "
            f"affine={self.affine}, track_running_stats={self.track_running_stats}"
        )


class _BatchNorm(_TrackedNorm):
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

    def averaged(self, X: TensorSpace) -> Sequence[int]:
        return [d for d in range(X.ndim) if d != 1]

    def _over_batch(self, X: TensorSpace, here: TensorSpace) -> Function:
        return lambda found: found.flatten(1)

    def _factor(self) -> float | Tensor:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        if self.momentum is not None:
            return self.momentum
        # The average over all batches. A number is exact, and graphs do not know it.
        batches = self.num_batches_tracked
        return 1 / (batches.double() if is_tracing() else float(batches))


class BatchNorm1d(_BatchNorm):
    """
    Example:
        >>> P, whole = linop.Partition((2,)), torch.tensor([0.0, 0.0, 2.0, 2.0]).view(4, 1)
        >>> x = whole.chunk(2, dim=0)
        >>> parts = linop.launch(lambda b: layers.BatchNorm1d(P, 1)(x[b.worker]), workers=2)
        >>> [part.round().flatten().tolist() for part in parts]  # by mean and variance of all four
        [[-1.0, -1.0], [1.0, 1.0]]
        >>> torch.nn.BatchNorm1d(1)(whole).round().flatten().tolist()
        [-1.0, -1.0, 1.0, 1.0]
    """

    ndims = (2, 3)


class BatchNorm2d(_BatchNorm):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2)), torch.tensor([0.0, 2.0]).view(1, 1, 2, 1)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.BatchNorm2d(P, 1)(x[b.worker]), workers=2)
        >>> [part.round().flatten().tolist() for part in parts]
        [[-1.0], [1.0]]
        >>> torch.nn.BatchNorm2d(1)(whole).round().flatten().tolist()
        [-1.0, 1.0]
    """

    ndims = (4,)


class BatchNorm3d(_BatchNorm):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2)), torch.tensor([0.0, 2.0]).view(1, 1, 2, 1, 1)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.BatchNorm3d(P, 1)(x[b.worker]), workers=2)
        >>> [part.round().flatten().tolist() for part in parts]
        [[-1.0], [1.0]]
        >>> torch.nn.BatchNorm3d(1)(whole).round().flatten().tolist()
        [-1.0, 1.0]
    """

    ndims = (5,)


class _InstanceNorm(_TrackedNorm):
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
        rest = momentum, affine, track_running_stats, device, dtype
        super().__init__(P_x, num_features, eps, *rest, bias=bias)

    def averaged(self, X: TensorSpace) -> Sequence[int]:
        return range(2, X.ndim)

    def _over_batch(self, X: TensorSpace, here: TensorSpace) -> Function:
        axes = [COPIES if old == 0 else new for old, new in zip(X.axes, here.axes, strict=True)]
        sums = here.like(here.partition, axes, {1: here.bounds[1]})
        total = self.moved(all_reduce, sums, [k for k, axis in enumerate(X.axes) if axis == 0])
        samples = max(1, X.global_shape[0])
        return lambda found: total(found.sum(1).flatten(1)) / samples


class InstanceNorm1d(_InstanceNorm):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2)), torch.tensor([0.0, 0.0, 2.0, 2.0]).view(1, 1, 4)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.InstanceNorm1d(P, 1)(x[b.worker]), workers=2)
        >>> [part.round().flatten().tolist() for part in parts]
        [[-1.0, -1.0], [1.0, 1.0]]
        >>> torch.nn.InstanceNorm1d(1)(whole).round().flatten().tolist()
        [-1.0, -1.0, 1.0, 1.0]
    """

    ndims = (3,)


class InstanceNorm2d(_InstanceNorm):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2)), torch.tensor([0.0, 2.0]).view(1, 1, 2, 1)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.InstanceNorm2d(P, 1)(x[b.worker]), workers=2)
        >>> [part.round().flatten().tolist() for part in parts]
        [[-1.0], [1.0]]
        >>> torch.nn.InstanceNorm2d(1)(whole).round().flatten().tolist()
        [-1.0, 1.0]
    """

    ndims = (4,)


class InstanceNorm3d(_InstanceNorm):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2)), torch.tensor([0.0, 2.0]).view(1, 1, 2, 1, 1)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.InstanceNorm3d(P, 1)(x[b.worker]), workers=2)
        >>> [part.round().flatten().tolist() for part in parts]
        [[-1.0], [1.0]]
        >>> torch.nn.InstanceNorm3d(1)(whole).round().flatten().tolist()
        [-1.0, 1.0]
    """

    ndims = (5,)


class GroupNorm(_ChannelNorm):
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

    Example:
        >>> P, whole = linop.Partition((1, 2)), torch.tensor([0.0, 0.0, 2.0, 2.0]).view(1, 4)
        >>> x = whole.chunk(2, dim=1)
        >>> parts = linop.launch(lambda b: layers.GroupNorm(P, 1, 4)(x[b.worker]), workers=2)
        >>> [part.round().flatten().tolist() for part in parts]  # one group, of channels of both
        [[-1.0, -1.0], [1.0, 1.0]]
        >>> torch.nn.GroupNorm(1, 4)(whole).round().flatten().tolist()
        [-1.0, -1.0, 1.0, 1.0]
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
        self._hold_channels(whole, bias)

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
        finish = self._finish(X)
        return self._on_blocks(X, lambda x: finish(*moments(x)[1:]))

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

    Example:
        >>> P, whole = linop.Partition((1, 2)), torch.ones(1, 4, 1)
        >>> x = whole.chunk(2, dim=1)
        >>> parts = linop.launch(
        ...     lambda b: layers.LocalResponseNorm(P, 2, 2.0, 1.0, 0.0)(x[b.worker]), workers=2
        ... )
        >>> [part.flatten().tolist() for part in parts]  # 1 / (squares of 2 neighbours)
        [[1.0, 0.5], [0.5, 0.5]]
        >>> torch.nn.LocalResponseNorm(2, 2.0, 1.0, 0.0)(whole).flatten().tolist()
        [1.0, 0.5, 0.5, 0.5]
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


def _nothing(x: Tensor) -> Tensor:
    raise AssertionError("there are no running statistics")
