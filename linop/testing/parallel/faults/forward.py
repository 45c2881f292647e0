"""From a loss that differs to the first tensor of the forward pass that does."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from linop.testing.parallel.faults.context import Context
from linop.testing.parallel.faults.groups import over_other_ranks
from linop.testing.parallel.faults.placements import misplaced
from linop.testing.parallel.faults.statistics import (
    NEAR,
    of_own_elements,
    of_single_numbers,
    own_statistics,
    varied,
)
from linop.testing.parallel.faults.ways import Way
from linop.testing.parallel.faults.words import averaged, factor_text
from linop.testing.parallel.findings import Finding, Place
from linop.testing.parallel.recording.records import FORWARD, Call
from linop.testing.parallel.twins.locations import Location, made_by, uses
from linop.testing.parallel.twins.relations import Kind, partitions


def origin(context: Context, parameters: tuple[str, ...]) -> Finding:
    """The fault that makes the losses differ.

    Args:
        parameters: names of those with other gradients than the twin's.
    """
    if (wrongly := misplaced(context, parameters)) is not None:
        return wrongly
    call = _first_without_counterpart(context)
    if call is None:
        return _of_the_loss(context, parameters)
    tensors = context.twin.tensors
    named = [tensors[n].parameter for n in call.inputs if tensors[n].parameter]
    own = [name for name in named if not context.twin.parameters[name].buffer]
    theirs = _counterpart(context, call, own)
    place = Place(call.module, *((theirs.line, theirs.text) if theirs else (call.line, call.text)))
    name = own[0] if own and _is_of_parameters(context, call) else ""
    kind, detail, why = Kind.OTHER, "", ""
    what = f"the result of {call.name}" + (f" in {call.module}" if call.module else "")
    if theirs is not None:
        for found in _totals(context, theirs):
            if reason := _residual(context, call, own, found):
                name, factor = reason
                kind, detail = Kind.FACTOR, f"{factor_text(factor)} times {name}"
                why = (
                    f"The forward pass counts {name} {factor_text(factor)} times: every "
                    f"rank adds it before the sum over ranks; one of them has to, or all behind it."
                )
                break
        else:
            if (wrongly := over_other_ranks(context, call, parameters, what)) is not None:
                return wrongly
            if own_statistics(context, call, theirs) or of_own_elements(context, call, theirs):
                kind = Kind.STATISTICS
                why = (
                    "Each rank takes a mean, a sum or another statistic of the elements that it "
                    "holds, and the twin of all: sums and counts have to be summed over the ranks, "
                    "forward and backward."
                )
    why = why or (
        f"Up to there each tensor of the twin is found on the ranks, as a copy, blocks or terms of "
        f"a sum; {what} is not."
    )
    operator = "all-reduce of the sums and counts" if kind is Kind.STATISTICS else ""
    return Finding(kind, detail, parameters, place, operator, why, name or what)


def _is_of_parameters(context: Context, call: Call) -> bool:
    """True if a call computes with no other floating-point numbers than those of parameters, as an
    embedding does."""
    given = (context.twin.tensors[n] for n in call.inputs)
    return all(t.parameter or t.value is None or t.value.dtype.kind not in "fc" for t in given)


def _first_without_counterpart(context: Context) -> Call | None:
    """The first call of the twin with a result that no rank has, nor anything that is computed from
    it alone, though the ranks have its arguments."""
    twin, locations = context.twin, context.locations
    there = {one.twin for one in locations.all if one.matched}
    used = uses(twin)
    made = made_by(twin)

    def recovered(number: int) -> bool:
        waiting, done = [number], {number}
        while waiting:
            for call in used.get(waiting.pop(), ()):
                for one in call.outputs:
                    if one in there and varied(context, one):
                        return True
                    if one not in done:
                        done.add(one)
                        waiting.append(one)
        return False

    for call in twin.calls:
        if call.phase != FORWARD or call.inside >= 0:
            continue
        lost = [n for n in call.outputs if n in used and n not in there and varied(context, n)]
        if not lost or any(recovered(n) for n in lost):
            continue
        known = [n for n in call.inputs if n in made and varied(context, n)]
        if all(n in there for n in known):
            return call
    return None


def _counterpart(context: Context, call: Call, own: list[str]) -> Call | None:
    """The call of a rank that does what one of the twin does: with its parameters, or by its name
    in its module."""
    alike = []
    for record in context.ranks.values():
        for one in record.calls:
            if one.phase != FORWARD:
                continue
            names = {record.tensors[n].parameter for n in one.inputs} - {""}
            score = (bool(names & set(own)), one.name == call.name, one.module == call.module)
            if score[0] or (not own and all(score[1:])) or (score[1] and score[2]):
                alike.append((score, -one.number, one))
        if alike:
            return max(alike, key=lambda each: each[:2])[2]
    modules = [one for record in context.ranks.values() for one in record.calls
               if one.module == call.module and call.module]  # fmt: skip
    return modules[0] if modules else None


def _totals(context: Context, call: Call) -> Iterator[np.ndarray]:
    """Results of a call, or soon after it, of all ranks together: those of one rank, and sums over
    groups of ranks."""
    for one in context.locations.all:
        if call.number <= one.order <= call.number + NEAR and not one.matched:
            values = {r: t.value for r, t in context.locations.tensors(one).items()}
            arrays = {r: v for r, v in values.items() if v is not None}
            if len({v.shape for v in arrays.values()}) != 1:
                continue
            yield next(iter(arrays.values()))
            for partition in partitions(sorted(arrays), context.locations.groups):
                if len(partition[0]) > 1:
                    yield np.asarray(sum(arrays[r] for r in partition[0]))


def _residual(
    context: Context, call: Call, own: list[str], total: np.ndarray
) -> tuple[str, float] | None:
    """A parameter of a call, and how many times a result counts it."""
    scale = context.locations.values
    for number in call.outputs:
        wanted = context.twin.tensors[number].value
        if wanted is None or wanted.shape != total.shape:
            continue
        rest = total - wanted
        if scale.near(total, wanted):
            return None
        for name in own:
            value = context.twin.parameters[name].value if name in context.twin.parameters else None
            if value is None or value.ndim > rest.ndim or not value.size:
                continue
            try:
                spread = np.broadcast_to(value, rest.shape)
            except ValueError:
                continue
            square = float((spread**2).sum())
            k = float((rest * spread).sum()) / square if square else 0.0
            if k and scale.near(rest, k * spread):
                return name, 1 + k
    return None


# The loss itself


def _of_the_loss(context: Context, parameters: tuple[str, ...]) -> Finding:
    """The fault if all tensors before the loss are the twin's."""
    if (single := of_single_numbers(context)) is not None and not _weights_explain(context):
        call, theirs = single
        return Finding(
            Kind.STATISTICS,
            "",
            parameters,
            Place(theirs.module, theirs.line, theirs.text),
            "all-reduce of the sums and counts",
            f"Each rank takes this {call.name} of the elements that it holds, and the twin of all: "
            f"the loss is no linear function of it, so a mean of the ranks' losses is another one.",
            f"the result of {call.name}",
        )
    last = _last_activation(context)
    calls = [c for r in context.ranks.values() for c in r.calls if c.phase == FORWARD and c.outputs]
    place, kind, detail = Place(), Kind.OTHER, ""
    if last is not None:
        rank = min(last.numbers)
        used = uses(context.ranks[rank]).get(last.numbers[rank], [])
        following = [c for c in context.ranks[rank].calls if used and c.number >= used[-1].number
                     and c.phase == FORWARD and c.name not in ("detach", "clone")]  # fmt: skip
        if following:
            at = following[-1]
            also = _beside_the_loss(context, rank, last, at)
            place = Place(at.module, at.line or used[-1].line, at.text or used[-1].text, also)
        if _weights_explain(context) and (factors := _weights(context, last)):
            kind, detail = Kind.FACTOR, _weights_text(factors)
    elif calls:
        place = Place(calls[-1].module, calls[-1].line, calls[-1].text)
    losses = [record.loss for record in (*context.ranks.values(), context.twin)]
    if not all(map(math.isfinite, losses)):
        why = "The loss is not finite; all tensors up to it are the twin's."
        return Finding(Kind.OTHER, "", parameters, place, "", why, "the loss")
    how = "in another way"
    if kind is Kind.FACTOR:
        how = "with another factor than the twin's"
    if kind is Kind.FACTOR and " on " in detail:
        how = (
            "with other weights than the twin's: a mean of means is the mean of everything only if "
            "all are of the same number of elements; weigh each by its own number"
        )
    why = f"All tensors up to the loss are the twin's; the ranks' losses are put together {how}."
    return Finding(kind, detail, parameters, place, "", why, "the loss")


def _weights_explain(context: Context) -> bool:
    """True if the gradients of most activations are multiples of the twin's, as they are where only
    the weights of the ranks' losses are others."""
    kinds = [one.gradient.kind for one in context.locations.all
             if one.gradient is not None and _is_activation(context, one)]  # fmt: skip
    multiples = sum(kind in (Kind.EQUAL, Kind.FACTOR) for kind in kinds)
    return 2 * multiples >= len(kinds)


def _weights(context: Context, last: Location) -> dict[tuple[int, int], float]:
    """By rank and part of its batch, the factor of what goes into the loss beside the twin's;
    nothing if a rank has none. Rows that are equal may be taken for each other: parts whose
    gradient is no multiple do not count while the rank has others."""
    ranks: set[int] = set()
    found: dict[tuple[int, int], float] = {}
    share = len(context.ranks) if averaged(context) else 1  # behind the backward pass
    others = False
    for one in context.locations.all:
        if one.key[:3] != last.key[:3] or not _is_activation(context, one):
            continue
        ranks.update(one.numbers)
        gradient = one.gradient
        if gradient is not None and gradient.kind in (Kind.EQUAL, Kind.FACTOR):
            each = gradient.factors or dict.fromkeys(one.numbers, gradient.factor)
            found |= {(rank, one.key[3]): k / share for rank, k in each.items()}
        else:
            others = True
    if others and max(found.values(), default=0) - min(found.values(), default=0) < 1e-9:
        return {}  # these weights are one factor, which does not explain the other parts
    return found if ranks == {rank for rank, _ in found} else {}


def _weights_text(factors: dict[tuple[int, int], float]) -> str:
    """Factors by rank and part of the batch, in as few words as there are different ones."""
    ranks, parts = ({key[k] for key in factors} for k in (0, 1))
    texts = {key: factor_text(k) for key, k in sorted(factors.items())}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    by_rank = {rank: {text for (r, _), text in texts.items() if r == rank} for rank in ranks}
    if all(len(each) == 1 for each in by_rank.values()):
        return ", ".join(f"{text} on rank {r}" for r, (text,) in by_rank.items())
    of = {part: k for k, part in enumerate(sorted(parts), 1)}
    return ", ".join(
        f"{text} on part {of[part]} of the batch" + (f" of rank {rank}" if len(ranks) > 1 else "")
        for (rank, part), text in texts.items()
    )


def _beside_the_loss(context: Context, rank: int, last: Location, call: Call) -> tuple[str, ...]:
    """Lines that compute what a call takes beside the loss, such as a number that scales it."""
    made = made_by(context.ranks[rank])
    behind = Way(context, rank, [last.numbers[rank]]).numbers
    makers = [made[n] for n in call.inputs if n in made and n not in behind]
    found = (f"{one.line}: {one.text}" for one in makers if one.line and one.line != call.line)
    return tuple(dict.fromkeys(found))


def _last_activation(context: Context) -> Location | None:
    """The last tensor before the loss of which a gradient is known."""
    found = [one for one in context.locations.all if _is_activation(context, one)]
    return found[-1] if found else None


def _is_activation(context: Context, one: Location) -> bool:
    """True for a tensor of the twin of which a gradient is known, and that is no parameter."""
    if not one.matched or one.gradient is None or not varied(context, one.twin):
        return False
    return not context.twin.tensors[one.twin].parameter
