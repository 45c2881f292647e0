"""Multi-head attention over blocks beside torch's: a contract. Needs torch.

Ranks import this module, and no test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

import linop
from linop import REPLICATED, Partition, TensorSpace
from linop.backends import Backend
from support.contracts.plans import mine
from support.layers.cases import _TWINS, WIDE, block, cut, grids, normal, same

GRIDS = (0, 1, 2), (1, 2), (0, 1), (1,), (0,), (-1,), (REPLICATED, 1), (REPLICATED,), (1, -1)
"""Roles of grid axes, by dimensions of the input."""


@dataclass(frozen=True)
class Heads:
    """A module and a call of it.

    Args:
        grid, axes: of the input.
        heads, size: of the module: features are their product.
        batch, length, columns: of the inputs; None: keys and values are as many as queries.
        kdim, vdim, bias, batch_first: of the module.
        causal: masked as such; masked: by both of torch's masks.
    """

    grid: Partition
    axes: tuple[Any, ...] = (0, 1, 2)
    heads: int = 1
    size: int = 1
    batch: int = 1
    length: int = 1
    columns: int | None = None
    kdim: int | None = None
    vdim: int | None = None
    bias: bool = True
    batch_first: bool = False
    causal: bool = False
    masked: bool = False
    seed: int = 0

    @property
    def workers(self) -> int:
        return 1 + max(self.grid.workers)

    def module(self, kind: Any, *places: Any, **options: Any) -> Any:
        """torch's, or linop's with places."""
        return kind(
            *places,
            self.heads * self.size,
            self.heads,
            bias=self.bias,
            kdim=self.kdim,
            vdim=self.vdim,
            batch_first=self.batch_first,
            dtype=WIDE,
            **options,
        )

    def shape(self, length: int, width: int | None) -> tuple[int, ...]:
        two = (self.batch, length) if self.batch_first else (length, self.batch)
        return (*two, width or self.heads * self.size)


def is_torchs(backend: Backend, case: Heads) -> None:
    """Output and all gradients are those of torch.nn.MultiheadAttention, of the same draws."""
    P, me = case.grid, mine(backend)
    with _TWINS:  # others may be drawing theirs
        torch.manual_seed(case.seed)
    net = case.module(linop.layers.MultiheadAttention, P, x_axes=case.axes)
    with _TWINS:
        torch.manual_seed(case.seed)
        twin = case.module(torch.nn.MultiheadAttention)
    S = case.length if case.columns is None else case.columns
    shapes = [case.shape(*x) for x in ((case.length, None), (S, case.kdim), (S, case.vdim))]
    wholes = [normal(shape, case.seed + k) for k, shape in enumerate(shapes)]
    leaves = [x.clone().requires_grad_() for x in wholes]
    mask = padding = None
    if case.masked:
        mask = normal((case.length, S), 7) > 0.5
        padding = normal((case.batch, S), 8) > 0.5
        mask[:, 0] = padding[:, 0] = False  # torch gives NaN to rows without columns
    whole_mask = mask
    if case.causal:
        whole_mask = torch.ones(case.length, S, dtype=torch.bool).triu(1)
    wanted, _ = twin(*leaves, key_padding_mask=padding, need_weights=False, attn_mask=whole_mask)
    upstream = normal(tuple(wanted.shape), 5)
    wanted.backward(upstream)
    axes = [a % 3 if isinstance(a, int) else a for a in case.axes]
    spaces = [_space(shape, case, axes) for shape in shapes]
    blocks = [block(X, x, backend, gradient=True) for X, x in zip(spaces, wholes, strict=True)]
    if me in P:
        rows, batch = spaces[0].slices(me)[:2][:: -1 if case.batch_first else 1]
        mask = None if mask is None else mask[rows]
        padding = None if padding is None else padding[batch]
    elif case.masked:
        mask = padding = None
    y, weights = net(*blocks, key_padding_mask=padding, attn_mask=mask, is_causal=case.causal)
    assert weights is None
    if me not in P:
        y.sum().backward()
        return
    bounds = {d: spaces[0].bounds[d] for d in range(2) if d in axes}
    Y = TensorSpace(tuple(wanted.shape), P, axes=axes, bounds=bounds)
    same(y, wanted[Y.slices(me)])
    y.backward(upstream[Y.slices(me)])
    for x, leaf, X in zip(blocks, leaves, spaces, strict=True):
        same(x.grad, leaf.grad[X.slices(me)])
    whole_parameters = dict(twin.named_parameters())
    for name, p in net.named_parameters():
        layer = net.out_proj if name.startswith("out_proj.") else net
        where = layer.spaces[name.split(".")[-1]].slices(me)
        same(p, whole_parameters[name][where])
        same(p.grad, whole_parameters[name].grad[where])


def _space(shape: tuple[int, ...], case: Heads, axes: list[Any]) -> TensorSpace:
    """Cut anywhere along the sequence, for all inputs in the same places along the batch."""
    if REPLICATED in axes:
        return TensorSpace(shape, case.grid, axes=axes)
    X = cut(shape, case.grid, case.seed, axes)
    return TensorSpace(shape, case.grid, axes=axes, bounds={d: X.bounds[d] for d in axes if d < 2})


@st.composite
def heads(draw: Any, most: int) -> Heads:
    """Modules of up to 6 heads, on grids of at most so many workers, all of which have blocks."""
    axes = draw(st.sampled_from(GRIDS))
    grid = draw(grids(most, len(axes)))
    causal = draw(st.booleans())
    width = st.none() | st.integers(1, 5)
    count = max(grid.workers) + 1
    masked = not causal and draw(st.booleans()) and count == len(grid.workers)
    return Heads(
        grid,
        axes,
        draw(st.integers(1, 6)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 20)),
        draw(st.none() | st.integers(1, 20)),
        draw(width),
        draw(width),
        draw(st.booleans()),
        draw(st.booleans()),
        causal,
        masked,
        draw(st.integers(0, 999)),
    )
