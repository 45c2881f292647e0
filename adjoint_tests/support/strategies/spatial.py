"""A module cut in space beside one process: outputs, gradients and buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from linop.backends.engine.base import Backend
from linop.strategies import CutTensor, Mesh, spatial

TOLERANCE = 1e-11
"""Of the largest entry, in float64."""


def whole(y: Any) -> Any:
    """A result as one process has it."""
    return y.whole() if isinstance(y, CutTensor) else y


ZERO = 1e-2
"""Of the largest entry of all gradients, or of all buffers, with which smaller ones are compared:
some are 0 but for rounding, as the gradient of a bias before a batch norm, or the mean behind."""


def difference(a: Tensor, b: Tensor, least: float = 0.0) -> float:
    """The largest difference, of the largest entry of the second, or of `least`."""
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    finite = b.isfinite()
    if not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return float("inf")
    a, b = a.where(finite, 0.0), b.where(finite, 0.0)
    scale = max(float(b.abs().max()), least, 1e-30)
    return float((a - b).abs().max()) / scale


def run(net: Any, inputs: Sequence[Tensor], draw: int) -> dict[str, Tensor]:
    """Output of a module, gradients of inputs and parameters, and buffers, all whole."""
    xs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    result = net(*xs)
    generator = torch.Generator().manual_seed(draw)
    results = list(result) if isinstance(result, tuple | list) else [result]
    loss: Any = 0.0
    given = {}
    for k, y in enumerate(results):
        if y.is_floating_point():
            weights = torch.randn(tuple(y.shape), generator=generator, dtype=torch.float64)
            given[f"gradient of output {k}"] = weights
            loss = loss + (y * weights.to(y.dtype)).sum()
    loss.backward()
    found = given | {f"output {k}": whole(y) for k, y in enumerate(results)}
    found |= {f"gradient of input {k}": x.grad for k, x in enumerate(xs) if x.requires_grad}
    for name, p in net.named_parameters():
        if p.grad is not None:
            found[f"gradient of {name.removeprefix('module.')}"] = p.grad
    for name, b in net.named_buffers():
        found[f"buffer {name.removeprefix('module.')}"] = b
    return {name: x for name, x in found.items() if x is not None}


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference, and of what it is."""
    if found.keys() != expected.keys():
        return float("inf"), f"keys {sorted(found.keys() ^ expected.keys())}"
    kinds = {name: name.split()[0] for name in expected}
    largest: dict[str, float] = {}
    for name, x in expected.items():
        if x.is_floating_point() and x.numel():
            kind = kinds[name]
            largest[kind] = max(largest.get(kind, 0.0), float(x.detach().abs().max()))
    differences = [
        (difference(found[name], x, ZERO * largest.get(kinds[name], 0.0)), name)
        for name, x in expected.items()
    ]
    return max(differences, default=(0.0, ""))


def as_torch_means(net: torch.nn.Module) -> torch.nn.Module:
    """A module whose batch norms get contiguous gradients: torch 2.13 computes wrong ones of those
    with other strides of dimensions of extent 1 (`test_spatial_networks` shows it)."""
    for one in net.modules():
        if isinstance(one, torch.nn.modules.batchnorm._NormBase):
            one.register_forward_hook(lambda m, x, y: y.reshape(-1).reshape(y.shape))
    return net


def compared(
    backend: Backend,
    net: torch.nn.Module,
    inputs: Sequence[Tensor],
    extents: Sequence[int],
    dims: Sequence[int],
    draw: int = 0,
) -> tuple[float, str]:
    """The largest difference from one process."""
    expected = run(as_torch_means(copy.deepcopy(net)), inputs, draw)
    names = [f"axis{k}" for k in range(len(extents))]
    mesh = Mesh(backend, **dict(zip(names, extents, strict=True)))
    found = run(spatial(copy.deepcopy(net), mesh[tuple(names)], dims), inputs, draw)
    return worst(found, expected)


def equals_one_process(
    backend: Backend,
    make: Callable[..., tuple[torch.nn.Module, Sequence[Tensor]]],
    arguments: Sequence[Any],
    extents: Sequence[int],
    dims: Sequence[int],
) -> None:
    """Contract: a module cut in space has one process's output, gradients and buffers.

    Args:
        make: gives the module and its inputs, the same on all workers.
        arguments: of `make`.
    """
    net, inputs = make(*arguments)
    error, what = compared(backend, net, inputs, extents, dims)
    assert error <= TOLERANCE, f"{what}: {error:.2e} of the largest entry"
