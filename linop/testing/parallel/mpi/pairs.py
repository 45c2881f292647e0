"""A pair of functions ``forward(x, comm)`` and ``adjoint(y, comm)``, checked on the ranks of an MPI
job. Collective.

Both are operators on the arrays of all ranks (`linop.testing.parallel.mpi.lifted`), and are
compared between all spaces that these may be in, exactly. Of large ones that are not followed,
inner products of whole numbers are compared, and a wrong entry is found by bisection
(`linop.testing.check_dot_exact`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

import linop
from linop import LinearOperator, Movement, Region, Space
from linop.normal_form.boxes import Ints
from linop.normal_form.columns import ones
from linop.testing.parallel.findings import groups_text, ranks_text
from linop.testing.parallel.lifting.comparing import multiple, same
from linop.testing.parallel.lifting.naming import in_words, sends, with_article
from linop.testing.parallel.lifting.places import count, entries, local, workers_of
from linop.testing.parallel.mpi.functions import OWN, REPLICATED, Fault, Pair, Parts, pair_of
from linop.testing.parallel.mpi.lifted import Both, both
from linop.testing.parallel.mpi.products import by_products
from linop.testing.parallel.mpi.report import PairReport, Trial
from linop.testing.parallel.mpi.words import Seen, movements, operators
from linop.testing.parallel.twins.relations import Groups
from linop.testing.report import shown

_OWN = "each rank's own"


@dataclass(frozen=True)
class Form:
    """The form of a space.

    Attributes:
        groups: of ranks that hold copies of one vector; empty if each rank has its own.
        text: in words.
        embedding: from the vector to the arrays of all ranks; a vector of which several ranks hold
            copies has replicated regions.
        picking: from the arrays to the vector, of the first copies.
        first: the positions of these in the arrays.
    """

    groups: Groups
    text: str
    embedding: LinearOperator
    picking: LinearOperator
    first: Ints


def forms(
    pair: Pair, side: int, arrays: Space, partitions: Sequence[Groups], stated: str | None
) -> list[Form]:
    """The forms that a space may have.

    Args:
        arrays: the space of the arrays of all ranks.
    """
    sizes, shapes = pair.sizes(side), [shape for shape, _ in pair.sides[side]]
    starts = np.cumsum([0, *sizes])
    found = []
    if stated != REPLICATED:
        alike = linop.identity(arrays)
        found.append(Form((), _OWN, alike, alike, np.arange(arrays.size)))
    for groups in partitions if stated != OWN else ():
        if any(len({shapes[r] for r in group}) > 1 for group in groups) or not arrays.size:
            continue
        held = [group for group in groups if sizes[group[0]]]
        vector = Space(
            [Region(f"{'XY'[side]}0.{group[0]}", (sizes[group[0]],), group) for group in held],
            arrays.dtype,
        )
        ends = np.cumsum([0, *(sizes[group[0]] for group in held)])
        rows, columns = (
            np.concatenate(each)
            for each in zip(
                *((starts[r] + np.arange(sizes[r]), ends[k] + np.arange(sizes[r]))
                  for k, group in enumerate(held) for r in group),
                strict=True,
            )
        )  # fmt: skip
        first = np.concatenate([starts[g[0]] + np.arange(sizes[g[0]]) for g in held])
        embedding = local("E", vector, arrays, rows, columns, ones(len(rows)))
        picking = local("D", arrays, vector, np.arange(len(first)), first, ones(len(first)))
        text = f"replicated over {groups_text(groups, {})}"
        found.append(Form(groups, text, embedding, picking, first))
    return found


def partitions(world: int, seen: Sequence[Sequence[Seen]]) -> list[Groups]:
    """All ranks, and groups of the collectives that cover all ranks."""
    if world < 2:
        return []
    found: list[Groups] = [(tuple(range(world)),)]
    groups = {tuple(sorted(one.ranks)) for calls in seen for one in calls if one.name != "send"}
    for group in sorted(groups):
        alike = [one for one in sorted(groups) if len(one) == len(group) > 1]
        chosen: list[tuple[int, ...]] = [group]
        for one in alike:
            if not set(one) & {r for each in chosen for r in each}:
                chosen.append(one)
        partition = tuple(sorted(chosen))
        if sum(map(len, partition)) == world and partition not in found and len(group) > 1:
            found.append(partition)
    return found


def checked(
    parts: Parts, comm: Any, follow: bool = True, following: Callable[[], None] | None = None
) -> PairReport:
    """The report of a pair, the same on all ranks. Collective.

    Args:
        follow: True to look at what the functions do with their arrays.
        following: called before that.
    """
    pair = Pair(parts, comm)
    about: dict[str, Any] = {"program": "", "workers": pair.world}
    try:
        for side in (0, 1):
            numbers = np.random.default_rng(side).integers(-9, 10, sum(pair.sizes(side)))
            pair.hear(side, numbers.astype(float))
    except Fault as fault:
        there, back = (pair.plain.allgather(each) for each in pair.seen)
        return PairReport(
            **about,
            passed=False,
            evidence="one application on whole numbers",
            trials=(),
            forward=movements(there),
            adjoint=movements(back),
            faults=(str(fault),),
        )
    there, back = (pair.plain.allgather(each) for each in pair.seen)
    groups = partitions(pair.world, [*there, *back])
    about |= {"forward": movements(there), "adjoint": movements(back)}
    if follow and following is not None:
        following()
    try:
        ops = both(pair, follow)
        if ops is not None:
            trials, why = _tried(pair, ops, groups)
            evidence = ops.evidence
        else:
            trials, evidence = by_products(pair, groups)
            why = ""
    except Fault as fault:
        return PairReport(
            **about, passed=False, evidence="all unit vectors", trials=(), faults=(str(fault),)
        )
    passed = trials[0].passed
    said = []
    if not passed:
        copies = trials[0].codomain != _OWN
        said = operators(there, back, copies, trials[0])
    return PairReport(
        **about,
        passed=passed,
        evidence=evidence,
        trials=tuple(trials),
        operators=tuple(said),
        faults=() if passed or not why else (why,),
        notes=_notes(parts, trials, bool(about["adjoint"])) if passed else (),
        operator="" if ops is None else str(ops.forward.body),
        adjoint_operator="" if ops is None else str(ops.adjoint.body),
    )


def _notes(parts: Parts, trials: Sequence[Trial], talks: bool) -> tuple[str, ...]:
    """Sentence about what a pair that passes between some spaces does between others.

    Args:
        talks: True if the adjoint communicates.
    """
    failed = [one for one in trials if not one.passed]
    if all(parts.forms) or not failed:
        return ()
    here = trials[0]
    there = min(failed, key=lambda one: (one.domain != _OWN) + (one.codomain != _OWN))
    instead = f", where its adjoint is {with_article(there.wanted)}" if there.wanted else ""
    doubts = []
    if talks and here.is_local:
        doubts.append(
            "between the first spaces the adjoint needs no communication, and adjoint() has some: "
            "it may be meant for others"
        )
    return (
        f"adjoint if {here.between}; NOT if {there.between}{instead}. The functions do not tell "
        f"which spaces are yours: say so by DOMAIN and CODOMAIN, {OWN!r} (each rank uses its array "
        f"for something else) or {REPLICATED!r} (copies of one vector, used alike)",
        *doubts,
    )


def _combinations(pair: Pair, ops: Both, groups: Sequence[Groups]) -> Iterator[tuple[Form, Form]]:
    stated = pair.parts.forms
    spaces = ops.forward.domain, ops.forward.codomain
    before, after = (forms(pair, k, spaces[k], groups, stated[k]) for k in (0, 1))
    yield from product(before, after)


def _tried(pair: Pair, ops: Both, groups: Sequence[Groups]) -> tuple[list[Trial], str]:
    """The pair between all spaces that are possible, the nearest to being right first; and what is
    wrong, in words.

    Raises:
        Fault: there are no such spaces.
    """
    tried = []
    for ends in _combinations(pair, ops, groups):
        trial, why = _trial(pair, ops, ends)
        size = max(1, len(ends[0].first) * len(ends[1].first))
        copies = sum(bool(form.groups) for form in ends)
        likely = not trial.passed, trial.is_zero, trial.wrong / size, copies, not why
        tried.append((likely, trial, why))
    tried.sort(key=lambda one: one[0])
    if tried and tried[0][1].passed:  # spaces that these functions cannot have in mind say nothing
        rows, columns = ops.forward.shape
        tried = [one for one in tried if one[1].wrong <= rows * columns]
    if not tried:
        raise Fault("the ranks' arrays have different shapes, and cannot be replicated")
    return [one[1] for one in tried], tried[0][2]


def _trial(pair: Pair, ops: Both, ends: tuple[Form, Form]) -> tuple[Trial, str]:
    """A pair between two spaces, and in words what is wrong."""
    before, after = ends
    about = before.text, after.text
    F, A = ops.forward, ops.adjoint
    many = F.shape[0] * F.shape[1] + 1
    if before.groups and (unused := _unused(pair, F.given)):
        text = f"forward() does not use the copies of {unused}"
        return Trial(*about, False, many + 1, text), ""
    there, back = F @ before.embedding, A @ after.embedding
    for op, form, side in ((there, after, 1), (back, before, 0)):
        alike = form.embedding @ form.picking @ op
        if form.groups and not same(op, alike, ops.allowed):
            rows, *_ = _sorted((op - alike).movement())
            name = ("adjoint", "forward")[side]
            text = f"{name}() gives other values to the copies, as in {pair.element(side, rows[0])}"
            return Trial(*about, False, many, text), ""
    found, wanted = before.picking @ back, (after.picking @ there).H
    named = in_words(wanted)
    is_local = not sends(wanted)
    if same(found, wanted, ops.allowed):
        return Trial(*about, True, 0, wanted=named, is_local=is_local), ""
    gap = (found - wanted).movement()
    i, j, _ = _sorted(gap)
    source = pair.element(1, int(after.first[j[0]]))
    target = pair.element(0, int(before.first[i[0]]))
    has, right = _Entries(found), _Entries(wanted)
    text = (
        f"from {source} to {target}, adjoint() has {_text(has.at(i[:1], j[:1])[0])} and the "
        f"{pair.transpose} of forward() {_text(right.at(i[:1], j[:1])[0])}; {count(gap)} of "
        f"{found.shape[0] * found.shape[1]} entries are wrong"
    )
    k: Any = multiple(found, wanted, ops.allowed)
    why = _reason(pair, has, right, (i, j), ends, k)
    arrives = _between(found.movement()) == _between(wanted.movement())
    factor = 1.0 if k.imag else float(k)
    more = _lost(pair, has, right, (i, j), ends), not len(right.rows)
    return Trial(*about, False, count(gap), text, arrives, factor, named, is_local, *more), why


def _sorted(made: Movement) -> tuple[Ints, Ints, np.ndarray]:
    """The entries of a movement, row after row."""
    rows, columns, numbers = entries(made)
    order = np.lexsort((columns, rows))
    return rows[order], columns[order], numbers[order]


class _Entries:
    """The entries of an operator, to be looked up."""

    def __init__(self, op: LinearOperator) -> None:
        self.rows, self.columns, self.numbers = _sorted(op.movement())
        self.width = op.shape[1]
        self.keys = self.rows * self.width + self.columns

    def at(self, rows: Ints, columns: Ints) -> np.ndarray:
        """The entries at some places, zero where there are none."""
        keys = rows * self.width + columns
        at = np.minimum(np.searchsorted(self.keys, keys), max(len(self.keys) - 1, 0))
        known = self.keys[at] == keys if len(self.keys) else np.zeros(len(keys), bool)
        found = np.zeros(len(keys), self.numbers.dtype)
        found[known] = self.numbers[at[known]]
        return found

    def contents(self) -> list[tuple[bytes, bytes]]:
        """Contents of each row, in an order that does not depend on that of rows."""
        cuts = np.flatnonzero(np.diff(self.rows)) + 1
        each = zip(np.split(self.columns, cuts), np.split(self.numbers, cuts), strict=True)
        return sorted((columns.tobytes(), numbers.tobytes()) for columns, numbers in each)


def _between(made: Movement) -> bytes:
    """The entries of a movement by which an element gets something of another rank: it, and both
    ranks; equal for equal ones."""
    rows, columns, _ = entries(made)
    a, b = (
        np.repeat(workers_of(space), [region.size for region in space.regions])[index]
        for space, index in ((made.codomain, rows), (made.domain, columns))
    )
    found = np.stack([rows, a, b])[:, a != b]
    return np.unique(found, axis=1).tobytes()


def _text(value: Any) -> str:
    """A number; a complex one without its imaginary part if that is zero."""
    number = complex(value)
    return shown(number if number.imag else number.real)


def _unused(pair: Pair, made: Movement) -> str:
    """Ranks whose arrays the forward does not look at, though others' it does."""
    used = set(workers_of(made.domain)[made.table.src].tolist())
    unused = tuple(r for r, size in enumerate(pair.sizes(0)) if size and r not in used)
    return ranks_text(unused) if unused and used else ""


def _reason(
    pair: Pair,
    has: _Entries,
    right: _Entries,
    wrong: tuple[Ints, Ints],
    ends: tuple[Form, Form],
    k: Any,
) -> str:
    """The common trait of the wrong entries, in words; empty if nothing.

    Args:
        k: the adjoint by the transpose of the forward; 1 if it is no multiple.
    """
    if not len(has.rows):
        return "adjoint() is zero"
    if k != 1:
        return f"adjoint() is {_text(k)} times the {pair.transpose} of forward()"
    i, j = wrong
    owners = _owners(pair, ends)
    local = owners[0][i] == owners[1][j]
    lost = (has.at(i, j) == 0) & (right.at(i, j) != 0)
    one = pair.element(0, int(ends[0].first[i[0]]))
    if lost.all() and local.all():
        return (
            f"the own term of a rank is lost, as in {one}: what arrives from other ranks has to be "
            f"added to it, and replaces it"
        )
    if lost.all() and not local.any():
        return f"terms of other ranks are lost, as in {one}: they have to be sent back and added"
    if has.contents() == right.contents():
        return f"the elements arrive in other places than they came from, as in {one}"
    if not (lost | (right.at(i, j) != 0)).any():
        return f"terms are added that do not belong there, as in {one}"
    return _scaled_terms(pair, has, right, (i[~local], j[~local]), one)


def _owners(pair: Pair, ends: tuple[Form, Form]) -> list[Ints]:
    """The ranks that have the elements of both spaces."""
    return [
        np.searchsorted(np.cumsum(pair.sizes(side)), form.first, side="right")
        for side, form in enumerate(ends)
    ]


def _lost(
    pair: Pair, has: _Entries, right: _Entries, wrong: tuple[Ints, Ints], ends: tuple[Form, Form]
) -> tuple[tuple[int, int], ...]:
    """The ranks of `Trial.lost`."""
    i, j = wrong
    if ((has.at(i, j) != 0) | (right.at(i, j) == 0)).any():
        return ()
    owners = _owners(pair, ends)
    found = set(zip(owners[1][j].tolist(), owners[0][i].tolist(), strict=True))
    return tuple(sorted(found)) if all(a != b for a, b in found) else ()


def _scaled_terms(
    pair: Pair, has: _Entries, right: _Entries, wrong: tuple[Ints, Ints], one: str
) -> str:
    """A sentence about terms of other ranks that all are one multiple of what they should be."""
    i, j = wrong
    if not len(i):
        return ""
    if not right.at(i, j).all():
        return ""
    ratios = has.at(i, j) / right.at(i, j)
    k = ratios[0]
    if not k or not np.allclose(ratios, k, rtol=1e-9, atol=0):
        return ""
    return (
        f"terms of other ranks are {_text(k)} times those of the {pair.transpose} of forward(), as "
        f"in {one}"
    )


__all__ = ["checked", "pair_of"]
