"""Pass that splits sums needed by several workers into a reduce-scatter and an all-gather, or into
rounds.

A sum of boxes of several workers, needed by several workers, takes one stage if all send to all and
form the same sum. In two stages, each receiver sums one share and sends it to the others
(Rabenseifner's all-reduce): fewer bytes are sent and added. In log₂ P rounds, P workers of as many
machines exchange partial sums in pairs (recursive doubling): the fewest messages. The cost model
decides.

Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np

from linop.normal_form.boxes import row_keys
from linop.normal_form.movement import Movement
from linop.normal_form.space_tables import Block
from linop.normal_form.transfer_table import IdentityTable
from linop.planning import network
from linop.planning.combinations import Combination, combinations, factors, labels, shares
from linop.planning.placement import Placement
from linop.spaces.region import Region, as_subset

LARGEST_MOVEMENT = 1 << 14
"""Largest movement, in transfers, that is examined: that of an all-reduce of 128 workers."""
AT_ONCE = 4
"""Number of workers up to which sums into replicated targets stay in one stage on one machine."""


def split_sums(movement: Movement, placement: Placement | None = None) -> tuple[Movement, ...]:
    """Factors of a movement, first applied first: itself, or a reduce-scatter and an all-gather, or
    rounds between machines.

    Args:
        placement: of the workers; by default on one machine.
    """
    same = (movement,)
    if isinstance(movement.transfers, IdentityTable):
        return same
    itemsize = movement.domain.dtype.itemsize
    assumed = network.ASSUMED
    least = assumed.latency / (assumed.per_byte + assumed.per_byte_added)
    longest = int(movement.codomain.numbering.shapes.prod(axis=1).max(initial=0)) * itemsize
    if placement is None and longest <= least:
        return same
    if int(movement.transfers.counts_into(len(movement.codomain)).sum()) > LARGEST_MOVEMENT:
        return same
    t = movement.table
    if len(np.unique(row_keys(t.dst, *t.at.T, *t.extent.T))) == len(t):
        return same  # no box is written twice
    ways = [(one, _way(one, itemsize, placement)) for one in combinations(movement)]
    return _factors(movement, ways) if any(way is not Way.AT_ONCE for _, way in ways) else same


class Way(Enum):
    """Algorithms of a sum: all send to all; in shares; in rounds of pairs."""

    AT_ONCE, SHARES, ROUNDS = range(3)


def _way(one: Combination, itemsize: int, placement: Placement | None) -> Way:
    """The way of a sum that is predicted to be fastest, for a worker that both sends and receives.

    Args:
        itemsize: bytes per element.
    """
    senders = {source.region.workers for source, _ in one.terms}
    receivers = {worker for worker, _ in one.receivers}
    S, D = len(senders), len(receivers)
    if min(S, D) < 2 or D < len(one.receivers) or any(len(w) > 1 for w in senders):
        return Way.AT_ONCE
    workers = receivers.union(*senders)
    size, assumed = one.targets[0].size * itemsize, network.ASSUMED
    link = assumed.link(placement is not None and placement.spans(sorted(workers)))
    sent, added = link.per_byte * size, assumed.per_byte_added * size
    others = max(S, D) - 1
    seconds = {Way.AT_ONCE: others * (link.latency + sent) + (S - 1) * added}
    at_once = len(one.targets) < D <= AT_ONCE and placement is None
    if not at_once and max(one.targets[0].shape, default=0) >= D:
        latency = (others + D - 1) * link.latency
        seconds[Way.SHARES] = latency + (others + D - 1) / D * sent + (S - 1) / D * added
    apart = placement is not None and len(np.unique(placement.of(np.array([*workers])))) == S
    if apart and S == len(one.terms) == len(workers) and S.bit_count() == 1:
        seconds[Way.ROUNDS] = (S.bit_length() - 1) * (link.latency + sent + added)
    return min(seconds, key=seconds.__getitem__)


def _factors(movement: Movement, ways: Sequence[tuple[Combination, Way]]) -> tuple[Movement, ...]:
    """Movements of one stage after the other; sums that take fewer stages than others take the last
    ones."""
    how = {Way.AT_ONCE: _at_once, Way.SHARES: _in_shares, Way.ROUNDS: _in_rounds}
    each = [
        how[way](one, number) for number, (one, way) in zip(labels(movement), ways, strict=False)
    ]
    last = max(map(len, each))
    stages: list[list[Block]] = [[] for _ in range(last)]
    for blocks in each:
        for stage, some in zip(stages[last - len(blocks) :], blocks, strict=True):
            stage += some
    return factors(movement, stages)


def _at_once(one: Combination, number: str) -> list[list[Block]]:
    del number
    return [one.blocks]


def _in_shares(one: Combination, number: str) -> list[list[Block]]:
    """Each receiver sums a share, and sends it to the others."""
    first: list[Block] = []
    last: list[Block] = []
    for k, part in enumerate(shares(one, len(one.receivers))):
        worker, memory = one.receivers[k]
        shape = part.targets[0].shape
        summed, copied = part.through(Region(f"share {k} of sum {number}", shape, worker, memory))
        first += summed
        last += copied
    return [first, last]


def _in_rounds(one: Combination, number: str) -> list[list[Block]]:
    """Workers form the sums of two, of four, and so on, each together with one that has the other
    half."""
    stages: list[list[Block]] = []
    terms = sorted(one.terms, key=lambda term: term[0].workers)
    memory = one.targets[0].memory
    while len(terms) > 2:
        pairs = [*zip(terms[::2], terms[1::2], strict=True)]
        stages.append([])
        terms = []
        for k, pair in enumerate(pairs):
            workers = tuple(worker for source, _ in pair for worker in source.workers)
            name = f"sum {number}, round {len(stages)}, {k}"
            box = as_subset(Region(name, pair[0][0].shape, workers, memory))
            stages[-1] += Combination(pair, (box,)).blocks
            terms.append((box, 1))
    return [*stages, Combination(tuple(terms), one.targets).blocks]
