"""Programs, as texts, that the ranks of one job run one after the other: to start ranks for each
takes longer than what most of them do. Ranks import this module, and no test."""

from __future__ import annotations

from typing import Any


def run_text(comm: Any, head: str, text: str) -> None:
    """Run a program that finds its communicator, which is its own, as `comm`."""
    exec(compile(head + text, "<program>", "exec"), {"comm": comm, "__name__": "program"})
