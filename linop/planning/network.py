"""What communication costs: the few numbers that predictions of time need."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from linop.errors import ArgumentError


@dataclass(frozen=True)
class Network:
    """Seconds that a worker spends on messages and memory (the α-β-γ model; design notes, 5).

    The defaults are round numbers for a cluster of this decade, not measurements.

    Raises:
        ArgumentError: one is no number, negative, or not finite.
    """

    latency: float = 2e-6
    """α: of one message, whatever its size, for each of its two ends."""
    per_byte: float = 1e-10
    """β: of one byte sent, packing included; and of one received."""
    per_byte_added: float = 1e-10
    """γ: of one byte added to what is there."""
    per_byte_copied: float = 1e-10
    """Of one byte copied inside a worker's memory."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isinstance(value, int | float | np.number) and 0 <= value < math.inf):
                raise ArgumentError(
                    f"network: {field.name} is a number of seconds from 0; given {value!r}"
                )
