"""Who sends what to whom: the transfers of a movement, assigned to workers.

Every worker that holds the destination needs the data. One that holds the source too reads its own
copy; the others are served by a holder of the source, spread over its holders.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from linop.boxes import Ints, expand
from linop.movement import Movement
from linop.space import Space


@dataclass(frozen=True, eq=False)
class Routes:
    """Transfers between workers, aligned by entry: `row` of the movement's table, from `sender` to
    `receiver` (the same worker for a local copy), `volume` elements."""

    row: Ints
    sender: Ints
    receiver: Ints
    volume: Ints

    def of(self, mask: np.ndarray) -> Routes:
        """The entries of a mask."""
        return Routes(self.row[mask], self.sender[mask], self.receiver[mask], self.volume[mask])


def routes(movement: Movement) -> Routes:
    """All transfers of a movement between workers, ordered by receiver, sender, and row: the order
    in which a receiver sums, and in which a message is packed."""
    table = movement.table
    targets, first_target, many_targets = _holders(movement.codomain)
    sources, first_source, many_sources = _holders(movement.domain)
    row, k = expand(many_targets[table.dst])
    receiver = targets[first_target[table.dst[row]] + k]
    src = table.src[row]
    sender = sources[first_source[src] + receiver % many_sources[src]]
    shared = many_sources[src] > 1
    if shared.any():
        # A receiver that holds the source reads its own copy.
        span = int(max(sources.max(), targets.max())) + 1
        held = np.repeat(np.arange(len(many_sources)), many_sources) * span + sources
        own = shared & np.isin(src * span + receiver, held)
        sender[own] = receiver[own]
    order = np.lexsort((row, sender, receiver))
    volume = table.extent.prod(axis=1)[row]
    return Routes(row[order], sender[order], receiver[order], volume[order])


def _holders(space: Space) -> tuple[Ints, Ints, Ints]:
    """The workers of all regions in one array, where each region's start, and how many it has."""
    many = np.array([len(r.workers) for r in space.regions], np.int64)
    flat = np.array([w for r in space.regions for w in r.workers], np.int64)
    return flat, np.cumsum(many) - many, many
