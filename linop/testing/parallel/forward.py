"""From a loss that differs to the first tensor of the forward pass that does."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from linop.testing.parallel.findings import Finding, Place
from linop.testing.parallel.locations import BLOCKS, TERMS, Location, made_by, uses
from linop.testing.parallel.recording.records import FORWARD, Call
from linop.testing.parallel.relations import Kind, Scale, partitions
from linop.testing.parallel.ways import Context, Way
from linop.testing.parallel.words import averaged, factor_text

_NEAR = 12
"""Calls behind one in which its result, summed or gathered, is looked for."""


def origin(context: Context, parameters: tuple[str, ...]) -> Finding:
    """The fault that makes the losses differ.

    Args:
        parameters: names of those with other gradients than the twin's.
    """
    call = _first_without_counterpart(context)
    if call is None:
        return _of_the_loss(context, parameters)
    tensors = context.twin.tensors
    named = [tensors[n].parameter for n in call.inputs if tensors[n].parameter]
    own = [name for name in named if not context.twin.parameters[name].buffer]
    theirs = _counterpart(context, call, own)
    place = Place(call.module, *((theirs.line, theirs.text) if theirs else (call.line, call.text)))
    name = own[0] if own else ""
    kind, detail, why = Kind.OTHER, "", ""
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
            if _own_statistics(context, call, theirs) or _of_own_elements(context, call, theirs):
                kind = Kind.STATISTICS
                why = (
                    "Each rank takes a mean, a sum or another statistic of the elements that it "
                    "holds, and the twin of all: sums and counts have to be summed over the ranks, "
                    "forward and backward."
                )
    what = f"the result of {call.name}" + (f" in {call.module}" if call.module else "")
    why = why or (
        f"Up to there each tensor of the twin is found on the ranks, as a copy, blocks or terms of "
        f"a sum; {what} is not."
    )
    operator = "all-reduce of the sums and counts" if kind is Kind.STATISTICS else ""
    return Finding(kind, detail, parameters, place, operator, why, name or what)


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
                    if one in there and _varied(context, one):
                        return True
                    if one not in done:
                        done.add(one)
                        waiting.append(one)
        return False

    for call in twin.calls:
        if call.phase != FORWARD or call.inside >= 0:
            continue
        lost = [n for n in call.outputs if n in used and n not in there and _varied(context, n)]
        if not lost or any(recovered(n) for n in lost):
            continue
        known = [n for n in call.inputs if n in made and _varied(context, n)]
        if all(n in there for n in known):
            return call
    return None


def _varied(context: Context, number: int) -> bool:
    """True for floating-point tensors of more than one element that are not all equal."""
    value = context.twin.tensors[number].value
    if value is None or value.dtype.kind not in "fc" or value.size < 2:
        return False
    return bool((value != value.flat[0]).any())


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
        if call.number <= one.order <= call.number + _NEAR and not one.matched:
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


def _own_statistics(context: Context, call: Call, theirs: Call) -> bool:
    """True if results are, channel by channel, a multiple of the arguments and a constant, as the
    twin's are, but other ones on each rank."""
    given = next(
        (n for n in call.inputs if not context.twin.tensors[n].parameter and _varied(context, n)),
        -1,
    )
    if given < 0 or not call.outputs:
        return False
    x, y = (context.twin.tensors[n].value for n in (given, call.outputs[0]))
    if x is None or y is None or x.shape != y.shape:
        return False
    for axis in range(1, x.ndim) if x.ndim > 1 else ():
        if not _is_affine(x, y, axis, context.locations.values):
            continue
        for one in context.locations.all:
            if one.matched or not theirs.number <= one.order <= theirs.number + 2 * _NEAR:
                continue
            for rank, tensor in context.locations.tensors(one).items():
                source = _argument_of(context, rank, given, tensor.value)
                if source is not None and tensor.value is not None:
                    if _is_affine(source, tensor.value, axis, context.locations.values):
                        return True
    return False


_REDUCING = (
    "mean",
    "sum",
    "var",
    "std",
    "norm",
    "softmax",
    "logsumexp",
    "max",
    "min",
    "div",
    "cov",
)
"""Parts of the names of functions whose results depend on all elements of a dimension, or divide by
what does."""


def _of_own_elements(context: Context, call: Call, theirs: Call) -> bool:
    """True if a statistic is taken of a block or term, where the twin takes it of the whole."""
    if not any(part in theirs.name for part in _REDUCING):
        return False
    for one in context.locations.all:
        used = any(n in theirs.inputs for n in one.numbers.values())
        if used and one.order <= theirs.number and one.form in (BLOCKS, TERMS):
            if not context.twin.tensors[one.twin].parameter:
                return True
    return False


def _argument_of(
    context: Context, rank: int, number: int, like: np.ndarray | None
) -> np.ndarray | None:
    """A rank's part of a tensor of the twin, of a given shape."""
    for one in context.locations.all:
        if one.twin == number and rank in one.numbers and like is not None:
            value = context.locations.tensors(one)[rank].value
            if value is not None and value.shape == like.shape:
                return value
    return None


def _is_affine(x: np.ndarray, y: np.ndarray, axis: int, scale: Scale) -> bool:
    """True if y is a multiple of x and a constant, for each index of an axis."""
    rows, results = (np.moveaxis(one, axis, 0).reshape(one.shape[axis], -1) for one in (x, y))
    if rows.shape[1] < 3 or np.ptp(rows, axis=1).min() <= scale.least:
        return False
    means = rows.mean(1, keepdims=True), results.mean(1, keepdims=True)
    slopes = ((rows - means[0]) * (results - means[1])).sum(1, keepdims=True)
    slopes = slopes / ((rows - means[0]) ** 2).sum(1, keepdims=True)
    return scale.near(means[1] + slopes * (rows - means[0]), results)


# The loss itself


def _of_the_loss(context: Context, parameters: tuple[str, ...]) -> Finding:
    """The fault if all tensors before the loss are the twin's."""
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
        if factors := _weights(context, last):
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
    if not one.matched or one.gradient is None or not _varied(context, one.twin):
        return False
    return not context.twin.tensors[one.twin].parameter
