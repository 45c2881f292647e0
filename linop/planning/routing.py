"""Routing: assignment of the transfers of a movement to pairs of sender and receiver.

Every holder of the destination receives. A receiver that also holds the source reads its own copy;
other receivers are distributed over the holders of the source. Steps and messages are made by
`linop.planning.lowering`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from linop.normal_form.boxes import Ints, Table, expand
from linop.normal_form.movement import Movement
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


def routes(movement: Movement) -> Routes:
    """All routes of a movement, local copies included, ordered by receiver, sender and row. A
    message is packed in this order."""
    return _served(movement, movement.table, *_receivers(movement.table, movement.codomain))


def routes_by_receiver(movement: Movement) -> Iterator[Routes]:
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
        yield _coming(movement, receivers)


def routes_into(movement: Movement, worker: int) -> Routes:
    """The routes into a worker, local copies included: its entries of `routes`, computed from the
    transfers into its regions alone."""
    table = movement.into(movement.codomain.numbering.numbers_on(worker))
    row = np.arange(len(table))
    return _served(movement, table, row, np.full(len(row), worker, np.int64))


def routes_out_of(movement: Movement, worker: int) -> Routes:
    """The routes from a worker to others: its entries of `routes`, computed from the transfers out
    of its regions alone."""
    table = movement.out_of(movement.domain.numbering.numbers_on(worker))
    served = _served(movement, table, *_receivers(table, movement.codomain))
    return served.of((served.sender == worker) & (served.receiver != worker))


def routes_among(movement: Movement, workers: Ints) -> tuple[Routes, bool]:
    """(Routes into some workers, True if the workers are closed under communication).

    Closed: the routes into them all come from them, and they send to no other worker. Computed from
    the transfers of their regions alone.
    """
    coming = _coming(movement, workers)
    table = movement.out_of(_held(movement.domain, workers))
    leaving = _served(movement, table, *_receivers(table, movement.codomain))
    outward = np.isin(leaving.sender, workers) & ~np.isin(leaving.receiver, workers)
    return coming, bool(np.isin(coming.sender, workers).all() and not outward.any())


def _coming(movement: Movement, workers: Ints) -> Routes:
    """Routes into some workers, local copies included; see `routes_into`."""
    table = movement.into(_held(movement.codomain, workers))
    row, receiver = _receivers(table, movement.codomain)
    wanted = np.isin(receiver, workers)
    return _served(movement, table, row[wanted], receiver[wanted])


def _held(space: Space, workers: Ints) -> Ints:
    """The numbers, increasing, of the regions that at least one of some workers holds."""
    holders, _, many = space.numbering.holders
    numbers = np.repeat(np.arange(len(many)), many)
    return np.unique(numbers[np.isin(holders, workers)])


def messages(every: Routes) -> tuple[Ints, Ints, Ints]:
    """(senders, receivers, elements), (n,) each, of the messages of routes: one for each pair of
    different workers, sorted by sender, then receiver."""
    remote = every.of(every.sender != every.receiver)
    span = int(remote.receiver.max(initial=0)) + 1
    pairs, which = np.unique(remote.sender * span + remote.receiver, return_inverse=True)
    sizes = np.bincount(which, remote.volume, len(pairs)).astype(np.int64)
    return pairs // span, pairs % span, sizes


def _receivers(table: Table, codomain: Space) -> tuple[Ints, Ints]:
    """(row, receiver), aligned: each row once for every holder of its destination."""
    holders, first, many = codomain.numbering.holders
    row, k = expand(many[table.dst])
    return row, holders[first[table.dst[row]] + k]


def _served(movement: Movement, table: Table, row: Ints, receiver: Ints) -> Routes:
    """Assign senders to rows with receivers; the routes sorted by receiver, sender, row."""
    holders, first, many = movement.domain.numbering.holders
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
