"""Offers: the exchange of buffer locations between workers with shared memory, when a plan is
bound; and the division of long messages into pieces."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

from linop.backends.mpi.shared_memory.pool import Place
from linop.backends.mpi.shared_memory.runs import Word

_PIECE = 256 * 1024
"""Bytes of a piece of a long message, small enough to stay in a core's cache until it is summed."""
PIECES = 1024
"""Bound on the number of pieces of a message, and the factor of the run's number in their
signals."""

Piece = tuple[int, int, int]
"""A box of a message: an axis, and start and stop along it."""
Line = tuple[int, int]
"""Location of a signal in a worker's shared memory: the window, and the index in units of eight
bytes."""


@dataclass
class Offer:
    """One worker's locations for another, sent when a plan is bound. From the receiver of messages:
    `done`, the signal of each stage's message, and `places`, the buffers of its boxes. From the
    sender: `ready`, the signal that the receiver's memory is ready."""

    done: dict[int, Line] = field(default_factory=dict)
    places: dict[int, list[Place]] = field(default_factory=dict)
    pieces: dict[int, list[Piece]] = field(default_factory=dict)
    """Division of each stage's message, for a receiver that sums it piece by piece; empty for
    undivided messages."""
    turns: int = 0
    """Number of buffers used in turn for messages; 0 if messages go directly into the result."""
    ready: Line | None = None


Said = tuple[Offer | None, Offer | None, Word]
"""Offers as the receiver from a peer and as the sender to it, and the location of the peer's
release signal."""


def pieces_of(shape: tuple[int, ...], itemsize: int) -> list[Piece]:
    """Pieces of a box, all along one axis; empty if the box is short."""
    axis = next((k for k, n in enumerate(shape) if n == max(shape) or n >= PIECES // 2), 0)
    count = min(math.prod(shape) * itemsize // _PIECE, shape[axis] if shape else 1, PIECES - 1)
    if count < 2:
        return []
    cuts = [shape[axis] * k // count for k in range(count + 1)]
    return [(axis, a, b) for a, b in pairwise(cuts)]
