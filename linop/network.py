"""What communication costs: the few numbers that predictions of time need."""

from __future__ import annotations

from dataclasses import dataclass, fields

from linop.errors import ArgumentError


@dataclass(frozen=True)
class Network:
    """Seconds that a worker spends on messages and memory (the α-β-γ model; design notes, 5).

    The defaults are round numbers for a cluster of this decade, not measurements.

    Raises:
        ArgumentError: a number is negative.
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
            if not getattr(self, field.name) >= 0:
                raise ArgumentError(
                    f"network: {field.name} is a number of seconds from 0; "
                    f"given {getattr(self, field.name)!r}"
                )
