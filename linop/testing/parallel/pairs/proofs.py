"""Forward and backward of `autograd.Function`s that move data between ranks, as operators: proofs
that one is the adjoint of the other, for the spaces that the program uses them between.

Both are lifted (`linop.testing.parallel.lifting`): F and G, on the tensors of all ranks. A tensor
that ranks hold copies of is one vector, of a region that is replicated over them: an embedding E
sends its elements to all of their copies. Its gradient is either whole on every rank, or each rank
has a term of it. With D what picks one copy of each result (or sums terms), the backward is right
if G turns the gradient of the result into that of the argument, E* F* D*. All are
`LinearOperator`s; their normal forms are compared, exactly, at any size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain
from typing import Any, TypeAlias

from linop import LinearOperator, Movement, Space
from linop.caching import cached_property
from linop.operators.named_movement import NamedMovement
from linop.testing.parallel.lifting.collectives import MESSAGES
from linop.testing.parallel.lifting.comparing import multiple, normal, same
from linop.testing.parallel.lifting.functions import Function, check_values, function
from linop.testing.parallel.lifting.naming import Named, in_words, listed, number_text, with_article
from linop.testing.parallel.lifting.places import (
    UndecidedError,
    coefficient,
    count,
    largest,
    moves,
    place_of,
    position_of,
    space_of,
    sums_of_ranks,
)
from linop.testing.parallel.pairs.in_place import in_place
from linop.testing.parallel.pairs.joining import joined_by_messages
from linop.testing.parallel.pairs.messages import messages
from linop.testing.parallel.pairs.spaces import Ends
from linop.testing.parallel.pairs.traits import trait
from linop.testing.parallel.recording.records import Call, Lifted, Record
from linop.testing.parallel.twins.locations import Locations


@dataclass(frozen=True)
class Pair:
    """A forward and a backward movement.

    Attributes:
        name: the function's.
        line: of its call.
        forward, backward: their collectives.
        spaces: the forms of the argument and of the result.
        proven: True if the backward is the adjoint of the forward between these spaces, exactly;
            False if it is not; None if that cannot be told.
        counterexample: the entry that is wrong, or the reason why it cannot be told.
        operator, adjoint: the forward and the backward, on the arguments ``x0.1`` (position 0, rank
            1) and results ``y0.1`` of all ranks, flat; None if they are not known.
        otherwise: other spaces, between which it is the adjoint.
        unless: a sentence about other spaces that it may have, between which it is not.
        lost: True if no gradient came back through it.
        factor: k, if the backward is k times the transposed forward, and so k times its adjoint.
        wanted, otherwise_wanted: the adjoint between these spaces, and between the other ones, in
            words; empty if they are not known.
        exact: False if both multiply by numbers that are no fractions, and were compared up to
            their rounding.
    """

    name: str
    line: str
    forward: str
    backward: str
    spaces: str
    proven: bool | None
    counterexample: str = ""
    operator: LinearOperator | None = field(default=None, compare=False, repr=False)
    adjoint: LinearOperator | None = field(default=None, compare=False, repr=False)
    otherwise: str = ""
    unless: str = ""
    lost: bool = False
    factor: float = 1.0
    wanted: str = ""
    otherwise_wanted: str = ""
    exact: bool = True

    def __str__(self) -> str:
        head = f"{self.line} {self.name}: {self.forward}"
        if not self.wanted:
            return f"{head} / {self.backward}: {self.verdict}"
        return f"{head} ({self.spaces}); its adjoint is {self.beside}: {self.verdict}"

    @property
    def verdict(self) -> str:
        """The verdict, and why."""
        texts = {True: "adjoint, proven", False: "NOT the adjoint", None: "not decided"}
        text = texts[self.proven]
        if self.proven and not self.exact:
            text += " up to the rounding of its factors"
        return f"{text} ({self.counterexample})" if self.counterexample else text

    @property
    def beside(self) -> str:
        """The adjoint, and what ran."""
        wanted, ran = with_article(self.wanted), with_article(self.backward)
        if wanted == ran:
            return (
                f"{wanted}, {'what ran was another one' if self.proven is False else 'which ran'}"
            )
        return f"{wanted}, what ran was {ran}"

    @property
    def to_copies(self) -> bool:
        """True if its result is, or may be, copies."""
        return "copies" in self.spaces.rpartition(" to ")[2] or self.unless.endswith("copies")

    @property
    def sentence(self) -> str:
        """The fault that it is, or may be."""
        head = f"Forward: {self.forward}"
        if self.proven is False:
            return (
                f"{head}, from {self.spaces}: its adjoint is {self.beside}. "
                f"{self.counterexample[:1].upper()}{self.counterexample[1:]}."
            )
        if self.lost:
            return f"{head}. Backward: {self.backward}: no gradient comes back through it."
        return f"{head}. Backward: {self.backward}: {self.unless}."

    def undecided(self, why: str) -> Pair:
        """As one that cannot be told."""
        return replace(self, proven=None, counterexample=why)

    def as_otherwise(self) -> Pair:
        """As one between the other spaces, between which it is the adjoint."""
        spaces, wanted = self.otherwise, self.otherwise_wanted
        return replace(self, spaces=spaces, wanted=wanted, proven=True, counterexample="")

    def as_dict(self) -> dict[str, Any]:
        """As data for JSON; operators as text."""
        texts = {name: op if op is None else str(op) for name, op in (
            ("operator", self.operator), ("adjoint", self.adjoint))}  # fmt: skip
        return {**vars(self), **texts}


Pairs: TypeAlias = dict[tuple[int, int], Pair]
"""By rank and number of calls."""


def pairs(locations: Locations) -> tuple[list[Pair], Pairs, Pairs]:
    """All pairs of a program, in order; those whose backward is not the adjoint; and those whose
    backward is not, between spaces that they may have."""
    found: list[Pair] = []
    broken: Pairs = {}
    suspect: Pairs = {}
    for calls in aligned(locations.ranks.values()):
        pair = _pair(locations, calls)
        if pair is None:
            continue
        found.append(pair)
        into = broken if pair.proven is False else suspect
        if pair.proven is False or pair.unless or (pair.lost and _has_gradient(locations, calls)):
            into |= {(rank, call.number): pair for rank, call in calls.items()}
    return found + list(_outside(locations)), broken, suspect


def _outside(locations: Locations) -> Iterator[Pair]:
    """The pairs of collectives outside of functions, which are reported, and judged by the
    gradients alone."""
    ranks = locations.ranks
    for one in chain(in_place(locations), messages(locations)):
        first, back = next(iter(one.calls.values())), _said(ranks, one.back)
        name = first.name if back else f"{first.name} in place"
        about = name, first.line, _said(ranks, one.there), back
        with suppress(UndecidedError):
            pair = _decided(locations, one.calls, one.there, one.back, about)
            if pair is not None:
                yield pair


def _has_gradient(locations: Locations, calls: dict[int, Call]) -> bool:
    """True if what a call makes has a gradient in the twin."""
    for rank, call in calls.items():
        for number in call.outputs:
            at = locations.at.get((rank, number))
            if at is not None and at.matched:
                return locations.twin.tensors[at.twin].gradient is not None
    return False


def aligned(ranks: Iterable[Record]) -> Iterator[dict[int, Call]]:
    """Calls of `autograd.Function`s with collectives, by rank: those of one line of the program
    that are its k-th."""
    keyed: dict[tuple[Any, ...], dict[int, Call]] = {}
    for record in ranks:
        lifted = {one.call for one in record.lifted}
        seen: Counter[tuple[str, str, str]] = Counter()
        for call in record.calls:
            if not call.custom or call.number not in lifted or call.phase != "forward":
                continue
            if call.inside >= 0:
                continue
            key = call.name, call.module, call.line
            seen[key] += 1
            keyed.setdefault((*key, seen[key]), {})[record.rank] = call
    yield from joined_by_messages(ranks, keyed.values())


def _pair(locations: Locations, calls: dict[int, Call]) -> Pair | None:
    ranks = locations.ranks
    there: dict[int, Lifted] = {}
    back: dict[int, Lifted] = {}
    for rank, call in calls.items():
        for one in ranks[rank].lifted:
            if one.call == call.number:
                (back if one.backward else there)[rank] = one
    first = next(iter(calls.values()))
    if not there or not any(one.moved for one in (*there.values(), *back.values())):
        return None
    about = first.name, first.line, _said(ranks, there), _said(ranks, back)
    told = *about[:2], about[2] or "identity", about[3] or "identity"
    if len(back) < len(there):
        why = "a gradient came back on some ranks only" if back else "no gradient came back"
        return Pair(*told, "", None, f"{why} through it", lost=not back)
    try:
        return _decided(locations, calls, there, back, about)
    except UndecidedError as error:
        return Pair(*told, "", None, str(error))


def _said(ranks: dict[int, Record], lifted: dict[int, Lifted]) -> str:
    """The collectives of one side, in words; empty if there are none."""
    found: list[Named] = []
    ends: list[tuple[int, int]] = []
    for rank, one in lifted.items():
        for moved in one.moved:
            about = ranks[rank].collectives[moved.number]
            if about.name in MESSAGES:
                ends.append((rank, about.peer) if about.name == "send" else (about.peer, rank))
            else:
                k = Fraction(1, len(about.ranks) if about.reduction == "average" else 1)
                found.append(Named(about.name, about.ranks, about.peer, k))
    return listed(found, ends)


def _decided(
    locations: Locations,
    calls: dict[int, Call],
    there: dict[int, Lifted],
    back: dict[int, Lifted],
    about: tuple[str, str, str, str],
) -> Pair | None:
    inputs = _positions(locations.ranks, calls, there, back)
    results = [range(len(one.made)) for one in there.values()]
    gradients = [range(len(one.given)) for one in back.values()]
    before, after = (
        Ends(locations, calls, side, chosen, [[n.size for n in arrays] for arrays in each])
        for side, chosen, each in (
            ("inputs", inputs[0], [one.given for one in there.values()]),
            ("outputs", results, [one.made for one in there.values()]),
        )
    )
    x, y = before.arrays, after.arrays
    forward = function(locations.ranks, there, inputs[0], results, x, y)
    given = {rank: [one.given[k].size for k in gradients[at]]
             for at, (rank, one) in enumerate(back.items())}  # fmt: skip
    made = {rank: [one.made[k].size for k in inputs[1][at]]
            for at, (rank, one) in enumerate(back.items())}  # fmt: skip
    y_back, x_back = space_of("y", given), space_of("x", made)
    backward = function(locations.ranks, back, gradients, inputs[1], y_back, x_back)
    F, G = normal(forward.operator), normal(backward.operator)
    check_values(F.given, there, inputs[0], None)
    check_values(G.given, back, None, inputs[1])
    if (x, y) != (x_back, y_back):
        raise UndecidedError("gradients of some arguments only came back")
    if not moves(F.given) and not moves(G.given):
        return None  # its collectives move something else, as FSDP's do parameters' gradients
    allowed = _allowed(locations.ranks, forward, backward)
    name, line, sent, sent_back = about
    about = name, line, sent or in_words(F), sent_back or in_words(G)
    found = _proven(before, after, F, G, allowed, about)
    return replace(found, operator=forward.operator, adjoint=backward.operator, exact=not allowed)


def _proven(
    before: Ends,
    after: Ends,
    F: NamedMovement,
    G: NamedMovement,
    allowed: float,
    about: tuple[str, str, str, str],
) -> Pair:
    """A pair between the spaces that its tensors may be in.

    Args:
        F, G: the forward and the backward, on the tensors of all ranks.
        allowed: as `same` takes it.
    """
    E, R, D = before.embedding, after.embedding, after.picking
    summed = sums_of_ranks(F.given)
    used = before.ranks_used(F.given)
    alone = before.spread and len(used) == 1
    wrong: list[_Way] = []
    otherwise, sure = ("", ""), None
    likely = after.representations()
    for whole_out in dict.fromkeys([*likely, *([True, False] if after.spread else [])]):
        pulled = F.H @ D.H if whole_out else F.H @ D.H @ R.H
        gradient = G @ R if whole_out else G
        for whole_in in (False, True) if before.spread else (True,):
            form = before.text(whole_in, summed, alone and not whole_in)
            way = _Way(
                f"{form} to {after.text(whole_out)}",
                gradient if whole_in else E.H @ gradient,
                E @ E.H @ pulled if whole_in else E.H @ pulled,
                E.H @ pulled if whole_in else pulled,
            )
            if same(way.found, way.wanted, allowed):
                if whole_out in likely:
                    sure = sure or Pair(*about, way.spaces, True, wanted=in_words(way.adjoint))
                otherwise = otherwise if otherwise[0] else (way.spaces, in_words(way.adjoint))
                break
            if whole_out in likely:
                wrong.append(way)
    if sure is not None:
        if len(likely) > 1 and (other := _unlike(sure.spaces, [one.spaces for one in wrong])):
            forms = [each.rpartition(" to ")[2] for each in (sure.spaces, other)]
            why = f"adjoint if its result is {forms[0]}, and not if it is {forms[1]}"
            return replace(sure, unless=why)
        return sure
    if not before.told or not after.told:
        raise UndecidedError("the spaces of its argument or result are not known")
    # The nearest way has the smallest share of wrong entries.
    nearest = min(wrong[:1] if alone else wrong, key=lambda one: one.share)
    what = _counterexample(nearest, before, after, used.pop() if alone else None)
    if why := trait(nearest.found.movement(), nearest.wanted.movement(), nearest.gap):
        what = f"{what}; {why}"
    k = multiple(G, F.H, allowed)
    k = k if k != 1 and same(nearest.found, k * nearest.wanted, allowed) else 1
    return Pair(
        *about,
        nearest.spaces,
        False,
        what,
        otherwise=otherwise[0],
        otherwise_wanted=otherwise[1],
        factor=float(k.real),
        wanted=in_words(nearest.adjoint),
    )


@dataclass(frozen=True)
class _Way:
    """Spaces between which a pair may be used.

    Attributes:
        found, wanted: what the backward does there, and what the adjoint does.
        adjoint: that between the spaces themselves.
    """

    spaces: str
    found: LinearOperator
    wanted: LinearOperator
    adjoint: LinearOperator

    @cached_property
    def gap(self) -> Movement:
        return (self.found - self.wanted).movement()

    @property
    def share(self) -> float:
        """The share of the entries of two operators that are not equal."""
        rows, columns = self.found.shape
        return count(self.gap) / max(1, rows * columns)


def _allowed(ranks: Mapping[int, Record], *functions: Function) -> float:
    """The share of the largest entry of an operator by which others may differ for the rounding of
    a program's own factors; zero if all are fractions."""
    if all(one.exact for one in functions):
        return 0.0
    kinds = {one.dtype for record in ranks.values() for one in record.collectives}
    return 2.0**-40 if kinds <= {"float64", "complex128"} else 2.0**-18


def _unlike(spaces: str, others: Sequence[str]) -> str:
    """The first of other spaces whose result has another form."""
    form = spaces.rpartition(" to ")[2]
    return next((one for one in others if one.rpartition(" to ")[2] != form), "")


def _counterexample(way: _Way, before: Ends, after: Ends, rank: int | None) -> str:
    """The largest wrong entry, in words.

    Args:
        rank: that which alone has the argument, if one has.
    """
    row, column, _ = largest(way.gap)
    has, right = (
        number_text(coefficient(op.movement(), row, column)) for op in (way.found, way.wanted)
    )
    source = _element(way.found.domain, column, after, "the result")
    target = _element(way.found.codomain, row, before, "the argument", rank)
    return (
        f"{target[0]} of {target[1]}'s gradient {target[2]} is {has} times {source[0]} of "
        f"{source[1]}'s {source[2]}; by the adjoint {right} times"
    )


def _element(
    space: Space, index: int, ends: Ends, name: str, of: int | None = None
) -> tuple[str, str, str]:
    """An element, its tensor and its rank, in words.

    Args:
        name: of the tensor, if a rank has only one.
        of: the rank, if it is not that of the first copy.
    """
    index = index if space == ends.arrays else ends.element(index)
    first, position, element = place_of(ends.arrays, index)
    rank = first if of is None else of
    if any(position_of(region) for region in ends.arrays.regions):
        name = f"{name.removeprefix('the ')} {position}"
    return f"element {element}", name, f"on rank {rank}"


def _positions(
    ranks: dict[int, Record],
    calls: dict[int, Call],
    there: dict[int, Lifted],
    back: dict[int, Lifted],
) -> tuple[list[list[int]], list[list[int]]]:
    """The arguments that have gradients: their positions among the arguments of the forward, and
    among the results of the backward, by rank. Those whose gradient goes nowhere, since no
    parameter is behind them, do not count, such as the tensor that a stage of a pipeline begins
    with."""
    arguments, results = [], []
    for rank, one in there.items():
        floats = [k for k, numbers in enumerate(one.given) if numbers.size]
        made = back[rank].made
        if len(made) == len(one.given):
            taken = [k for k in floats if made[k].size == one.given[k].size]
            inputs, behind = calls[rank].inputs, _trained(ranks[rank])
            wanted = [k for k in taken if k >= len(inputs) or inputs[k] in behind]
            taken = wanted if len(calls) > 1 and not _all_idle(ranks, calls) else taken
            arguments.append(taken)
            results.append(taken)
        else:
            raise UndecidedError("its arguments are not plain tensors")
    return arguments, results


def _all_idle(ranks: dict[int, Record], calls: dict[int, Call]) -> bool:
    """True if no argument of the calls has a parameter behind it."""
    return not any(_trained(ranks[r]).intersection(call.inputs) for r, call in calls.items())


def _trained(record: Record) -> set[int]:
    """Tensors that depend on parameters, on this or other ranks."""
    found = {one.number for one in record.tensors if one.parameter}
    for call in record.calls:
        if call.custom or found.intersection(call.inputs):
            found.update(call.outputs)
    for one in record.tensors:
        if found.intersection(one.sources):
            found.add(one.number)
    return found
