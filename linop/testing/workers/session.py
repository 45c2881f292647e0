"""What pytest's options say of tests across workers, and what ran, for this process's tests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Options:
    """What holds for all tests, whatever they say; None where nothing does."""

    workers: int | None = None
    """No test runs on more."""
    backend: str | None = None
    timeout: float | None = None


@dataclass
class Tally:
    """What ran, for pytest's summary."""

    ran: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Examples, by backend and number of workers."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Tests that ran no example, by reason."""
    left_out: set[str] = field(default_factory=set)
    """Tests, and numbers of workers on which they were to run, which are not there."""


OPTIONS = Options()
TALLY = Tally()


def skip(reason: str) -> None:
    """Skip the running test, which the summary counts."""
    import pytest

    TALLY.skipped[reason] += 1
    pytest.skip(reason)
