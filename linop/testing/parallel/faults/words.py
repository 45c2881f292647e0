"""Words of a diagnosis: factors, groups of ranks, places in the program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from linop.testing.parallel.faults.context import Context
from linop.testing.parallel.faults.ways import Way
from linop.testing.parallel.findings import Place, groups_text, ranks_text
from linop.testing.parallel.recording.records import (
    AFTER,
    FORWARD,
    Call,
    Collective,
    Record,
    Tensor,
)
from linop.testing.parallel.twins.locations import Location
from linop.testing.parallel.twins.relations import Kind, Relation


def detail(relation: Relation, context: Context, moved: Sequence[Collective] = ()) -> str:
    """The words about a relation beside its kind.

    Args:
        moved: collectives that have to do with it, whose ranks a factor counts first.
    """
    if relation.kind is Kind.FACTOR and relation.factors:
        each = (f"{factor_text(k)} on rank {r}" for r, k in relation.factors.items())
        return ", ".join(each)
    if relation.kind is Kind.FACTOR:
        return f"{factor_text(relation.factor)}{_factor_of(relation.factor, context, moved)}"
    if relation.kind is Kind.UNSUMMED:
        return f"over {groups_text(relation.groups, context.names)}"
    return ""


def times_of_a_sum(relation: Relation) -> str:
    """The number by which a sum of terms has to be multiplied, ``times 1/2``; empty if it is 1."""
    k = relation.factor if relation.kind is Kind.UNSUMMED else 1.0
    return "" if not k or abs(k - 1) < 1e-6 else f"times {factor_text(1 / k)}"


def factor_text(k: float) -> str:
    """A factor, as a fraction where it is one of small numbers."""
    for bottom in range(1, 65):
        top = round(k * bottom)
        if top and abs(k * bottom - top) < 1e-7 * bottom:
            return str(top) if bottom == 1 else f"{top}/{bottom}"
    return f"{k:.12g}" if abs(k - 1) < 1e-4 else f"{k:.6g}"


def _factor_of(k: float, context: Context, moved: Sequence[Collective]) -> str:
    """The ranks whose number a factor is."""
    for size, word in ((k, ""), (1 / k if k else 0, "one over ")):
        n = round(size)
        if n < 2 or abs(size - n) > 1e-6:
            continue
        over = {tuple(sorted(one.ranks)) for one in moved}
        axes = sorted(context.names.items(), key=lambda each: not over.intersection(each[0]))
        for groups, name in axes:
            if len(groups[0]) == n:
                return f" = {word}the number of ranks of {name!r}"
        if n == len(context.ranks):
            return f" = {word}the number of ranks"
    return ""


def titles(collectives: Sequence[Collective]) -> list[str]:
    return [f"{c.name.replace('_', '-')} over {ranks_text(c.ranks)}" for c in collectives]


def module_of(name: str) -> str:
    return name.rpartition(".")[0]


def of_module(context: Context, name: str) -> Place:
    """The module of a parameter, and the line that uses it first."""
    calls = uses_of(context, name)
    if not calls:
        records = context.ranks.values()
        calls = [c for r in records for c in r.calls if c.module == module_of(name) and c.module]
    first = calls[0] if calls else None
    return Place(module_of(name), first.line if first else "", first.text if first else "")


def uses_of(context: Context, name: str) -> list[Call]:
    """The calls that use a parameter, one for each place."""
    found: dict[str, Call] = {}
    for record in context.ranks.values():
        numbers = {one.number for one in record.tensors if one.parameter == name}
        for call in record.calls:
            if call.phase != AFTER and call.inside < 0 and numbers.intersection(call.inputs):
                found.setdefault(call.line, call)
    return list(found.values())


def lines_of(record: Record, name: str) -> frozenset[str]:
    """The lines at which a rank uses a parameter."""
    numbers = {one.number for one in record.tensors if one.parameter == name}
    used = (c for c in record.calls if c.phase == FORWARD and numbers.intersection(c.inputs))
    return frozenset(call.line for call in used)


def used_name(call: Call, way: Way) -> str:
    """The module that a call belongs to, or the parameter that it uses."""
    if call.module:
        named = [way.record.tensors[n].parameter for n in call.inputs]
        own = [name for name in named if name.startswith(f"{call.module}.")]
        if own or call.kind:
            return call.module
    named = [way.record.tensors[n].parameter for n in call.inputs]
    names = [name for name in named if name]
    return module_of(names[0]) or names[0] if names else call.name


def place_of(call: Call | None, here: Location | None) -> Place:
    if call is not None:
        return Place(call.module, call.line, call.text)
    return Place(here.key[1], here.key[2]) if here is not None else Place()


def at(moved: Collective, module: str) -> Place:
    return Place(module, moved.line, moved.text)


def with_switches(context: Context, place: Place) -> Place:
    """With the lines that keep data parallelism from summing gradients."""
    lines = [each for record in context.ranks.values() for each in record.unsynchronized]
    return replace(place, also=tuple(dict.fromkeys(lines)))


def ends_of_the_loss(context: Context) -> list[str]:
    """The last lines of forward passes, which put the loss together."""
    return [f"{call.line}: {call.text}" for _, call in _ends(context)]


def knows_the_loss(context: Context) -> bool:
    """True if a line of the program computes the loss."""
    return any(any(_is_a_loss(record.tensors[n]) for n in call.outputs)
               for record, call in _ends(context))  # fmt: skip


def sums_of_gradients(context: Context) -> list[str]:
    """The lines of the program that reduce gradients, in or after backward passes."""
    return list(dict.fromkeys(f"{c.line}: {c.text}" for c in _sums_of_gradients(context)))


def _sums_of_gradients(context: Context) -> list[Collective]:
    return [
        c
        for record in context.ranks.values()
        for c in record.collectives
        if c.phase != FORWARD and c.backward_of < 0 and c.inside < 0 and c.line and c.reduction
        and not c.within
        and c.value is not None and c.value.size > 1
    ]  # fmt: skip


def sum_of_gradients(context: Context, factor: float) -> Collective | None:
    """The first of these if all are sums over as many ranks as a factor, and none is a mean."""
    sums = _sums_of_gradients(context)
    over = {len(c.ranks) for c in sums}
    alike = len(over) == 1 and abs(min(over) - factor) < 1e-6
    return sums[0] if alike and all(c.reduction == "sum" for c in sums) else None


def _ends(context: Context) -> list[tuple[Record, Call]]:
    """The calls that made the losses of ranks, and their records; if none is known, the last calls
    of forward passes."""
    found: list[tuple[bool, Record, Call]] = []
    for record in context.ranks.values():
        calls = [c for c in record.calls if c.phase == FORWARD and c.line
                 and c.name not in ("detach", "clone", "item")]  # fmt: skip
        losses = [c for c in calls if any(_is_a_loss(record.tensors[n]) for n in c.outputs)]
        losses = [c for c in losses if any(record.tensors[n].gradient is not None
                                           for n in c.outputs)] or losses  # fmt: skip
        found += [(bool(losses), record, c) for c in (losses or calls)[-1:]]
    known = any(one[0] for one in found)
    return [one[1:] for one in found if one[0] or not known]


def _is_a_loss(tensor: Tensor) -> bool:
    return tensor.differentiable and tensor.value is not None and tensor.value.size == 1


def parts_of_the_loss(context: Context) -> int:
    """The number of times that a rank computes the loss, each for a part of its batch."""
    for record, end in _ends(context)[:1]:
        alike = [c for c in record.calls if (c.name, c.line, c.phase) == (
            end.name, end.line, FORWARD) and c.inside < 0]  # fmt: skip
        differentiated = [c for c in alike if any(record.tensors[n].gradient is not None
                                                  for n in c.outputs)]  # fmt: skip
        return len(differentiated or alike)
    return 0


def averaged(context: Context) -> bool:
    """True if the program has a DistributedDataParallel, which averages gradients after a backward
    pass."""
    records = context.ranks.values()
    return any("DistributedDataParallel" in record.modules.values() for record in records)
