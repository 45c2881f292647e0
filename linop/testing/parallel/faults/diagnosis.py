"""From wrong gradients to the place in the program that makes them wrong.

Gradients travel from the loss to the parameters. Of each tensor on the way that is a copy, a block
or a term of a tensor of the twin, it is known how its gradient is related to the twin's
(`twins.locations`). The fault lies where a right gradient becomes a wrong one, or behind the
backward pass (`faults.after`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from linop.testing.parallel.faults.after import (
    after_the_pass,
    dropped,
    moved_gradients,
    rest_is_missing,
    scaled_by_rank,
    spread,
    summed_twice,
    treated_as_others,
)
from linop.testing.parallel.faults.alone import proven, verdicts
from linop.testing.parallel.faults.causes import (
    broken,
    copied,
    detached,
    each_once,
    mixed,
    not_differentiated,
    unsummed,
)
from linop.testing.parallel.faults.context import Context, scaled
from linop.testing.parallel.faults.placements import misdeclared
from linop.testing.parallel.faults.stages import between_stages, returned
from linop.testing.parallel.faults.ways import Way
from linop.testing.parallel.faults.words import (
    at,
    averaged,
    detail,
    ends_of_the_loss,
    factor_text,
    knows_the_loss,
    lines_of,
    module_of,
    of_module,
    parts_of_the_loss,
    place_of,
    sum_of_gradients,
    sums_of_gradients,
    times_of_a_sum,
    titles,
    used_name,
    with_switches,
)
from linop.testing.parallel.findings import (
    Finding,
    Place,
    Verdict,
    groups_text,
)
from linop.testing.parallel.recording.records import Call
from linop.testing.parallel.twins.locations import Location
from linop.testing.parallel.twins.parameters import Compared
from linop.testing.parallel.twins.relations import Groups, Kind, Relation


def diagnosed(context: Context, wrong: Sequence[Compared]) -> list[Finding]:
    """The faults of parameters whose gradients alone are wrong, those alike as one; before what
    follows from them."""
    popular = _popular(one.left or one.gradient for one in wrong)
    found = [_of_parameter(context, one, popular) for one in wrong]
    alike: dict[tuple[object, ...], list[Finding]] = {}
    for one in found:
        alike.setdefault((one.kind, one.detail, one.operator, one.explanation), []).append(one)
    causes: dict[tuple[object, ...], list[Finding]] = {}
    for one in map(_merged, alike.values()):
        cause = one.operator, one.explanation, one.place.line
        causes.setdefault(cause if one.operator else (one,), []).append(one)
    merged = [_of_one_cause(each) for each in causes.values()]
    named = [one for one in merged if one.operator]
    behind = {k: one for k, one in enumerate(named, 1) if OF_ITS not in one.operator}
    known = {one.name: one for one in wrong}
    return named + [
        _suspected(context, _following(context, one, behind), known)
        for one in merged
        if not one.operator
    ]


OF_ITS = "of its gradient"
"""In operators of sums of gradients of parameters, through which no other gradient comes."""


_ITS = "Its gradients"


def _following(context: Context, one: Finding, named: Mapping[int, Finding]) -> Finding:
    """A finding without an operator; if its gradients come through the places of others, given by
    their numbers in the report, it says so."""
    from_them = [
        str(k)
        for k, other in named.items()
        if all(_passes(context, name, other.place) for name in one.parameters)
    ]
    if one.kind is not Kind.OTHER or not from_them:
        return one
    why = f"{_ITS} come through the place of fault {' and '.join(from_them)}, and are wrong"
    return replace(one, explanation=f"{why} since those are; mend that first.")


def _suspected(context: Context, one: Finding, known: Mapping[str, Compared]) -> Finding:
    """A finding without an operator that follows from no other one; at a pair on its way that is
    adjoint between some of the spaces that it may have, if there is one."""
    if one.kind not in (Kind.OTHER, Kind.SHARD) or one.explanation.startswith(_ITS):
        return one
    for name in one.parameters:
        start = known[name].gradient
        for rank in sorted(known[name].held):
            way = Way.of(context, rank, name)
            if found := way.broken_pair(start, context.suspect):
                made = broken(context, known[name], start, found, way)
                return replace(made, parameters=one.parameters)
    return one


def _passes(context: Context, name: str, place: Place) -> bool:
    """True if a gradient of a parameter comes from what is computed at a place."""
    for rank, record in context.ranks.items():
        numbers = set(Way.of(context, rank, name).numbers)
        for call in record.calls:
            if (call.line, call.module) == (place.line, place.module) and place.line:
                if numbers.intersection(call.inputs):
                    return True
    return False


def _merged(alike: Sequence[Finding]) -> Finding:
    """One finding for several that differ in their parameters and places."""
    first = alike[0]
    names = tuple(name for one in alike for name in one.parameters)
    places = dict.fromkeys(str(replace(one.place, also=())) for one in alike)
    also = dict.fromkeys(line for one in alike for line in one.place.also)
    others = (*list(places)[1:], *also)
    return replace(first, parameters=names, place=replace(first.place, also=others))


def _of_one_cause(found: Sequence[Finding]) -> Finding:
    """One finding for several of one cause, which are of different kinds."""
    first, *others = sorted(found, key=lambda one: -len(one.parameters))
    unlike = {n: Verdict(one.kind, one.detail) for one in others for n in one.parameters}
    return replace(first, parameters=(*first.parameters, *unlike), unlike=unlike)


def _popular(relations: Iterable[Relation]) -> Groups:
    """The partition that most relations have among their options."""
    count: dict[Groups, int] = {}
    for relation in relations:
        for groups, _ in relation.options:
            count[groups] = count.get(groups, 0) + 1
    return max(count, key=lambda one: count[one]) if count else ()


def _of_parameter(context: Context, one: Compared, popular: Groups) -> Finding:
    final = one.gradient.preferring(popular)
    left = one.left.preferring(popular) if one.left is not None else None
    moved = moved_gradients(context, one)
    if left is not None and left.kind is Kind.UNSUMMED and not any(c.reduction for c in moved):
        if undone := spread(context, one, left, final):
            return undone
    if found := dropped(context, one) or summed_twice(context, one):
        return found
    if declared := misdeclared(context, one):
        return declared
    if rest_is_missing(context, one, one.gradient):
        return _on_the_way(context, one, one.gradient, one.gradient)
    as_others = left is not None and treated_as_others(context, left, final)
    if _is_of_all(context, one, left, final):
        return _of_the_loss(context, one, final)
    if left is not None and not as_others and (moved or not _alike(left, final)):
        if finding := after_the_pass(context, one, left, final):
            return finding
    if left is None and (finding := scaled_by_rank(context, one, final)):
        return finding
    start = left if left is not None and left.kind is not Kind.EQUAL and not as_others else final
    return _on_the_way(context, one, start, final)


def _alike(a: Relation, b: Relation) -> bool:
    return a.kind is b.kind and a.options == b.options and abs(a.factor - b.factor) < 1e-6


_DDP = (
    " DistributedDataParallel sums gradients only if its own forward is called (not that of the "
    "module inside), outside of no_sync(), and if each parameter gets one (or "
    "find_unused_parameters=True)."
)


def _on_the_way(context: Context, one: Compared, start: Relation, final: Relation) -> Finding:
    """A fault between the loss and the parameter."""
    kind = final.kind if final.kind is not Kind.EQUAL else start.kind
    form = "on different parts of the batch or of the sequence"
    for rank in sorted(one.held):
        way = Way.of(context, rank, one.name)
        if not way.locations:
            continue
        if start.kind is not Kind.UNSUMMED and (wrong := proven(context, one, way, start, final)):
            return wrong
        if found := way.broken_pair(start):
            return broken(context, one, final, found, way)
        if start.kind is Kind.UNSUMMED and (call := way.copying(start)):
            return copied(context, one, way, start, call)
        if start.kind in (Kind.OTHER, Kind.SHARD, Kind.NONE) and (cut := way.detached(start)):
            return detached(context, one, final, cut)
        if start.kind in (Kind.OTHER, Kind.SHARD):
            moved = way.undifferentiated(start)
            if moved is not None and not returned(context, rank, moved):
                return not_differentiated(context, one, final, moved)
        turn = way.turn(start)
        if start.kind is Kind.UNSUMMED and turn is not None and turn[0] is not None:
            if way.carries_right_ones(turn[0]):  # a sum there would spoil them
                form = "for different parts of the model"
                break
        if turn is not None and turn[0] is not None:
            if found_there := between_stages(context, one, way, turn[0], final):
                return found_there
        if turn is not None and turn[1] is not None:
            pair = context.broken.get((rank, turn[1].number))
            if pair is not None:
                return broken(context, one, final, (turn[1], pair), way)
        if turn is not None:
            return _turned(context, one, way, start, final, *turn)
    over = start.groups or final.groups
    groups = groups_text(over, context.names) if over else ""
    place = of_module(context, one.name)
    if kind is Kind.UNSUMMED:
        if len({lines_of(record, one.name) for record in context.ranks.values()}) > 1:
            form = "in different places of the model"
        place = with_switches(context, place)
        averages = averaged(context)
        by = ", by DistributedDataParallel" if averages else ""
        times = times_of_a_sum(final)
        mean = f" The sum has to be taken {times}, as a mean is." if times else ""
        return Finding(
            kind,
            f"over {groups}" + f"; their sum {times}" * bool(times),
            (one.name,),
            place,
            f"all-reduce {OF_ITS} over {groups}" + f", {times}" * bool(times) + by,
            f"It is replicated, and the ranks use it {form}: each has a term of its gradient, and "
            f"no sum over {groups} ran.{mean}{_DDP if averages else ''}",
        )
    if kind is Kind.FACTOR and context.overall != 1:
        return _of_the_loss(context, one, final)
    if kind is Kind.NONE and (switched := with_switches(context, place).also):
        line, _, text = switched[0].partition(": ")
        module = f"module {place.module}" if place.module else ""
        also = tuple(one for one in (*switched[1:], module) if one)
        return Finding(
            kind,
            detail(final, context),
            (one.name,),
            Place("", line, text, also),
            "the sums of gradients that this line switches off",
            "No gradient arrives: data parallelism keeps what the backward pass computes until the "
            "collectives run that this line switches off.",
        )
    if kind is Kind.FACTOR:
        place = replace(place, also=tuple(dict.fromkeys(ends_of_the_loss(context))))
    changed = tuple(dict.fromkeys(p.line for p in one.held.values() if p.line))
    place = replace(place, also=(*place.also, *changed))
    seen = any(at.gradient is not None for rank in one.held
               for at in Way.of(context, rank, one.name).beyond())  # fmt: skip
    why = _plain_reason(kind, seen)
    return Finding(kind, detail(final, context), (one.name,), place, "", why)


def _is_of_all(context: Context, one: Compared, left: Relation | None, final: Relation) -> bool:
    """True if all gradients have this one's factor, and neither a movement on its way nor what
    becomes of it after the backward pass explains it."""
    if final.kind is not Kind.FACTOR or context.overall == 1:
        return False
    if any(p.line for p in one.held.values()):
        return False
    before = None if left is None else scaled(left)
    if before is not None and abs(before - final.factor) > 1e-6 * abs(final.factor):
        return False
    ways = (Way.of(context, rank, one.name) for rank in one.held)
    return not any(way.broken_pair(final) for way in ways)


def _of_the_loss(context: Context, one: Compared, final: Relation) -> Finding:
    """A factor that all gradients have, which is that of the loss of which they are."""
    lines = list(dict.fromkeys(ends_of_the_loss(context)))
    changes = dict.fromkeys(p.line for p in one.held.values() if p.line)
    sums = sums_of_gradients(context)
    changes |= dict.fromkeys(sums)
    if not knows_the_loss(context):
        lines = [*sums, *lines]
    line, _, text = lines[0].partition(": ") if lines else ("", "", "")
    changes = dict.fromkeys(each for each in changes if each not in lines)
    n = parts_of_the_loss(context)
    k = factor_text(final.factor)
    why = (
        f"All gradients are {k} times the twin's: so is the loss whose backward pass runs, or they "
        f"are by what all of them go through, such as a mean over the ranks."
    )
    what, operator, origin = detail(final, context), "", "the loss"
    if n > 1:
        why += f" The backward passes of {n} losses sum up their gradients"
        is_their_number = abs(final.factor - n) < 1e-6
        why += f": each loss has to be divided by {n}." if is_their_number else "."
        what = f"{k} = the number of losses" if is_their_number else what
    place = Place("", line, text, (*lines[1:], *changes))
    if not n > 1 and (moved := sum_of_gradients(context, final.factor)):
        operator = (
            f"the {titles([moved])[0]} has to be a mean: times {factor_text(1 / final.factor)}"
        )
        divided = dict.fromkeys(each for r in context.ranks.values() for each in r.divided)
        place, origin = replace(at(moved, ""), also=(*divided, *lines, *changes)), ""
        place = replace(place, also=tuple(one for one in place.also if moved.line not in one))
    return Finding(Kind.FACTOR, what, (one.name,), place, operator, why, origin)


def _plain_reason(kind: Kind, seen: bool) -> str:
    """The sentence about a fault of which no more is known.

    Args:
        seen: gradients of tensors that are computed from the parameter are known.
    """
    if kind is Kind.NONE:
        return "No gradient arrives: it is not used in a way that is differentiated."
    if not seen:
        return "The gradients of what is computed from it are not known: they were not seen."
    return (
        "The gradients of the tensors that it acts on are the twin's: the fault is in what becomes "
        "of its own gradient."
    )


def _turned(
    context: Context,
    one: Compared,
    way: Way,
    start: Relation,
    final: Relation,
    here: Location | None,
    call: Call | None,
) -> Finding:
    """The fault at a place where a right gradient becomes a wrong one: `here` has the wrong one,
    and `call` used it."""
    kind = final.kind if final.kind is not Kind.EQUAL else start.kind
    if kind is Kind.OTHER and here is not None and here.gradient is not None:
        if here.gradient.kind is not Kind.FACTOR:
            kind = here.gradient.kind
    place = place_of(call, here)
    name = used_name(call, way) if call else ""
    if kind is Kind.UNSUMMED:
        what = f"the input of {name}" if name else "this tensor"
        own = f"module {module_of(one.name)}"
        place = replace(place, also=(*place.also, own) if module_of(one.name) else place.also)
        return unsummed(context, one, way, start, place, (what, here, call))
    if kind is Kind.NONE:
        moved = way.collective_of(here) if here is not None else None
        by = f"the {moved.name.replace('_', '-')} at {moved.line}" if moved else "what uses it"
        if moved:
            place = at(moved, place.module)
        return Finding(
            kind,
            "",
            (one.name,),
            place,
            "the adjoint of what moves the tensor, in the backward pass",
            f"This tensor requires a gradient, and gets none: {by} is not differentiated.",
        )
    if kind is Kind.OTHER and here is not None and (found := way.mixed(here, start)):
        return mixed(context, one, way, *found)
    if kind in (Kind.OTHER, Kind.SHARD) and (pair_on_way := way.unlike_its_adjoint()):
        return broken(context, one, final, pair_on_way, way)
    moved_back = way.movements(call) if call else ([], [])
    operator = ""
    why = "The gradients of what is computed here are the twin's, those of its arguments are not."
    wrong = kind in (Kind.OTHER, Kind.SHARD) and here is not None
    if wrong and call is not None and call.custom and way.has_right_result(call):
        operator = f"the adjoint of {call.name}"
        said = verdicts(context, way, start).get(call.name, "")
        either = "" if said.startswith("alone") else "is not the derivative of its forward, or "
        why = (
            f"The gradient of the result of {call.name} is right, that of its argument is not: its "
            f"backward {either}leaves out what other ranks send{' (' * bool(said)}{said}"
            f"{')' * bool(said)}."
        )
    if wrong and not operator and (local := way.local_functions(start)):
        place = replace(place, also=(*place.also, *(f"{c.line}: {c.text}" for c in local)))
        known = verdicts(context, way, start)
        each = (f"{c.name}: {known[c.name]}" if c.name in known else c.name for c in local)
        names = ", ".join(dict.fromkeys(each))
        what = "functions with a backward of their own, which move nothing between ranks"
        why += f" On its way are {what} ({names})."
    if kind is Kind.FACTOR and moved_back[1] and final.factor > 1:
        there, back = (each_once(one) or "nothing" for one in moved_back)
        operator = f"the {back} of the backward pass is too many"
        why = (
            f"Forward: {there}, from terms of a sum to one tensor that is replicated, since each "
            f"rank has its whole gradient. The adjoint is the identity; {back} ran."
        )
    return Finding(kind, detail(final, context, moved_back[1]), (one.name,), place, operator, why)
