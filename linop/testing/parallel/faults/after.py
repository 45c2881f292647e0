"""Faults of what a program does to gradients after its backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from linop.testing.parallel.faults.context import Context, scaled
from linop.testing.parallel.faults.ways import Way
from linop.testing.parallel.faults.words import (
    at,
    detail,
    ends_of_the_loss,
    factor_text,
    module_of,
    titles,
)
from linop.testing.parallel.findings import Finding, Place, groups_text, ranks_text
from linop.testing.parallel.recording.records import Collective
from linop.testing.parallel.twins.parameters import Compared
from linop.testing.parallel.twins.relations import Kind, Relation, factor, joined


def after_the_pass(
    context: Context, one: Compared, left: Relation, final: Relation
) -> Finding | None:
    """A fault of what the program does to gradients after the backward pass; None if the pass left
    a wrong one."""
    moved = moved_gradients(context, one)
    if left.kind is Kind.UNSUMMED and moved:
        groups = joined({tuple(sorted(c.ranks)) for c in moved})
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
    elif final.kind is Kind.OTHER and (passes := _of_one_pass(context, one)):
        operator = f"the terms of {passes[1]} of {passes[2]} backward passes"
        why = (
            f"{passes[2]} backward passes have terms of this gradient, and only that of pass "
            f"{passes[0]} is in it: the others are lost after they are computed."
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
        line, other = _unlike_right_ones(context, one, left)
        sums = [f"{c.line}: {c.text}" for c in moved]
        divided = [each for p in one.held.values() for each in p.scaled]
        lines = [line, *sums, *lines] if line else [*divided, *lines]
        lines += Way.of(context, min(one.held), one.name).lines_of_movements()
        lines += ends_of_the_loss(context)
        why = (
            f"The backward pass leaves terms whose sum is {factor_text(left.factor)} times the "
            f"twin's, and what happens to them afterwards makes it {factor_text(final.factor)}: "
        )
        why += (
            f"the gradient of {other}, which is right, goes through this line, and this one does "
            f"not."
            if line
            else "the loss or the sum is divided by another number than it should be."
        )
    elif final.kind is Kind.UNSUMMED and left.kind is not Kind.EQUAL:
        operator, why = (
            f"all-reduce over {groups_text(final.groups or left.groups, context.names)}",
            "Ranks have terms of it after the step, which some backward passes leave unsummed.",
        )
    module, first, also = module_of(one.name) if not lines else "", *_first(lines)
    line, _, text = first.partition(": ")
    return Finding(final.kind, what, (one.name,), Place(module, line, text, also), operator, why)


def _of_one_pass(context: Context, one: Compared) -> tuple[int, int, int] | None:
    """If a gradient is, up to a factor, the sum over the ranks of what one of several backward
    passes left: that pass, the number of others, and of all; else None."""
    numbers = {len(held.gradients) for held in one.held.values()}
    n = numbers.pop()
    if numbers or n < 2:
        return None
    for k in range(n):
        parts = [held.gradients[k] for held in one.held.values()]
        if len({part.shape for part in parts}) != 1:
            return None
        total = np.sum(np.array(parts), axis=0)
        finals = [held.gradient for held in one.held.values()]
        scale = context.locations.gradients
        if all(
            g is not None and g.shape == total.shape and factor(g, total, scale) for g in finals
        ):
            return k + 1, n - 1, n
    return None


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
            ran = [each for each in joined({tuple(sorted(c.ranks)) for c in moved_gradients(
                context, one)}) if len(each) == len(ranks)]  # fmt: skip
            most = dict(left.options).get(joined({*ran, *rest}))
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


def dropped(context: Context, one: Compared) -> Finding | None:
    """The fault of a gradient whose terms are summed by a functional collective, which leaves them
    as they are, and whose result is not used."""
    final = one.gradient
    if final.kind is not Kind.UNSUMMED:
        return None
    wanted = [each for each, _ in final.options]
    for moved in moved_gradients(context, one):
        of = tuple(sorted(moved.ranks))
        if not moved.functional or moved.reduction != "sum" or moved.backward_of >= 0:
            continue
        if any(of in groups for groups in wanted):
            return Finding(
                Kind.UNSUMMED,
                detail(final, context),
                (one.name,),
                at(moved, ""),
                f"the result of the {titles([moved])[0]} is not used",
                "A functional collective returns the sum, and leaves its argument as it is: the "
                "gradient is still this rank's term. Copy the result into it.",
            )
    return None


def spread(context: Context, one: Compared, left: Relation, final: Relation) -> Finding | None:
    """The fault of terms that are left since a broadcast is not differentiated."""
    for rank in sorted(one.held):
        moved = Way.of(context, rank, one.name).spread(left)
        if moved is None:
            continue
        adjoint = f"sum-reduce over {ranks_text(moved.ranks)} to rank {moved.peer}"
        return Finding(
            final.kind,
            detail(final, context),
            (one.name,),
            at(moved, ""),
            f"{adjoint}, in the backward pass",
            f"This {titles([moved])[0]} gives each rank a copy, and each uses it for another part: "
            f"its adjoint is the {adjoint}. To autograd it is the identity, or it is not "
            f"differentiated at all.",
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
    return bool(ran) and any(joined({*ran, *each}) in wanted for each, _ in final.options)


def moved_gradients(context: Context, one: Compared) -> list[Collective]:
    """Collectives of the gradient of a parameter."""
    everything = (c for record in context.ranks.values() for c in record.collectives)
    return [c for c in everything if c.parameter == one.name or one.name in c.of]


def _first(lines: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The first of some lines, and the others, each once."""
    each = list(dict.fromkeys(one for one in lines if one.strip(": ")))
    return (each[0], tuple(each[1:4])) if each else ("", ())


def treated_as_others(context: Context, left: Relation, final: Relation) -> bool:
    """True if what happens to a gradient after the backward pass is what happens to right ones."""
    before, after = scaled(left), scaled(final)
    if before is None or after is None or final.kind is Kind.UNSUMMED:
        return False
    for one in context.references.values():
        k = scaled(one)
        if k and _of_same_form(one, left):
            return abs(before / k - after) < 1e-6 * max(1.0, abs(after))
    return False


def _of_same_form(a: Relation, b: Relation) -> bool:
    """True if both are whole gradients, or terms over the same ranks."""
    shared = {g for g, _ in a.options} & {g for g, _ in b.options}
    return bool(shared) or (not a.options and not b.options)


def _unlike_right_ones(context: Context, one: Compared, left: Relation) -> tuple[str, str]:
    """A line that gradients go through after the backward pass which it leaves as it does this one,
    and which are right in the end, as this one does not; and their parameter. Empty if there is
    none."""
    mine = {line for p in one.held.values() for line in p.passed}
    for name, relation in context.references.items():
        k, other = scaled(relation), scaled(left)
        if k is None or other is None or abs(k - other) > 1e-6 * abs(k):
            continue
        if not _of_same_form(relation, left):
            continue
        for record in context.ranks.values():
            held = record.parameters.get(name)
            lines = held.passed if held is not None else ()
            if found := [line for line in lines if line not in mine]:
                return found[0], name
    return "", ""
