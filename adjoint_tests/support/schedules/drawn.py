"""Schedules drawn at random, right ones and broken ones, from a few numbers and a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from linop.schedules import Action, Kind, Schedule, with_messages

Edges = list[tuple[int, int]]


@dataclass(frozen=True)
class Drawn:
    """A schedule with messages, and the edges between its stages."""

    schedule: Schedule
    edges: Edges


@st.composite
def greedy(draw: st.DrawFn) -> Drawn:
    """Schedules that take ready actions in random order, over stages placed at random, with skip
    connections, halved backwards, and updates after groups of micro-batches."""
    stages, workers, micro_batches = (draw(st.integers(1, most)) for most in (4, 3, 3))
    skips = [(a, b) for a in range(stages) for b in range(a + 2, stages)]
    edges = [(s, s + 1) for s in range(stages - 1)]
    edges += draw(st.lists(st.sampled_from(skips), unique=True, max_size=1)) if skips else []
    size = draw(st.sampled_from([0, 1, 2, micro_batches]))  # of a group; 0 for no updates
    in_order, stashed = draw(st.booleans()), draw(st.booleans())
    rng = random.Random(draw(st.integers(0, 10**6)))
    place = [rng.randrange(workers) for _ in range(stages)]
    halved = [rng.random() < 0.3 for _ in range(stages)]
    rows: list[list[Action]] = [[] for _ in range(workers)]
    done: set[tuple[int, str, int]] = set()
    read: dict[tuple[int, int], int] = {}
    updates = [0] * stages

    def is_ready(s: int, kind: str, m: int) -> bool:
        if kind in "FB" and in_order and m and (s, kind, m - 1) not in done:
            return False
        if kind == "F":
            return all((a, "F", m) in done for a, b in edges if b == s)
        if kind == "W":
            return halved[s] and (s, "B", m) in done
        turn = not size or m // size == updates[s]
        return turn and (s, "F", m) in done and all((b, "B", m) in done for a, b in edges if a == s)

    while True:
        ready = [
            (s, kind, m)
            for s in range(stages)
            for kind in "FBW"
            for m in range(micro_batches)
            if (s, kind, m) not in done and is_ready(s, kind, m)
        ]
        if not ready:
            break
        s, kind, m = rng.choice(ready)
        done.add((s, kind, m))
        version = read.setdefault((s, m), updates[s]) if stashed else None
        text = "I" if kind == "B" and halved[s] else kind
        rows[place[s]].append(Action(s, Kind(text), m, version))
        group = range(updates[s] * size, min(micro_batches, (updates[s] + 1) * size))
        if group and all((s, "W" if halved[s] else "B", m) in done for m in group):
            rows[place[s]].append(Action(s, Kind.UPDATE))
            updates[s] += 1
    return Drawn(with_messages(Schedule(tuple(map(tuple, rows))), edges), edges)


FAULTS = ("swap", "drop", "duplicate", "shift a version", "move", "hoist", "early receive")


@st.composite
def broken(draw: st.DrawFn) -> Drawn:
    """Schedules of `greedy` with one change, which need not be a fault."""
    drawn = draw(greedy())
    rng = random.Random(draw(st.integers(0, 10**6)))
    fault = draw(st.sampled_from(FAULTS))
    rows = [list(row) for row in drawn.schedule.workers]
    row = rng.choice([row for row in rows if row])
    i, j = rng.randrange(len(row)), rng.randrange(len(row))
    if fault == "swap":
        row[i], row[j] = row[j], row[i]
    elif fault == "drop" and len(row) > 1:
        del row[i]
    elif fault == "duplicate":
        row.insert(j, row[i])
    elif fault == "shift a version" and row[i].kind.value in "FBIW":
        row[i] = replace(row[i], version=max(0, (row[i].version or 0) + rng.choice([-1, 1])))
    elif fault == "move":
        other = rng.choice(rows)
        other.insert(rng.randrange(len(other) + 1), row.pop(i))
    elif fault == "hoist":
        row.insert(j, row.pop(i))
    elif fault == "early receive":
        receives = [k for k, action in enumerate(row) if action.kind.value.startswith("RECV")]
        if receives:
            k = rng.choice(receives)
            row.insert(rng.randrange(k + 1), row.pop(k))
    return Drawn(Schedule(tuple(map(tuple, rows))), drawn.edges)
