"""Rows of tokens on their way to experts, as indices: NumPy alone, nothing is sent here.

A movement whose sizes change at every step would be planned at every step. So it is taken apart
into three, whose product is `linop.dispatch` (a test proves it): rows are put into a buffer of
equal blocks, one for each worker; an all-to-all of these blocks, which stays the same; rows are
taken out of the blocks that have arrived. The first and the last are index operations inside one
worker's memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from linop.operators.experts import ranks_in
from linop.spaces.partition import balanced
from linop.spaces.scalars import Array


class Slots(NamedTuple):
    """Places of this worker's rows, and of those that its experts get.

    Attributes:
        block: rows of a block; a buffer has one for each worker.
        tokens: the token of each row of the buffer that is sent; that of rows without one is 0.
        rows: the row of the buffer of each token and choice; that of dropped ones is 0.
        dropped: True for each token and choice that is dropped; None if none is.
        arrived: rows of the buffer that arrives, in the order of experts, and of tokens for each.
        counts: rows of each of this worker's experts.
    """

    block: int
    tokens: Array
    rows: Array
    dropped: Array | None
    arrived: Array
    counts: list[int]


def counts_of(indices: Array, experts: int) -> Array:
    """Tokens of each choice and expert: int64, of shape (k, experts)."""
    k = indices.shape[1]
    flat = (indices + experts * np.arange(k)).reshape(-1)
    return np.bincount(flat, minlength=k * experts).reshape(k, experts)


def most_rows(kept: Array) -> int:
    """The largest number of rows that a worker sends to one.

    Args:
        kept: as of `slots_of`.
    """
    return int(np.add.reduceat(kept, _starts(kept), axis=1).max(initial=0))


def kept_of(counts: Array, capacity: int | None) -> Array:
    """Slots by worker of the token and expert, of shape (workers, experts).

    Args:
        counts: of all workers, of shape (workers, k, experts).
        capacity: of an expert; None: nothing is dropped.
    """
    if capacity is None:
        total: Array = counts.sum(1)
        return total
    some: Array = np.clip(capacity - _before(counts), 0, counts).sum(1)
    return some


def slots_of(
    indices: Array, counts: Array, kept: Array, worker: int, capacity: int | None, block: int
) -> Slots:
    """The slots of a worker's tokens and experts.

    Args:
        indices: the experts of this worker's tokens, of shape (tokens, k).
        counts: as of `kept_of`.
        kept: the result of that.
        worker: the position of this one.
        block: rows of a block, at least `most_rows`.
    """
    (workers, _, experts), (tokens, k) = counts.shape, indices.shape
    flat = indices.reshape(-1).astype(np.uint16 if experts < 2**16 else np.int64)
    order = np.argsort(flat, kind="stable")
    dropped = None
    if capacity is not None:
        dropped = _dropped(indices, counts, worker, capacity)
        order = order[~dropped.reshape(-1)[order]]
        dropped = dropped if dropped.any() else None
    starts = _starts(kept)
    sent = np.add.reduceat(kept[worker], starts)
    places = ranks_in(sent) + np.repeat(block * np.arange(len(sent)), sent)
    of_rows, rows = np.zeros(workers * block, np.int64), np.zeros(tokens * k, np.int64)
    of_rows[places], rows[order] = order // max(k, 1), places
    lengths = balanced(experts, workers)
    first = sum(lengths[:worker])
    mine = kept[:, first : first + lengths[worker]]
    begins = np.cumsum(mine, 1) - mine + block * np.arange(workers)[:, None]
    each = mine.T.reshape(-1)  # of an expert, worker after worker
    arrived = ranks_in(each) + np.repeat(begins.T.reshape(-1), each)
    return Slots(block, of_rows, rows, dropped, arrived, mine.sum(0).tolist())


def _starts(kept: Array) -> Array:
    """The first expert of each worker that has one."""
    lengths = np.array(balanced(kept.shape[1], kept.shape[0]))
    starts: Array = (np.cumsum(lengths) - lengths)[lengths > 0]
    return starts


def _before(counts: Array) -> Array:
    """Assignments to an expert that come before those of a worker and choice: earlier choices of
    all workers, the same one of workers before."""
    choices = counts.sum(0)
    earlier = np.cumsum(choices, 0) - choices
    before: Array = earlier + np.cumsum(counts, 0) - counts
    return before


def _dropped(indices: Array, counts: Array, worker: int, capacity: int) -> Array:
    """True for each token and choice that its expert has no slot for."""
    tokens, k = indices.shape
    keys = (indices + counts.shape[2] * np.arange(k)).T.reshape(-1)
    own = counts[worker].reshape(-1)
    ranks = np.empty(len(keys), np.int64)
    ranks[np.argsort(keys, kind="stable")] = ranks_in(own)
    ranks += _before(counts)[worker].reshape(-1)[keys]
    dropped: Array = (ranks >= capacity).reshape(k, tokens).T
    return dropped
