"""Attention over blocks: sequences cut along one axis of a grid, and heads, or the batch, along
others. The ring is in `linop.layers.attention.ring`, the all-to-all in
`linop.layers.attention.ulysses`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linop.backends.autograd.bridge import bridge_of
from linop.backends.autograd.real_calls import apart
from linop.errors import ArgumentError, LinopError, PartitionError, ShapeError
from linop.layers.agreement.input_agreement import Cache, program_backend
from linop.layers.attention.blocks import spread_over
from linop.layers.attention.checks import check
from linop.layers.attention.cuts import Segments, in_order, size, zigzag
from linop.layers.attention.ring import Ring
from linop.layers.dropout import BITS, Dropout, random_bits
from linop.layers.layer import Function, Layer
from linop.layers.moments import wide
from linop.layers.zero_volume import empty_block, zero_volume_result
from linop.operators.collectives import shift
from linop.operators.named_movement import collective
from linop.operators.operator import LinearOperator
from linop.spaces.decomposition import COPIES, Axis, Bounds
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace

METHODS = "ring", "ulysses"


class Settings(NamedTuple):
    """Arguments of attention that are the same for all of its calls."""

    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    method: str = "ring"
    zigzag: bool = False
    masked: bool = False
    window: int | None = None


class ScaledDotProductAttention(Layer):
    """Attention of queries to keys and values that are cut alike.

    Args:
        P_x: the partition of all of them.
        dropout_p, is_causal, scale, enable_gqa, method, zigzag: as of
            `scaled_dot_product_attention`.
        masked: True if calls have a mask.
        window: tokens that attention of the caller is limited to; longer sequences without a mask
            are refused.
        x_axes: roles of the grid axes; by default axis k splits dimension k.
    """

    def __init__(
        self,
        P_x: Partition,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        method: str,
        zigzag: bool,
        masked: bool,
        window: int | None,
        x_axes: Sequence[Axis] | None,
    ) -> None:
        settings = Settings(dropout_p, is_causal, scale, enable_gqa, method, zigzag, masked, window)
        if settings.method not in METHODS:
            raise ArgumentError(
                f"{self._name}: method={settings.method!r}; one of {METHODS} expected"
            )
        if not 0 <= settings.dropout_p < 1:
            raise ArgumentError(
                f"{self._name}: dropout_p={settings.dropout_p!r}; a probability below 1 expected"
            )
        super().__init__([P_x] * (4 if settings.masked else 3), P_x)
        self.settings, self.x_axes = settings, x_axes
        self._drop = Dropout(P_x, settings.dropout_p) if settings.dropout_p else None

    def axes(self, number: int, ndim: int) -> Sequence[Axis]:
        return roles(self._name, self.inputs[0], ndim, self.x_axes)

    def invalid_values(self, tensors: Sequence[Tensor | None]) -> str:
        mask = tensors[3] if len(tensors) > 3 else None
        if isinstance(mask, Tensor) and mask.requires_grad:
            return (
                "attn_mask that requires a gradient; biases that learn are not cut: "
                "detach it, or add it to the scores of a module of your own"
            )
        return ""

    def forward(self, *tensors: Tensor | None) -> Tensor:
        """This worker's block of the result.

        Args:
            tensors: its blocks of queries, keys, values, and of the mask: the rows of its queries,
                and all columns.
        """
        if len(tensors) > 3 and isinstance(tensors[3], Tensor) and isinstance(tensors[0], Tensor):
            tensors = (*tensors[:3], self._rows_of_mask(tensors[0], tensors[3]))
        return super().forward(*tensors)

    def _rows_of_mask(self, q: Tensor, mask: Tensor) -> Tensor:
        """A mask with the queries' number of dimensions, and their extent in those that are cut: a
        view. Masks of bool, which is no dtype of operators, are bytes."""
        try:
            found = self.axes(0, q.ndim)
            cut = [d for d, n in zip(found, self.inputs[0].shape, strict=True) if n > 1]
        except LinopError:
            return mask  # all workers get the error when they compare their calls
        if self.worker in self.inputs[0] and mask.ndim <= q.ndim:
            mask = mask.reshape((1,) * (q.ndim - mask.ndim) + tuple(mask.shape))
            shape = [q.shape[d] if d in (*cut, q.ndim - 2) else -1 for d in range(q.ndim)]
            fits = all(m in (1, n) or n == -1 for m, n in zip(mask.shape, shape, strict=True))
            mask = mask.expand(shape) if fits else mask
        return mask.view(torch.uint8) if mask.dtype is torch.bool else mask

    def bind(self, *inputs: TensorSpace) -> Function:
        return bound_attention(self, self.settings, inputs, self._drop)

    def extra_repr(self) -> str:
        return f"{self.inputs[0]}, {self.settings}"


def roles(name: str, grid: Partition, ndim: int, given: Sequence[Axis] | None) -> Sequence[Axis]:
    """Roles of the grid axes for queries, keys and values of so many dimensions.

    Raises:
        PartitionError: they split the features, or hold copies. ShapeError: there are fewer than
            two dimensions.
    """
    if ndim < 2:
        raise ShapeError(f"{name}: a tensor of {ndim} dimensions; (…, length, features) expected")
    axes = range(grid.ndim) if given is None else given
    if len(axes) != grid.ndim or any(isinstance(k, int) and not -ndim <= k < ndim for k in axes):
        raise PartitionError(
            f"{name}: axes {tuple(axes)} of {grid!r} for a tensor of {ndim} dimensions"
        )
    found = [k % ndim if isinstance(k, int) else k for k in axes]
    for role, parts in zip(found, grid.shape, strict=True):
        if parts > 1 and (role == ndim - 1 or role is COPIES):
            what = "copies" if role is COPIES else "the features"
            raise PartitionError(
                f"{name}: a grid axis of {grid!r} holds {what}; batch, heads, the sequence or "
                f"linop.REPLICATED expected"
            )
    return found


def bound_attention(
    layer: Layer, settings: Settings, inputs: Sequence[TensorSpace], drop: Dropout | None
) -> Function:
    """Function from this worker's blocks of queries, keys, values and the mask to its block of
    attention. Collective.

    Args:
        layer: whose workers take part.
        inputs: spaces of the global tensors.

    Raises:
        ShapeError, DTypeError, PartitionError: they do not fit; on every worker.
    """
    Q, K, V = inputs[:3]
    M = inputs[3] if len(inputs) > 3 else None
    check(layer._name, settings, Q, K, V, M)
    if settings.method == "ulysses" and workers_of_sequence(Q) > 1:
        from linop.layers.attention.ulysses import bound_ulysses  # imports this module

        return bound_ulysses(layer, settings, Q, K, V, M, drop)
    queries, keys = (cut_of(layer._name, X, settings.zigzag) for X in (Q, K))
    return local_attention(layer, settings, (Q, K, V), queries, keys, drop)


def local_attention(
    layer: Layer,
    settings: Settings,
    spaces: tuple[TensorSpace, TensorSpace, TensorSpace],
    queries: Sequence[Segments],
    keys: Sequence[Segments],
    drop: Dropout | None,
) -> Function:
    """Attention around the ring of the workers that have blocks of the keys' sequence; without
    messages where there is one. Collective."""
    Q, K, V = spaces
    K, fetch_k = with_heads_of(layer, K, Q, 1)
    V, fetch_v = with_heads_of(layer, V, Q, 2)
    seed_of = None if drop is None else drop.drawn_seed
    ring = _ring(layer, settings, (Q, K, V), queries, keys)
    if ring is None:
        return lambda *tensors: _outside(seed_of if layer.training else None, Q, tensors)
    ndim = Q.ndim

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        k, v = fetch_k(k), fetch_v(v)
        seed = seed_of() if seed_of is not None and layer.training else None
        shape = (*q.shape[:-1], v.shape[-1])
        folded = [four(x) for x in (q, k, v)]
        if mask is not None:
            mask = four(mask.view(torch.bool) if mask.dtype is torch.uint8 else mask)
        if not q.shape[:-2].numel():  # a worker without heads
            return _without_heads(ring, folded, shape)
        y = ring(*folded, mask, seed)
        return y.reshape(shape) if ndim != 4 else y

    return attend


def _without_heads(ring: Ring, folded: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """The empty block of a worker without heads, which has its place in the ring."""
    if ring.move is None:
        # A square of the sum, so that each gradient depends on all, as those of workers with heads.
        total = torch.stack([x.sum() for x in folded]).sum()
        return empty_block(shape, total * total)
    return ring(*folded, None, None).reshape(shape)


def _outside(seed: Any, Q: TensorSpace, tensors: Sequence[Tensor | None]) -> Tensor:
    """The result of a worker without blocks, which takes part in the draw of a seed."""
    if seed is not None:
        seed()
    return zero_volume_result(Q, *tensors)


def _ring(
    layer: Layer,
    settings: Settings,
    spaces: tuple[TensorSpace, TensorSpace, TensorSpace],
    queries: Sequence[Segments],
    keys: Sequence[Segments],
) -> Ring | None:
    """This worker's ring; None on workers without blocks. Collective."""
    Q, K, V = spaces
    moves: list[LinearOperator | None] = [None, None]
    axis = Q.axes.index(Q.ndim - 2) if workers_of_sequence(Q) > 1 else None
    features = K.global_shape[-1], V.global_shape[-1]
    if axis is not None:
        longest = max(map(size, keys))
        shape = (*K.global_shape[:-2], longest, sum(features))
        axes = [COPIES if k == axis else role for k, role in enumerate(K.axes)]
        bounds = {d: K.bounds[d] for d in range(K.ndim - 2) if d in axes}
        for k, dtype in enumerate((K.dtype, wide(layer, K))):
            # Two operators even of one dtype: their plans run at the same time.
            X = TensorSpace(shape, K.partition, dtype, axes, ("kv", "gradient")[k], bounds=bounds)
            moves[k] = op = shift(X, 1, axis)
            bridge_of(op, layer.backend)  # compiled by all
    if layer.worker not in Q.partition:
        return None
    at = Q.partition.coordinates(layer.worker)
    scale = settings.scale
    kept = Kept(settings.dropout_p, Q, K, layer.worker) if settings.dropout_p else None
    return Ring(
        layer.backend,
        layer.__dict__["_where"],
        moves[0],
        moves[1],
        0 if axis is None else at[axis],
        queries,
        keys,
        settings.is_causal,
        Q.global_shape[-1] ** -0.5 if scale is None else scale,
        spread_over(heads_of_groups(Q, K, layer.worker)),
        features,
        kept,
    )


class Kept:
    """Factors of dropout: functions of one seed and of an element's index in the global matrix of
    attention, whatever the cut.

    Args:
        p: the probability of a zero.
        Q, K: spaces of queries and keys.
        worker: this one.
    """

    def __init__(self, p: float, Q: TensorSpace, K: TensorSpace, worker: int) -> None:
        self._p, self._where = p, Q.slices(worker)[:-2]
        self._shape = (*Q.global_shape[:-1], K.global_shape[-2])

    def __call__(self, seed: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
        bits = random_bits(seed, self._shape, (*self._where, rows, columns))
        return four((bits >= int(self._p * 2**BITS)).to(dtype).mul_(1 / (1 - self._p)))


# Shapes


def four(x: Tensor) -> Tensor:
    """A tensor of (…, heads, length, features) as one of four dimensions."""
    if x.ndim == 4:
        return x
    return x[(None,) * (4 - x.ndim)] if x.ndim < 4 else x.flatten(0, -4)


def workers_of_sequence(X: TensorSpace) -> int:
    """The number of blocks of a sequence."""
    return len(X.bounds[X.ndim - 2])


def cut_of(name: str, X: TensorSpace, zigzagged: bool) -> list[Segments]:
    """Positions of the blocks of a sequence.

    Raises:
        PartitionError: they have not the lengths of a zigzag cut.
    """
    sizes = [stop - start for start, stop in X.bounds[X.ndim - 2]]
    if not zigzagged:
        return in_order(sizes)
    found = zigzag(sum(sizes), len(sizes))
    expected = [size(segments) for segments in found]
    if sizes != expected:
        raise PartitionError(
            f"{name}: blocks of {sizes} tokens; those of a zigzag cut of {sum(sizes)} tokens have "
            f"{expected}: cut the sequence by the `shard` of its ContextParallel"
        )
    return found


def with_heads_of(
    layer: Layer, X: TensorSpace, Q: TensorSpace, of: int
) -> tuple[TensorSpace, Function]:
    """Keys or values with the groups that each worker's heads need, and the function to them.
    Collective.

    Args:
        of: number of the input.
    """
    Y = space_of_groups(X, Q)
    if Y is X:
        return X, lambda x: x
    return Y, layer.moved(collective, "P", "heads", X, Y, of=of)


def space_of_groups(X: TensorSpace, Q: TensorSpace) -> TensorSpace:
    """Keys or values in blocks of the groups that the blocks of the queries' heads need, which
    overlap where several have heads of one group; X itself where its blocks are these."""
    h = X.ndim - 3
    if h < 0:
        return X
    each = max(1, Q.global_shape[h] // max(1, X.global_shape[h]))
    needed: Bounds = tuple((a // each, -(-b // each)) if a < b else (0, 0) for a, b in Q.bounds[h])
    if needed == X.bounds[h]:
        return X
    bounds = {d: X.bounds[d] for d in range(X.ndim) if d in X.axes} | {h: needed}
    return TensorSpace(X.global_shape, X.partition, X.dtype, X.axes, X.name, bounds=bounds)


def heads_of_groups(Q: TensorSpace, K: TensorSpace, worker: int) -> int | list[int]:
    """The number of this worker's heads for each of its groups, if it is the same; else the group
    of each head, by its number here."""
    if Q.ndim < 3:
        return 1
    h = Q.ndim - 3
    each = max(1, Q.global_shape[h] // max(1, K.global_shape[h]))
    heads, groups = (X.slices(worker)[h] for X in (Q, K))
    if heads.start % each == heads.stop % each == 0:
        return each
    return [n // each - groups.start for n in range(heads.start, heads.stop)]


def scaled_dot_product_attention(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor | None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    P_x: Partition,
    x_axes: Sequence[Axis] | None = None,
    method: str = "ring",
    zigzag: bool = False,
    window: int | None = None,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` of tensors in blocks. Collective: all
    workers of the program call it.

    Args:
        query, key, value: this worker's blocks of tensors of shape (…, L, E), (…, S, E) and
            (…, S, features), of one floating-point dtype; None, or tensors without elements, on
            workers that are not in `P_x`. Lengths, heads and groups need no common divisor with
            the grid.
        attn_mask: the rows of this worker's queries, and all columns in the order of the sequence:
            of bool, or added to the scores, in the dtype of the queries; it broadcasts with
            (…, rows, S). It has no gradient.
        dropout_p: as torch's, at every call. The zeros are a function of one number that worker 0
            draws, and so those of any other cut.
        is_causal, scale, enable_gqa: as torch's.
        P_x: the partition of all three; axis k of the grid splits dimension k.
        x_axes: roles of its axes, where they are others: dimensions of the batch, of heads (-3) and
            of the sequence (-2), or `linop.REPLICATED`.
        method: of a sequence that is cut: "ring", where keys and values go around its workers; or
            "ulysses", where the cut of the sequence becomes one of the heads by an all-to-all.
        zigzag: True: each worker has two chunks of the sequence, as
            `linop.strategies.ContextParallel` cuts it.
        window: tokens that attention of the caller is limited to; longer sequences without a mask
            are refused.

    Returns:
        This worker's block of attention, of shape (…, L, features).

    Raises:
        ShapeError, DTypeError, PartitionError: tensors do not fit each other, or the cut;
        ArgumentError: an argument is none of these; BackendError: workers pass different
            arguments. On every worker, before anything is sent.

    Example:
        >>> P, x = linop.Partition((1, 1, 2)), torch.rand(1, 2, 6, 4)  # a sequence of 6, in halves
        >>> def main(backend):
        ...     mine = x.chunk(2, dim=2)[backend.worker]
        ...     return layers.scaled_dot_product_attention(mine, mine, mine, is_causal=True, P_x=P)
        >>> y = torch.cat(linop.launch(main, workers=2), dim=2)
        >>> whole = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        >>> torch.allclose(y, whole, atol=1e-5)
        True
    """
    given = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    rest = P_x, x_axes, method, zigzag, window
    if torch.compiler.is_dynamo_compiling():
        from linop.layers.attention.compiled import compiled_attention  # imports this module

        return compiled_attention("", *given, *rest)
    return attended(*given, *rest)


def attended(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor | None,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    P_x: Partition,
    x_axes: Sequence[Axis] | None,
    method: str,
    zigzag: bool,
    window: int | None,
) -> Tensor:
    """As `scaled_dot_product_attention`, by torch's tracers, too."""
    settings = Settings(
        dropout_p, is_causal, scale, enable_gqa, method, zigzag, attn_mask is not None, window
    )
    layer = apart(attention_of, P_x, settings, x_axes)
    given = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    result: Tensor = layer(*given)
    return result


def attention_of(
    P_x: Partition, settings: Settings, x_axes: Sequence[Axis] | None = None
) -> ScaledDotProductAttention:
    """The layer of some arguments, which equal calls share. Collective."""
    kept = program_backend().kept
    known: Cache[ScaledDotProductAttention] = kept.get(_KEPT) or kept.setdefault(
        _KEPT, Cache[ScaledDotProductAttention](_MOST)
    )
    key = P_x, settings, None if x_axes is None else tuple(x_axes)
    layer: ScaledDotProductAttention | None = known.get(key)
    return layer or known.keep(key, ScaledDotProductAttention(P_x, *settings, key[2]))


_KEPT = "attention"
_MOST = 32
"""Settings whose layers are kept."""
