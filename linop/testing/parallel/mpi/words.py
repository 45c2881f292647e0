"""Collectives of a forward function and of its adjoint, compared: the operators that are missing,
or too many. Plain data of all ranks; nothing runs here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from linop.testing.parallel.findings import ranks_text
from linop.testing.parallel.mpi.report import Movement, Trial

_ADJOINTS = {
    "all_reduce": "all_reduce",
    "broadcast": "reduce",
    "reduce": "broadcast",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "gather": "scatter",
    "scatter": "gather",
    "all_to_all": "all_to_all",
    "message": "message",
}
_WORDS = {
    "all_reduce": "all-reduce over {over}",
    "broadcast": "broadcast from rank {peer} over {over}",
    "reduce": "sum-reduce to rank {peer} over {over}",
    "all_gather": "all-gather over {over}",
    "reduce_scatter": "reduce-scatter over {over}",
    "gather": "gather to rank {peer} over {over}",
    "scatter": "scatter from rank {peer} over {over}",
    "all_to_all": "all-to-all over {over}",
    "scan": "scan over {over}",
    "exclusive_scan": "exclusive scan over {over}",
}

_SUMS = {"all_reduce", "reduce_scatter", "reduce"}

Key = tuple[str, tuple[int, ...], int]
"""Name, ranks and root of a collective; of a message, its two ends are the ranks."""


@dataclass(frozen=True)
class Seen:
    """A call of mpi4py on one rank.

    Attributes:
        peer: the root, the source or the target; -1 if there is none.
        given, made: numbers of elements, to and from each rank.
    """

    name: str
    ranks: tuple[int, ...]
    peer: int
    reduction: str
    given: tuple[int, ...]
    made: tuple[int, ...]
    line: str


def key(one: Seen, rank: int) -> Key | None:
    """The communication that a call is part of; None for the receiving end, whose sender tells."""
    if one.name == "receive":
        return None
    if one.name == "send":
        return "message", (rank, one.peer), -1
    return one.name, one.ranks, one.peer


def count(ranks: Sequence[Sequence[Seen]]) -> tuple[Counter[Key], dict[Key, str]]:
    """How often each collective ran, and the line of its first call.

    Args:
        ranks: the calls of each rank.
    """
    found: Counter[Key] = Counter()
    lines: dict[Key, str] = {}
    for rank, calls in enumerate(ranks):
        mine = Counter(known for one in calls if (known := key(one, rank)) is not None)
        found |= mine
        for one in calls:
            if (known := key(one, rank)) is not None:
                lines.setdefault(known, one.line)
    return found, lines


def words(one: Key) -> str:
    """A collective in words."""
    name, ranks, peer = one
    if name == "message":
        return f"message from rank {ranks[0]} to rank {ranks[1]}"
    return _WORDS.get(name, f"{name} over {{over}}").format(over=ranks_text(ranks), peer=peer)


def a(text: str) -> str:
    """With its article."""
    return f"an {text}" if text.startswith("all") else f"a {text}"


def adjoint_of(one: Key) -> Key | None:
    """The collective that is the adjoint; None if it has no name."""
    name, ranks, peer = one
    if name == "message":
        return name, ranks[::-1], peer
    return (_ADJOINTS[name], ranks, peer) if name in _ADJOINTS else None


def movements(ranks: Sequence[Sequence[Seen]]) -> tuple[Movement, ...]:
    """The collectives of a function in their order; messages of one line together."""
    found, lines = count(ranks)
    ordered: dict[tuple[str, str], list[Key]] = {}
    for one in found:
        group = ("messages", lines[one]) if one[0] == "message" else (words(one), lines[one])
        ordered.setdefault(group, []).append(one)
    made = []
    for (text, line), keys in ordered.items():
        if text == "messages":
            text = f"messages {_pairs(keys)}"
        elif (times := found[keys[0]]) > 1:
            text = f"{text}, {times} times"
        made.append(Movement(text, line))
    return tuple(made)


def _pairs(keys: Iterable[Key]) -> str:
    return ", ".join(f"{ends[0]} to {ends[1]}" for _, ends, _ in sorted(keys))


def operators(
    forward: Sequence[Sequence[Seen]],
    adjoint: Sequence[Sequence[Seen]],
    replicated: bool,
    trial: Trial,
) -> list[str]:
    """The operators that the adjoint lacks, or has too many.

    Args:
        forward, adjoint: the calls of each rank.
        replicated: True if the results of the forward are copies of one vector, so that an
            all-reduce has the identity as its adjoint, and an all-gather a slice.
        trial: of the spaces. If all elements arrive there, and no others, no collective is missing,
            and only those are too many for which the identity would do, or which explain a factor:
            a sum over as many ranks.
    """
    there, lines = count(forward)
    back, back_lines = count(adjoint)
    wanted: Counter[Key] = Counter()
    origin: dict[Key, Key] = {}
    free: Counter[Key] = Counter()
    for one, times in there.items():
        other = adjoint_of(one)
        if other is None:
            continue
        origin[other] = one
        if replicated and one[0] in ("all_reduce", "all_gather"):
            free[other] += times
        else:
            wanted[other] += times
    said = []
    missing, extra = wanted - back, back - wanted
    if any(one[0] == "unread" for one in there):
        extra = Counter()  # what it moves is not known
    if any(one[0] == "unread" for one in back):
        missing = Counter()
    if trial.arrives:
        missing = Counter()
        sums = {one for one in extra if one[0] in _SUMS and len(one[1]) == trial.factor}
        extra = Counter({one: n for one, n in extra.items() if one in free or one in sums})
    ran = ", ".join(f"{a(words(one))} ({back_lines[one]})" for one in extra)
    messages = [one for one in missing if one[0] == "message"]
    for one in missing:
        if one in messages:
            continue
        source = origin[one]
        said.append(
            f"forward: {words(source)} ({lines[source]}); the adjoint is {a(words(one))}; "
            f"{ran + ' ran instead' if ran else 'none ran'}"
        )
    if messages:
        sources = [origin[one] for one in messages]
        said.append(
            f"forward: messages from rank {_pairs(sources)} ({lines[sources[0]]}); the adjoint has "
            f"messages from rank {_pairs(messages)}; none ran"
        )
    if not missing:
        for one in extra:
            needless = f"{words(one)} ({back_lines[one]}) of the adjoint is too many"
            if one in free:
                needless += f": the {words(origin[one])} of the forward makes copies of one vector"
            said.append(needless)
    return said or _unused(trial, back_lines) or _counts(forward, adjoint)


def _unused(trial: Trial, lines: dict[Key, str]) -> list[str]:
    """Messages of the adjoint that bring what is lost."""
    ran: list[Key] = [("message", ends, -1) for ends in trial.lost]
    if not ran or any(one not in lines for one in ran):
        return []
    where = ", ".join(dict.fromkeys(lines[one] for one in ran))
    return [f"what messages from rank {_pairs(ran)} ({where}) bring in the adjoint is not added"]


def _counts(forward: Sequence[Sequence[Seen]], adjoint: Sequence[Sequence[Seen]]) -> list[str]:
    """Ranks that send back other numbers of elements than they have got."""
    said = []
    for rank, (there, back) in enumerate(zip(forward, adjoint, strict=True)):
        for name in ("all_to_all", "all_gather", "reduce_scatter", "gather", "scatter"):
            got = [one for one in there if one.name == name]
            sent = [one for one in back if one.name == _ADJOINTS[name]]
            for first, last in zip(got, reversed(sent), strict=False):
                if len(first.made) == len(last.given) and first.made != last.given:
                    what = f"the {name.replace('_', '-')} ({first.line})"
                    said.append(
                        f"forward: rank {rank} gets {_listed(first.made)} elements from the ranks "
                        f"in {what}; in the adjoint it sends back {_listed(last.given)} "
                        f"({last.line})"
                    )
    return said


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
