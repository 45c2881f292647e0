"""Attention by an all-to-all: the cut of the sequence becomes one of the heads, each worker attends
over the whole sequence with its heads, and the result is cut as before (Jacobs et al. 2023,
"DeepSpeed Ulysses"). Both repartitions are operators with derived adjoints, of any number of heads
and any lengths; groups of keys and values go to each worker that has heads of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from linop.errors import PartitionError
from linop.layers.attention.attention import (
    Settings,
    cut_of,
    local_attention,
    space_of_groups,
)
from linop.layers.attention.cuts import in_order, positions
from linop.layers.dropout import Dropout
from linop.layers.layer import Function, Layer
from linop.operators.collectives import all_gather, repartition
from linop.spaces.decomposition import Axis
from linop.spaces.tensor import TensorSpace


def bound_ulysses(
    layer: Layer,
    settings: Settings,
    Q: TensorSpace,
    K: TensorSpace,
    V: TensorSpace,
    M: TensorSpace | None,
    drop: Dropout | None,
) -> Function:
    """As `linop.layers.attention.attention.bound_attention`.

    Raises:
        PartitionError: there are no heads, or another grid axis cuts them; on every worker.
    """
    h, s = Q.ndim - 3, Q.ndim - 2
    if h < 0 or len(Q.bounds[h]) > 1:
        raise PartitionError(
            f"{layer._name}: method='ulysses' cuts the heads of tensors of shape {Q.global_shape}, "
            f"{'which have none' if h < 0 else 'which are cut already'}; method='ring' expected"
        )
    axis = Q.axes.index(s)
    queries, keys = (cut_of(layer._name, X, settings.zigzag) for X in (Q, K))
    by_heads = [_by_heads(X, axis) for X in (Q, K, V)]
    Yq = by_heads[0]
    to_q = layer.moved(repartition, Q, Yq, of=0)
    # Groups of which several workers have heads go to each of them: to blocks that overlap.
    spaces = [Yq]
    to_heads = [to_q]
    for number, (X, Y) in enumerate(zip((K, V), by_heads[1:], strict=True), 1):
        wanted = space_of_groups(Y, Yq)
        spaces.append(wanted)
        to_heads.append(layer.moved(repartition, X, wanted, of=number))
    out_shape = (*Q.global_shape[:-1], V.global_shape[-1])
    Yo, Z = (
        TensorSpace(
            out_shape,
            X.partition,
            X.dtype,
            X.axes,
            bounds={d: X.bounds[d] for d in range(X.ndim - 1) if d in X.axes},
        )
        for X in (Yq, Q)
    )
    back = layer.moved(repartition, Yo, Z)
    rows = None if M is None else layer.moved(all_gather, M, axis, of=3)
    lengths = [in_order([X.global_shape[s]]) for X in (Q, K)]
    attend = local_attention(
        layer, settings, (spaces[0], spaces[1], spaces[2]), lengths[0], lengths[1], drop
    )
    inside = layer.worker in Q.partition
    mine = Yq.slices(layer.worker)[h] if inside else slice(0)
    order, columns = (_order(cut) if settings.zigzag else None for cut in (queries, keys))
    again, again_k = (None if each is None else _inverse(each) for each in (order, columns))

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (move(x) for move, x in zip(to_heads, (q, k, v), strict=True))
        if rows is not None:
            mask = rows(mask)
        if not inside:
            return back(attend(q, k, v))
        q, k, v = _taken(q, again), _taken(k, again_k), _taken(v, again_k)
        if mask is not None:
            mask = _taken(mask, again)
            mask = mask[..., mine, :, :] if mask.shape[h] > 1 else mask
            return back(_taken(attend(q, k, v, mask), order))
        return back(_taken(attend(q, k, v), order))

    return attention


def _by_heads(X: TensorSpace, axis: int) -> TensorSpace:
    """The space with heads cut, in balanced blocks, along the grid axis that cuts the sequence."""
    h, roles = X.ndim - 3, list[Axis](X.axes)
    if h in roles:  # along an axis of one worker
        roles[roles.index(h)] = X.ndim - 2
    roles[axis] = h
    bounds = {d: X.bounds[d] for d in range(h) if d in X.axes}
    return TensorSpace(X.global_shape, X.partition, X.dtype, roles, X.name, bounds=bounds)


def _order(cut: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
    """The positions of the tokens, in the order of the workers' blocks."""
    return list(chain.from_iterable(positions(tuple(segments)) for segments in cut))


def _inverse(order: list[int]) -> list[int]:
    found = [0] * len(order)
    for k, p in enumerate(order):
        found[p] = k
    return found


def _taken(x: Tensor, order: list[int] | None) -> Tensor:
    """Rows in another order."""
    return x if order is None else x.index_select(-2, torch.tensor(order, device=x.device))
