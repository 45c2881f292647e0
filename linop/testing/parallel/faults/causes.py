"""Causes of wrong gradients on their way back from the loss, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from linop.testing.parallel.faults.context import Context
from linop.testing.parallel.faults.ways import Way
from linop.testing.parallel.faults.words import (
    at,
    detail,
    factor_text,
    place_of,
    titles,
    used_name,
)
from linop.testing.parallel.findings import Finding, Place, groups_text, ranks_text
from linop.testing.parallel.pairs.proofs import Pair
from linop.testing.parallel.recording.records import Call, Collective
from linop.testing.parallel.twins.locations import Location
from linop.testing.parallel.twins.parameters import Compared
from linop.testing.parallel.twins.relations import Groups, Kind, Relation


def unsummed(
    context: Context,
    one: Compared,
    way: Way,
    start: Relation,
    place: Place,
    used: tuple[str, Location | None, Call | None],
) -> Finding:
    """The fault of a tensor whose gradients on several ranks are terms, and are not summed in the
    backward pass.

    Args:
        used: the tensor in words, the tensor, and the call that uses it.
    """
    what, here, call = used
    groups = groups_text(start.groups, context.names)
    form = here.form if here is not None else "on several ranks"
    head = (
        f"{what[0].upper()}{what[1:]} is {form}, and {groups} use it for different parts "
        f"of the model: its gradient is the sum of theirs, an all-reduce, and "
    )
    operator = f"all-reduce over {groups}, in the backward pass"
    if call is not None and here is not None and (ran := _of_a_copy(way, start, here, call)):
        return Finding(
            Kind.UNSUMMED,
            f"over {groups}",
            (one.name,),
            replace(place, also=(f"{ran.line}: {ran.text}", *place.also)),
            operator,
            f"{head}the {titles([ran])[0]} that runs in the backward of {call.name} ({ran.line}) "
            f"does not change what that returns: it is of a copy, and its result is not used.",
        )
    return Finding(
        Kind.UNSUMMED, f"over {groups}", (one.name,), place, operator, f"{head}none ran."
    )


def _of_a_copy(way: Way, start: Relation, here: Location, call: Call) -> Collective | None:
    """The sum that the backward of a call runs of a tensor as large as a gradient that needs it."""
    size = sum(np.size(at) for rank, at in here.selections.items() if rank == way.rank)
    for moved in way.movements(call)[1]:
        if moved.reduction and moved.value is not None and moved.value.size == size:
            if tuple(sorted(moved.ranks)) in start.groups:
                return moved
    return None


def mixed(context: Context, one: Compared, way: Way, call: Call, groups: Groups) -> Finding:
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


_DETACHED = {**_ADJOINTS, "reduce_scatter": "all-gather", "all_to_all": "all-to-all"}
"""Of collectives that are not differentiated."""


def detached(context: Context, one: Compared, final: Relation, cut: Call) -> Finding:
    return Finding(
        final.kind,
        detail(final, context),
        (one.name,),
        Place(cut.module, cut.line, cut.text),
        "the detach of a tensor that has a gradient is too many",
        "What is computed from the result here has a gradient in the twin, and sends none back.",
    )


def not_differentiated(
    context: Context, one: Compared, final: Relation, moved: Collective
) -> Finding:
    there = titles([moved])[0]
    adjoint = f"{_DETACHED[moved.name]} over {ranks_text(moved.ranks)}"
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


def copied(context: Context, one: Compared, way: Way, start: Relation, call: Call) -> Finding:
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


def each_once(moved: Sequence[Collective]) -> str:
    return ", ".join(dict.fromkeys(titles(moved)))


def broken(
    context: Context, one: Compared, final: Relation, found: tuple[Call, Pair], way: Way
) -> Finding:
    call, pair = found
    kind = final.kind
    if kind is Kind.OTHER:
        at = context.locations.at.get((way.rank, call.inputs[0])) if call.inputs else None
        relation = at.gradient if at is not None else None
        if relation is not None and relation.kind not in (Kind.EQUAL, Kind.FACTOR):
            kind = relation.kind
    first, names, also = _same_on_other_ranks(context, call, pair)
    operator = f"the adjoint of {names}"
    there, back = way.movements(call)
    if pair.factor != 1:
        operator = f"{operator}: its backward is {factor_text(pair.factor)} times that"
    elif back and final.kind is Kind.FACTOR and final.factor > 1:
        operator = f"the {each_once(back)} of the backward pass is too many"
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
        Place(first.module, first.line, first.text, also),
        operator,
        pair.sentence + "".join(more),
    )


def _same_on_other_ranks(
    context: Context, call: Call, pair: Pair
) -> tuple[Call, str, tuple[str, ...]]:
    """Of a pair whose calls are of different functions, as one that sends and one that receives
    are: the first of them, the names of all, and the lines of the others. Of other pairs the call
    itself."""
    calls = [context.ranks[rank].calls[number] for among in (context.broken, context.suspect)
             for (rank, number), one in among.items() if one is pair]  # fmt: skip
    names = list(dict.fromkeys(one.name for one in calls))
    if len(names) < 2:
        return call, call.name, ()
    lines = dict.fromkeys(f"{one.line}: {one.text}" for one in calls)
    return calls[0], " and ".join(names), tuple(lines)[1:]
