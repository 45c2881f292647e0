"""State of this process's test session: pytest's options for `spmd` tests, and the tally of
examples for the summary."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Options:
    """Options that override those of every `spmd` test; None for no override.

    Attributes:
        backend: "mpi" or "threads".
        timeout: of an example, in seconds.
    """

    workers: int | None = None
    """Largest number of workers of a test."""
    backend: str | None = None
    timeout: float | None = None


@dataclass
class Tally:
    """Counts of examples and skipped tests, for pytest's summary."""

    ran: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Number of examples, by backend and number of workers."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Number of tests that ran no example, by reason."""
    left_out: set[str] = field(default_factory=set)
    """Texts "test on n", for tests that were to run on more workers than there are."""


OPTIONS = Options()
TALLY = Tally()


def skip(reason: str) -> None:
    """Skip the running test, and count it in the tally."""
    import pytest

    TALLY.skipped[reason] += 1
    pytest.skip(reason)
