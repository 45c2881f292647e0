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

    The defaults are round numbers for messages sent from Python between machines of this decade.

    Raises:
        ArgumentError: a value is not a number, negative, or not finite.
    """

    latency: float = 1e-5
    """α: per message, at each of its two ends, independent of size. By default that of the measured
    choice between one stage and two: in shared memory, on two workers, a sum in shares was faster
    from 64 to 256 KiB on."""
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


ASSUMED = Network()
"""The network for which sums are split and collectives are chosen, and that is simulated by
default."""
