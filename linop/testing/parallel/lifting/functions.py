"""The forward or the backward of a function on all ranks as an operator: its collectives, each
lifted, and between them what ranks do in their own memory.

Ranks follow the elements of their tensors (`linop.testing.parallel.recording.shadows`): of what is
given to each collective, and of the results, it is known which elements of arguments and of earlier
collectives they are, or sums of multiples of which. So the operator is L_y + Σ L_k C_k (L_a + …),
with collectives C and movements L inside of each rank's memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import repeat
from operator import add
from typing import Any, NamedTuple

import numpy as np

import linop
from linop import LinearOperator, Movement, Region, Space
from linop.normal_form.boxes import Ints, expand
from linop.testing.parallel.lifting.collectives import MESSAGES, Lift, Ran, lifted, message
from linop.testing.parallel.lifting.places import UndecidedError, applied, exactly, local
from linop.testing.parallel.recording.records import UNKNOWN, Collective, Lifted, Moved, Record

_ARGUMENTS, _NOWHERE, _STRANGE = 0, -1, -2
"""Sources of elements beside collectives, which are numbered from 1: the arguments; none, such as
zeros; what is not looked at."""


@dataclass(frozen=True)
class Function:
    """A function on all ranks.

    Attributes:
        operator: from the arguments that count to the results that count.
        collectives: those that its results depend on, in an order in which they can run; those of
            one name that can run at one time are one.
        exact: False if it multiplies by numbers that are no fractions, such as 1 / sqrt(3).
    """

    operator: LinearOperator
    collectives: tuple[LinearOperator, ...]
    exact: bool


def function(
    ranks: Mapping[int, Record],
    runs: Mapping[int, Lifted],
    given: Sequence[Sequence[int]],
    made: Sequence[Sequence[int]],
    domain: Space,
    codomain: Space,
) -> Function:
    """The operator of a function.

    Args:
        given, made: by rank, positions of the arguments and results that count.
        domain, codomain: the spaces of these (`linop.testing.parallel.lifting.places.space_of`).

    Raises:
        UndecidedError: it is no linear map, or one of its collectives is none that is known.
    """
    for rank, one in runs.items():
        if one.unknown and any((numbers == UNKNOWN).any() for numbers in one.made):
            raise UndecidedError(f"{one.unknown} in it is no movement of data")
        if any(ranks[rank].collectives[moved.number].name == "unread" for moved in one.moved):
            raise UndecidedError("it has a call of MPI that is not looked at")
    parts = _collectives(ranks, runs)
    numbers = {call: k for k, part in enumerate(parts, 1) for call in part.calls}
    memories = {
        rank: _Memory(one, chosen, [numbers[rank, k] for k in range(len(one.moved))])
        for (rank, one), chosen in zip(runs.items(), given, strict=True)
    }
    results = [
        (rank, memories[rank].terms(_joined([one.made[k] for k in chosen])))
        for (rank, one), chosen in zip(runs.items(), made, strict=True)
    ]
    return _Composed(memories, parts, domain).function(results, codomain)


def _joined(arrays: Sequence[np.ndarray]) -> Ints:
    return np.concatenate([one.ravel() for one in arrays]) if arrays else np.zeros(0, np.int64)


# Collectives of all ranks


@dataclass
class _Part:
    """A collective of a function on all ranks, or one message.

    Attributes:
        ends: of a message, the ranks that send and receive.
        records, moved: by rank; of a message, by "send" and "receive".
        calls: ranks, and the position of the call among the collectives of each.
    """

    ends: tuple[int, int] | None
    records: dict[Any, Collective] = field(default_factory=dict)
    moved: dict[Any, Moved] = field(default_factory=dict)
    calls: list[tuple[int, int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return next(iter(self.records.values())).name if self.ends is None else "message"

    def lift(self, name: str) -> Lift:
        if self.ends is not None:
            if "send" not in self.moved:
                raise UndecidedError(f"rank {self.ends[0]}, which sends, does not call it")
            sent, got = _joined(self.moved["send"].given), _joined(self.moved["receive"].made)
            return message(*self.ends, len(sent), len(got), name)
        given, made = (
            {rank: [one.size for one in getattr(moved, side)] for rank, moved in self.moved.items()}
            for side in ("given", "made")
        )
        return lifted(Ran.of(self.records, given, made), name)

    def given(self) -> Iterator[tuple[int, Ints]]:
        """The numbers of the elements that each rank gives."""
        for key, moved in self.moved.items():
            if self.ends is None:
                yield key, _joined(moved.given)
            elif key == "send":
                yield self.ends[0], _joined(moved.given)


def _collectives(ranks: Mapping[int, Record], runs: Mapping[int, Lifted]) -> list[_Part]:
    """The collectives of all ranks: on each the k-th of its name and group."""
    keyed: dict[tuple[Any, ...], _Part] = {}
    for rank, one in runs.items():
        seen: Counter[tuple[Any, ...]] = Counter()
        for position, moved in enumerate(one.moved):
            about = ranks[rank].collectives[moved.number]
            key: tuple[Any, ...] = (about.name, about.ranks)
            at: int | str = rank
            ends = None
            if about.name in MESSAGES:
                ends = (rank, about.peer) if about.name == "send" else (about.peer, rank)
                at, key = about.name, ("message", *ends, about.tag)
            seen[at, key] += 1
            part = keyed.setdefault((*key, seen[at, key]), _Part(ends))
            part.records[at], part.moved[at] = about, moved
            part.calls.append((rank, position))
    return list(keyed.values())


# What ranks do in their own memory


class _Terms(NamedTuple):
    """Elements as sums of multiples of others, (n,) each: the position of the element, the source
    that the other one is of, its position there, and the factor."""

    at: Ints
    source: Ints
    place: Ints
    factor: np.ndarray


class _Memory:
    """A rank's memory while a function runs.

    Args:
        one: what the rank has followed.
        given: positions of the arguments that count.
        sources: the numbers of its collectives.
    """

    def __init__(self, one: Lifted, given: Sequence[int], sources: Sequence[int]) -> None:
        sums = one.sums or [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))]
        into, of, factors = (np.concatenate([each[k] for each in sums]) for k in range(3))
        made = [_joined(moved.made) for moved in one.moved]
        sent = [_joined(moved.given) for moved in one.moved]
        count = 1 + max(int(n.max(initial=0)) for n in (*one.given, *made, *sent, into, *one.made))
        self._source, self._place = np.full(count, _NOWHERE), np.zeros(count, np.int64)
        arguments = _joined([one.given[k] for k in given])
        if np.bincount(arguments).max(initial=0) > 1:
            raise UndecidedError("elements of its arguments are the same memory")
        for numbers, source in zip((*made, arguments), (*sources, _ARGUMENTS), strict=True):
            self._source[numbers], self._place[numbers] = source, np.arange(len(numbers))
        order = np.argsort(into, kind="stable")
        self._of, self._factors = of[order].astype(np.int64), factors[order].astype(float)
        self._many = np.bincount(into.astype(np.int64), minlength=count)
        self._first = np.cumsum(self._many) - self._many

    def terms(self, numbers: Ints) -> _Terms:
        """Terms that elements, given by their numbers, are made of."""
        at, factor = np.arange(len(numbers)), np.ones(len(numbers))
        found: list[_Terms] = []
        while True:
            strange = numbers == UNKNOWN
            source = np.where(strange, _STRANGE, self._source[numbers])
            place = np.where(strange, 0, self._place[numbers])
            known = source != _NOWHERE
            found.append(_Terms(at[known], source[known], place[known], factor[known]))
            rows, within = expand(np.where(known, 0, self._many[numbers]))
            if not len(rows):
                return _Terms(*(np.concatenate(each) for each in zip(*found, strict=True)))
            terms = self._first[numbers[rows]] + within
            at, numbers, factor = _added(
                at[rows], self._of[terms], factor[rows] * self._factors[terms]
            )


def _added(at: Ints, numbers: Ints, factor: np.ndarray) -> tuple[Ints, Ints, np.ndarray]:
    """The same terms, those of one element and one number added up."""
    order = np.lexsort((numbers, at))
    at, numbers, factor = at[order], numbers[order], factor[order]
    first = np.flatnonzero(np.append(True, (np.diff(at) != 0) | (np.diff(numbers) != 0)))
    return at[first], numbers[first], np.add.reduceat(factor, first)


# The composition

_Made = Sequence[tuple[int, _Terms]]
"""Ranks, and what elements of each are made of."""


class _Value(NamedTuple):
    """The arguments, or what a collective makes.

    Attributes:
        made: the operator that makes it of the arguments; None for these themselves.
        space: that it is in.
        starts: the positions there at which the elements of ranks begin, by rank.
    """

    made: LinearOperator | None
    space: Space
    starts: Mapping[int, int]


class _Composed:
    """A function's operator while it is composed."""

    def __init__(
        self, memories: Mapping[int, _Memory], parts: Sequence[_Part], domain: Space
    ) -> None:
        self._memories, self._parts, self._domain = memories, parts, domain
        self._whole = domain
        self._given: dict[int, _Made] = {}
        self._values: dict[int, _Value] = {}
        self._exact = True

    def function(self, results: _Made, codomain: Space) -> Function:
        steps = self._steps(_sources(results))
        strange = [Region(f"?.{rank}", (1,), rank) for rank in self._memories]
        is_strange = any(_STRANGE in _sources(each) for each in (results, *self._given.values()))
        if is_strange:
            self._whole = Space((*self._domain.regions, *strange))
        positions = _first_positions(self._whole)
        for source, regions in ((_ARGUMENTS, self._domain.regions), (_STRANGE, strange)):
            starts: dict[int, int] = {}
            for region in regions if source == _ARGUMENTS or is_strange else ():
                starts.setdefault(region.workers[0], positions[region.name])
            self._values[source] = _Value(None, self._whole, starts)
        collectives = [self._run(step, k) for k, step in enumerate(steps, 1)]
        places = _first_of_ranks(codomain)
        op = self._combined(
            [(places.get(rank, 0), rank, terms) for rank, terms in results], codomain, "L_y"
        )
        if is_strange:
            if (op.movement().table.src >= len(self._domain)).any():
                raise UndecidedError("what it moves is computed by something that is not looked at")
            op = op @ linop.allocate(self._domain, *strange)
        return Function(op, tuple(collectives), self._exact)

    def _steps(self, sources: Iterable[int]) -> list[list[int]]:
        """The collectives that results depend on, each behind those that it depends on. Those of
        one name that can run at one time are one step.

        Args:
            sources: those that the results themselves are made of.

        Raises:
            UndecidedError: one depends on itself.
        """
        levels: dict[int, int] = {}
        begun: set[int] = set()
        waiting = [(k, False) for k in sources if k > 0]
        while waiting:
            number, is_done = waiting.pop()
            if is_done:
                before = [levels[k] for k in _sources(self._given[number]) if k > 0]
                levels[number] = 1 + max(before, default=0)
            elif number not in begun:
                begun.add(number)
                self._given[number] = [
                    (rank, self._memories[rank].terms(numbers))
                    for rank, numbers in self._parts[number - 1].given()
                ]
                waiting.append((number, True))
                waiting += [(k, False) for k in _sources(self._given[number]) if k > 0]
            elif number not in levels:
                raise UndecidedError("its collectives wait for each other")
        steps: dict[tuple[int, str], list[int]] = {}
        for number in sorted(levels):
            steps.setdefault((levels[number], self._parts[number - 1].name), []).append(number)
        return [steps[key] for key in sorted(steps, key=lambda each: each[0])]

    def _run(self, step: Sequence[int], at: int) -> LinearOperator:
        """Collectives of one name; what they make of the arguments becomes known.

        Args:
            step: their numbers.
            at: the number of the step.
        """
        lifts = [self._parts[k - 1].lift(f"{at}.{k}") for k in step]
        op = linop.direct_sum(*(one.operator for one in lifts))
        into, out_of = _first_positions(op.domain), _first_positions(op.codomain)
        given = [
            (into[one.into[rank]], rank, terms)
            for k, one in zip(step, lifts, strict=True)
            for rank, terms in self._given[k]
            if rank in one.into
        ]
        made = op @ self._combined(given, op.domain, f"L_{at}")
        for k, one in zip(step, lifts, strict=True):
            starts = {rank: out_of[name] for rank, name in one.out_of.items()}
            self._values[k] = _Value(made, op.codomain, starts)
        return op

    def _combined(
        self, given: Sequence[tuple[int, int, _Terms]], space: Space, symbol: str
    ) -> LinearOperator:
        """A value as a sum of movements of others.

        Args:
            given: positions in the space, the ranks whose elements begin there, and what these are
                made of.
        """
        found: dict[int, tuple[_Value, list[tuple[Ints, Ints, np.ndarray]]]] = {}
        for start, rank, terms in given:
            for source in _distinct(terms.source):
                value, chosen = self._values[source], terms.source == source
                if rank in value.starts:  # others get nothing that is defined
                    columns = terms.place[chosen] + value.starts[rank]
                    entries = terms.at[chosen] + start, columns, terms.factor[chosen]
                    found.setdefault(id(value.space), (value, []))[1].append(entries)
        sums = []
        for value, parts in found.values():
            rows, columns, factors = (np.concatenate(each) for each in zip(*parts, strict=True))
            numbers, is_exact = exactly(factors)
            self._exact &= is_exact
            moved = local(symbol, value.space, space, rows, columns, numbers)
            sums.append(moved if value.made is None else moved @ value.made)
        return reduce(add, sums) if sums else linop.zero(self._whole, space)


def _sources(made: _Made) -> list[int]:
    """The sources of elements, sorted."""
    return sorted({source for _, terms in made for source in _distinct(terms.source)})


def _distinct(sources: Ints) -> list[int]:
    """The distinct numbers of sources: few, of many elements."""
    found: list[int] = (np.flatnonzero(np.bincount(sources - _STRANGE)) + _STRANGE).tolist()
    return found


def _first_positions(space: Space) -> dict[str, int]:
    """The positions at which regions begin, by name, in the order of regions."""
    ends = np.cumsum([0, *(region.size for region in space.regions)])
    return {r.name: int(end) for r, end in zip(space.regions, ends, strict=False)}


def _first_of_ranks(space: Space) -> dict[int, int]:
    """The positions at which the regions of ranks begin, by rank."""
    found: dict[int, int] = {}
    for name, at in _first_positions(space).items():
        found.setdefault(space[name].workers[0], at)
    return found


def check_values(
    made_of: Movement,
    lifted: dict[int, Lifted],
    given: Sequence[Sequence[int]] | None,
    made: Sequence[Sequence[int]] | None,
) -> None:
    """Check that a movement makes the results of the arguments, where values were kept: operations
    of other packages than torch may have been missed.

    Args:
        given, made: by rank, positions of the arguments and results that count; None for all.

    Raises:
        UndecidedError: it does not.
    """
    if not all(one.values and one.results for one in lifted.values()):
        return
    x, y = (
        np.concatenate(
            [
                values[k].ravel()
                for one, which in zip(lifted.values(), chosen or repeat(None), strict=False)
                for values in [one.values if side == 0 else one.results]
                for k in (range(len(values)) if which is None else which)
            ]
            or [np.zeros(0)]
        )
        for side, chosen in enumerate((given, made))
    )
    if (len(y), len(x)) != (made_of.codomain.size, made_of.domain.size):
        return
    size = applied(made_of, x, magnitudes=True) + np.abs(y)
    if (np.abs(applied(made_of, x) - y) > 2.0**-18 * size.max(initial=0.0)).any():
        raise UndecidedError("something in it computes that is not looked at, or it is not linear")
