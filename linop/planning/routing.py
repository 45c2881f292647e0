"""Who sends what to whom: the transfers of a movement, assigned to workers.

Every worker that holds the destination needs the data. One that holds the source too reads its own
copy; the others are served by a holder of the source, spread over its holders.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from linop.normal_form.boxes import Ints, Table, expand
from linop.normal_form.movement import Movement
from linop.spaces.space import Space

AT_ONCE = 2**19
"""Transfers of all receivers that are looked at together."""


@dataclass(frozen=True, eq=False)
class Routes:
    """Transfers between workers, aligned by entry: `row` of a table of transfers, from `sender` to
    `receiver` (the same worker for a local copy), `volume` elements."""

    table: Table
    row: Ints
    sender: Ints
    receiver: Ints
    volume: Ints

    def of(self, mask: np.ndarray) -> Routes:
        """The entries of a mask."""
        return Routes(
            self.table, self.row[mask], self.sender[mask], self.receiver[mask], self.volume[mask]
        )


def routes(movement: Movement) -> Routes:
    """All transfers of a movement between workers, ordered by receiver, sender, and row: the order
    in which a receiver sums, and in which a message is packed."""
    return _served(movement, movement.table, *_receivers(movement.table, movement.codomain))


def routes_by_receiver(movement: Movement) -> Iterator[Routes]:
    """All routes, those of some receivers at a time, in increasing order: as many as have about
    `AT_ONCE` transfers, so that an all-to-all of thousands needs little memory."""
    holders, _, many = movement.codomain.holders
    if not len(holders):
        return
    counts = movement.rows.counts_into(len(movement.codomain))
    order = np.argsort(holders, kind="stable")
    workers, first = np.unique(holders[order], return_index=True)
    load = np.add.reduceat(np.repeat(counts, many)[order], first)
    cuts = np.flatnonzero(np.diff(np.cumsum(load) // AT_ONCE)) + 1
    for receivers in np.split(workers, cuts):
        yield _coming(movement, receivers)


def routes_into(movement: Movement, worker: int) -> Routes:
    """What a worker receives or copies: its entries of `routes`, found from its regions alone."""
    table = movement.into(movement.codomain.numbers_on(worker))
    row = np.arange(len(table))
    return _served(movement, table, row, np.full(len(row), worker, np.int64))


def routes_out_of(movement: Movement, worker: int) -> Routes:
    """What a worker sends to others: its entries of `routes`, found from its regions alone."""
    table = movement.out_of(movement.domain.numbers_on(worker))
    served = _served(movement, table, *_receivers(table, movement.codomain))
    return served.of((served.sender == worker) & (served.receiver != worker))


def routes_among(movement: Movement, workers: Ints) -> tuple[Routes, bool]:
    """What some workers receive or copy: their entries of `routes`, found from their regions alone;
    and whether all of it is from them, and all that they send goes to them."""
    coming = _coming(movement, workers)
    table = movement.out_of(_held(movement.domain, workers))
    leaving = _served(movement, table, *_receivers(table, movement.codomain))
    outward = np.isin(leaving.sender, workers) & ~np.isin(leaving.receiver, workers)
    return coming, bool(np.isin(coming.sender, workers).all() and not outward.any())


def _coming(movement: Movement, workers: Ints) -> Routes:
    """Routes into some workers, local copies included."""
    table = movement.into(_held(movement.codomain, workers))
    row, receiver = _receivers(table, movement.codomain)
    wanted = np.isin(receiver, workers)
    return _served(movement, table, row[wanted], receiver[wanted])


def _held(space: Space, workers: Ints) -> Ints:
    """The regions of a space that any of some workers holds, by increasing number."""
    holders, _, many = space.holders
    numbers = np.repeat(np.arange(len(many)), many)
    return np.unique(numbers[np.isin(holders, workers)])


def messages(every: Routes) -> tuple[Ints, Ints, Ints]:
    """(senders, receivers, elements) of the messages of routes: one for each pair of workers, by
    sender, then receiver."""
    remote = every.of(every.sender != every.receiver)
    span = int(remote.receiver.max(initial=0)) + 1
    pairs, which = np.unique(remote.sender * span + remote.receiver, return_inverse=True)
    sizes = np.bincount(which, remote.volume, len(pairs)).astype(np.int64)
    return pairs // span, pairs % span, sizes


def _receivers(table: Table, codomain: Space) -> tuple[Ints, Ints]:
    """Rows and who needs them: every holder of the destination."""
    holders, first, many = codomain.holders
    row, k = expand(many[table.dst])
    return row, holders[first[table.dst[row]] + k]


def _served(movement: Movement, table: Table, row: Ints, receiver: Ints) -> Routes:
    """The routes of rows to receivers, in their order."""
    holders, first, many = movement.domain.holders
    src = table.src[row]
    sender = holders[first[src] + receiver % many[src]]
    shared = many[src] > 1
    if shared.any():
        # A receiver that holds the source reads its own copy.
        span = int(max(holders.max(), receiver.max())) + 1
        held = np.repeat(np.arange(len(many)), many) * span + holders
        own = shared & np.isin(src * span + receiver, held)
        sender[own] = receiver[own]
    order = np.lexsort((row, sender, receiver))
    volume = table.extent.prod(axis=1)[row]
    return Routes(table, row[order], sender[order], receiver[order], volume[order])
