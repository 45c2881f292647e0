"""Attention over blocks of batch, heads and sequence beside torch's of the whole: contracts. Needs
torch.

Ranks import this module, and no test.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from hypothesis import strategies as st

import linop
from linop import Partition, TensorSpace
from linop.backends import Backend
from support.contracts.plans import mine
from support.layers.cases import WIDE, block, cut, grids, normal, same

MASKS = None, "bool", "float", "keys", "heads"
AXES = {4: (0, 1, 2), 3: (0, 1), 2: (0,)}
"""Dimensions that grids split: of the batch, of heads, of the sequence."""


@dataclass(frozen=True)
class Attending:
    """A call of attention.

    Args:
        grid: that splits the dimensions before the last one.
        batch, groups, heads, length: of queries; heads of each group.
        columns: the keys' length; None: that of the queries.
        features: of queries and keys, and of values.
        mask: one of `MASKS`.
        ndim: of the tensors.
        seed: of their values, and of where they are cut.
    """

    grid: Partition
    batch: int = 1
    groups: int = 1
    heads: int = 1
    length: int = 1
    columns: int | None = None
    features: tuple[int, int] = (2, 2)
    mask: str | None = None
    causal: bool = False
    scale: float | None = None
    ndim: int = 4
    method: str = "ring"
    seed: int = 0

    @property
    def workers(self) -> int:
        return 1 + max(self.grid.workers)

    def shapes(self) -> list[tuple[int, ...]]:
        """Of queries, keys and values."""
        e, v = self.features
        S = self.length if self.columns is None else self.columns
        all_heads = self.groups * self.heads if self.ndim > 3 else self.groups
        whole = [
            (self.batch, all_heads, self.length, e),
            (self.batch, self.groups, S, e),
            (self.batch, self.groups, S, v),
        ]
        return [shape[4 - self.ndim :] for shape in whole]

    def given(self) -> tuple[list[Any], Any]:
        """Whole tensors, and the mask."""
        shapes = self.shapes()
        tensors = [normal(shape, self.seed + k) for k, shape in enumerate(shapes)]
        rows, columns = shapes[0][-2], shapes[1][-2]
        if self.mask is None:
            return tensors, None
        shape: tuple[int, ...] = (rows, columns)
        if self.mask == "heads":
            shape = (*shapes[0][:-1], columns)
        if self.mask == "keys":
            shape = (*shapes[0][: max(0, self.ndim - 3)], *[1] * min(2, self.ndim - 1), columns)
        values = normal(shape, self.seed + 3)
        if self.mask == "float":
            return tensors, values
        allowed = values > 0.3
        allowed[..., 0, :] = self.seed % 2 == 0  # a row may have no columns at all
        return tensors, allowed


_CHOOSING = Lock()
"""Of the kernel of attention, which is one choice for all threads."""


def whole(case: Attending, given: list[Any], mask: Any) -> Any:
    """torch's attention of the whole, by matrix products."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if case.causal and mask is not None:
        lower = torch.ones(given[0].shape[-2], given[1].shape[-2], dtype=torch.bool).tril()
        mask = mask & lower if mask.dtype is torch.bool else mask.masked_fill(~lower, -torch.inf)
    causal = case.causal and mask is None
    with _CHOOSING, sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(
            *given, mask, 0.0, causal, scale=case.scale, enable_gqa=case.ndim > 3
        )


def attends_as_one(backend: Backend, case: Attending) -> None:
    """Attention of blocks of any lengths, and its gradients, are those of the whole."""
    P, axes = case.grid, AXES[case.ndim]
    given, mask = case.given()
    leaves = [x.clone().requires_grad_() for x in given]
    wanted = whole(case, leaves, mask)
    upstream = normal(tuple(wanted.shape), case.seed + 4)
    wanted.backward(upstream)
    spaces = _spaces(case)
    blocks = [block(X, x, backend, gradient=True) for X, x in zip(spaces, given, strict=True)]
    me = mine(backend)
    rows = None
    if mask is not None:
        rows = torch.zeros(1, 0)
        if me in P:
            rows = mask
            for d, part in enumerate(spaces[0].slices(me)[:-1]):
                e = d - (case.ndim - mask.ndim)
                if e >= 0 and mask.shape[e] > 1:
                    rows = rows[(slice(None),) * e + (part,)]
    y = linop.layers.scaled_dot_product_attention(
        *blocks,
        rows,
        is_causal=case.causal,
        scale=case.scale,
        enable_gqa=case.ndim > 3,
        P_x=P,
        x_axes=axes,
        method=case.method,
    )
    Y = TensorSpace(wanted.shape, P, axes=axes, bounds=dict(enumerate(spaces[0].bounds[:-1])))
    if me not in P:
        y.sum().backward()
        return
    same(y, wanted[Y.slices(me)])
    y.backward(upstream[Y.slices(me)])
    for x, leaf, X in zip(blocks, leaves, spaces, strict=True):
        same(x.grad, leaf.grad[X.slices(me)])


def _spaces(case: Attending) -> list[TensorSpace]:
    """Queries are cut anywhere; keys and values in the batch as these, elsewhere anywhere else."""
    axes, shapes = AXES[case.ndim], case.shapes()
    Q = cut(shapes[0], case.grid, case.seed, axes)
    bounds = {0: Q.bounds[0]} if case.ndim > 3 else {}
    K = cut(shapes[1], case.grid, case.seed + 2 * (case.seed % 2), axes)
    every = dict(enumerate(K.bounds[:-1])) | bounds
    every = {d: ends for d, ends in every.items() if d in axes}
    return [Q, *(TensorSpace(shape, case.grid, axes=axes, bounds=every) for shape in shapes[1:])]


@st.composite
def attentions(draw: Any, most: int, longest: int = 257) -> Attending:
    """Attention of up to 12 heads, on grids of at most so many workers."""
    ndim = draw(st.sampled_from([4, 4, 4, 3, 2]))
    grid = draw(grids(most, len(AXES[ndim])))
    method = "ring"
    if ndim > 2 and (ndim == 3 or grid.shape[1] == 1) and len(AXES[ndim]) > 1:
        whole_heads = ndim == 4 or grid.shape[0] == 1
        method = draw(st.sampled_from(["ring", "ulysses"])) if whole_heads else "ring"
    groups = draw(st.integers(1, 6))
    length = st.integers(1, longest) | st.integers(1, 9)
    same_features = draw(st.booleans())
    e = draw(st.integers(1, 4))
    return Attending(
        grid,
        draw(st.integers(1, 3)),
        groups,
        draw(st.integers(1, 12 // groups)) if ndim > 3 else 1,
        draw(length),
        draw(st.none() | length),
        (e, e if same_features else draw(st.integers(1, 4))),
        draw(st.sampled_from(MASKS)),
        draw(st.booleans()),
        draw(st.sampled_from([None, None, 0.3])),
        ndim,
        method,
        draw(st.integers(0, 999)),
    )


def drops_as_one(backend: Backend, case: Attending, wanted: list[Any]) -> None:
    """Dropout by any cut has the zeros, and the gradients, of one worker, which are given."""
    for given, whole_one, X in zip(
        dropped(backend, case), wanted, _dropped_spaces(case), strict=True
    ):
        if mine(backend) in case.grid:
            same(given, torch.from_numpy(whole_one)[X.slices(mine(backend))])


def _dropped_spaces(case: Attending) -> list[TensorSpace]:
    Q, K, V = _spaces(case)
    shape = (*Q.global_shape[:-1], V.global_shape[-1])
    Y = TensorSpace(shape, Q.partition, axes=Q.axes, bounds=dict(enumerate(Q.bounds[:-1])))
    return [Y, Q, K, V]


def dropped(backend: Backend, case: Attending) -> list[Any]:
    """This worker's blocks of attention with dropout, and of its gradients."""
    given, _ = case.given()
    torch.manual_seed(case.seed)
    spaces = _spaces(case)
    blocks = [block(X, x, backend, gradient=True) for X, x in zip(spaces, given, strict=True)]
    y = linop.layers.scaled_dot_product_attention(
        *blocks,
        dropout_p=0.4,
        is_causal=case.causal,
        enable_gqa=case.ndim > 3,
        P_x=case.grid,
        x_axes=AXES[case.ndim],
        method=case.method,
    )
    Y = _dropped_spaces(case)[0]
    upstream = block(Y, normal(Y.global_shape, 5), backend)
    y.backward(upstream if mine(backend) in case.grid else torch.zeros_like(y))
    return [y.detach(), *(x.grad for x in blocks)]


def alone(case: Attending) -> list[Any]:
    """`dropped` by one worker, as arrays, which travel to ranks."""
    from dataclasses import replace

    one = replace(case, grid=Partition((1,) * len(AXES[case.ndim])))
    (found,) = linop.launch(lambda backend: dropped(backend, one), 1)
    return [x.numpy() for x in found]


assert WIDE is torch.float64
