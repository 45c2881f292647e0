"""Pass that factors movements between machines into sums inside machines, transfers between
machines, and copies inside machines.

A box that several workers of another machine need crosses the network once, to one of them, which
copies it to the others. Terms of a sum from several workers of a machine are added inside it, and
their partial sum crosses. With both, an all-reduce becomes a reduce inside each machine, an
all-reduce between machines, and a broadcast inside each; or, in shares, a reduce-scatter, an
all-reduce of each share, and an all-gather. The workers of a machine take turns at leading: each
sums and receives some of the boxes, or shares. The cost model decides.

Partial sums are added in the order of their workers: the same for all targets.
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
from linop.planning.combinations import Combination, combinations, factors, shares
from linop.planning.placement import Placement
from linop.planning.reduce_scatter_sums import split_sums
from linop.planning.routing import memory_traffic, messages, routes
from linop.spaces.exact import Exact
from linop.spaces.region import Region, Subset, as_subset

LARGEST_MOVEMENT = 2**14
"""Largest movement, in transfers, that is examined: that of an all-reduce of 128 workers, in half a
second. Those of more are products that `factored_products` takes apart."""


def two_level(movement: Movement, placement: Placement) -> tuple[Movement, ...]:
    """Factors of a movement, first applied first: itself, or two or three of two levels."""
    if isinstance(movement.transfers, IdentityTable):
        return (movement,)
    if int(movement.transfers.counts_into(len(movement.codomain)).sum()) > LARGEST_MOVEMENT:
        return (movement,)
    if not _repeats(movement, placement):
        return (movement,)
    every = combinations(movement)
    ways = [(movement,), _two_level(movement, every, placement)]
    leaders = [_most_leaders(one, placement) for one in every]
    both = list(zip(every, leaders, strict=True))
    rows = sum(many * (len(one.terms) + len(one.receivers)) for one, many in both)
    if max(leaders) > 1 and rows <= LARGEST_MOVEMENT:
        cut = [part for one, many in both for part in shares(one, many)]
        ways.append(_two_level(movement, cut, placement))
    return min(ways, key=lambda way: _seconds(way, placement))


def _repeats(movement: Movement, placement: Placement) -> bool:
    """True if a box crosses to several workers of a machine, or several terms of a box cross from
    a machine to one worker."""
    every = routes(movement, placement)
    here, there = placement.of(every.sender), placement.of(every.receiver)
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


def _two_level(
    movement: Movement, every: Sequence[Combination], placement: Placement
) -> tuple[Movement, ...]:
    """The movement, given as combinations, as sums inside machines, transfers between machines,
    and copies inside machines; without those stages that have nothing to do."""
    turns: dict[tuple[int, ...], int] = defaultdict(int)
    sums: list[Block] = []
    inside: list[Block] = []
    crossing: list[tuple[Combination, tuple[int, ...]]] = []
    for number, one in enumerate(every):
        near, far = _near_and_far(one, placement)
        inside += Combination(one.terms, near).blocks
        if far:
            wanted = Combination(one.terms, far)
            leaders = _leaders(wanted, placement, turns)
            terms = _partial_sums(wanted, leaders, number, placement, turns, sums)
            crossing.append((Combination(terms, far), tuple(leaders.values())))
    if all(len(one.receivers) == len(leaders) for one, leaders in crossing):
        last = inside + [block for one, _ in crossing for block in one.blocks]
        return factors(movement, [sums, last] if sums else [last])
    between: list[Block] = []
    for number, (one, at) in enumerate(crossing):
        box = one.targets[0]
        arriving, copied = one.through(Region(f"total {number}", box.shape, at, box.memory))
        between += arriving
        inside += copied
    return factors(movement, [sums, between, inside] if sums else [between, inside])


def _near_and_far(
    one: Combination, placement: Placement
) -> tuple[tuple[Subset, ...], tuple[Subset, ...]]:
    """The targets of a combination for which nothing crosses, and the others. Those of a sum are
    either all near or all far, so that its terms are added in the same order for each."""
    homes = [_by_machine(source.workers, placement).keys() for source, _ in one.terms]
    all_at = set.intersection(*map(set, homes))
    near: list[Subset] = []
    far: list[Subset] = []
    for target in one.targets:
        (near if _by_machine(target.workers, placement).keys() <= all_at else far).append(target)
    if not far or len({target.memory for target in one.targets}) > 1:
        return one.targets, ()
    return ((), one.targets) if len(one.terms) > 1 else (tuple(near), tuple(far))


def _leaders(
    one: Combination, placement: Placement, turns: dict[tuple[int, ...], int]
) -> dict[int, int]:
    """The worker of each receiving machine at which a combination is formed. If it is a box, the
    receivers that hold it already come first."""
    source = one.terms[0][0].workers if len(one.terms) == 1 else ()
    receivers = _by_machine((worker for worker, _ in one.receivers), placement)
    return {
        machine: _turn([w for w in workers if w in source] or workers, turns)
        for machine, workers in receivers.items()
    }


def _partial_sums(
    one: Combination,
    leaders: Mapping[int, int],
    number: int,
    placement: Placement,
    turns: dict[tuple[int, ...], int],
    sums: list[Block],
) -> tuple[tuple[Subset, Exact], ...]:
    """The terms of a combination that are left to be added between machines: single ones, and
    partial sums of those on one machine, whose blocks are appended to `sums`."""
    left: list[tuple[Subset, Exact]] = []
    for machine, terms in _terms_by_machine(one, placement).items():
        if machine is None or len(terms) == 1:
            left += terms
            continue
        box = terms[0][0]
        workers = _workers_on(machine, (source for source, _ in terms), placement)
        at = leaders[machine] if machine in leaders else _turn(workers, turns)
        name = f"partial sum {number} on machine {machine}"
        partial = as_subset(Region(name, box.shape, at, box.memory))
        sums += Combination(tuple(terms), (partial,)).blocks
        left.append((partial, 1))
    return tuple(left)


def _most_leaders(one: Combination, placement: Placement) -> int:
    """Largest number of workers of a machine that can share the work on a combination: 1 if nothing
    of it crosses."""
    _, far = _near_and_far(one, placement)
    if not far:
        return 1
    receivers = _by_machine((worker for target in far for worker in target.workers), placement)
    many = [len(workers) for workers in receivers.values()]
    for machine, terms in _terms_by_machine(one, placement).items():
        if machine is not None and len(terms) > 1:
            many.append(len(_workers_on(machine, (source for source, _ in terms), placement)))
    return max(many)


def _terms_by_machine(
    one: Combination, placement: Placement
) -> dict[int | None, list[tuple[Subset, Exact]]]:
    """The terms of a combination by machine. A replicated one is counted on that of its machines on
    which most terms are; on None, if it crosses nowhere, since all receivers' machines have it."""
    everywhere = _by_machine((worker for worker, _ in one.receivers), placement).keys()
    homes = [_by_machine(source.workers, placement).keys() for source, _ in one.terms]
    many = Counter(machine for home in homes for machine in home)
    found: dict[int | None, list[tuple[Subset, Exact]]] = defaultdict(list)
    for term, home in zip(one.terms, homes, strict=True):
        most = min(home, key=lambda machine: (-many[machine], machine))
        found[None if len(home) > 1 and everywhere <= home else most].append(term)
    return found


def _workers_on(machine: int, boxes: Iterable[Subset], placement: Placement) -> list[int]:
    """The workers of a machine that hold any of some boxes, sorted."""
    return _by_machine((worker for box in boxes for worker in box.workers), placement)[machine]


def _by_machine(workers: Iterable[int], placement: Placement) -> dict[int, list[int]]:
    """Workers, sorted, by their machine."""
    found: dict[int, list[int]] = defaultdict(list)
    for worker in sorted(set(workers)):
        found[int(placement.machines[worker])].append(worker)
    return found


def _turn(candidates: Sequence[int], turns: dict[tuple[int, ...], int]) -> int:
    """The candidate whose turn it is; next time it is the next one's."""
    key = tuple(candidates)
    turns[key] += 1
    return key[(turns[key] - 1) % len(key)]
