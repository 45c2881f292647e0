"""Spectral convolutions beside a sequential one in torch, as SPMD programs. Needs torch.

Ranks import this module, and no test.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

import linop
from linop import Partition, TensorSpace
from linop.backends import Backend
from support.contracts.plans import mine
from support.layers.cases import grids


class Spectral(NamedTuple):
    """A layer, the shape of its input, and whether that is real; and whether the layer is."""

    partition: Partition
    shape: tuple[int, ...]
    out_channels: int
    modes: tuple[int, ...]
    real: bool
    seed: int
    half: bool = False

    @property
    def workers(self) -> int:
        """How many it needs."""
        return 1 + max(self.partition.workers)


@st.composite
def spectral_layers(draw: Any, most: int) -> Spectral:
    ndim = draw(st.integers(1, 3))
    partition = draw(grids(most, 2 + ndim))
    shape = tuple(draw(st.integers(1, 6)) for _ in range(2 + ndim))
    half = draw(st.booleans())
    most_of = [*shape[2:-1], shape[-1] // 2 + 1 if half else shape[-1]]
    modes = tuple(draw(st.integers(1, n)) for n in most_of)
    out, seed = draw(st.integers(1, 3)), draw(st.integers(0, 99))
    return Spectral(partition, shape, out, modes, half or draw(st.booleans()), seed, half)


def sequential(x: Any, weight: Any, modes: tuple[int, ...]) -> Any:
    """The layer's formula, by index arrays."""
    dims = tuple(range(2, x.ndim))
    sizes = x.shape[2:]
    kept = [
        torch.cat([torch.arange(m - m // 2), torch.arange(n - m // 2, n)])
        for n, m in zip(sizes, modes, strict=True)
    ]
    at = (slice(None), slice(None), *torch.meshgrid(*kept, indexing="ij"))
    low = torch.fft.fftn(x, dim=dims)[at]
    mixed = torch.stack([(low * weight[None, :, o]).sum(1) for o in range(weight.shape[1])], dim=1)
    spread = torch.zeros(x.shape[0], weight.shape[1], *sizes, dtype=mixed.dtype)
    spread[at] = mixed
    y = torch.fft.ifftn(spread, dim=dims)
    return y if x.is_complex() else y.real


def sequential_of_halves(x: Any, weight: Any, modes: tuple[int, ...]) -> Any:
    """Torch's rfftn and irfftn, and the paper's corners: one for each sign of each dimension but
    the last."""
    dims, sizes = tuple(range(2, x.ndim)), x.shape[2:]
    low = torch.fft.rfftn(x, dim=dims)
    parts = [[slice(m - m // 2), slice(-(m // 2), None)][: 1 + (m > 1)] for m in modes[:-1]]
    spread = torch.zeros(x.shape[0], weight.shape[1], *low.shape[2:], dtype=low.dtype)
    for corner in product(*parts):
        at = (..., *corner, slice(modes[-1]))
        spread[at] = torch.einsum("bi...,io...->bo...", low[at], weight[at])
    return torch.fft.irfftn(spread, s=sizes, dim=dims)


def is_sequential(backend: Backend, case: Spectral) -> None:
    """Result, and gradients of input and weight, to 1e-12."""
    generator = torch.Generator().manual_seed(case.seed)
    kinds = torch.float64 if case.real else torch.complex128, torch.complex128
    shape = case.shape[1], case.out_channels, *case.modes
    whole, weight = (
        torch.randn(size, dtype=kind, generator=generator).requires_grad_()
        for size, kind in zip((case.shape, shape), kinds, strict=True)
    )
    wanted = (sequential_of_halves if case.half else sequential)(whole, weight, case.modes)
    upstream = torch.randn(wanted.shape, dtype=kinds[0], generator=generator)
    wanted.backward(upstream)
    layer = linop.layers.SpectralConv(
        case.partition,
        case.shape[1],
        case.out_channels,
        case.modes,
        dtype=torch.complex128,
        real=case.half,
    )
    held, here = layer.spaces["weight"], mine(backend)
    if here in held.partition:
        layer.weight.data.copy_(weight.detach()[held.slices(here)])
    X, Y = (TensorSpace(t.shape, case.partition) for t in (whole, wanted))
    inside = here in case.partition
    x = whole.detach()[X.slices(here)].clone().requires_grad_() if inside else None
    y = layer(x)
    if inside:
        near(y, wanted[Y.slices(here)])
        y.backward(upstream[Y.slices(here)])
        near(x.grad, whole.grad[X.slices(here)])
    else:
        y.backward(torch.zeros_like(y))
    if here in held.partition:
        near(layer.weight.grad, weight.grad[held.slices(here)])


def near(given: Any, wanted: Any) -> None:
    assert given.shape == wanted.shape and given.dtype == wanted.dtype
    size = max(1.0, float(wanted.detach().abs().max()) if wanted.numel() else 0.0)
    assert torch.allclose(given, wanted, rtol=0, atol=1e-12 * size)
