"""Normalisations, by mean and variance of the whole tensor: two sums over the workers that share
what is averaged over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linop.strategies.space.call import Call, count
from linop.strategies.space.layout import Layout


class Moments:
    """Mean and variance over some dimensions of a tensor in blocks.

    Args:
        block: this worker's.
        layout: of the tensor.
        dims: that are averaged over; they have extent 1 in the results.

    Attributes:
        count: elements that each mean is over.
        mean, variance: alike on the workers that share them, of layout `alike`.
        here_mean, here_variance: as copies, for this worker's block.
    """

    def __init__(self, call: Call, block: Tensor, layout: Layout, dims: Sequence[int]) -> None:
        grid, copies = call.grid, call.reduced(layout, dims)
        self.count = count(layout.shape, dims)
        sums, self.alike = call.sums(block, layout, dims)
        self.mean = sums / self.count
        self.here_mean = grid.move(self.mean, self.alike, copies)
        self.centered = block - self.here_mean
        # The norm makes no tensor of squares.
        lengths = torch.linalg.vector_norm(self.centered, 2, tuple(dims), keepdim=True)
        squares, _ = call.total(lengths.square(), copies)
        self.variance = squares / self.count
        self.here_variance = grid.move(self.variance, self.alike, copies)


def _wide(block: Tensor) -> Tensor:
    return block.to(torch.promote_types(block.dtype, torch.float32))


def _scaled(centered: Tensor, scale: Tensor, weight: Any, bias: Any) -> Tensor:
    scale = scale if weight is None else scale * weight
    return centered * scale if bias is None else torch.addcmul(bias, centered, scale)


def _track(running: Any, value: Tensor, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


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
    w, b = call.beside(weight, x.blocks), call.beside(bias, x.blocks)
    if not training:
        return _evaluated(call, x, w, b, running_mean, running_var, eps)
    dims = [d for d in range(x.ndim) if d != 1]
    found = Moments(call, _wide(x.block), x.blocks, dims)
    with torch.no_grad():
        n = found.count
        _track(running_mean, found.mean.flatten(), momentum)
        _track(running_var, found.variance.flatten() * (n / max(n - 1, 1)), momentum)
    shape = (1, -1, *[1] * (x.ndim - 2))
    w, b = (None if p is None else p.view(shape) for p in (w, b))
    scale = (found.here_variance + eps).rsqrt()
    return call.wrap(_scaled(found.centered, scale, w, b).to(x.dtype), x.blocks)


def _evaluated(
    call: Call, x: Any, w: Any, b: Any, mean: Tensor, variance: Tensor, eps: float
) -> Any:
    """By statistics that are given. It is not torch's function, whose gradient is wrong in torch
    2.13 for gradients with some strides of dimensions of extent 1."""
    block = _wide(x.block)
    shape = (1, -1, *[1] * (x.ndim - 2))
    mean, variance = mean.to(block.dtype), variance.to(block.dtype)
    w, b = (None if p is None else p.view(shape) for p in (w, b))
    scale = (variance + eps).rsqrt().view(shape)
    scale = scale if w is None else scale * w
    shift = -mean.view(shape) * scale if b is None else b - mean.view(shape) * scale
    return call.wrap(torch.addcmul(shift, block, scale).to(x.dtype), x.blocks)


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
    scale = (found.here_variance + eps).rsqrt()
    w, b = call.beside(weight, layout), call.beside(bias, layout)
    affine = (1, num_groups, channels // num_groups, *[1] * (x.ndim - 2))
    w, b = (None if p is None else p.view(affine) for p in (w, b))
    result = _scaled(found.centered, scale, w, b).to(x.dtype)
    return call.wrap(result.reshape(x.block.shape), layout)


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
    found = Moments(call, _wide(x.block), x.blocks, range(2, x.ndim))
    with torch.no_grad():
        for running, value in (
            (running_mean, found.mean),
            (running_var, found.variance * (found.count / max(found.count - 1, 1))),
        ):
            if running is not None:
                sums, _ = call.sums(value, found.alike, (0,))
                _track(running, sums.flatten() / x.shape[0], momentum)
    shape = (1, -1, *[1] * (x.ndim - 2))
    w, b = (call.beside(p, x.blocks) for p in (weight, bias))
    w, b = (None if p is None else p.view(shape) for p in (w, b))
    scale = (found.here_variance + eps).rsqrt()
    return call.wrap(_scaled(found.centered, scale, w, b).to(x.dtype), x.blocks)


def _last(call: Call, x: Any, normalized_shape: Sequence[int]) -> tuple[list[int], dict[int, int]]:
    """The dimensions that are normalised over, and for those the parameters' dimensions."""
    first = x.ndim - len(normalized_shape)
    dims = list(range(first, x.ndim))
    return dims, {d: d - first for d in dims}


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
    found = Moments(call, _wide(x.block), x.blocks, dims)
    scale = (found.here_variance + eps).rsqrt()
    return call.wrap(_scaled(found.centered, scale, w, b).to(x.dtype), x.blocks)


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
