"""Pass that splits sums needed by several workers into a reduce-scatter and an all-gather.

A sum of boxes of several workers, needed by several workers, takes one stage if all send to all and
form the same sum. In two stages, each receiver sums one share and sends it to the others
(Rabenseifner's all-reduce): fewer bytes are sent and added. The cost model decides.
"""

from __future__ import annotations

import numpy as np

from linop.normal_form.boxes import row_keys
from linop.normal_form.movement import Movement
from linop.normal_form.space_tables import Block
from linop.normal_form.transfer_table import IdentityTable
from linop.planning import network
from linop.planning.combinations import Combination, combinations, factors, shares
from linop.planning.placement import Placement
from linop.spaces.region import Region

LARGEST_MOVEMENT = 1 << 14
"""Largest movement, in transfers, that is examined: that of an all-reduce of 128 workers."""
AT_ONCE = 4
"""Number of workers up to which sums into replicated targets stay in one stage on one machine."""


def split_sums(movement: Movement, placement: Placement | None = None) -> tuple[Movement, ...]:
    """Factors of a movement, first applied first: itself, or a reduce-scatter and an all-gather.

    Args:
        placement: of the workers; by default on one machine.
    """
    if isinstance(movement.transfers, IdentityTable):
        return (movement,)
    itemsize = movement.domain.dtype.itemsize
    assumed = network.ASSUMED
    links = assumed.link(False), assumed.link(placement is not None)
    least = min(link.latency / (link.per_byte + assumed.per_byte_added) for link in links)
    if not (movement.codomain.numbering.shapes.prod(axis=1) * itemsize > least).any():
        return (movement,)
    if int(movement.transfers.counts_into(len(movement.codomain)).sum()) > LARGEST_MOVEMENT:
        return (movement,)
    t = movement.table
    if len(np.unique(row_keys(t.dst, *t.at.T, *t.extent.T))) == len(t):
        return (movement,)  # no box is written twice
    sums: list[Combination] = []
    rest: list[Combination] = []
    for one in combinations(movement):
        (sums if _is_faster(one, itemsize, placement) else rest).append(one)
    return _factors(movement, sums, rest) if sums else (movement,)


def _is_faster(one: Combination, itemsize: int, placement: Placement | None) -> bool:
    """True if a sum is predicted to be faster in shares, for a worker that both sends and receives,
    with messages between all pairs of workers.

    Args:
        itemsize: bytes per element.
    """
    senders = {source.region.workers for source, _ in one.terms}
    receivers = {worker for worker, _ in one.receivers}
    S, D = len(senders), len(receivers)
    if min(S, D) < 2 or D < len(one.receivers) or any(len(w) > 1 for w in senders):
        return False
    if len(one.targets) < D <= AT_ONCE and placement is None:
        return False
    if max(one.targets[0].shape, default=0) < D:
        return False
    workers = receivers.union(*senders)
    size, assumed = one.targets[0].size * itemsize, network.ASSUMED
    link = assumed.link(placement is not None and placement.spans(sorted(workers)))
    sent, added = link.per_byte * size, assumed.per_byte_added * size * (S - 1)
    others = max(S, D) - 1
    at_once = others * (link.latency + sent) + added
    in_two_stages = (others + D - 1) * (link.latency + sent / D) + added / D
    return in_two_stages < at_once


def _factors(
    movement: Movement, sums: list[Combination], rest: list[Combination]
) -> tuple[Movement, ...]:
    """Two movements: the first sums the shares and keeps the sources of `rest`; the second sends
    shares and rest to their targets."""
    first: list[Block] = []
    last = [block for one in rest for block in one.blocks]
    for number, one in enumerate(sums):
        for k, part in enumerate(shares(one, len(one.receivers))):
            worker, memory = one.receivers[k]
            shape = part.targets[0].shape
            summed, copied = part.through(
                Region(f"share {k} of sum {number}", shape, worker, memory)
            )
            first += summed
            last += copied
    return factors(movement, [first, last])
