"""Calls of one function on several ranks, found by what they send each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from linop.testing.parallel.recording.records import Call, Record


def joined_by_messages(
    ranks: Iterable[Record], groups: Iterable[dict[int, Call]]
) -> list[dict[int, Call]]:
    """Calls, by rank, those of different lines put together of which one sends what the other one
    receives."""
    records = {one.rank: one for one in ranks}
    found: list[tuple[dict[int, Call], Counter[Any], Counter[Any]]] = []
    for calls in groups:
        sent, got = _messages(records, calls)
        open_ends, needs = sent - got, got - sent
        for at, (other, their_ends, their_needs) in enumerate(found):
            if (open_ends or needs) and (open_ends, needs) == (their_needs, their_ends):
                if not set(calls) & set(other):
                    found[at] = dict(sorted({**other, **calls}.items())), Counter(), Counter()
                    break
        else:
            found.append((calls, open_ends, needs))
    return [calls for calls, _, _ in found]


def _messages(
    records: dict[int, Record], calls: dict[int, Call]
) -> tuple[Counter[Any], Counter[Any]]:
    """The messages of the forward of calls, by source, target and tag: sent, and received."""
    sent: Counter[Any] = Counter()
    got: Counter[Any] = Counter()
    for rank, call in calls.items():
        for one in records[rank].lifted:
            if one.call != call.number or one.backward:
                continue
            for moved in one.moved:
                about = records[rank].collectives[moved.number]
                if about.name == "send":
                    sent[rank, about.peer, about.tag] += 1
                elif about.name == "receive":
                    got[about.peer, rank, about.tag] += 1
    return sent, got
