"""The words in which workers that share memory tell each other, before a plan's first run, where
messages go; and how a long message is cut."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

from linop.backends.shared_memory.pool import Place
from linop.backends.shared_memory.runs import Word

_PIECE = 256 * 1024
"""Bytes of a piece of a long message: it stays in the cache of a core until it is summed."""
MOST = 1024
"""Pieces of a message at most, and a few: what a run's number is multiplied by."""

Piece = tuple[int, int, int]
"""An axis, and two indices along it: a part of a message that is one box."""
Line = tuple[int, int]
"""The place of a number in a worker's shared memory: the window, and the index there."""


@dataclass
class Offer:
    """One worker's message to another before a plan's first run. As the receiver of its messages:
    where to say that a stage is sent, and where the parts of each stage's message go. As the
    sender: where to say that memory is ready."""

    done: dict[int, Line] = field(default_factory=dict)
    places: dict[int, list[Place]] = field(default_factory=dict)
    pieces: dict[int, list[Piece]] = field(default_factory=dict)
    """How each stage's message is cut, if it is: for a receiver that sums it piece by piece."""
    turns: int = 0
    """How many buffers there are for messages, used in turn; 0 where they go into the result."""
    ready: Line | None = None


Said = tuple[Offer | None, Offer | None, Word]
"""As the receiver of a peer's messages, as the sender to it, and where to say that one is gone."""


def pieces_of(shape: tuple[int, ...], itemsize: int) -> list[Piece]:
    """How a box is cut; not at all if it is short."""
    axis = next((k for k, n in enumerate(shape) if n == max(shape) or n >= MOST // 2), 0)
    count = min(math.prod(shape) * itemsize // _PIECE, shape[axis] if shape else 1, MOST - 1)
    if count < 2:
        return []
    cuts = [shape[axis] * k // count for k in range(count + 1)]
    return [(axis, a, b) for a, b in pairwise(cuts)]
