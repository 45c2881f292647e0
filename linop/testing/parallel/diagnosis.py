"""From wrong gradients to the place in the program that makes them wrong.

Gradients travel from the loss to the parameters. Of each tensor on the way that is a copy, a block
or a term of a tensor of the twin, it is known how its gradient is related to the twin's
(`linop.testing.parallel.locations`). The fault lies where a right gradient becomes a wrong one, or
behind the backward pass (`linop.testing.parallel.after`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from linop.testing.parallel.after import (
    after_the_pass,
    moved_gradients,
    rest_is_missing,
    scaled_by_rank,
    summed_twice,
    treated_as_others,
)
from linop.testing.parallel.findings import (
    Finding,
    Place,
    Verdict,
    groups_text,
    ranks_text,
)
from linop.testing.parallel.locations import Location
from linop.testing.parallel.parameters import Compared
from linop.testing.parallel.proofs import Pair
from linop.testing.parallel.recording.records import Call, Collective
from linop.testing.parallel.relations import Groups, Kind, Relation
from linop.testing.parallel.stages import between_stages, returned
from linop.testing.parallel.ways import Context, Way, scaled
from linop.testing.parallel.words import (
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
    sums_of_gradients,
    titles,
    used_name,
    with_switches,
)


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
                made = _broken(context, known[name], start, found, way)
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
    moved = bool(moved_gradients(context, one))
    if again := summed_twice(context, one):
        return again
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
        if found := way.broken_pair(start):
            return _broken(context, one, final, found, way)
        if start.kind is Kind.UNSUMMED and (call := way.copying(start)):
            return _copied(context, one, way, start, call)
        if start.kind in (Kind.OTHER, Kind.SHARD):
            if cut := way.detached(start):
                return _detached(context, one, final, cut)
            moved = way.undifferentiated()
            if moved is not None and not returned(context, rank, moved):
                return _not_differentiated(context, one, final, moved)
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
                return _broken(context, one, final, (turn[1], pair), way)
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
        return Finding(
            kind,
            f"over {groups}",
            (one.name,),
            place,
            f"all-reduce {OF_ITS} over {groups}{by}",
            f"It is replicated, and the ranks use it {form}: each has a term of its gradient, and "
            f"no sum over {groups} ran.{_DDP if averages else ''}",
        )
    if kind is Kind.FACTOR and context.overall != 1:
        return _of_the_loss(context, one, final)
    if kind is Kind.NONE:
        place = with_switches(context, place)
    elif kind is Kind.FACTOR:
        place = replace(place, also=tuple(dict.fromkeys(ends_of_the_loss(context))))
    changed = tuple(dict.fromkeys(p.line for p in one.held.values() if p.line))
    place = replace(place, also=(*place.also, *changed))
    return Finding(kind, detail(final, context), (one.name,), place, "", _plain_reason(kind))


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
    what = detail(final, context)
    if n > 1:
        why += f" The backward passes of {n} losses sum up their gradients"
        what = k if abs(final.factor - n) < 1e-6 else what
        why += f": each loss has to be divided by {n}." if what == k else "."
        what += " = the number of losses" * (what == k)
    place = Place("", line, text, (*lines[1:], *changes))
    return Finding(Kind.FACTOR, what, (one.name,), place, "", why, "the loss")


def _plain_reason(kind: Kind) -> str:
    if kind is Kind.NONE:
        return "No gradient arrives: it is not used in a way that is differentiated."
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
    groups = groups_text(start.groups, context.names) if start.groups else ""
    place = place_of(call, here)
    name = used_name(call, way) if call else ""
    if kind is Kind.UNSUMMED:
        what = f"the input of {name}" if name else "this tensor"
        own = f"module {module_of(one.name)}"
        place = replace(place, also=(*place.also, own) if module_of(one.name) else place.also)
        form = here.form if here is not None else "on several ranks"
        return Finding(
            kind,
            f"over {groups}",
            (one.name,),
            place,
            f"all-reduce over {groups}, in the backward pass",
            f"{what[0].upper()}{what[1:]} is {form}, and {groups} use it for different parts "
            f"of the model: its gradient is the sum of theirs, an all-reduce, and none ran.",
        )
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
        return _mixed(context, one, way, *found)
    if kind in (Kind.OTHER, Kind.SHARD) and (pair_on_way := way.unlike_its_adjoint()):
        return _broken(context, one, final, pair_on_way, way)
    moved_back = way.movements(call) if call else ([], [])
    operator = ""
    why = "The gradients of what is computed here are the twin's, those of its arguments are not."
    wrong = kind in (Kind.OTHER, Kind.SHARD) and here is not None
    if wrong and call is not None and call.custom and way.has_right_result(call):
        operator = f"the adjoint of {call.name}"
        why = (
            f"The gradient of the result of {call.name} is right, that of its argument is not: its "
            f"backward is not the derivative of its forward, or leaves out what other ranks send."
        )
    if wrong and not operator and (local := way.local_functions(start)):
        place = replace(place, also=(*place.also, *(f"{c.line}: {c.text}" for c in local)))
        names = ", ".join(dict.fromkeys(c.name for c in local))
        why += (
            f" On its way are functions with a backward of their own ({names}), which move nothing "
            f"between ranks: torch.autograd.gradcheck tells if they are right."
        )
    if kind is Kind.FACTOR and moved_back[1] and final.factor > 1:
        there, back = (_each(one) or "nothing" for one in moved_back)
        operator = f"the {back} of the backward pass is too many"
        why = (
            f"Forward: {there}, from terms of a sum to one tensor that is replicated, since each "
            f"rank has its whole gradient. The adjoint is the identity; {back} ran."
        )
    return Finding(kind, detail(final, context, moved_back[1]), (one.name,), place, operator, why)


def _mixed(context: Context, one: Compared, way: Way, call: Call, groups: Groups) -> Finding:
    over = groups_text(groups, context.names)
    return Finding(
        Kind.OTHER,
        "",
        (one.name,),
        place_of(call, None),
        f"all-reduce over {over}, in the backward pass of what {used_name(call, way)} uses",
        f"The input of {used_name(call, way)} is replicated, and {over} use it here for different "
        f"parts of the model: its gradient from here is a term on each of them, and no sum ran "
        f"before it is added to those of its other uses, which are whole.",
    )


_ADJOINTS = {"all_reduce": "all-reduce", "all_gather": "reduce-scatter", "broadcast": "sum-reduce"}
"""Of collectives whose results are used by each rank for another part."""


def _detached(context: Context, one: Compared, final: Relation, cut: Call) -> Finding:
    return Finding(
        final.kind,
        detail(final, context),
        (one.name,),
        Place(cut.module, cut.line, cut.text),
        "the detach of a tensor that has a gradient is too many",
        "What is computed from the result here has a gradient in the twin, and sends none back.",
    )


def _not_differentiated(
    context: Context, one: Compared, final: Relation, moved: Collective
) -> Finding:
    there = titles([moved])[0]
    adjoint = f"{_ADJOINTS[moved.name]} over {ranks_text(moved.ranks)}"
    return Finding(
        final.kind,
        detail(final, context),
        (one.name,),
        at(moved, ""),
        f"{adjoint}, in the backward pass",
        f"This {there} is not differentiated: what the ranks do with its result sends no gradients "
        f"back to the other ranks. Where they use it for different parts, its adjoint is "
        f"the {adjoint}.",
    )


def _copied(context: Context, one: Compared, way: Way, start: Relation, call: Call) -> Finding:
    groups = groups_text(start.groups, context.names)
    there = ", ".join(dict.fromkeys(titles(way.movements(call)[0])))
    adjoint = "sum-reduce" if "broadcast" in there else "reduce-scatter"
    return Finding(
        Kind.UNSUMMED,
        f"over {groups}",
        (one.name,),
        Place(call.module, call.line, call.text),
        f"{adjoint} over {groups}, in the backward pass of {call.name}",
        f"Forward: {there}. Each rank's copy is used for another part, so the adjoint is the "
        f"{adjoint} of their gradients; nothing is moved backward.",
    )


def _each(moved: Sequence[Collective]) -> str:
    return ", ".join(dict.fromkeys(titles(moved)))


def _broken(
    context: Context, one: Compared, final: Relation, found: tuple[Call, Pair], way: Way
) -> Finding:
    call, pair = found
    kind = final.kind
    if kind is Kind.OTHER:
        at = context.locations.at.get((way.rank, call.inputs[0])) if call.inputs else None
        relation = at.gradient if at is not None else None
        if relation is not None and relation.kind not in (Kind.EQUAL, Kind.FACTOR):
            kind = relation.kind
    operator = f"the adjoint of {call.name}"
    there, back = way.movements(call)
    if pair.factor != 1:
        operator = f"{operator}: its backward is {factor_text(pair.factor)} times that"
    elif back and final.kind is Kind.FACTOR and final.factor > 1:
        operator = f"the {_each(back)} of the backward pass is too many"
    elif (
        not back
        and pair.to_copies
        and (moved := next((c for c in there if c.name in _ADJOINTS), None))
    ):
        adjoint = f"{_ADJOINTS[moved.name]} over {ranks_text(moved.ranks)}"
        operator = f"{adjoint}, in the backward pass of {call.name}"
    others = [other for _, other in way.pairs(context.broken) if other.line != pair.line]
    more = dict.fromkeys(f" On its way too: {each.line} {each.name}. {each.sentence}"
                         for each in others if each.proven is False)  # fmt: skip
    return Finding(
        kind,
        detail(final, context, back),
        (one.name,),
        Place(call.module, call.line, call.text),
        operator,
        pair.sentence + "".join(more),
    )
