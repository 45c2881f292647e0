"""Pass that factors movements between machines into sums inside machines, transfers between
machines, and copies inside machines; and those again, for ever smaller groups of machines.

A box that several workers of another machine need crosses the network once, to one of them, which
copies it to the others. Terms of a sum from several workers of a machine are added inside it, and
their partial sum crosses. With both, an all-reduce becomes a reduce inside each machine, an
all-reduce between machines, and a broadcast inside each; or, in shares, a reduce-scatter, an
all-reduce of each share, and an all-gather. The workers of a machine take turns at leading: each
sums and receives some of the boxes, or shares.

Groups of machines are treated alike, from halves of all down to single ones. So a broadcast
becomes a tree of log₂ M messages of its root for M machines, an all-gather recursive doubling, and
a reduce-scatter recursive halving. The cost model decides, at every level.

Partial sums are added in the order of their workers: the same for all targets.

Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from linop.normal_form.boxes import row_keys
from linop.normal_form.movement import Movement
from linop.normal_form.space_tables import Block
from linop.normal_form.transfer_table import IdentityTable
from linop.planning import network
from linop.planning.combinations import Combination, combinations, factors, labels, shares
from linop.planning.placement import Placement
from linop.planning.reduce_scatter_sums import split_sums
from linop.planning.routing import memory_traffic, messages, routes
from linop.spaces.exact import Exact
from linop.spaces.region import Region, Subset, as_subset

LARGEST_MOVEMENT = 2**14
"""Largest movement, in transfers, that is examined: that of an all-reduce of 128 workers, in half a
second. Those of more are products that `factored_products` takes apart."""
LARGEST_IN_LEVELS = 2**12
"""Largest movement that is examined in all levels: that of an all-reduce of 64 workers."""


def hierarchical(movement: Movement, placement: Placement) -> tuple[Movement, ...]:
    """Factors of a movement, first applied first: itself, or two or three for machines, or up to
    three for each level of groups of machines, from halves down."""
    size = _size(movement)
    if size > LARGEST_MOVEMENT or isinstance(movement.transfers, IdentityTable):
        return (movement,)
    ways = [_in_groups(movement, placement, placement)]
    if size <= LARGEST_IN_LEVELS and len(placement.names) > 2:
        found: tuple[Movement, ...] = (movement,)
        for k in reversed(range((len(placement.names) - 1).bit_length())):
            groups = Placement(placement.machines >> k)
            found = tuple(part for one in found for part in _in_groups(one, groups, placement))
        ways.append(found)
    return min(ways, key=lambda way: _seconds(way, placement)) if len(ways) > 1 else ways[0]


def _size(movement: Movement) -> int:
    """Number of transfers."""
    return int(movement.transfers.counts_into(len(movement.codomain)).sum())


def _in_groups(movement: Movement, groups: Placement, placement: Placement) -> tuple[Movement, ...]:
    """Factors of a movement: itself, or two or three, where only what has to crosses between groups
    of machines."""
    if isinstance(movement.transfers, IdentityTable) or not _repeats(movement, groups):
        return (movement,)
    every = combinations(movement)
    ways = [(movement,), _across(movement, every, groups)]
    leaders = [_most_leaders(one, groups) for one in every]
    both = list(zip(every, leaders, strict=True))
    rows = sum(many * (len(one.terms) + len(one.receivers)) for one, many in both)
    if max(leaders) > 1 and rows <= LARGEST_MOVEMENT:
        cut = [part for one, many in both for part in shares(one, many)]
        ways.append(_across(movement, cut, groups))
    return min(ways, key=lambda way: _seconds(way, placement))


def _repeats(movement: Movement, groups: Placement) -> bool:
    """True if a box crosses to several workers of a group, or several terms of a box cross from
    a group to one worker."""
    every = routes(movement, groups)
    here, there = groups.of(every.sender), groups.of(every.receiver)
    crosses = np.flatnonzero(here != there)
    t, receiver = movement.table.take(every.row[crosses]), every.receiver[crosses]
    copies = row_keys(t.src, there[crosses], *t.of.T, *t.extent.T)
    terms = row_keys(t.dst, here[crosses], receiver, *t.at.T, *t.extent.T)
    return min(len(np.unique(copies)), len(np.unique(terms))) < len(crosses)


def _seconds(way: Iterable[Movement], placement: Placement) -> float:
    """Predicted time of movements one after another, sums in shares included: stage by stage, of
    the busiest worker. A worker sends and receives its messages one by one: of ways with equally
    many rounds, that with fewer messages wins (`linop.simulate` lets both go on at once). No stage
    is faster than the links of machines."""
    assumed, total = network.ASSUMED, 0.0
    for movement in (part for factor in way for part in split_sums(factor, placement)):
        every, itemsize = routes(movement, placement), movement.domain.dtype.itemsize
        workers = np.union1d(every.sender, every.receiver)
        sender, receiver, elements = messages(every)
        here, there = placement.of(sender), placement.of(receiver)
        crosses, size = here != there, elements * itemsize
        each = np.tile(assumed.seconds(size, crosses), 2)
        ends = np.searchsorted(workers, np.concatenate([sender, receiver]))
        copied, _, added = memory_traffic(movement, every, workers)
        busy = np.bincount(ends, each, len(workers)) + itemsize * (
            copied * assumed.per_byte_copied + added * assumed.per_byte_added
        )
        through = np.concatenate([np.bincount(m[crosses], size[crosses]) for m in (here, there)])
        link = assumed.per_byte_of_machine * through.max(initial=0)
        total += max(float(busy.max(initial=0.0)), float(link))
    return total


def _across(
    movement: Movement, every: Sequence[Combination], groups: Placement
) -> tuple[Movement, ...]:
    """The movement, given as combinations, as sums inside groups, transfers between groups,
    and copies inside groups; without those stages that have nothing to do."""
    turns: dict[tuple[int, ...], int] = defaultdict(int)
    sums: list[Block] = []
    inside: list[Block] = []
    crossing: list[tuple[Combination, tuple[int, ...]]] = []
    for number, one in zip(labels(movement), every, strict=False):
        near, far = _near_and_far(one, groups)
        inside += Combination(one.terms, near).blocks
        if far:
            wanted = Combination(one.terms, far)
            leaders = _leaders(wanted, groups, turns)
            terms = _partial_sums(wanted, leaders, number, groups, turns, sums)
            crossing.append((Combination(terms, far), tuple(leaders.values())))
    if all(len(one.receivers) == len(leaders) for one, leaders in crossing):
        last = inside + [block for one, _ in crossing for block in one.blocks]
        return factors(movement, [sums, last] if sums else [last])
    between: list[Block] = []
    for number, (one, at) in zip(labels(movement), crossing, strict=False):
        box = one.targets[0]
        name = f"total {number} between {len(groups.names)} groups"
        arriving, copied = one.through(Region(name, box.shape, at, box.memory))
        between += arriving
        inside += copied
    return factors(movement, [sums, between, inside] if sums else [between, inside])


def _near_and_far(
    one: Combination, groups: Placement
) -> tuple[tuple[Subset, ...], tuple[Subset, ...]]:
    """The targets of a combination for which nothing crosses, and the others. Those of a sum are
    either all near or all far, so that its terms are added in the same order for each."""
    homes = [_by_group(source.workers, groups).keys() for source, _ in one.terms]
    all_at = set.intersection(*map(set, homes))
    near: list[Subset] = []
    far: list[Subset] = []
    for target in one.targets:
        (near if _by_group(target.workers, groups).keys() <= all_at else far).append(target)
    if not far or len({target.memory for target in one.targets}) > 1:
        return one.targets, ()
    return ((), one.targets) if len(one.terms) > 1 else (tuple(near), tuple(far))


def _leaders(
    one: Combination, groups: Placement, turns: dict[tuple[int, ...], int]
) -> dict[int, int]:
    """The worker of each receiving group at which a combination is formed. If it is a box, the
    receivers that hold it already come first."""
    source = one.terms[0][0].workers if len(one.terms) == 1 else ()
    receivers = _by_group((worker for worker, _ in one.receivers), groups)
    return {
        group: _turn([w for w in workers if w in source] or workers, turns)
        for group, workers in receivers.items()
    }


def _partial_sums(
    one: Combination,
    leaders: Mapping[int, int],
    number: str,
    groups: Placement,
    turns: dict[tuple[int, ...], int],
    sums: list[Block],
) -> tuple[tuple[Subset, Exact], ...]:
    """The terms of a combination that are left to be added between groups: single ones, and
    partial sums of those in one group, whose blocks are appended to `sums`."""
    left: list[tuple[Subset, Exact]] = []
    for group, terms in _terms_by_group(one, groups).items():
        if group is None or len(terms) == 1:
            left += terms
            continue
        box = terms[0][0]
        workers = _workers_in(group, (source for source, _ in terms), groups)
        at = leaders[group] if group in leaders else _turn(workers, turns)
        name = f"partial sum {number} of group {group} of {len(groups.names)}"
        partial = as_subset(Region(name, box.shape, at, box.memory))
        sums += Combination(tuple(terms), (partial,)).blocks
        left.append((partial, 1))
    return tuple(left)


def _most_leaders(one: Combination, groups: Placement) -> int:
    """Largest number of workers of a group that can share the work on a combination: 1 if nothing
    of it crosses."""
    _, far = _near_and_far(one, groups)
    if not far:
        return 1
    receivers = _by_group((worker for target in far for worker in target.workers), groups)
    many = [len(workers) for workers in receivers.values()]
    for group, terms in _terms_by_group(one, groups).items():
        if group is not None and len(terms) > 1:
            many.append(len(_workers_in(group, (source for source, _ in terms), groups)))
    return max(many)


def _terms_by_group(
    one: Combination, groups: Placement
) -> dict[int | None, list[tuple[Subset, Exact]]]:
    """The terms of a combination by group. A replicated one is counted in that of its groups in
    which most terms are; in None, if it crosses nowhere, since all receivers' groups have it."""
    everywhere = _by_group((worker for worker, _ in one.receivers), groups).keys()
    homes = [_by_group(source.workers, groups).keys() for source, _ in one.terms]
    many = Counter(group for home in homes for group in home)
    found: dict[int | None, list[tuple[Subset, Exact]]] = defaultdict(list)
    for term, home in zip(one.terms, homes, strict=True):
        most = min(home, key=lambda group: (-many[group], group))
        found[None if len(home) > 1 and everywhere <= home else most].append(term)
    return found


def _workers_in(group: int, boxes: Iterable[Subset], groups: Placement) -> list[int]:
    """The workers of a group that hold any of some boxes, sorted."""
    return _by_group((worker for box in boxes for worker in box.workers), groups)[group]


def _by_group(workers: Iterable[int], groups: Placement) -> dict[int, list[int]]:
    """Workers, sorted, by their group."""
    found: dict[int, list[int]] = defaultdict(list)
    for worker in sorted(set(workers)):
        found[int(groups.machines[worker])].append(worker)
    return found


def _turn(candidates: Sequence[int], turns: dict[tuple[int, ...], int]) -> int:
    """The candidate whose turn it is; next time it is the next one's."""
    key = tuple(candidates)
    turns[key] += 1
    return key[(turns[key] - 1) % len(key)]
