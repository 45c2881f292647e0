"""From wrong gradients to the place in the program that makes them wrong.

Gradients travel from the loss to the parameters. Of each tensor on the way that is a copy, a block
or a term of a tensor of the twin, it is known how its gradient is related to the twin's
(`linop.testing.parallel.locations`). The fault lies where a right gradient becomes a wrong one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from linop.testing.parallel.findings import Finding, Place, groups_text, ranks_text
from linop.testing.parallel.locations import SAME, TERMS, Location, Locations, uses
from linop.testing.parallel.parameters import Compared
from linop.testing.parallel.records import AFTER, FORWARD, Call, Collective, Record
from linop.testing.parallel.relations import Groups, Kind, Relation


@dataclass
class Context:
    """What is known of a program.

    Attributes:
        names: of groups of ranks, the axes of the mesh.
        base: the factor by which gradients on the way of right parameters are larger than the
            twin's, since they are averaged later.
        broken: calls of `autograd.Function`s, by rank and number, whose backward is not the adjoint
            of their forward; each with a sentence.
    """

    ranks: dict[int, Record]
    twin: Record
    locations: Locations
    names: dict[Groups, str]
    broken: dict[tuple[int, int], str]
    base: float = 1.0
    references: tuple[Relation, ...] = ()


def program_groups(ranks: Iterable[Record]) -> tuple[list[Groups], dict[Groups, str]]:
    """Partitions of all ranks that the program's collectives have, the most frequent first, and
    the names of those that are axes of a mesh."""
    count: dict[tuple[int, ...], int] = {}
    titles: dict[tuple[int, ...], str] = {}
    ranks = list(ranks)
    for record in ranks:
        for one in record.collectives:
            group = tuple(sorted(one.ranks))
            if len(group) > 1:
                count[group] = count.get(group, 0) + 1
                titles.setdefault(group, one.group)
    everyone = sorted(record.rank for record in ranks)
    found: list[Groups] = []
    for group in sorted(count, key=lambda one: -count[one]):
        same = [one for one in count if len(one) == len(group)]
        partition, left = [group], set(everyone) - set(group)
        for one in sorted(same):
            if left.issuperset(one):
                partition.append(one)
                left -= set(one)
        if not left and tuple(sorted(partition)) not in found:
            found.append(tuple(sorted(partition)))
    names = {}
    for partition in found:
        called = {titles.get(group, "") for group in partition} - {""}
        if len(called) == 1:
            names[partition] = called.pop()
    return found, names


def diagnosed(context: Context, wrong: Sequence[Compared]) -> list[Finding]:
    """The faults of parameters whose gradients alone are wrong, those alike as one."""
    popular = _popular(one.left or one.gradient for one in wrong)
    found = [_of_parameter(context, one, popular) for one in wrong]
    alike: dict[tuple[object, ...], list[Finding]] = {}
    for one in found:
        alike.setdefault((one.kind, one.detail, one.operator, one.explanation), []).append(one)
    return [_merged(each) for each in alike.values()]


def _merged(alike: Sequence[Finding]) -> Finding:
    """One finding for several that differ in their parameters and places."""
    first = alike[0]
    names = tuple(name for one in alike for name in one.parameters)
    places = dict.fromkeys(str(replace(one.place, also=())) for one in alike)
    also = dict.fromkeys(line for one in alike for line in one.place.also)
    others = (*list(places)[1:], *also)
    return replace(first, parameters=names, place=replace(first.place, also=others))


def _popular(relations: Iterable[Relation]) -> Groups:
    """The partition that most relations have among their options."""
    count: dict[Groups, int] = {}
    for relation in relations:
        for groups, _ in relation.options:
            count[groups] = count.get(groups, 0) + 1
    return max(count, key=lambda one: count[one]) if count else ()


# One parameter


def _of_parameter(context: Context, one: Compared, popular: Groups) -> Finding:
    final = one.gradient.preferring(popular)
    left = one.left.preferring(popular) if one.left is not None else None
    moved = bool(_moved_gradients(context, one))
    as_others = left is not None and _treated_as_others(context, left, final)
    if left is not None and not as_others and (moved or not _alike(left, final)):
        if finding := _after_the_pass(context, one, left, final):
            return finding
    start = left if left is not None and left.kind is not Kind.EQUAL and not as_others else final
    return _on_the_way(context, one, start, final)


def _scaled(relation: Relation) -> float | None:
    """The factor of a whole gradient or of a sum of terms; None of others."""
    if relation.kind is Kind.EQUAL:
        return 1.0
    if relation.kind in (Kind.FACTOR, Kind.UNSUMMED) and not relation.factors:
        return relation.factor
    return None


def base(right: Iterable[Compared]) -> tuple[float, tuple[Relation, ...]]:
    """The factor of gradients as backward passes leave them, of parameters that are right in the
    end, and how those are related to the twin's."""
    found = [one.left for one in right if one.left is not None]
    factors = [k for one in found if (k := _scaled(one))]
    return (max(set(factors), key=factors.count) if factors else 1.0), tuple(found)


def _treated_as_others(context: Context, left: Relation, final: Relation) -> bool:
    """True if what happens to a gradient after the backward pass is what happens to right ones."""
    before, after = _scaled(left), _scaled(final)
    if before is None or after is None or final.kind is Kind.UNSUMMED:
        return False
    for one in context.references:
        k = _scaled(one)
        shared = {g for g, _ in one.options} & {g for g, _ in left.options}
        if k and (shared or (not one.options and not left.options)):
            return abs(before / k - after) < 1e-6 * max(1.0, abs(after))
    return False


def _alike(a: Relation, b: Relation) -> bool:
    return a.kind is b.kind and a.options == b.options and abs(a.factor - b.factor) < 1e-6


def _moved_gradients(context: Context, one: Compared) -> list[Collective]:
    """Collectives of the gradient of a parameter."""
    everything = (c for record in context.ranks.values() for c in record.collectives)
    return [c for c in everything if c.parameter == one.name]


def _closed(groups: Iterable[tuple[int, ...]]) -> Groups:
    """The groups over which sums are, that were taken over some groups one after the other."""
    found: list[set[int]] = []
    for group in groups:
        joined = set(group)
        for other in [one for one in found if one & joined]:
            joined |= other
            found.remove(other)
        found.append(joined)
    return tuple(sorted(tuple(sorted(one)) for one in found))


def _after_the_pass(
    context: Context, one: Compared, left: Relation, final: Relation
) -> Finding | None:
    """A fault of what the program does to gradients after the backward pass; None if the pass left
    a wrong one."""
    moved = _moved_gradients(context, one)
    if left.kind is Kind.UNSUMMED and moved:
        groups = _closed({tuple(sorted(c.ranks)) for c in moved})
        if groups not in [each for each, _ in left.options]:
            text = groups_text(left.groups, context.names)
            over = groups_text(groups, context.names)
            return Finding(
                Kind.WRONG_RANKS,
                f"over {over}, instead of {text}",
                (one.name,),
                _at(moved[0], ""),
                f"all-reduce over {text}",
                f"After the backward pass each rank has a term of this gradient, and the terms of "
                f"{text} sum up to the twin's; the all-reduce runs over {over}.",
            )
    if left.kind not in (Kind.EQUAL, Kind.UNSUMMED) and not (
        left.kind is Kind.FACTOR and not left.factors
    ):
        return None
    lines = [p.line for p in one.held.values() if p.line]
    lines += [f"{c.line}: {c.text}" for c in moved]
    lines += [each for record in context.ranks.values() for each in record.unsynchronized]
    what = _detail(final, context)
    per_rank = final.kind is Kind.FACTOR and final.factors
    operator, why = "", "The backward pass leaves it right; what happens to it afterwards does not."
    if per_rank:
        operator = "all-reduce of that number"
        why = (
            "Ranks scale their gradients differently: a number that all of them need, such as the "
            "norm by which gradients are clipped, is each rank's own."
        )
    elif left.kind is Kind.EQUAL and moved and final.kind is Kind.FACTOR:
        operator = f"the {_titles(moved[:1])[0]} is too many"
        why = (
            "The backward pass leaves the whole gradient on every rank, and it is summed again "
            "afterwards."
        )
    elif final.kind is Kind.FACTOR and left.kind is Kind.UNSUMMED:
        lines += Way(context, min(one.held), one.name).lines_of_movements()
        lines += _ends_of_the_loss(context)
        why = (
            f"The backward pass leaves terms whose sum is {factor_text(left.factor)} times the "
            f"twin's, and what happens to them afterwards makes it {factor_text(final.factor)}: "
            f"the loss or the sum is divided by another number than it should be."
        )
    elif final.kind is Kind.UNSUMMED and left.kind is not Kind.EQUAL:
        groups = groups_text((final.groups or left.groups), context.names)
        operator, why = (
            f"all-reduce over {groups}",
            "Ranks have terms of it after the step, which some backward passes leave unsummed.",
        )
    module, first, also = _module(one.name) if not lines else "", *_first(lines)
    line, _, text = first.partition(": ")
    return Finding(final.kind, what, (one.name,), Place(module, line, text, also), operator, why)


def _first(lines: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The first of some lines, and the others, each once."""
    each = list(dict.fromkeys(one for one in lines if one.strip(": ")))
    return (each[0], tuple(each[1:4])) if each else ("", ())


def _ends_of_the_loss(context: Context) -> list[str]:
    """The last lines of forward passes, which put the loss together."""
    found = []
    for record in context.ranks.values():
        calls = [c for c in record.calls if c.phase == FORWARD and c.line
                 and c.name not in ("detach", "clone", "item")]  # fmt: skip
        found += [f"{c.line}: {c.text}" for c in calls[-1:]]
    return found


def _on_the_way(context: Context, one: Compared, start: Relation, final: Relation) -> Finding:
    """A fault between the loss and the parameter."""
    kind = final.kind if final.kind is not Kind.EQUAL else start.kind
    for rank in sorted(one.held):
        way = Way(context, rank, one.name)
        if not way.locations:
            continue
        if found := way.broken_pair(start):
            return _broken(context, one, final, found, rank)
        if start.kind is Kind.UNSUMMED and (call := way.copying(start)):
            return _copied(context, one, way, start, call)
        turn = way.turn(start)
        if turn is not None:
            return _turned(context, one, way, start, final, *turn)
    over = start.groups or final.groups
    groups = groups_text(over, context.names) if over else ""
    place = _of_module(context, one.name)
    if kind is Kind.UNSUMMED:
        form = "on different parts of the batch or of the sequence"
        if len({_lines_of(record, one.name) for record in context.ranks.values()}) > 1:
            form = "in different places of the model"
        place = _with_switches(context, place)
        return Finding(
            kind,
            f"over {groups}",
            (one.name,),
            place,
            f"all-reduce of its gradient over {groups}",
            f"It is replicated, and the ranks use it {form}: each has a term of its gradient, and no "
            f"sum over {groups} ran.",
        )
    if kind is Kind.NONE:
        place = _with_switches(context, place)
    elif kind is Kind.FACTOR:
        place = replace(place, also=tuple(dict.fromkeys(_ends_of_the_loss(context))))
    changed = tuple(dict.fromkeys(p.line for p in one.held.values() if p.line))
    place = replace(place, also=(*place.also, *changed))
    return Finding(kind, _detail(final, context), (one.name,), place, "", _plain_reason(kind))


def _with_switches(context: Context, place: Place) -> Place:
    """With the lines that keep data parallelism from summing gradients."""
    lines = [each for record in context.ranks.values() for each in record.unsynchronized]
    return replace(place, also=tuple(dict.fromkeys(lines)))


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
        kind = here.gradient.kind
    groups = groups_text(start.groups, context.names) if start.groups else ""
    place = _place(call, here)
    name = _used_name(call, way) if call else ""
    if kind is Kind.UNSUMMED:
        what = f"the input of {name}" if name else "this tensor"
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
            place = _at(moved, place.module)
        return Finding(
            kind,
            "",
            (one.name,),
            place,
            "the adjoint of what moves the tensor, in the backward pass",
            f"This tensor requires a gradient, and gets none: {by} is not differentiated.",
        )
    moved_back = way.movements(call) if call else ([], [])
    operator = ""
    why = "The gradients of what is computed here are the twin's, those of its arguments are not."
    if kind is Kind.FACTOR and moved_back[1]:
        there, back = (", ".join(_titles(each)) or "nothing" for each in moved_back)
        operator = f"the {back} of the backward pass is too many"
        why = (
            f"Forward: {there}, from terms of a sum to one tensor that is replicated, since each "
            f"rank has its whole gradient. The adjoint is the identity; {back} ran."
        )
    return Finding(kind, _detail(final, context), (one.name,), place, operator, why)


def _copied(context: Context, one: Compared, way: Way, start: Relation, call: Call) -> Finding:
    groups = groups_text(start.groups, context.names)
    there = ", ".join(dict.fromkeys(_titles(way.movements(call)[0])))
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


def _broken(
    context: Context, one: Compared, final: Relation, found: tuple[Call, str], rank: int
) -> Finding:
    call, sentence = found
    kind = final.kind
    if kind is Kind.OTHER:
        at = context.locations.at.get((rank, call.inputs[0])) if call.inputs else None
        if at is not None and at.gradient is not None and at.gradient.kind is not Kind.EQUAL:
            kind = at.gradient.kind
    return Finding(
        kind,
        _detail(final, context),
        (one.name,),
        Place(call.module, call.line, call.text),
        f"the adjoint of {call.name}",
        sentence,
    )


# The way of a gradient


class Way:
    """The tensors between a parameter and the loss, on one rank."""

    def __init__(self, context: Context, rank: int, name: str) -> None:
        self.context, self.rank = context, rank
        self.record = context.ranks[rank]
        self.used = uses(self.record)
        self._start: list[int] = []
        self._beside: dict[int, list[int]] = {}
        self.numbers = self._downstream(name)
        at = context.locations.at
        found = [at.get((rank, number)) for number in self.numbers]
        self.locations = [one for one in found if one is not None]

    def _downstream(self, name: str) -> list[int]:
        """Numbers of the tensors that are computed from a parameter, in the order of the pass."""
        record = self.record
        start = [one.number for one in record.tensors if one.parameter == name]
        beside: dict[int, list[int]] = {}
        for one in record.tensors:
            for source in one.sources:
                beside.setdefault(source, []).append(one.number)
        self._start, self._beside = start, beside
        found, waiting = set(start), list(start)
        while waiting:
            number = waiting.pop()
            following = [n for call in self.used.get(number, ()) for n in call.outputs]
            for other in (*following, *beside.get(number, ())):
                if other not in found:
                    found.add(other)
                    waiting.append(other)
        return sorted(found)

    def turn(self, start: Relation) -> tuple[Location | None, Call | None] | None:
        """The last tensor on the way from the parameter to the loss whose gradient is wrong as that
        of the parameter is, before one whose gradient is not; and the call that used it. The tensor
        is None if no known one has a wrong gradient, and data are moved before the first that is
        known."""
        bad = [one for one in self._run(start) if one.gradient is not None]
        if not bad:
            calls = [call for number in self._start for call in self._until_known(number)]
            moving = [call for call in calls if any(self.movements(call))]
            changes = start.kind in (Kind.FACTOR, Kind.OTHER, Kind.SHARD, Kind.NONE)
            return (None, moving[0]) if moving and changes else None
        last = max(bad, key=lambda one: self.numbers.index(one.numbers[self.rank]))
        calls = self._until_known(last.numbers[self.rank])
        moving = [call for call in calls if any(self.movements(call))]
        return last, (moving or calls or [None])[0]

    def _run(self, start: Relation) -> list[Location]:
        """Tensors that are computed from the parameter by way of tensors with wrong gradients, or
        unknown ones."""
        found: list[Location] = []
        waiting = list(self._start)
        done = set(waiting)
        while waiting:
            number = waiting.pop()
            at = self.context.locations.at.get((self.rank, number))
            if at is not None and at.gradient is not None and number not in self._start:
                if not self._as_wrong(at, start):
                    continue
                found.append(at)
            following = [n for call in self.used.get(number, ()) for n in call.outputs]
            for other in (*following, *self._beside.get(number, ())):
                if other not in done:
                    done.add(other)
                    waiting.append(other)
        return found

    def calls_of(self, start: Relation) -> list[Call]:
        """Calls on that way, in order."""
        numbers = {one.numbers[self.rank] for one in self._run(start)} | set(self._start)
        return [
            call
            for call in self.record.calls
            if call.inside < 0 and call.phase == FORWARD and numbers.intersection(call.inputs)
        ]

    def _until_known(self, number: int) -> list[Call]:
        """Calls that compute from a tensor what no tensor of the twin is, and the first that is
        one, in order."""
        found: dict[int, Call] = {}
        waiting = [number]
        while waiting:
            for call in self.used.get(waiting.pop(), ()):
                if call.number in found:
                    continue
                found[call.number] = call
                for output in call.outputs:
                    at = self.context.locations.at.get((self.rank, output))
                    if at is None or at.gradient is None:
                        waiting.append(output)
        return [found[k] for k in sorted(found)]

    def _as_wrong(self, one: Location, start: Relation) -> bool:
        gradient = one.gradient
        assert gradient is not None
        tensors = self.context.locations.tensors(one)
        if start.kind is Kind.UNSUMMED:
            shared = {groups for groups, _ in start.options} & {g for g, _ in gradient.options}
            return gradient.kind is Kind.UNSUMMED and bool(shared)
        if start.kind is Kind.NONE:
            return gradient.kind is Kind.NONE and all(t.differentiable for t in tensors.values())
        if start.kind is Kind.FACTOR and not start.factors:
            k = _scaled(gradient)
            wrong = start.factor * self.context.base
            return k is not None and abs(k - wrong) < 1e-6 * max(1.0, abs(wrong))
        if start.kind is Kind.FACTOR:
            return gradient.kind is Kind.FACTOR and bool(gradient.factors)
        return gradient.kind in (Kind.OTHER, Kind.SHARD) or bool(gradient.factors)

    def broken_pair(self, start: Relation) -> tuple[Call, str] | None:
        """A call on the way whose backward is not the adjoint of its forward, the first from the
        parameter whose result has a right gradient."""
        for call in self.calls_of(start):
            sentence = self.context.broken.get((self.rank, call.number))
            if sentence is not None:
                return call, sentence
        return None

    def copying(self, start: Relation) -> Call | None:
        """A call on the way that spreads a tensor over ranks, and whose backward moves nothing."""
        for call in self.calls_of(start):
            there, back = self.movements(call)
            if call.custom and not back and {c.name for c in there} & {"broadcast", "all_gather"}:
                return call
        return None

    def movements(self, call: Call) -> tuple[list[Collective], list[Collective]]:
        """Collectives of a call's forward, and of its backward."""
        moved = self.record.collectives
        there = [c for c in moved if c.inside == call.number]
        return there, [c for c in moved if c.backward_of == call.number]

    def lines_of_movements(self) -> list[str]:
        """Lines that move tensors on the way between ranks."""
        numbers = set(self.numbers)
        calls = [c for c in self.record.calls if c.custom and numbers.intersection(c.inputs)]
        found = [f"{c.line}: {c.text}" for c in calls if any(self.movements(c))]
        moved = [self.collective_of(one) for one in self.locations]
        return found + [f"{c.line}: {c.text}" for c in moved if c is not None]

    def collective_of(self, here: Location) -> Collective | None:
        """The collective outside of `autograd.Function`s that moves a tensor."""
        value = self.record.tensors[here.numbers[self.rank]].value
        for one in self.record.collectives:
            same = value is not None and one.value is not None and one.value.size == value.size
            if (
                one.inside < 0
                and one.phase == FORWARD
                and same
                and (one.value == value.ravel()).all()
            ):
                return one
        return None


# Words


def _detail(relation: Relation, context: Context) -> str:
    if relation.kind is Kind.FACTOR and relation.factors:
        each = (f"{factor_text(k)} on rank {r}" for r, k in relation.factors.items())
        return ", ".join(each)
    if relation.kind is Kind.FACTOR:
        return f"{factor_text(relation.factor)}{_factor_of(relation.factor, context)}"
    if relation.kind is Kind.UNSUMMED:
        return f"over {groups_text(relation.groups, context.names)}"
    return ""


def factor_text(k: float) -> str:
    """A factor, as a fraction where it is one of small numbers."""
    for bottom in range(1, 65):
        top = round(k * bottom)
        if top and abs(k * bottom - top) < 1e-7 * bottom:
            return str(top) if bottom == 1 else f"{top}/{bottom}"
    return f"{k:.6g}"


def _factor_of(k: float, context: Context) -> str:
    """The ranks whose number a factor is."""
    for size, word in ((k, ""), (1 / k if k else 0, "one over ")):
        n = round(size)
        if n < 2 or abs(size - n) > 1e-6:
            continue
        for groups, name in context.names.items():
            if len(groups[0]) == n:
                return f" = {word}the number of ranks of {name!r}"
        if n == len(context.ranks):
            return f" = {word}the number of ranks"
    return ""


def _titles(collectives: Sequence[Collective]) -> list[str]:
    return [f"{c.name.replace('_', '-')} over {ranks_text(c.ranks)}" for c in collectives]


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _of_module(context: Context, name: str) -> Place:
    """The module of a parameter, and the line that uses it first."""
    calls = _uses_of(context, name)
    if not calls:
        records = context.ranks.values()
        calls = [c for r in records for c in r.calls if c.module == _module(name) and c.module]
    first = calls[0] if calls else None
    return Place(_module(name), first.line if first else "", first.text if first else "")


def _uses_of(context: Context, name: str) -> list[Call]:
    """The calls that use a parameter, one for each place."""
    found: dict[str, Call] = {}
    for record in context.ranks.values():
        numbers = {one.number for one in record.tensors if one.parameter == name}
        for call in record.calls:
            if call.phase != AFTER and call.inside < 0 and numbers.intersection(call.inputs):
                found.setdefault(call.line, call)
    return list(found.values())


def _lines_of(record: Record, name: str) -> frozenset[str]:
    """The lines at which a rank uses a parameter."""
    numbers = {one.number for one in record.tensors if one.parameter == name}
    used = (c for c in record.calls if c.phase == FORWARD and numbers.intersection(c.inputs))
    return frozenset(call.line for call in used)


def _used_name(call: Call, way: Way) -> str:
    """The module that a call belongs to, or the parameter that it uses."""
    if call.module:
        named = [way.record.tensors[n].parameter for n in call.inputs]
        own = [name for name in named if name.startswith(f"{call.module}.")]
        if own or call.kind:
            return call.module
    named = [way.record.tensors[n].parameter for n in call.inputs]
    names = [name for name in named if name]
    return _module(names[0]) or names[0] if names else call.name


def _place(call: Call | None, here: Location | None) -> Place:
    if call is not None:
        return Place(call.module, call.line, call.text)
    return Place(here.key[1], here.key[2]) if here is not None else Place()


def _at(moved: Collective, module: str) -> Place:
    return Place(module, moved.line, moved.text)


__all__ = ["SAME", "TERMS", "Context", "Way", "diagnosed", "factor_text", "program_groups"]
