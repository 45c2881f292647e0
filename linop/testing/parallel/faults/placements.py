"""Placements that a program declares wrongly: where plain tensors become DTensors or the other way
round, of the tensors or of their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from linop.testing.parallel.faults.after import moved_gradients
from linop.testing.parallel.faults.context import Context
from linop.testing.parallel.faults.ways import Way
from linop.testing.parallel.faults.words import detail
from linop.testing.parallel.findings import Finding, Place, groups_text
from linop.testing.parallel.recording.records import FORWARD, Call, Placed
from linop.testing.parallel.twins.locations import TERMS, Location, made_by
from linop.testing.parallel.twins.parameters import Compared
from linop.testing.parallel.twins.relations import Groups, Kind, Relation, joined, related

_WHOLE, _TERM = "Replicate()", "Partial()"
_FROM, _TO = "DTensor.from_local", "DTensor.to_local"


@dataclass
class _Boundary:
    """A call of a function of DTensor, on all ranks.

    Attributes:
        calls: by rank.
        axes: for each dimension of the mesh, the groups of ranks along it; empty if these are no
            partition of the ranks.
        at: the plain tensor of the call.
    """

    calls: dict[int, Call]
    axes: list[Groups]
    at: Location
    placed: Placed = field(init=False)

    def __post_init__(self) -> None:
        found = next(iter(self.calls.values())).placed
        assert found is not None
        self.placed = found

    def text(self, axis: int, context: Context) -> str:
        return groups_text(self.axes[axis], context.names)


def _boundary(context: Context, rank: int, call: Call) -> _Boundary | None:
    """A call on all ranks that have its plain tensor; None if this is not a part of the twin's."""
    plain = call.outputs if call.name == _TO else call.inputs
    at = context.locations.at.get((rank, plain[0])) if plain else None
    if at is None or not at.matched:
        return None
    calls: dict[int, Call] = {}
    for other, number in at.numbers.items():
        record = context.ranks[other]
        if call.name == _TO:
            found = made_by(record).get(number)
        else:
            users = [c for c in record.calls if c.name == _FROM and number in c.inputs]
            found = next((c for c in users if (c.line, c.module) == (call.line, call.module)), None)
        if found is None or found.placed is None:
            return None
        calls[other] = found
    axes = []
    for k in range(len(next(iter(calls.values())).placed.axes)):  # type: ignore[union-attr]
        groups = {tuple(sorted(c.placed.axes[k])) for c in calls.values() if c.placed is not None}
        members = sorted(r for group in groups for r in group)
        axes.append(tuple(sorted(groups)) if members == sorted(calls) else ())
    return _Boundary(calls, axes, at)


def _boundaries(context: Context, rank: int, name: str) -> Iterator[_Boundary]:
    """The calls of functions of DTensor on one rank that have a plain tensor of the twin."""
    for call in context.ranks[rank].calls:
        if call.name == name and call.placed is not None and call.phase == FORWARD:
            if (found := _boundary(context, rank, call)) is not None:
                yield found


def misdeclared(context: Context, one: Compared) -> Finding | None:
    """The fault of a gradient on whose way a plain tensor becomes a DTensor, or the other way
    round, with other placements of the gradient than it has; the last one before the loss."""
    moved = (c for c in moved_gradients(context, one) if c.reduction and not c.within)
    later = {tuple(sorted(c.ranks)) for c in moved}
    for rank in sorted(one.held):
        way = Way.of(context, rank, one.name)
        numbers = set(way.numbers)
        for call in reversed(context.ranks[rank].calls):
            if call.placed is None or call.phase != FORWARD or call.name not in (_FROM, _TO):
                continue
            if not numbers.intersection(call.inputs):
                continue
            boundary = _boundary(context, rank, call)
            if boundary is None or _is_right_for_others(context, rank, call):
                continue
            if _is_of_others_too(context, rank, call, one):
                continue
            judge = _of_result if call.name == _TO else _of_argument
            if (found := judge(context, one, way, boundary, later)) is not None:
                return found
    return None


def _is_right_for_others(context: Context, rank: int, call: Call) -> bool:
    """True if the gradient of a parameter that is right comes through a call."""
    given = set(call.inputs)
    names = (name for name in context.right if name in context.ranks[rank].parameters)
    return any(given.intersection(Way.of(context, rank, name).numbers) for name in names)


def _is_of_others_too(context: Context, rank: int, call: Call, one: Compared) -> bool:
    """True if all gradients have one factor, those too that do not come through a call."""
    if context.overall == 1 or one.gradient.kind is not Kind.FACTOR:
        return False
    given, parameters = set(call.inputs), context.ranks[rank].parameters
    names = [name for name, each in parameters.items() if each.trained and not each.buffer]
    return any(not given.intersection(Way.of(context, rank, name).numbers) for name in names)


# A plain tensor, of a DTensor


def _of_result(
    context: Context, one: Compared, way: Way, boundary: _Boundary, later: set[tuple[int, ...]]
) -> Finding | None:
    """``to_local``: the gradient of its result is a term on each rank, and is taken for whole; or
    the other way round.

    Args:
        later: groups of ranks over which the gradient of the parameter is summed afterwards.
    """
    gradient, placed = boundary.at.gradient, boundary.placed
    if gradient is None or placed.before is None:
        return None
    if gradient.kind not in (Kind.EQUAL, Kind.UNSUMMED) and (
        gradient.kind is not Kind.FACTOR or gradient.factors
    ):
        return None
    declared = placed.gradient or tuple(
        _WHOLE if kind.startswith("Partial") else kind for kind in placed.before
    )
    copied = [k for k, kind in enumerate(declared) if kind in (_WHOLE, _TERM)
              and boundary.axes[k] and _are_copies(boundary.at, boundary.axes[k])]  # fmt: skip
    terms = _axes_of(gradient, boundary.axes, copied)
    if terms is None:
        return None
    missing = [k for k in copied if declared[k] == _WHOLE and k in terms
               and not later.intersection(boundary.axes[k])]  # fmt: skip
    needless = [k for k in copied if declared[k] == _TERM and k not in terms]
    if not missing and not needless:
        return None
    wanted = [_TERM if k in missing else _WHOLE if k in needless else kind
              for k, kind in enumerate(declared)]  # fmt: skip
    say = f"grad_placements=[{', '.join(wanted)}]"
    given = f"grad_placements=[{', '.join(declared)}]" if placed.gradient else "no grad_placements"
    lacks, sums = (" and ".join(boundary.text(k, context) for k in each)
                   for each in (missing, needless))  # fmt: skip
    about = one.gradient.kind, detail(one.gradient, context)
    if missing and needless:
        about = Kind.WRONG_RANKS, f"over {sums}, instead of {lacks}"
        operator = f"a sum over {lacks} instead of {sums}, in the backward pass: {say}"
        why = f"each of {lacks} has a term of it, and those of {sums} have the same"
    elif missing:
        operator = f"all-reduce over {lacks}, in the backward pass: {say}"
        why = f"each of {lacks} has a term of it, and none sums them"
    else:
        operator = f"the all-reduce over {sums} in the backward pass is too many: {say}"
        why = f"each of {sums} has the whole of it, and they are summed"
    return Finding(
        *about,
        (one.name,),
        _place(boundary),
        operator,
        f"to_local() has {given} here: so DTensor takes the gradient of its result to be "
        f"[{', '.join(declared)}]; {why}.",
    )


def _place(boundary: _Boundary) -> Place:
    call = next(iter(boundary.calls.values()))
    return Place(call.module, call.line, call.text)


def _are_copies(at: Location, groups: Groups) -> bool:
    """True if the ranks of each group hold the same elements."""
    return all(
        np.array_equal(at.selections[group[0]], at.selections[r]) for group in groups for r in group
    )


def _axes_of(gradient: Relation, axes: Sequence[Groups], among: Sequence[int]) -> set[int] | None:
    """The dimensions of a mesh over which a gradient is terms; None if it is over other ranks."""
    if gradient.kind is not Kind.UNSUMMED:
        return set()
    wanted = [groups for groups, _ in gradient.options]
    for bits in range(1, 2 ** len(among)):
        chosen = [k for i, k in enumerate(among) if bits >> i & 1]
        if joined(group for k in chosen for group in axes[k]) in wanted:
            return set(chosen)
    return None


# A DTensor, of a plain tensor


def _of_argument(
    context: Context, one: Compared, way: Way, boundary: _Boundary, later: set[tuple[int, ...]]
) -> Finding | None:
    """``from_local``: terms of a gradient are summed, and are summed again before; or they are left
    to be summed, and are not. Of both the other one would be right, by numbers."""
    placed, at = boundary.placed, boundary.at
    if placed.arrived is None or placed.after is None:
        return None
    declared = placed.gradient or placed.after
    for k, kind in enumerate(placed.arrived):
        groups = boundary.axes[k]
        if kind != _TERM or declared[k] not in (_WHOLE, _TERM) or not groups:
            continue
        other = _otherwise(context, boundary, groups, declared[k] == _TERM)
        mine = at.gradient
        if other is None or mine is None:
            continue
        summed = _summed_before(way, boundary, groups)
        over = boundary.text(k, context)
        wanted = [_TERM if k == i and declared[k] == _WHOLE else _WHOLE if k == i else kind
                  for i, kind in enumerate(declared)]  # fmt: skip
        say = f"grad_placements=[{', '.join(wanted)}]"
        about = one.gradient.kind, detail(one.gradient, context), (one.name,), _place(boundary)
        if declared[k] == _WHOLE and summed is not None and _is_terms(other, groups):
            if not _is_terms(mine, groups):
                return Finding(
                    *about[:3],
                    _with(about[3], f"{summed.line}: {summed.text}"),
                    f"the all-reduce over {over} in the backward pass of from_local is too many: "
                    f"{say}",
                    f"{summed.name} sums the gradients of what it gives away over {over}, and "
                    f"from_local() has summed them already.",
                )
        elif declared[k] == _TERM and summed is None and _is_whole(other):
            if not _is_whole(mine) and not later.intersection(groups):
                return Finding(
                    *about,
                    f"all-reduce over {over}, in the backward pass of from_local: {say}",
                    f"Each of {over} has a term of the gradient of this DTensor, and from_local() "
                    f"is told to leave them; nothing before it sums them.",
                )
    return None


def _with(place: Place, line: str) -> Place:
    return Place(place.module, place.line, place.text, (*place.also, line))


def _is_terms(relation: Relation, groups: Groups) -> bool:
    return relation.kind is Kind.UNSUMMED and groups in [each for each, _ in relation.options]


def _is_whole(relation: Relation) -> bool:
    plain = relation.kind is Kind.FACTOR and not relation.factors
    return relation.kind is Kind.EQUAL or plain


def _otherwise(
    context: Context, boundary: _Boundary, groups: Groups, is_left: bool
) -> Relation | None:
    """The relation of the gradient of the plain tensor to the twin's, if terms that are left were
    summed, and if those that are summed were left; None if it is not known."""
    at = boundary.at
    theirs = context.twin.tensors[at.twin].gradient
    if theirs is None or set(at.numbers) != {r for group in groups for r in group}:
        return None
    terms: dict[int, np.ndarray] = {}
    whole: dict[int, np.ndarray] = {}
    for rank, call in boundary.calls.items():
        tensors = context.ranks[rank].tensors
        given, made = tensors[at.numbers[rank]].gradient, tensors[call.outputs[0]].gradient
        if given is None or made is None or given.shape != made.shape:
            return None
        terms[rank], whole[rank] = made, given
    changed = {}
    for group in groups:
        total = sum(terms[r] for r in group)
        for r in group:
            changed[r] = whole[r] + (total - terms[r]) * (1 if is_left else -1)
    expected = {rank: theirs.ravel()[chosen] for rank, chosen in at.selections.items()}
    if any(changed[r].shape != expected[r].shape for r in expected):
        return None
    locations = context.locations
    return related(changed, expected, locations.gradients, locations.groups)


def _summed_before(way: Way, boundary: _Boundary, groups: Groups) -> Call | None:
    """A call between the parameter and the plain tensor whose backward sums over some groups."""
    call = boundary.calls[way.rank]
    numbers = set(way.numbers)
    for one in reversed(way.record.calls[: call.number]):
        if one.custom and one.inside < 0 and numbers.intersection(one.inputs):
            sums = [c for c in way.movements(one)[1] if c.reduction == "sum"]
            if any(tuple(sorted(c.ranks)) in groups for c in sums):
                return one
    return None


# Placements of tensors


def misplaced(context: Context, parameters: tuple[str, ...]) -> Finding | None:
    """The first plain tensor of which the program makes a DTensor of other placements than it
    has."""
    for boundary in _boundaries(context, min(context.ranks), _FROM):
        placed = boundary.placed
        if placed.after is None:
            continue
        for k, kind in enumerate(placed.after):
            has = _placement(context, boundary.at, boundary.axes[k])
            if not has or has.split("(")[0] == kind.split("(")[0]:
                continue
            wanted = [has if i == k else each for i, each in enumerate(placed.after)]
            over = boundary.text(k, context)
            form = {_WHOLE: "hold copies of one tensor", _TERM: "hold terms of a sum"}
            return Finding(
                Kind.OTHER,
                "",
                parameters,
                _place(boundary),
                f"placements [{', '.join(wanted)}] of from_local()",
                f"{over[0].upper()}{over[1:]} {form.get(has, 'hold parts of one tensor')} here, "
                f"and the program declares {kind}: DTensor takes them for another tensor.",
                "the argument of from_local()",
            )
    return None


def _placement(context: Context, at: Location, groups: Groups) -> str:
    """The placement of a tensor along a dimension of a mesh; empty if it cannot be told."""
    if not groups:
        return ""
    if at.form == TERMS:
        return _TERM if at.groups == groups else ""
    if _are_copies(at, groups):
        return _WHOLE
    whole = context.twin.tensors[at.twin].value
    part = next(iter(at.selections.values())).shape
    if whole is None or whole.ndim != len(part):
        return ""
    cut = [d for d, (a, b) in enumerate(zip(part, whole.shape, strict=True)) if a != b]
    apart = all(
        len(set(at.selections[a].ravel().tolist()) & set(at.selections[b].ravel().tolist())) == 0
        for group in groups for a in group for b in group if a < b
    )  # fmt: skip
    return f"Shard({cut[0]})" if len(cut) == 1 and apart else ""
