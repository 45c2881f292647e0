"""Parameters of the cost model of communication (α-β-γ); no predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from linop.errors import ArgumentError


@dataclass(frozen=True)
class Network:
    """Times, in seconds, of messages and memory traffic of one worker: α, β and γ as in Thakur,
    Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).

    The defaults are round numbers for a cluster of this decade, not measurements.

    Raises:
        ArgumentError: a value is not a number, negative, or not finite.
    """

    latency: float = 2e-6
    """α: per message, at each of its two ends, independent of size."""
    per_byte: float = 1e-10
    """β: per byte sent, packing included; and per byte received."""
    per_byte_added: float = 1e-10
    """γ: per byte accumulated into a region."""
    per_byte_copied: float = 1e-10
    """Per byte copied inside a worker's memory."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isinstance(value, int | float | np.number) and 0 <= value < math.inf):
                raise ArgumentError(
                    f"network: {field.name} is a number of seconds from 0; given {value!r}"
                )
