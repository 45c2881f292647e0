"""Normalisations, by mean and variance of the whole tensor: the moments of blocks are gathered on
the workers that share what is averaged over, and combined there; a factor and a term of those go to
each block. So a norm has one message of few numbers, and so has its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linop.backends.autograd.functions import add_dependency
from linop.spaces.decomposition import Bounds
from linop.strategies.space.call import Call, count
from linop.strategies.space.cut_tensor import CutTensor
from linop.strategies.space.layout import COPIES, REPLICATED, Axis, Layout


class Moments:
    """Mean and variance over some dimensions of a tensor in blocks.

    Args:
        block: this worker's.
        layout: of the tensor.
        dims: that are averaged over; they have extent 1 in the results.

    Attributes:
        count: elements that each mean is over.
        mean, variance: alike on the workers that share them, of layout `alike`.
    """

    def __init__(self, call: Call, block: Tensor, layout: Layout, dims: Sequence[int]) -> None:
        self._call, self._dims, self._layout = call, tuple(dims), layout
        self.count = count(layout.shape, dims)
        ones = dict.fromkeys(dims, 1)
        axes = [REPLICATED if axis in dims else axis for axis in layout.axes]
        self.alike = layout.changed([ones.get(d, n) for d, n in enumerate(layout.shape)], axes)
        mean, variance = _moments(block, self._dims)
        cut = [d for d in dims if d in layout.cut]
        if cut:
            parts = {d: len(layout.bounds[d]) for d in cut}
            shape = [parts.get(d, n) for d, n in enumerate(self.alike.shape)]
            each = {d: tuple((k, k + 1) for k in range(n)) for d, n in parts.items()}
            here = _stacked(layout.changed(shape, bounds=each))
            there = _stacked(layout.changed(shape, axes))
            means, variances = call.grid.move(torch.stack([mean, variance]), here, there)
            counts = _counts(tuple(layout.bounds[d] for d in dims), self._dims, len(shape))
            weights = (counts / counts.sum()).to(mean)
            mean = (weights * means).sum(self._dims, keepdim=True)
            apart = variances + (means - mean).square()
            variance = (weights * apart).sum(self._dims, keepdim=True)
        self.mean, self.variance = mean, variance

    def scaled(self, block: Tensor, eps: float, weight: Any, bias: Any) -> Tensor:
        """The block of the normalised tensor.

        Args:
            weight, bias: beside `alike`, and of a shape that is broadcast with the block; or None.
        """
        scale = (self.variance + eps).rsqrt()
        scale = scale if weight is None else scale * weight
        shift = -self.mean * scale if bias is None else torch.addcmul(bias, self.mean, -scale)
        shape = self.alike.shape
        if scale.shape != self.mean.shape:
            shape = tuple(max(n, m) for n, m in zip(shape, scale.shape, strict=True))
        alike = _stacked(self.alike.changed(shape))
        copies = _stacked(self._layout).axes
        axes: list[Axis] = [
            COPIES if axis is not REPLICATED and other is REPLICATED else other
            for axis, other in zip(copies, alike.axes, strict=True)
        ]
        both = self._call.grid.move(torch.stack([scale, shift]), alike, alike.changed(axes=axes))
        return affine(block, both[0], both[1], [d for d in self._dims if scale.shape[d] == 1])


def _stacked(layout: Layout) -> Layout:
    """The layout of two such tensors, one after the other in a new first dimension."""
    return layout.moved_dims({d: d + 1 for d in range(len(layout.shape))}, (2, *layout.shape))


def _moments(block: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mean and variance of a block; zeros of one without elements."""
    if not block.numel():
        shape = [1 if d in dims else n for d, n in enumerate(block.shape)]
        nothing = add_dependency(block.new_zeros(shape), *([block] if block.requires_grad else ()))
        return nothing, nothing
    n = count(block.shape, dims)
    mean = block.mean(dims, keepdim=True)
    # About a constant: the squares and their gradient are one pass each.
    about = mean.detach()
    squares = F.mse_loss(block, about.expand_as(block), reduction="none")
    return mean, squares.sum(dims, keepdim=True) / n - (mean - about).square()


@lru_cache(maxsize=1024)
def _counts(cuts: tuple[Bounds, ...], dims: tuple[int, ...], ndim: int) -> Tensor:
    """Elements of each part of what is averaged over."""
    with torch.inference_mode(False):
        found = torch.ones((1,) * ndim, dtype=torch.float64)
        for d, bounds in zip(dims, cuts, strict=True):
            lengths = torch.tensor([float(b - a) for a, b in bounds], dtype=torch.float64)
            found = found * lengths.view([-1 if e == d else 1 for e in range(ndim)])
        return found


def affine(block: Tensor, scale: Tensor, shift: Tensor, dims: Sequence[int]) -> Tensor:
    """``block * scale + shift``, where scale and shift have extent 1 in some dimensions.

    By torch's batch norm with the mean 0 and the variance 1, whose gradients are two passes over
    the block, if these dimensions are all but the second, or the last ones.
    """
    ndim = block.ndim
    batch = tuple(dims) == (0, *range(2, ndim)) and scale.shape[1] == block.shape[1]
    n = scale.numel()
    tail = not batch and all(
        a == (1 if d in dims else b)
        for d, (a, b) in enumerate(zip(scale.shape, block.shape, strict=True))
    )
    tail = tail and tuple(dims) == tuple(range(ndim - len(dims), ndim))
    if (
        not (batch or tail)
        or not block.numel()
        or not block.is_contiguous()
        or block.dtype not in (torch.float32, torch.float64)
    ):
        return torch.addcmul(shift, block, scale)
    given = block if batch else block.view(1, n, -1)
    zeros, ones = block.new_zeros(n), block.new_ones(n)
    result = F.batch_norm(given, zeros, ones, scale.reshape(n), shift.reshape(n), False, 0.0, 0.0)
    if result.requires_grad:
        result.register_hook(_in_order)
    return result if batch else result.view(block.shape)


def _in_order(gradient: Tensor) -> Tensor:
    """A gradient with the strides of a contiguous tensor: those that torch's batch norm computes of
    some others are wrong in torch 2.13."""
    return gradient.reshape(-1).reshape(gradient.shape)


def _wide(block: Tensor) -> Tensor:
    return block.to(torch.promote_types(block.dtype, torch.float32))


def _track(running: Any, value: Tensor, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


def of_elements(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule for a norm: a tensor without elements has no moments, and torch has its own answer,
    with gradients of parameters that are 0, and running statistics as they were."""

    @wraps(rule)
    def norm(call: Call, input: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(input, CutTensor) or input.numel():
            return rule(call, input, *args, **kwargs)
        result = call.function(input.whole(), *args, **kwargs)
        whole = call.grid.whole(input.shape)
        return call.wrap(call.grid.move(result, whole, input.blocks), input.blocks)

    return norm


@of_elements
def batch_norm(
    call: Call,
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Any:
    """batch_norm: of the whole batch and all of space."""
    x = call.uncut(call.cut(input), (1,))
    if call.layout(x).is_whole:
        return call.function(
            x, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
        )
    if not training:
        w, b = call.beside(weight, x.blocks), call.beside(bias, x.blocks)
        return _evaluated(call, x, w, b, running_mean, running_var, eps)
    block = _wide(x.block)
    found = Moments(call, block, x.blocks, [d for d in range(x.ndim) if d != 1])
    with torch.no_grad():
        n = found.count
        _track(running_mean, found.mean.flatten(), momentum)
        _track(running_var, found.variance.flatten() * (n / max(n - 1, 1)), momentum)
    shape = (1, -1, *[1] * (x.ndim - 2))
    w, b = (None if p is None else p.view(shape) for p in (weight, bias))
    return call.wrap(found.scaled(block, eps, w, b).to(x.dtype), x.blocks)


def _evaluated(
    call: Call, x: Any, w: Any, b: Any, mean: Tensor, variance: Tensor, eps: float
) -> Any:
    """By statistics that are given."""
    block = _wide(x.block)
    shape = (1, -1, *[1] * (x.ndim - 2))
    mean, variance = mean.to(block.dtype), variance.to(block.dtype)
    w, b = (None if p is None else p.view(shape) for p in (w, b))
    scale = (variance + eps).rsqrt().view(shape)
    scale = scale if w is None else scale * w
    shift = -mean.view(shape) * scale if b is None else b - mean.view(shape) * scale
    dims = [d for d in range(x.ndim) if d != 1]
    return call.wrap(affine(block, scale, shift, dims).to(x.dtype), x.blocks)


@of_elements
def group_norm(
    call: Call,
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """group_norm."""
    x = call.uncut(call.cut(input), (1,))
    if call.layout(x).is_whole:
        return call.function(x, num_groups, weight, bias, eps, cudnn_enabled)
    layout = x.blocks
    channels = x.shape[1]
    shape = (x.shape[0], num_groups, channels // num_groups, *x.shape[2:])
    places = {0: 0, **{d: d + 1 for d in range(2, x.ndim)}}
    grouped = layout.moved_dims(places, shape)
    block = _wide(x.block).reshape(call.local_shape(grouped))
    found = Moments(call, block, grouped, range(2, len(shape)))
    w, b = call.beside(weight, found.alike), call.beside(bias, found.alike)
    shaped = (1, num_groups, channels // num_groups, *[1] * (x.ndim - 2))
    w, b = (None if p is None else p.view(shaped) for p in (w, b))
    result = found.scaled(block, eps, w, b).to(x.dtype)
    return call.wrap(result.reshape(x.block.shape), layout)


@of_elements
def instance_norm(
    call: Call,
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Any:
    """instance_norm: of each channel of each sample; running statistics are means over the
    batch."""
    x = call.uncut(call.cut(input), (1,))
    given = weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled
    if call.layout(x).is_whole:
        return call.function(x, *given)
    if not use_input_stats:
        w, b = call.beside(weight, x.blocks), call.beside(bias, x.blocks)
        return _evaluated(call, x, w, b, running_mean, running_var, eps)
    block = _wide(x.block)
    found = Moments(call, block, x.blocks, range(2, x.ndim))
    with torch.no_grad():
        for running, value in (
            (running_mean, found.mean),
            (running_var, found.variance * (found.count / max(found.count - 1, 1))),
        ):
            if running is not None:
                sums, _ = call.sums(value, found.alike, (0,))
                _track(running, sums.flatten() / x.shape[0], momentum)
    shape = (1, -1, *[1] * (x.ndim - 2))
    w, b = (call.beside(p, found.alike) for p in (weight, bias))
    w, b = (None if p is None else p.view(shape) for p in (w, b))
    return call.wrap(found.scaled(block, eps, w, b).to(x.dtype), x.blocks)


def _last(call: Call, x: Any, normalized_shape: Sequence[int]) -> tuple[list[int], dict[int, int]]:
    """The dimensions that are normalised over, and for those the parameters' dimensions."""
    first = x.ndim - len(normalized_shape)
    dims = list(range(first, x.ndim))
    return dims, {d: d - first for d in dims}


@of_elements
def layer_norm(
    call: Call,
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    """layer_norm: over the last dimensions, cut or not."""
    x = call.cut(input)
    dims, places = _last(call, x, normalized_shape)
    w, b = call.beside(weight, x.blocks, places), call.beside(bias, x.blocks, places)
    if not {*dims} & {*x.blocks.cut}:
        result = F.layer_norm(x.block, normalized_shape, w, b, eps)
        return call.wrap(result, x.blocks)
    block = _wide(x.block)
    result = Moments(call, block, x.blocks, dims).scaled(block, eps, None, None)
    if w is not None:
        result = result * w if b is None else torch.addcmul(b, result, w)
    return call.wrap(result.to(x.dtype), x.blocks)


@of_elements
def rms_norm(
    call: Call, input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: Any = None
) -> Any:
    """rms_norm: over the last dimensions, cut or not."""
    x = call.cut(input)
    dims, places = _last(call, x, normalized_shape)
    w = call.beside(weight, x.blocks, places)
    if not {*dims} & {*x.blocks.cut}:
        return call.wrap(F.rms_norm(x.block, normalized_shape, w, eps), x.blocks)
    block = _wide(x.block)
    squares, alike = call.sums(block.square(), x.blocks, dims)
    here = call.grid.move(squares / count(x.shape, dims), alike, call.reduced(x.blocks, dims))
    scale = (here + (torch.finfo(block.dtype).eps if eps is None else eps)).rsqrt()
    result = block * scale
    return call.wrap((result if w is None else result * w).to(x.dtype), x.blocks)


def local_response_norm(
    call: Call, input: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Any:
    """local_response_norm: over neighbouring channels."""
    x = call.uncut(call.cut(input), (1,))
    if call.layout(x).is_whole:
        return F.local_response_norm(x, size, alpha, beta, k)
    if 0 in x.block.shape:
        return x
    return call.wrap(F.local_response_norm(x.block, size, alpha, beta, k), x.blocks)
