"""Dispatch of tokens to experts, and its adjoint, as one operator that the routing determines.

A routing says which experts each token goes to. Dispatch D is a 0/1 matrix: each of its rows, a
slot of an expert, selects a token; a token has as many slots as experts. Experts are cut over the
workers, so the movement behind it is an all-to-all of blocks whose sizes depend on the routing.
What experts compute comes back by D.H, which is derived, and sums a token's slots.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from linop.caching import cached_property
from linop.errors import ArgumentError, PartitionError, ShapeError, expect
from linop.normal_form.diagonals import multiplication
from linop.normal_form.matching import Segment, along
from linop.operators.algebra import direct_sum
from linop.operators.expressions import Local, compose
from linop.operators.named_movement import collective
from linop.operators.operator import LinearOperator
from linop.provenance import records_origin
from linop.spaces.blocks import is_tiled
from linop.spaces.partition import balanced
from linop.spaces.region import integer
from linop.spaces.scalars import Array, of_dtype
from linop.spaces.space import Space
from linop.spaces.tensor import TensorSpace


class Routing:
    """The experts of each token.

    Slots are in the order of experts, those of an expert in the order of tokens.

    Args:
        indices: the experts of token n, ``indices[n]``: integers of shape (tokens, k).
        experts: how many there are.
        capacity: the largest number of slots of an expert; further ones are dropped: all tokens'
            first choices, in the order of tokens, come before second ones (Lepikhin et al. 2020,
            "GShard"). None: nothing is dropped.

    Attributes:
        indices: int64, of shape (tokens, k).
        experts, capacity: as given.

    Raises:
        ShapeError: `indices` has not two dimensions. ArgumentError: an index is no expert, or a
            number is negative.

    Example:
        >>> routing = linop.Routing([[1], [0], [1]], experts=2)
        >>> routing.sizes.tolist(), routing.slots.tolist()
        ([1, 2], [1, 0, 2])
        >>> linop.Routing([[1], [0], [1]], experts=2, capacity=1).sizes.tolist()
        [1, 1]
    """

    def __init__(self, indices: npt.ArrayLike, experts: int, capacity: int | None = None) -> None:
        given = np.asarray(indices)
        if given.ndim != 2:
            raise ShapeError(
                f"Routing: indices of shape {given.shape}; (tokens, experts of each) expected"
            )
        if given.size and given.dtype.kind not in "iu":
            raise ArgumentError(f"Routing: indices of {given.dtype}; integers expected")
        self.experts = integer(experts, "Routing: experts")
        self.capacity = None if capacity is None else integer(capacity, "Routing: capacity")
        if self.experts < 1 or (self.capacity is not None and self.capacity < 0):
            raise ArgumentError(
                f"Routing: experts={experts}, capacity={capacity}; numbers from 1 and from 0 "
                f"expected"
            )
        self.indices = given.astype(np.int64)
        if given.size and not (self.indices.min() >= 0 and self.indices.max() < self.experts):
            raise ArgumentError(
                f"Routing: experts {self.indices.min()} to {self.indices.max()} given, where there "
                f"are {self.experts}: 0 to {self.experts - 1} expected"
            )

    @cached_property
    def slots(self) -> Array:
        """Numbers token · k + choice of the slots: int64, of shape (slots,)."""
        flat = self.indices.reshape(-1)
        order: Array = np.argsort(flat, kind="stable")
        if self.capacity is None:
            return order
        tokens, k = self.indices.shape
        choices = self.indices.T.reshape(-1)  # all first choices, all second ones, …
        ranks = np.empty(len(flat), np.int64)
        ranks[np.argsort(choices, kind="stable")] = ranks_in(np.bincount(choices, minlength=1))
        kept = (ranks < self.capacity).reshape(k, tokens).T.reshape(-1)
        found: Array = order[kept[order]]
        return found

    @cached_property
    def sizes(self) -> Array:
        """Slots of each expert: int64, of shape (experts,)."""
        flat = self.indices.reshape(-1)
        found: Array = np.bincount(flat[self.slots], minlength=self.experts)
        return found

    def __repr__(self) -> str:
        tokens, k = self.indices.shape
        most = "" if self.capacity is None else f", capacity={self.capacity}"
        return f"Routing({tokens} tokens, {k} of {self.experts} experts{most})"


def ranks_in(counts: Array) -> Array:
    """0, 1, … of each group, of consecutive groups of so many."""
    ends = np.cumsum(counts)
    found: Array = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return found


@records_origin
def dispatch(X: TensorSpace, routing: Routing) -> LinearOperator:
    """D: tokens to the slots of their experts. The adjoint sums a token's slots, and is combine
    without gates; ``D.H @ D`` is k times the identity where nothing is dropped.

    Args:
        X: tokens, of shape (tokens, …), in blocks; a grid axis may cut dimension 0, others as they
            like.
        routing: of these tokens.

    Returns:
        The operator to a `TensorSpace` of shape (slots, …) on the same grid. Along the axis that
        cuts dimension 0, each worker has the slots of consecutive experts; of these, the first
        ``experts mod workers`` workers have one more.

    Raises:
        ShapeError: the routing is of another number of tokens. PartitionError: blocks of X overlap,
            leave gaps, or are not in order.

    Example:
        >>> X = linop.TensorSpace((3,), linop.Partition(2))
        >>> D = linop.dispatch(X, linop.Routing([[1], [0], [1]], experts=2))
        >>> (D @ np.array([10.0, 11.0, 12.0])).tolist()
        [11.0, 10.0, 12.0]
        >>> (D.H @ D).equals(linop.identity(X))
        True
    """
    X = expect("dispatch", X, TensorSpace)
    routing = expect("dispatch", routing, Routing)
    tokens, k = routing.indices.shape
    if not X.ndim or X.global_shape[0] != tokens:
        raise ShapeError(
            f"dispatch: a routing of {tokens} tokens for a tensor of shape {X.global_shape}; "
            f"({tokens}, …) expected"
        )
    if not is_tiled(X):
        raise PartitionError(f"dispatch: the blocks of X must follow one another; {X.bounds}")
    axis = X.axes.index(0) if 0 in X.axes else None
    workers = 1 if axis is None else X.partition.shape[axis]
    parts = np.split(routing.sizes, np.cumsum(balanced(routing.experts, workers))[:-1])
    Y = TensorSpace(
        (len(routing.slots), *X.global_shape[1:]),
        X.partition,
        X.dtype,
        X.axes,
        "slots",
        sizes={0: [int(part.sum()) for part in parts]} if axis is not None else None,
        bounds={d: X.bounds[d] for d in range(1, X.ndim) if d in X.axes},
        memory=X.memory,
    )
    links = along(X, [] if axis is None else [axis])
    return collective("D", "", X, Y, links, {0: _runs(routing.slots // max(k, 1))})


@records_origin
def combine(X: TensorSpace, routing: Routing, gates: npt.ArrayLike) -> LinearOperator:
    """C = D.H · diag(gates): each token the sum of its slots, times their gates. Dropped ones are
    zero.

    Args:
        X, routing: as of `dispatch`.
        gates: of each token and choice, of shape (tokens, k).

    Returns:
        The operator from the codomain of ``dispatch(X, routing)`` to X.

    Raises:
        ShapeError: the gates are not of that shape. DTypeError: the dtype of X does not represent
            them; and as `dispatch`.

    Example:
        >>> X = linop.TensorSpace((2,), linop.Partition(2))
        >>> routing = linop.Routing([[0, 1], [1, 0]], experts=2)
        >>> C = linop.combine(X, routing, gates=[[0.5, 0.5], [1.0, 0.0]])
        >>> (C @ linop.dispatch(X, routing) @ np.array([2.0, 3.0])).tolist()
        [2.0, 3.0]
    """
    D = dispatch(X, routing)
    given = np.asarray(gates)
    if given.shape != routing.indices.shape:
        raise ShapeError(
            f"combine: gates of shape {given.shape}; {routing.indices.shape} expected, as the "
            f"routing's"
        )
    Y = D.codomain
    assert isinstance(Y, TensorSpace)
    of_slots = given.reshape(-1)[routing.slots]
    each = []
    for region, start in zip(Y.regions, Y.numbering.starts[:, 0].tolist(), strict=True):
        own = of_slots[start : start + region.shape[0]]
        full = np.broadcast_to(own.reshape(-1, *[1] * (Y.ndim - 1)), region.shape)
        values = of_dtype(full, Y.dtype, "combine")
        each.append(Local(multiplication(values, Space(region, Y.dtype), "g")))
    return compose(D.euclidean_adjoint, direct_sum(*each))


def _runs(tokens: Array) -> tuple[Segment, ...]:
    """Slots and their tokens, as runs of consecutive ones of both."""
    starts = np.flatnonzero(np.diff(tokens, prepend=tokens[:1] - 2) != 1)
    lengths = np.diff(starts, append=len(tokens))
    rows = np.stack([starts, tokens[starts], lengths], 1).tolist()
    return tuple(Segment(*row) for row in rows)
