"""Functions of the program that move nothing between ranks, and whose backward is wrong: they are
looked at alone, when the step is repeated."""

from __future__ import annotations

from collections.abc import Iterator

from linop.testing.parallel.faults.context import Context
from linop.testing.parallel.faults.ways import Way
from linop.testing.parallel.faults.words import detail
from linop.testing.parallel.findings import Finding, Place
from linop.testing.parallel.recording.records import FORWARD, Call, Probe, Probed, Record
from linop.testing.parallel.twins.parameters import Compared
from linop.testing.parallel.twins.relations import Relation

_MOST = 6
"""Functions that are looked at in one repetition, of one rank."""
_TWIN = -1


def proven(
    context: Context, one: Compared, way: Way, start: Relation, final: Relation
) -> Finding | None:
    """The fault of a function on the way whose result has a right gradient, as far as that is
    known, and whose backward is not the adjoint of its derivative."""
    for call in _suspects(context, way, start):
        found = _looked_at(context, way.rank, call)
        if found is None or found.right is not False or _is_surrogate(context, call, found):
            continue
        return Finding(
            final.kind,
            detail(final, context),
            (one.name,),
            Place(call.module, call.line, call.text),
            f"the adjoint of {call.name}",
            f"The backward of {call.name} ({found.where}) is not the adjoint of its derivative: "
            f"{found.text}. It was run alone for that, with the arguments of this step.",
        )
    return None


def verdicts(context: Context, way: Way, start: Relation) -> dict[str, str]:
    """Verdicts about functions on the way that were looked at alone, by their titles."""
    said: dict[str, str] = {}
    for call in _suspects(context, way, start):
        found = _looked_at(context, way.rank, call)
        if found is None:
            continue
        if found.right:
            said[call.name] = "alone, its backward is the adjoint of its derivative"
        elif found.right is None:
            said[call.name] = f"it could not be looked at alone: {found.text}"
        elif _is_surrogate(context, call, found):
            said[call.name] = "its gradient is a surrogate, and the twin has the same one"
    return said


def _suspects(context: Context, way: Way, start: Relation) -> Iterator[Call]:
    """Functions that may make a right gradient a wrong one by themselves."""
    for call in way.local_calls(start):
        moves = any(any(Way(context, rank, []).movements(other)) for rank, record in
                    context.ranks.items() for other in _alike(record, call))  # fmt: skip
        given = [n for n in call.inputs if way.record.tensors[n].differentiable]
        is_right = bool(given) and all(map(way.is_right, given))
        if not moves and not is_right and way.has_right_result(call):
            yield call


def _alike(record: Record, call: Call) -> Iterator[Call]:
    """Calls of the same function in the same place."""
    for one in record.calls:
        if one.custom and one.phase == FORWARD and one.inside < 0:
            if (one.name, one.module, one.line) == (call.name, call.module, call.line):
                yield one


def _looked_at(context: Context, rank: int, call: Call) -> Probed | None:
    """Result about the function of a call; None if it was not looked at, which is asked for
    then."""
    record = context.twin if rank == _TWIN else context.ranks[rank]
    occurrence = [one.number for one in _alike(record, call)].index(call.number) + 1
    key = call.name, call.module, call.line, occurrence
    for one in record.probed:
        if (one.name, one.module, one.line, one.occurrence) == key:
            return one
    probe = Probe(rank, *key)
    if probe not in context.wanted and sum(p.rank == rank for p in context.wanted) < _MOST:
        context.wanted.append(probe)
    return None


def _is_surrogate(context: Context, call: Call, found: Probed) -> bool:
    """True if the twin calls the same function, whose backward is no derivative there either, or
    has not been looked at yet."""
    theirs = [one for one in context.twin.calls if one.custom and one.name == call.name
              and one.phase == FORWARD and one.inside < 0]  # fmt: skip
    theirs.sort(key=lambda one: one.module != call.module)
    if not theirs:
        return False
    of_twin = _looked_at(context, _TWIN, theirs[0])
    return of_twin is None or (of_twin.where == found.where and of_twin.right is False)
