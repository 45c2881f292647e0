"""Pass that splits sums needed by several workers into a reduce-scatter and an all-gather.

A sum of boxes of several workers, needed by several workers, takes one stage if all send to all and
form the same sum. In two stages, each receiver sums one share and sends it to the others
(Rabenseifner's all-reduce): fewer bytes are sent and added. The cost model decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from linop.normal_form.boxes import row_keys
from linop.normal_form.movement import Movement, Transfer
from linop.normal_form.space_tables import Block
from linop.normal_form.transfer_table import IdentityTable
from linop.planning import network
from linop.spaces.exact import Exact
from linop.spaces.region import Region, Subset, as_subset
from linop.spaces.space import Space

LARGEST_MOVEMENT = 4096
"""Largest movement, in transfers, that is examined: that of an all-reduce of 64 workers."""


class _Sum(NamedTuple):
    """A linear combination of source boxes, and the target boxes that receive it."""

    sources: tuple[tuple[Subset, Exact], ...]
    targets: tuple[Subset, ...]


def split_sums(movement: Movement) -> tuple[Movement, ...]:
    """Factors of a movement, first applied first: itself, or a reduce-scatter and an all-gather."""
    if isinstance(movement.transfers, IdentityTable):
        return (movement,)
    itemsize = movement.domain.dtype.itemsize
    assumed = network.ASSUMED
    least = assumed.latency / (assumed.per_byte + assumed.per_byte_added)
    if not (movement.codomain.numbering.shapes.prod(axis=1) * itemsize > least).any():
        return (movement,)
    if int(movement.transfers.counts_into(len(movement.codomain)).sum()) > LARGEST_MOVEMENT:
        return (movement,)
    t = movement.table
    if len(np.unique(row_keys(t.dst, *t.at.T, *t.extent.T))) == len(t):
        return (movement,)  # no box is written twice
    sums, rest = _sums(movement)
    return _factors(movement, sums, rest) if sums else (movement,)


def _sums(movement: Movement) -> tuple[list[_Sum], list[Transfer]]:
    """(sums predicted to be faster in shares, transfers that are in none of them)."""
    into: dict[Subset, list[tuple[Subset, Exact]]] = defaultdict(list)
    for transfer in movement:
        into[transfer.target].append((transfer.source, transfer.coefficient))
    alike: dict[tuple[tuple[Subset, Exact], ...], list[Subset]] = defaultdict(list)
    for target, sources in into.items():
        alike[tuple(sources)].append(target)
    every = [_Sum(sources, tuple(targets)) for sources, targets in alike.items()]
    sums = [one for one in every if _is_faster(one, movement.domain.dtype.itemsize)]
    shared = {target for one in sums for target in one.targets}
    return sums, [transfer for transfer in movement if transfer.target not in shared]


def _is_faster(one: _Sum, itemsize: int) -> bool:
    """True if a sum is predicted to be faster in shares, for a worker that both sends and receives,
    with messages between all pairs of workers.

    Args:
        itemsize: bytes per element.
    """
    senders = {source.region.workers for source, _ in one.sources}
    receivers = {target.region.workers for target in one.targets}
    S, D = len(senders), len(receivers)
    if min(S, D) < 2 or D < len(one.targets) or any(len(w) > 1 for w in senders | receivers):
        return False
    if max(one.targets[0].shape, default=0) < D:
        return False
    size, assumed = one.targets[0].size * itemsize, network.ASSUMED
    sent, added = assumed.per_byte * size, assumed.per_byte_added * size * (S - 1)
    others = max(S, D) - 1
    at_once = others * (assumed.latency + sent) + added
    in_two_stages = (others + D - 1) * (assumed.latency + sent / D) + added / D
    return in_two_stages < at_once


def _factors(
    movement: Movement, sums: Sequence[_Sum], rest: Sequence[Transfer]
) -> tuple[Movement, Movement]:
    """Two movements: the first sums the shares and keeps the sources of `rest`; the second sends
    shares and rest to their targets. Shares are cut along the longest axis."""
    stay = list(dict.fromkeys(transfer.source.region for transfer in rest))
    first: list[Block] = [(as_subset(region), as_subset(region), 1) for region in stay]
    last: list[Block] = [(t.target, t.source, t.coefficient) for t in rest]
    shares: list[Region] = []
    for number, one in enumerate(sums):
        shape = one.targets[0].shape
        axis = int(np.argmax(shape))
        cuts = [shape[axis] * k // len(one.targets) for k in range(len(one.targets) + 1)]
        for k, (low, high) in enumerate(pairwise(cuts)):
            slab = partial(_slab, axis=axis, low=low, high=high)
            (worker,), memory = one.targets[k].workers, one.targets[k].memory
            extent = (*shape[:axis], high - low, *shape[axis + 1 :])
            share = as_subset(Region(f"share {k} of sum {number}", extent, worker, memory))
            shares.append(share.region)
            first += [(share, slab(source), coefficient) for source, coefficient in one.sources]
            last += [(slab(target), share, 1) for target in one.targets]
    middle = Space([*stay, *shares], movement.domain.dtype)
    return (
        Movement.of_blocks(movement.domain, middle, first),
        Movement.of_blocks(middle, movement.codomain, last),
    )


def _slab(box: Subset, axis: int, low: int, high: int) -> Subset:
    """The subset of a box between two indices, relative to it, along an axis."""
    start, stop = list(box.start), list(box.stop)
    stop[axis] = start[axis] + high
    start[axis] += low
    return Subset(box.region, tuple(start), tuple(stop))
