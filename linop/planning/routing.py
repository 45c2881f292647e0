"""Routing: assignment of the transfers of a movement to pairs of sender and receiver.

Every holder of the destination receives. A receiver that also holds the source reads its own copy;
other receivers are distributed over the holders of the source, those on the receiver's machine if
there are any. Steps and messages are made by `linop.planning.lowering`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from linop.caching import cached_property
from linop.normal_form.boxes import FEW, Ints, Table, expand, row_keys, totals
from linop.normal_form.movement import Movement
from linop.planning.placement import Placement
from linop.spaces.space import Space

TRANSFERS_AT_ONCE = 2**19
"""Approximate number of transfers that `routes_by_receiver` yields at a time."""


@dataclass(frozen=True, eq=False)
class Routes:
    """Transfers with sender and receiver, as arrays aligned by entry: `row` of `table`, `sender`,
    `receiver` (the same worker for a local copy), `volume` in elements."""

    table: Table
    row: Ints
    sender: Ints
    receiver: Ints
    volume: Ints

    def of(self, mask: np.ndarray) -> Routes:
        """The entries selected by a mask."""
        return Routes(
            self.table, self.row[mask], self.sender[mask], self.receiver[mask], self.volume[mask]
        )


def routes(movement: Movement, placement: Placement | None = None) -> Routes:
    """All routes of a movement, local copies included, ordered by receiver, sender and row. A
    message is packed in this order.

    Args:
        placement: of the workers, here and below; by default on one machine.
    """
    table = movement.table
    return _served(movement, table, *_receivers(table, movement.codomain), placement)


def routes_by_receiver(movement: Movement, placement: Placement | None = None) -> Iterator[Routes]:
    """All routes in batches of receivers, in increasing order. A batch has about
    `TRANSFERS_AT_ONCE`, which bounds the memory for an all-to-all of thousands of workers."""
    holders, _, many = movement.codomain.numbering.holders
    if not len(holders):
        return
    counts = movement.transfers.counts_into(len(movement.codomain))
    order = np.argsort(holders, kind="stable")
    workers, first = np.unique(holders[order], return_index=True)
    load = np.add.reduceat(np.repeat(counts, many)[order], first)
    cuts = np.flatnonzero(np.diff(np.cumsum(load) // TRANSFERS_AT_ONCE)) + 1
    for receivers in np.split(workers, cuts):
        yield routes_into(movement, receivers, placement)


@dataclass(frozen=True, eq=False)
class Exchange:
    """The routes of some workers in a movement, evaluated together."""

    workers: Ints
    coming: Routes
    """The routes into them, local copies included, ordered by receiver, sender and row."""
    leaving: Routes
    """The routes from them to others, ordered by sender, receiver and row."""

    def of(self, workers: Ints) -> Exchange:
        """The routes of some of the workers, sorted."""
        if np.array_equal(workers, self.workers):
            return self
        coming = self.coming.of(_among(self.coming.receiver, workers))
        return Exchange(workers, coming, self.leaving.of(_among(self.leaving.sender, workers)))

    @cached_property
    def receives(self) -> dict[int, list[Parcel]]:
        """The messages to each worker, by increasing sender."""
        return _parcels(self.coming.receiver, self.coming.sender, self.coming.volume)

    @cached_property
    def sends(self) -> dict[int, list[Parcel]]:
        """The messages from each worker, by increasing receiver."""
        return _parcels(self.leaving.sender, self.leaving.receiver, self.leaving.volume)

    @cached_property
    def offsets(self) -> Ints:
        """Offset, in elements, of each route into the workers in its sender's message."""
        ends, volume = self.coming, self.coming.volume
        first, stop = _runs(ends.receiver, ends.sender)
        before = np.cumsum(volume) - volume
        return before - np.repeat(before[first], stop - first)

    def peers(self, worker: int) -> tuple[list[int], list[int]]:
        """(other workers that send to a worker, other workers that it sends to), each sorted."""
        parcels = self.receives.get(worker, ()), self.sends.get(worker, ())
        return [one.peer for one in parcels[0]], [one.peer for one in parcels[1]]

    @property
    def closed(self) -> bool:
        """True if the workers neither receive from others nor send to others."""
        ends = self.coming.sender, self.leaving.receiver
        return all(bool(_among(end, self.workers).all()) for end in ends)


class Parcel(NamedTuple):
    """A message to or from a peer: the routes from `first` to `stop` - 1."""

    peer: int
    first: int
    stop: int
    size: int
    """Number of elements."""


def exchange(movement: Movement, workers: Ints, placement: Placement | None = None) -> Exchange:
    """The routes of some workers, sorted: their entries of `routes`, computed from the transfers of
    their regions alone. Those of small movements are computed for all workers at once, and
    cached."""
    key = Exchange, placement
    if movement.transfers.short and key not in movement.kept:
        few = int(movement.codomain.numbering.holders[2][movement.table.dst].sum()) <= FEW
        movement.kept[key] = _whole(movement, _holders(movement), placement) if few else None
    known: Exchange | None = movement.kept.get(key)
    if known is not None:
        return known.of(workers)
    if len(workers) > 1 and np.isin(_holders(movement), workers).all():
        return _whole(movement, workers, placement)
    coming = routes_into(movement, workers, placement)
    return Exchange(workers, coming, routes_out_of(movement, workers, placement))


def _holders(movement: Movement) -> Ints:
    """All workers of a movement, sorted."""
    return np.union1d(movement.domain.numbering.holders[0], movement.codomain.numbering.holders[0])


def _whole(movement: Movement, workers: Ints, placement: Placement | None) -> Exchange:
    """All routes of a movement; no others than `workers` have any."""
    every = routes(movement, placement)
    remote = every.of(every.sender != every.receiver)
    return Exchange(workers, every, remote.of(np.argsort(remote.sender, kind="stable")))


def routes_into(movement: Movement, workers: Ints, placement: Placement | None = None) -> Routes:
    """The routes into some workers, local copies included, ordered as `routes`."""
    receiver, number = held(movement.codomain, workers)
    table = movement.into(_distinct(number, workers))
    first, last = (np.searchsorted(table.dst, number, side) for side in ("left", "right"))
    which, within = expand(last - first)
    return _served(movement, table, first[which] + within, receiver[which], placement)


def routes_out_of(movement: Movement, workers: Ints, placement: Placement | None = None) -> Routes:
    """The routes from some workers to others, ordered by sender, receiver and row."""
    table = movement.out_of(_distinct(held(movement.domain, workers)[1], workers))
    every = _served(movement, table, *_receivers(table, movement.codomain), placement)
    leaving = every.of(_among(every.sender, workers) & (every.receiver != every.sender))
    return leaving.of(np.argsort(leaving.sender, kind="stable")) if len(workers) > 1 else leaving


def held(space: Space, workers: Ints) -> tuple[Ints, Ints]:
    """(holder, number) of the regions that some workers hold, sorted by holder, then number."""
    if len(workers) == 1:
        numbers = space.numbering.numbers_on(int(workers[0]))
        return np.repeat(workers, len(numbers)), numbers
    holders, _, many = space.numbering.holders
    held = np.flatnonzero(np.isin(holders, workers))
    held = held[np.argsort(holders[held], kind="stable")]
    return holders[held], np.repeat(np.arange(len(many)), many)[held]


def _distinct(numbers: Ints, workers: Ints) -> Ints:
    """Region numbers without repetitions, increasing; those of one worker are so already."""
    return numbers if len(workers) == 1 else np.unique(numbers)


def _among(workers: Ints, some: Ints) -> np.ndarray:
    """Mask of the workers that are among some."""
    return workers == some[0] if len(some) == 1 else np.isin(workers, some)


def _parcels(worker: Ints, peer: Ints, volume: Ints) -> dict[int, list[Parcel]]:
    """The messages of each worker, of entries sorted by worker, then peer."""
    found: dict[int, list[Parcel]] = {}
    first, stop = _runs(worker, peer)
    total = np.append(0, np.cumsum(volume))
    columns = worker[first], peer[first], first, stop, total[stop] - total[first]
    for one, *parcel in zip(*(column.tolist() for column in columns), strict=True):
        if parcel[0] != one:
            found.setdefault(one, []).append(Parcel(*parcel))
    return found


def _runs(a: Ints, b: Ints) -> tuple[Ints, Ints]:
    """(first, stop) of each run of equal pairs (a[k], b[k])."""
    cuts = np.flatnonzero((a[1:] != a[:-1]) | (b[1:] != b[:-1])) + 1
    ends = np.concatenate([[0], cuts, [len(a)]]) if len(a) else np.zeros(1, np.int64)
    return ends[:-1], ends[1:]


def messages(every: Routes) -> tuple[Ints, Ints, Ints]:
    """(senders, receivers, elements), (n,) each, of the messages of routes: one for each pair of
    different workers, sorted by sender, then receiver."""
    remote = every.of(every.sender != every.receiver)
    pairs = row_keys(remote.sender, remote.receiver)
    _, first, which = np.unique(pairs, return_index=True, return_inverse=True)
    sizes = totals(which, remote.volume, len(first))
    return remote.sender[first], remote.receiver[first], sizes


def memory_traffic(movement: Movement, every: Routes, workers: Ints) -> tuple[Ints, Ints, Ints]:
    """(elements copied, of these between kinds of memory, elements accumulated) by worker. A region
    that aliases another one (`linop.planning.plan.Alias`) is not copied."""
    table = every.table
    sizes_to, sizes_from = (
        space.numbering.shapes.prod(axis=1) for space in (movement.codomain, movement.domain)
    )
    dst, src = table.dst[every.row], table.src[every.row]
    copy = np.searchsorted(workers, every.receiver) * len(sizes_to) + dst
    copies, which, many = np.unique(copy, return_inverse=True, return_counts=True)
    coming = totals(which, every.volume, len(copies))
    beyond = np.maximum(coming - sizes_to[copies % max(1, len(sizes_to))], 0)
    n = len(workers)
    added = totals(copies // max(1, len(sizes_to)), beyond, n)
    whole = (every.volume == sizes_to[dst]) & (every.volume == sizes_from[src])
    local = every.sender == every.receiver
    crossing = local & (
        movement.codomain.numbering.memories[dst] != movement.domain.numbering.memories[src]
    )
    kept = whole & (many[which] == 1) & (table.coef[every.row] == 1) & ~crossing
    copied, between = (
        totals(np.searchsorted(workers, every.receiver[mask]), every.volume[mask], n)
        for mask in (local & ~kept, crossing)
    )
    return copied, between, added


def _receivers(table: Table, codomain: Space) -> tuple[Ints, Ints]:
    """(row, receiver), aligned: each row once for every holder of its destination."""
    holders, first, many = codomain.numbering.holders
    row, k = expand(many[table.dst])
    return row, holders[first[table.dst[row]] + k]


def _served(
    movement: Movement, table: Table, row: Ints, receiver: Ints, placement: Placement | None
) -> Routes:
    """Assign senders to rows with receivers; the routes sorted by receiver, sender, row."""
    holders, first, many = movement.domain.numbering.holders
    src = table.src[row]
    sender = holders[first[src] + receiver % many[src]]
    shared = many[src] > 1
    if shared.any():
        # A receiver that holds the source reads its own copy.
        held = np.repeat(np.arange(len(many)), many)
        keys = row_keys(np.append(src, held), np.append(receiver, holders))
        own = shared & np.isin(keys[: len(src)], keys[len(src) :])
        sender[own] = receiver[own]
        if placement is not None:
            away = np.flatnonzero(shared & ~own)
            near, server = _nearby(movement.domain, src[away], receiver[away], placement)
            sender[away[near]] = server
    order = np.lexsort((row, sender, receiver))
    volume = table.extent.prod(axis=1)[row]
    return Routes(table, row[order], sender[order], receiver[order], volume[order])


def _nearby(
    domain: Space, src: Ints, receiver: Ints, placement: Placement
) -> tuple[np.ndarray, Ints]:
    """Mask of the receivers that have a holder of the source on their machine; and of these the
    holder that serves each."""
    holders, first, many = domain.numbering.holders
    which, k = expand(many[src])
    holder = holders[first[src[which]] + k]
    near = placement.of(holder) == placement.of(receiver)[which]
    count = np.bincount(which[near], minlength=len(src))
    some = count > 0
    turn = receiver[some] % count[some]
    return some, holder[near][(np.cumsum(count) - count)[some] + turn]
