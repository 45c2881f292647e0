"""Attention between a block of queries and one of keys and values, in one process.

Of a softmax over columns that are in several blocks, a block has the largest score of each row,
the sum of exponentials beside it, and the values weighted by them; `combine` is the associative
rule that makes those of two blocks those of both. Backward needs no such state: for any number c of
each row, attention is N / Z, with N the sum over blocks of exp(S - c) V and Z that of exp(S - c);
with the row's log-sum-exp as c, Z is 1. So the gradients of the terms of one block are torch's, of
functions of that block alone. On CPUs blocks without masks go through torch's flash attention and
its derivative, which is of just these terms; others through matrix products, a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MOST = 2**20
"""Scores that are in memory at once."""
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_KINDS = torch.float64, torch.float32, torch.bfloat16, torch.float16


class State(NamedTuple):
    """Of each row: the largest score, the sum of exponentials beside it, and the weighted values;
    of shapes (batch, heads, rows, 1), twice, and (batch, heads, rows, features), in float32 at
    least."""

    top: Tensor
    total: Tensor
    values: Tensor


class Scores(NamedTuple):
    """How scores become weights.

    Attributes:
        scale: factor of the products.
        causal: True if row i takes the columns up to i.
        mask: function of a slice of rows that gives what is added to their scores, or the columns
            that they take (bool); None: nothing.
        kept: likewise, the factors of dropout.
        spread: function from keys or values to those of every head.
    """

    scale: float
    spread: Callable[[Tensor], Tensor]
    causal: bool = False
    mask: Callable[[slice], Tensor] | None = None
    kept: Callable[[slice], Tensor] | None = None


def combine(a: State, b: State) -> State:
    """The state of the columns of both."""
    top = torch.maximum(a.top, b.top)
    left, right = (a.top - top).exp(), (b.top - top).exp()
    return State(top, a.total * left + b.total * right, a.values * left + b.values * right)


def nothing(q: Tensor, features: int) -> State:
    """The state of no columns, for queries of shape (batch, heads, rows, …)."""
    dtype = wide(q.dtype)
    one = q.new_zeros((*q.shape[:3], 1), dtype=dtype)
    values = q.new_zeros((*q.shape[:3], features), dtype=dtype)
    return State(torch.full_like(one, torch.finfo(dtype).min), one, values)


def padded(state: State, before: int, after: int) -> State:
    """The state of more rows, which have no columns."""
    fills = torch.finfo(state.top.dtype).min, 0.0, 0.0
    pairs = zip(state, fills, strict=True)
    pad = torch.nn.functional.pad
    return State(*(pad(x, (0, 0, before, after), value=fill) for x, fill in pairs))


def result(state: State, may_be_empty: bool) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithms of the sums of exponentials. Rows without columns, if there may
    be some, are zero, as torch's."""
    if not may_be_empty:
        return state.values / state.total, state.top + state.total.log()
    empty = state.total == 0
    total = state.total.masked_fill(empty, 1)
    return state.values / total, (state.top + total.log()).masked_fill(empty, 0)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.promote_types(dtype, torch.float32)


def attended(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> State:
    """The state of one block of columns. Differentiable by torch if gradients are enabled.

    Args:
        q: (batch, heads, rows, features). k, v: (batch, groups, columns, features); at least one
            row and one column.
    """
    k, v = scores.spread(k), scores.spread(v)
    if _is_plain(q, v, scores) and not torch.is_grad_enabled():
        out, logs = getattr(torch.ops.aten, _FLASH)(q, k, v, 0.0, scores.causal, scale=scores.scale)
        top = logs.unsqueeze(-1).to(wide(q.dtype))
        return State(top, torch.ones_like(top), out.to(top.dtype))
    k, v = k.to(wide(k.dtype)), v.to(wide(v.dtype))
    chunks = [State(*_chunk(q[:, :, rows], k, v, rows, scores)) for rows in _rows(q, k)]
    if len(chunks) == 1:
        return chunks[0]
    return State(*(torch.cat(each, 2) for each in zip(*chunks, strict=True)))


def gradients(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, row: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of the terms of one block of columns, in the dtype of sums.

    Args:
        q, k, v: as for `attended`.
        row: attention of all columns, the logarithms of the sums of exponentials, and the gradient
            of attention.
    """
    out, logs, gradient = row
    kind = wide(q.dtype)
    with torch.enable_grad():
        k, v = k.detach().requires_grad_(), v.detach().requires_grad_()
        wide_k, wide_v = scores.spread(k), scores.spread(v)
    if _is_plain(q, v, scores):
        of_q, of_k, of_v = getattr(torch.ops.aten, _FLASH + "_backward")(
            gradient,
            q,
            wide_k.detach(),
            wide_v.detach(),
            out.to(q.dtype),
            logs.squeeze(-1),
            0.0,
            scores.causal,
            scale=scores.scale,
        )
        if wide_k is not k:
            of_k, of_v = torch.autograd.grad((wide_k, wide_v), (k, v), (of_k, of_v))
        return of_q.to(kind), of_k.to(kind), of_v.to(kind)
    return _of_terms(q, k.detach(), v.detach(), scores, (out, logs, gradient.to(kind)))


def _of_terms(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, row: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """`gradients` by torch's autograd, a few rows at a time."""
    out, logs, gradient = row
    kind = out.dtype
    k, v = (x.to(kind).requires_grad_() for x in (k, v))
    of_q, of_k, of_v = (torch.zeros_like(x, dtype=kind) for x in (q, k, v))
    of_total = -(gradient * out).sum(-1, keepdim=True)  # of Z, in N / Z, where Z is 1
    for rows in _rows(q, k):
        with torch.enable_grad():
            part = q[:, :, rows].detach().to(kind).requires_grad_()
            of = part, scores.spread(k), scores.spread(v)
            _, total, values = _chunk(*of, rows, scores, logs[:, :, rows])
            given = of_total[:, :, rows], gradient[:, :, rows]
            each = torch.autograd.grad((total, values), (part, k, v), given)
        of_q[:, :, rows] = each[0]
        of_k += each[1]
        of_v += each[2]
    return of_q, of_k, of_v


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, rows: slice, scores: Scores, top: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of some rows: `top`, by default the largest score, the sum of exponentials beside it, and the
    weighted values."""
    products = (q.to(k.dtype) * scores.scale) @ k.transpose(-1, -2)
    for given in (scores.mask and scores.mask(rows), scores.causal and _causal(rows, products)):
        if isinstance(given, Tensor):
            bias = given.dtype is not torch.bool
            products = products + given if bias else products.masked_fill(~given, -torch.inf)
    if top is None:
        # Of a row without columns all are -inf: the subtrahend stays finite.
        top = products.detach().amax(-1, True).clamp(min=torch.finfo(products.dtype).min)
    weights = (products - top).exp()
    total = weights.sum(-1, True)
    if scores.kept is not None:
        weights = weights * scores.kept(rows)
    return top, total, weights @ v


def _causal(rows: slice, products: Tensor) -> Tensor:
    numbers = torch.arange(rows.start, rows.stop, device=products.device)
    columns = torch.arange(products.shape[-1], device=products.device)
    return columns <= numbers.unsqueeze(1)


def _rows(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Rows whose scores are in memory at once."""
    batch, heads, count, _ = q.shape
    step = max(1, _MOST // max(1, batch * heads * k.shape[2]))
    return (slice(a, min(a + step, count)) for a in range(0, count, step))


def _is_plain(q: Tensor, v: Tensor, scores: Scores) -> bool:
    """True if torch's flash attention for CPUs computes this."""
    return (
        scores.mask is None
        and scores.kept is None
        and q.device.type == "cpu"
        and q.dtype in _KINDS
        and q.shape[-1] == v.shape[-1] > 0
        and q.shape[0] * q.shape[1] > 0
        and hasattr(torch.ops.aten, _FLASH)
    )


def spread_over(heads: Any) -> Callable[[Tensor], Tensor]:
    """Function from keys or values, of shape (batch, groups, …), to those of every head.

    Args:
        heads: the number of heads of each group, if it is the same; else the group of each head.
    """
    if isinstance(heads, int):
        return _itself if heads == 1 else lambda x: x.repeat_interleave(heads, 1)
    return lambda x: x.index_select(1, torch.tensor(heads, device=x.device))


def _itself(x: Tensor) -> Tensor:
    return x
