"""A second opinion on schedules, for small ones: every interleaving of the workers is walked, and
data are names that actions pass on. It shares no code with the checker, but the actions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from linop.schedules import Action, Schedule


@dataclass
class Opinion:
    """Names of the error classes that a schedule may be refused with; none if it is right."""

    faults: set[str] = field(default_factory=set)
    in_flight: dict[tuple[int, int], int] = field(default_factory=dict)
    """Largest number of messages sent and not received in any interleaving, by edge."""
    activations: dict[int, int] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)


def name(action: Action) -> str:
    """An action in short, without version."""
    other = "" if action.other is None else f">{action.other}"
    return f"{action.stage}{action.kind.value}{action.micro_batch}{other}"


def opinion(
    schedule: Schedule, edges: list[tuple[int, int]], slots: int | None, kept: int | None
) -> Opinion:
    """The first kind of faults that a schedule with messages has any of."""
    for look in (_counts, _ends, _order, _values):
        faults = look(schedule, edges, kept)
        if faults:
            return Opinion(faults)
    found = _walk(schedule, slots)
    if found is None:
        return Opinion({"ScheduleDeadlockError"})
    eager = found if slots is None else _walk(schedule, None)
    assert eager is not None
    return Opinion(set(), eager, *_held(schedule))


def _all(schedule: Schedule) -> list[Action]:
    return [action for row in schedule.workers for action in row]


def _backwards(schedule: Schedule) -> bool:
    return any(action.kind.value in "BIW" for action in _all(schedule))


def _counts(schedule: Schedule, edges: object, kept: object) -> set[str]:
    faults = set()
    homes: dict[int, set[int]] = {}
    for worker, row in enumerate(schedule.workers):
        for action in row:
            homes.setdefault(action.stage, set()).add(worker)
    if any(len(workers) > 1 for workers in homes.values()):
        faults.add("PlacementError")
    count = Counter(name(a) for a in _all(schedule) if a.micro_batch is not None)
    if any(number > 1 for number in count.values()):
        faults.add("DuplicateActionError")
    for s in range(max(homes) + 1):
        for m in range(schedule.micro_batches):
            f, b, i, w = (f"{s}{kind}{m}" in count for kind in "FBIW")
            if not f:
                faults.add("MissingActionError")
            if _backwards(schedule):
                if b and (i or w):
                    faults.add("DuplicateActionError")
                if not b and not (i and w):
                    faults.add("MissingActionError")
    return faults


def _ends(schedule: Schedule, edges: list[tuple[int, int]], kept: object) -> set[str]:
    home = {a.stage: worker for worker, row in enumerate(schedule.workers) for a in row}
    wanted = set()
    for a, b in edges:
        for m in range(schedule.micro_batches):
            if home[a] != home[b]:
                wanted |= {f"{a}SEND_F{m}>{b}", f"{b}RECV_F{m}>{a}"}
                if _backwards(schedule):
                    wanted |= {f"{b}SEND_B{m}>{a}", f"{a}RECV_B{m}>{b}"}
    have = {name(a) for a in _all(schedule) if a.other is not None}
    return {"UnmatchedMessageError"} if have != wanted else set()


def _order(schedule: Schedule, edges: list[tuple[int, int]], kept: object) -> set[str]:
    """Each worker alone, with the names of the data that it holds."""
    home = {a.stage: worker for worker, row in enumerate(schedule.workers) for a in row}
    for row in schedule.workers:
        held: set[str] = set()
        for action in row:
            s, m, kind = action.stage, action.micro_batch, action.kind.value
            inputs = [a for a, b in edges if b == s]
            outputs = [b for a, b in edges if a == s]
            needs: list[str] = []
            makes: list[str] = []
            if kind == "F":
                needs = [f"y{a},{m}" + (f"@{s}" if home[a] != home[s] else "") for a in inputs]
                makes = [f"y{s},{m}"]
            elif kind in "BI":
                needs = [f"y{s},{m}"]
                needs += [f"g{b},{m}" + (f"@{s}" if home[b] != home[s] else "") for b in outputs]
                makes = [f"g{s},{m}", f"half{s},{m}"]
            elif kind == "W":
                needs = [f"half{s},{m}"]
            elif kind.startswith("SEND"):
                needs = [f"{'y' if kind == 'SEND_F' else 'g'}{s},{m}"]
            elif kind.startswith("RECV"):
                makes = [f"{'y' if kind == 'RECV_F' else 'g'}{action.other},{m}@{s}"]
            if not held.issuperset(needs):
                return {"DependencyError"}
            held.update(makes)
    return set()


def _values(schedule: Schedule, edges: object, kept: int | None) -> set[str]:
    faults = set()
    order: dict[tuple[str, int, int | None], list[int | None]] = {}
    groups = {}
    for row in schedule.workers:
        for s in {action.stage for action in row}:
            own = [action for action in row if action.stage == s]
            text = [[]]  # micro-batches with gradients, between updates
            versions: dict[int | None, set[int]] = {}
            for action in own:
                kind, m = action.kind.value, action.micro_batch
                if kind == "U":
                    text.append([])
                if kind in "FBIW":
                    newest = len(text) - 1
                    version = newest if action.version is None else action.version
                    versions.setdefault(m, set()).add(version)
                    gone = kept is not None and newest - version >= kept
                    if version > newest or gone:
                        faults.add("MissingVersionError")
                if kind in "BW":
                    text[-1].append(m)
                if action.other is not None:
                    way = "SEND" if kind.startswith("SEND") else "RECV"
                    ends = (s, action.other) if way == "SEND" else (action.other, s)
                    order.setdefault((way, *ends), []).append(m)
            if any(len(read) > 1 for read in versions.values()):
                faults.add("VersionError")
            groups[s] = [sorted(part) for part in text]
    if any(action.kind.value == "U" for action in _all(schedule)) and (
        any(parts[-1] or [] in parts[:-1] for parts in groups.values())
        or any(parts != groups[0] for parts in groups.values())
    ):
        faults.add("UpdateError")
    if any(seen != order["RECV", a, b] for (way, a, b), seen in order.items() if way == "SEND"):
        faults.add("MessageOrderError")
    return faults


def _walk(schedule: Schedule, slots: int | None) -> dict[tuple[int, int], int] | None:
    """Largest numbers in flight over all states that workers can reach; None if they get stuck."""
    rows = [[a for a in row if a.other is not None] for row in schedule.workers]
    most: dict[tuple[int, int], int] = {}
    start = (0,) * len(rows)
    seen, left = {start}, [start]
    while left:
        state = left.pop()
        sent: Counter[tuple[int, int | None]] = Counter()
        received: Counter[tuple[int, int | None]] = Counter()
        for at, row in zip(state, rows, strict=True):
            for action in row[:at]:
                if action.kind.value.startswith("SEND"):
                    sent[action.stage, action.other] += 1
                else:
                    received[action.other, action.stage] += 1
        for edge, number in sent.items():
            most[edge] = max(most.get(edge, 0), number - received[edge])
        after = []
        for worker, (at, row) in enumerate(zip(state, rows, strict=True)):
            if at == len(row):
                continue
            action = row[at]
            step = [*state]
            step[worker] += 1
            if action.kind.value.startswith("SEND"):
                edge = action.stage, action.other
                if slots == 0:
                    for other, (place, theirs) in enumerate(zip(state, rows, strict=True)):
                        head = theirs[place] if place < len(theirs) else None
                        if (
                            head is not None
                            and head.kind.value == action.kind.value.replace("SEND", "RECV")
                            and (head.other, head.stage) == edge
                        ):
                            step[other] += 1
                            after.append(tuple(step))
                elif slots is None or sent[edge] - received[edge] < slots:
                    after.append(tuple(step))
            elif (
                slots != 0
                and sent[action.other, action.stage] > received[action.other, action.stage]
            ):
                after.append(tuple(step))
        if not after and any(at < len(row) for at, row in zip(state, rows, strict=True)):
            return None
        left += [new for new in after if new not in seen]
        seen.update(after)
    return most


def _held(schedule: Schedule) -> tuple[dict[int, int], dict[int, int]]:
    """Peaks of activations and versions, by looking at all positions before and after each."""
    activations, versions = {}, {}
    for row in schedule.workers:
        for s in {action.stage for action in row}:
            own = [action for action in row if action.stage == s]
            updates = [i for i, action in enumerate(own) if action.kind.value == "U"]
            read = [
                (i, sum(u < i for u in updates) if a.version is None else a.version)
                for i, a in enumerate(own)
                if a.kind.value in "FBIW"
            ]
            counts, kept = [0], [1]
            for i in range(len(own)):
                begun = {a.micro_batch for a in own[: i + 1] if a.kind.value == "F"}
                done = {a.micro_batch for a in own[:i] if a.kind.value in "BW"}
                newest = sum(u <= i for u in updates)
                here = {v for j, v in read if j >= i and v <= newest}
                counts.append(len(begun - done))
                kept.append(len(here | {newest}))
            activations[s], versions[s] = max(counts), max(kept)
    return dict(sorted(activations.items())), dict(sorted(versions.items()))
