"""Operators between tensors of ranks in words: the collectives that they are, as linop's planner
recognizes them in what has to be sent (`linop.planning.patterns`), whatever they were made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from linop import LinearOperator, Movement
from linop.normal_form.columns import each
from linop.planning.patterns import Kind, pattern
from linop.planning.routing import routes
from linop.spaces.exact import Exact, shown
from linop.testing.parallel.findings import groups_text, ranks_text
from linop.testing.parallel.lifting.places import count

_WORDS = {
    "all_reduce": "all-reduce over {over}",
    "broadcast": "broadcast from {root} over {over}",
    "reduce": "sum-reduce to {root} over {over}",
    "all_gather": "all-gather over {over}",
    "reduce_scatter": "reduce-scatter over {over}",
    "gather": "gather to {root} over {over}",
    "scatter": "scatter from {root} over {over}",
    "all_to_all": "all-to-all over {over}",
    "scan": "scan over {over}",
    "exclusive_scan": "exclusive scan over {over}",
}
_KINDS = {
    Kind.BROADCAST: "broadcast",
    Kind.REDUCE: "reduce",
    Kind.ALL_REDUCE: "all_reduce",
    Kind.ALL_GATHER: "all_gather",
    Kind.REDUCE_SCATTER: "reduce_scatter",
    Kind.ALL_TO_ALL: "all_to_all",
}
MOST = 6
"""Most messages that are listed."""
MOST_OF_FRACTIONS = 4096
"""The largest denominator of numbers that are shown as fractions."""


class Named(NamedTuple):
    """A collective.

    Attributes:
        root: a rank; -1 if there is none.
        times: the number by which it multiplies.
    """

    name: str
    ranks: tuple[int, ...]
    root: int = -1
    times: Exact = 1


def listed(collectives: Iterable[Named], ends: Iterable[tuple[int, int]] = ()) -> str:
    """Collectives and messages in words, such as ``sum-reduce to rank 0 over ranks 0, 1``: those of
    one name over several groups together, and of several roots over one group.

    Args:
        ends: of messages, their two ranks.
    """
    groups: dict[tuple[Any, ...], dict[tuple[int, ...], None]] = {}
    for one in collectives:
        groups.setdefault((one.name, one.root, one.times), {})[one.ranks] = None
    roots: dict[tuple[Any, ...], list[int]] = {}
    for (name, root, times), over in groups.items():
        roots.setdefault((name, times, tuple(over)), []).append(root)
    texts = []
    for (name, times, over), several in roots.items():
        plain = _WORDS.get(name, f"{name.replace('_', '-')} over {{over}}")
        words = plain.format(over=groups_text(over, {}), root=ranks_text(tuple(several)))
        texts.append(words if times == 1 else f"{words}, times {number_text(times)}")
    between = sorted(set(ends))
    if len(between) == 1:
        texts.append("message from rank {} to rank {}".format(*between[0]))
    elif between:
        some = ", ".join(f"{a} to {b}" for a, b in between[:MOST])
        more = f", and {len(between) - MOST} more" if len(between) > MOST else ""
        texts.append(f"messages {some}{more}")
    return ", ".join(texts)


def _plain(made: Movement) -> Movement:
    """A movement with the fractions that its factors are but for rounding."""
    table = made.table
    if table.coef.dtype != object:
        return made
    numbers = each(table.coef, _fraction)
    return Movement(made.domain, made.codomain, replace(table, coef=numbers))


def _fraction(number: Exact) -> Exact:
    if not isinstance(number, Fraction):
        return number
    near = number.limit_denominator(MOST_OF_FRACTIONS)
    if abs(near - number) > abs(number) / 2**40:
        return number
    return int(near) if near.denominator == 1 else near


def number_text(number: Exact) -> str:
    """A coefficient: a fraction of small numbers as such."""
    number = _fraction(number)
    small = isinstance(number, Fraction) and number.denominator <= MOST_OF_FRACTIONS
    return str(number) if small else shown(number)


def with_article(text: str) -> str:
    """In a sentence: ``the all-reduce over …``."""
    return text if text.startswith(("a ", "zero", "messages")) else f"the {text}"


def in_words(op: LinearOperator) -> str:
    """The communication that an operator needs, in words: collectives by name, other messages by
    their ends. What all ranks hold alike (a replicated region) does not have to be sent."""
    made = _plain(op.movement())
    workers = sorted({*made.domain.workers, *made.codomain.workers})
    found = [pattern(made, rank) for rank in workers]
    known = {
        Named(_KINDS[one.kind], one.group, -1 if one.root is None else one.root, one.coefficient)
        : None for one in found if one.kind.collective
    }  # fmt: skip
    single = {rank for rank, one in zip(workers, found, strict=True) if not one.kind.collective}
    every = routes(made)
    ends = [
        (a, b)
        for a, b in zip(every.sender.tolist(), every.receiver.tolist(), strict=True)
        if a != b and a in single
    ]
    return listed(known, ends) or _local_text(made)


def sends(op: LinearOperator) -> bool:
    """True if an operator needs messages."""
    every = routes(op.movement())
    return bool((every.sender != every.receiver).any())


def _local_text(made: Movement) -> str:
    """An operator that moves nothing between ranks."""
    table = made.table
    if not len(table):
        return "zero"
    numbers = set(table.coef.tolist())
    if len(numbers) > 1 or count(made) != made.codomain.size:
        return "a sum of each rank's own elements"
    number = numbers.pop()
    times = "" if number == 1 else f", times {number_text(number)}"
    own = {r.workers[0]: r.size for r in made.codomain.regions}
    held = {w: sum(r.size for r in made.domain.on(w)) for w in own}
    whole = bool((table.at == table.of).all()) and own == held
    return f"identity{times}" if whole else f"own block of each rank{times}"
