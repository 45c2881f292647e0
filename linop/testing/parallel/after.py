"""Faults of what a program does to gradients after its backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from linop.testing.parallel.findings import Finding, Place, groups_text
from linop.testing.parallel.parameters import Compared
from linop.testing.parallel.recording.records import Collective
from linop.testing.parallel.relations import Groups, Kind, Relation, factor
from linop.testing.parallel.ways import Context, Way, scaled
from linop.testing.parallel.words import (
    at,
    detail,
    ends_of_the_loss,
    factor_text,
    module_of,
    titles,
)


def after_the_pass(
    context: Context, one: Compared, left: Relation, final: Relation
) -> Finding | None:
    """A fault of what the program does to gradients after the backward pass; None if the pass left
    a wrong one."""
    moved = moved_gradients(context, one)
    if left.kind is Kind.UNSUMMED and moved:
        groups = _closed({tuple(sorted(c.ranks)) for c in moved})
        wanted = [each for each, _ in left.options]
        if groups not in wanted and not rest_is_missing(context, one, final):
            text = groups_text(left.groups, context.names)
            over = groups_text(groups, context.names)
            return Finding(
                Kind.WRONG_RANKS,
                f"over {over}, instead of {text}",
                (one.name,),
                at(moved[0], ""),
                f"all-reduce over {text}",
                f"After the backward pass each rank has a term of this gradient, and the terms of "
                f"{text} sum up to the twin's; the all-reduce runs over {over}.",
            )
    if left.kind not in (Kind.EQUAL, Kind.UNSUMMED) and not (
        left.kind is Kind.FACTOR and not left.factors
    ):
        return None
    lines = [p.line for p in one.held.values() if p.line]
    changes = [line for p in one.held.values() for line in p.changes]
    before = _scaled_before(context, one)
    lines = [*changes, *lines] if before or not lines else [*lines, *changes]
    lines += [f"{c.line}: {c.text}" for c in moved]
    lines += [each for record in context.ranks.values() for each in record.unsynchronized]
    what = detail(final, context)
    per_rank = final.kind is Kind.FACTOR and final.factors
    operator, why = "", "The backward pass leaves it right; what happens to it afterwards does not."
    if per_rank:
        operator, why = _by_rank(context, final)
    elif before and final.kind is Kind.OTHER:
        operator = "the sum over the ranks, before the terms are scaled"
        each = ", ".join(f"{factor_text(k)} on rank {r}" for r, k in before.items())
        why = (
            f"Ranks scale their terms of this gradient before they are summed, each by a number of "
            f"its own ({each}), such as a norm by which each clips its own. Sum first, or let the "
            f"number be the same."
        )
    elif left.kind is Kind.EQUAL and moved and final.kind is Kind.FACTOR:
        operator = f"the {titles(moved[:1])[0]} is too many"
        why = (
            "The backward pass leaves the whole gradient on every rank, and it is summed again "
            "afterwards."
        )
    elif final.kind is Kind.FACTOR and (needless := _summed_again(context, one, final.factor)):
        lines = [f"{needless.line}: {needless.text}", *lines]
        operator = f"the {titles([needless])[0]} is too many"
        why = "The other sums are over these ranks already, and it is summed again."
    elif final.kind is Kind.FACTOR and left.kind is Kind.UNSUMMED:
        lines += Way.of(context, min(one.held), one.name).lines_of_movements()
        lines += ends_of_the_loss(context)
        why = (
            f"The backward pass leaves terms whose sum is {factor_text(left.factor)} times the "
            f"twin's, and what happens to them afterwards makes it {factor_text(final.factor)}: "
            f"the loss or the sum is divided by another number than it should be."
        )
    elif final.kind is Kind.UNSUMMED and left.kind is not Kind.EQUAL:
        operator, why = (
            f"all-reduce over {groups_text(final.groups or left.groups, context.names)}",
            "Ranks have terms of it after the step, which some backward passes leave unsummed.",
        )
    module, first, also = module_of(one.name) if not lines else "", *_first(lines)
    line, _, text = first.partition(": ")
    return Finding(final.kind, what, (one.name,), Place(module, line, text, also), operator, why)


def _scaled_before(context: Context, one: Compared) -> dict[int, float]:
    """By rank, the factors by which terms of a gradient are scaled between the backward pass and
    the first sum over ranks; empty if there are none, or they are one."""
    found: dict[int, float] = {}
    for rank, held in one.held.items():
        moved = next((c for c in context.ranks[rank].collectives if c.parameter == one.name), None)
        value = None if moved is None else moved.value
        if value is None or len(held.gradients) != 1 or value.size != held.gradients[0].size:
            return {}
        k = factor(value.ravel(), held.gradients[0].ravel(), context.locations.gradients)
        if k is None:
            return {}
        found[rank] = k
    apart = max(found.values(), default=0.0) - min(found.values(), default=0.0)
    return found if apart > 1e-6 * max(map(abs, found.values()), default=0.0) else {}


def summed_twice(context: Context, one: Compared) -> Finding | None:
    """The fault of a gradient that is summed twice over the same ranks, and not over others."""
    left, final = one.left, one.gradient
    if left is None or {left.kind, final.kind} != {Kind.UNSUMMED}:
        return None
    record = context.ranks[min(one.held)]
    sums = [c for c in record.collectives if c.parameter == one.name and c.reduction == "sum"]
    for k, last in enumerate(sums):
        ranks = tuple(sorted(last.ranks))
        if ranks not in [tuple(sorted(each.ranks)) for each in sums[:k]]:
            continue
        for rest, k_of_rest in final.options:
            ran = [each for each in _closed({tuple(sorted(c.ranks)) for c in moved_gradients(
                context, one)}) if len(each) == len(ranks)]  # fmt: skip
            most = dict(left.options).get(_closed({*ran, *rest}))
            if most is None or abs(k_of_rest - most * len(ranks)) > 1e-6 * abs(k_of_rest):
                continue
            over, text = (groups_text(each, context.names) for each in (tuple(ran), rest))
            return Finding(
                Kind.WRONG_RANKS,
                f"over {over} twice, instead of {over} and {text}",
                (one.name,),
                at(last, ""),
                f"all-reduce over {text}",
                f"After the backward pass each rank has a term of this gradient. It is summed over "
                f"{over} twice, and over {text} not at all.",
            )
    return None


def _summed_again(context: Context, one: Compared, factor: float) -> Collective | None:
    """The last sum of a gradient over as many ranks as a factor, which another sum is over, too."""
    record = context.ranks[min(one.held)]
    sums = [c for c in record.collectives if c.parameter == one.name and c.reduction == "sum"]
    for k in reversed(range(len(sums))):
        others = (set(each.ranks) for each in sums[:k] + sums[k + 1 :])
        if abs(len(sums[k].ranks) - factor) < 1e-6 and any(
            each.issuperset(sums[k].ranks) for each in others
        ):
            return sums[k]
    return None


def scaled_by_rank(context: Context, one: Compared, final: Relation) -> Finding | None:
    """The fault of a gradient that each rank has scaled by a number of its own, of one whose state
    between the backward pass and that is not known, as of FSDP; None if no line is known that
    changes it."""
    lines = [p.line for p in one.held.values() if p.line]
    if not final.factors or not lines:
        return None
    first, also = _first(lines)
    line, _, text = first.partition(": ")
    place = Place("", line, text, also)
    return Finding(
        final.kind, detail(final, context), (one.name,), place, *_by_rank(context, final)
    )


def _by_rank(context: Context, final: Relation) -> tuple[str, str]:
    """The operator and the sentence of gradients that have another factor on each rank."""
    why = (
        "Ranks scale their gradients differently: a number that all of them need, such as the norm "
        "by which gradients are clipped, is each rank's own."
    )
    products = [k * context.norms.get(r, 0.0) for r, k in final.factors.items()]
    allowed = 1e-6 + 4 * context.locations.gradients.of_factors
    if max(products) - min(products) > allowed * max(map(abs, products)):
        return "all-reduce of that number", why
    return "all-reduce of the square of the norm", (
        "Ranks scale their gradients by one over the norm of those that each of them holds, as "
        "clipping by a local norm does. The norm of all is the root of the sum of the squares over "
        "the ranks."
    )


def rest_is_missing(context: Context, one: Compared, final: Relation) -> bool:
    """True if the sums that run over terms are right, and others over what is left of them are not
    there: together they would be over the groups over which the terms sum up."""
    if one.left is None or one.left.kind is not Kind.UNSUMMED or final.kind is not Kind.UNSUMMED:
        return False
    ran = {tuple(sorted(c.ranks)) for c in moved_gradients(context, one)}
    # Sums over more ranks than hold terms are too large.
    least = min(abs(k) for _, k in one.left.options)
    wanted = [each for each, k in one.left.options if abs(k) < least + 1e-6]
    return bool(ran) and any(_closed({*ran, *each}) in wanted for each, _ in final.options)


def moved_gradients(context: Context, one: Compared) -> list[Collective]:
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


def _first(lines: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The first of some lines, and the others, each once."""
    each = list(dict.fromkeys(one for one in lines if one.strip(": ")))
    return (each[0], tuple(each[1:4])) if each else ("", ())


def treated_as_others(context: Context, left: Relation, final: Relation) -> bool:
    """True if what happens to a gradient after the backward pass is what happens to right ones."""
    before, after = scaled(left), scaled(final)
    if before is None or after is None or final.kind is Kind.UNSUMMED:
        return False
    for one in context.references:
        k = scaled(one)
        shared = {g for g, _ in one.options} & {g for g, _ in left.options}
        if k and (shared or (not one.options and not left.options)):
            return abs(before / k - after) < 1e-6 * max(1.0, abs(after))
    return False
