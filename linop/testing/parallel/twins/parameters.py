"""Parameters, buffers and losses of all ranks beside the twin's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from linop.errors import ArgumentError
from linop.testing.parallel.recording.records import Parameter, Record
from linop.testing.parallel.twins.relations import (
    Groups,
    Index,
    Kind,
    Relation,
    Scale,
    related,
    related_to_a_block,
)

LOOSE = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 2**-23, "float64": 2**-52}


@dataclass(frozen=True)
class Tolerances:
    """Errors that are taken for rounding.

    Attributes:
        values, gradients: of tensors and of their gradients.
        text: in words.
    """

    values: Scale
    gradients: Scale
    text: str


def tolerances(ranks: Sequence[Record], twin: Record) -> Tolerances:
    """For the least precise dtype in use: 2**-30 in float64 (more than a million roundings of
    an element of the size of the largest), 2**-10 in float32, 2**-3 in half precision."""
    used = {one.dtype for record in (*ranks, twin) for one in record.tensors}
    used |= {one.dtype for record in ranks for one in record.parameters.values()}
    used |= {one.dtype for record in ranks for one in record.collectives}
    widest = max((LOOSE.get(name, 0.0) for name in used), default=LOOSE["float64"])
    relative = {2**-52: 2.0**-30, 2**-23: 2.0**-10}.get(widest, 2.0**-3)
    largest = [
        np.abs(one.gradient).max()
        for one in twin.parameters.values()
        if one.gradient is not None and one.gradient.size
    ]
    largest = [one for one in largest if math.isfinite(one)]
    peak = float(max(largest, default=1.0)) or 1.0
    name = next((name for name, eps in LOOSE.items() if eps == widest), "float64")
    return Tolerances(
        Scale(relative, relative * 1e-4),
        Scale(relative, relative * 1e-3 * peak),
        f"{relative:.0e} of the largest element of a tensor, since {name} is used",
    )


@dataclass
class Compared:
    """A parameter of the twin, and what the ranks have of it.

    Attributes:
        held: by rank.
        expected: the twin's gradients of those parts, by rank.
        gradient, value, after: relations of the gradients, of the values before the step, and after
            the optimizer's.
        left: the relation of gradients as backward passes left them; None if they were not seen.
    """

    name: str
    held: dict[int, Parameter]
    expected: dict[int, np.ndarray]
    gradient: Relation
    value: bool
    after: bool
    left: Relation | None = None


def compared(
    ranks: Sequence[Record], twin: Record, allowed: Tolerances, groups: Sequence[Groups]
) -> list[Compared]:
    """The parameters of the twin that require gradients, each as the ranks have it; one that has
    several names, in the twin and on all ranks, by the first.

    Raises:
        ArgumentError: names differ, or which part a rank holds cannot be told.
    """
    theirs = {n: one for n, one in twin.parameters.items() if not one.buffer and one.trained}
    _check_names(ranks, twin)
    theirs = {n: one for n, one in theirs.items() if not one.tied or _is_apart(one, ranks)}
    found = [_compared(one, ranks, twin, allowed, groups) for one in theirs.values()]
    gradients = [one.gradient for one in found]
    left = [one.left for one in found if one.left is not None]
    for one in found:
        one.gradient = one.gradient.as_terms(gradients)
        one.left = None if one.left is None else one.left.as_terms(left)
    for one in found:
        if _is_any_number(one, found, allowed.gradients):
            one.gradient = Relation(Kind.OTHER)
    factors: list[Relation] = []
    for one in found:  # factors that are equal up to rounding are one
        alike = (each for each in factors if one.gradient.like(each, allowed.gradients))
        if (first := next(alike, None)) is not None:
            one.gradient = first
        factors.append(one.gradient)
    return found


def _is_any_number(one: Compared, found: Sequence[Compared], scale: Scale) -> bool:
    """True if a gradient has a factor by rank only since each rank has one element, which is a
    multiple of any other, and no other one is wrong in this way."""
    mine = one.gradient
    if not mine.factors or mine.sums or any(each.size != 1 for each in one.expected.values()):
        return False
    others = [each.gradient for each in found if each is not one]
    wrong = [each for each in others if each.kind is not Kind.EQUAL]
    return bool(wrong) and not any(mine.like(each, scale) for each in wrong)


def _is_apart(one: Parameter, ranks: Sequence[Record]) -> bool:
    """True if a parameter that the twin has by two names is two, on some rank."""
    held = [r.parameters[one.name] for r in ranks if one.name in r.parameters]
    return any(mine.tied != one.tied for mine in held) or any(
        one.tied in r.parameters and one.name not in r.parameters for r in ranks
    )


def _check_names(ranks: Sequence[Record], twin: Record) -> None:
    held = {n for record in ranks for n, one in record.parameters.items() if not one.buffer}
    known = set(twin.parameters)
    if strange := sorted(held - known):
        raise ArgumentError(
            f"the parallel model has parameters {strange[:5]} that the twin has not: "
            f"{sorted(n for n, one in twin.parameters.items() if not one.buffer)[:10]}; parameters "
            f"are matched by their names"
        )
    trained = {n for n, one in twin.parameters.items() if not one.buffer and one.trained}
    if missing := sorted(trained - held):
        raise ArgumentError(
            f"no rank has the parameters {missing[:5]} of the twin; parameters are matched by "
            f"their names"
        )


def _compared(
    one: Parameter,
    ranks: Sequence[Record],
    twin: Record,
    allowed: Tolerances,
    groups: Sequence[Groups],
) -> Compared:
    held = {r.rank: r.parameters[one.name] for r in ranks if one.name in r.parameters}
    zero = np.zeros_like(one.value)
    whole = one.gradient if one.gradient is not None else zero
    parts = {rank: _parts(one, whole, mine, ranks[rank], twin) for rank, mine in held.items()}
    expected = {rank: part[1] for rank, part in parts.items()}
    given = {rank: mine.gradient for rank, mine in held.items()}
    _check_shapes(one.name, held, expected)
    values = all(allowed.values.near(held[r].value, parts[r][0]) for r in held)
    after = all(_near_where_trained(held[r].after, parts[r][2], expected[r], allowed) for r in held)
    left = None
    if all(mine.gradients for mine in held.values()):
        sums = {rank: mine.gradients[-1] for rank, mine in held.items()}
        if all(sums[r].shape == expected[r].shape for r in sums):
            left = related(sums, expected, allowed.gradients, groups)
            if left.kind in (Kind.OTHER, Kind.SHARD):
                left = _of_all_passes(one.name, ranks, expected, allowed, groups) or left
    elif given_away := _given_away(one.name, ranks, held):
        left = related_to_a_block(given_away, whole, allowed.gradients, groups)
    relation = related(given, expected, allowed.gradients, groups)
    if relation.kind in (Kind.OTHER, Kind.SHARD):
        apart = _on_own_elements(held, given, expected, allowed)
        relation = apart if apart is not None and apart.kind is Kind.FACTOR else relation
    return Compared(one.name, held, expected, relation, values, after, left)


def _of_all_passes(
    name: str,
    ranks: Sequence[Record],
    expected: dict[int, np.ndarray],
    allowed: Tolerances,
    groups: Sequence[Groups],
) -> Relation | None:
    """The relation of what all backward passes add to a gradient, of a program that takes it away
    after each, to sum it elsewhere; None if that is unlike the twin's, too, or was not seen."""
    found: dict[int, np.ndarray] = {}
    for record in ranks:
        each = [
            t.gradient for t in record.tensors if t.parameter == name and t.gradient is not None
        ]
        if record.rank in expected and each and each[0].shape == expected[record.rank].shape:
            found[record.rank] = each[0]
    if found.keys() != expected.keys():
        return None
    relation = related(found, expected, allowed.gradients, groups)
    return None if relation.kind in (Kind.OTHER, Kind.SHARD, Kind.NONE) else relation


def _on_own_elements(
    held: dict[int, Parameter],
    given: dict[int, np.ndarray | None],
    expected: dict[int, np.ndarray],
    allowed: Tolerances,
) -> Relation | None:
    """The relation of the gradients of a DTensor, on the elements that each rank has; None if it is
    no DTensor, or a rank has one element, which is a multiple of any other, and another factor."""
    mine: dict[int, np.ndarray] = {}
    theirs: dict[int, np.ndarray] = {}
    for rank, one in held.items():
        gradient = given[rank]
        if one.held is None or gradient is None:
            return None
        if one.held.size:
            mine[rank] = gradient.ravel()[one.held]
            theirs[rank] = expected[rank].ravel()[one.held]
    found = related(mine, theirs, allowed.gradients)
    if found.factors and min(one.size for one in mine.values()) < 2:
        return None
    return found


def norms(found: Sequence[Compared]) -> dict[int, float]:
    """By rank, the norm of the twin's gradients of all elements that the rank has."""
    squares: dict[int, float] = {}
    for one in found:
        for rank, theirs in one.expected.items():
            at = one.held[rank].held
            mine = theirs.ravel() if at is None else theirs.ravel()[at]
            squares[rank] = squares.get(rank, 0.0) + float((np.abs(mine) ** 2).sum())
    return {rank: math.sqrt(square) for rank, square in squares.items()}


def _given_away(
    name: str, ranks: Sequence[Record], held: dict[int, Parameter]
) -> dict[int, np.ndarray]:
    """Contributions of ranks to the first collective of a gradient: theirs, as the backward pass
    left them; nothing if there is none on some rank. So those of DTensors are seen."""
    found: dict[int, np.ndarray] = {}
    for rank in held:
        moved = next((c for c in ranks[rank].collectives if c.parameter == name), None)
        if moved is None or moved.value is None or len(moved.sent) != 1:
            return {}
        found[rank] = moved.value.reshape(moved.sent[0])
    return found


def _near_where_trained(
    mine: np.ndarray, theirs: np.ndarray, gradient: np.ndarray, allowed: Tolerances
) -> bool:
    """True if values after a step are equal, except where a gradient is zero but for rounding,
    which an optimizer such as Adam makes as large as any other."""
    clear = np.abs(gradient) > allowed.gradients.least
    return mine.shape == theirs.shape and allowed.values.near(mine[clear], theirs[clear])


def _check_shapes(name: str, held: dict[int, Parameter], expected: dict[int, np.ndarray]) -> None:
    for rank, mine in held.items():
        if mine.value.shape != expected[rank].shape:
            raise ArgumentError(
                f"{name!r}: rank {rank} has shape {mine.value.shape}, and shard() gives "
                f"{expected[rank].shape} of the twin's"
            )


def _parts(
    one: Parameter, whole: np.ndarray, mine: Parameter, record: Record, twin: Record
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The twin's value, gradient and value after the step, of the part that a rank holds."""
    if mine.expected is not None:
        value, gradient, after = mine.expected
        return value, np.zeros_like(value) if gradient is None else gradient, after
    at = _selection(one, mine, record, twin)
    return one.value.ravel()[at], whole.ravel()[at], one.after.ravel()[at]


def _selection(one: Parameter, mine: Parameter, record: Record, twin: Record) -> np.ndarray:
    everything = np.arange(one.value.size).reshape(one.value.shape)
    if mine.value.shape == one.value.shape:
        return everything
    exact = Scale(1e-6, 1e-12)
    index = Index(one.value, exact)
    if index.varied and (found := index.selection(mine.value)) is not None:
        return found
    # A bias of zeros is cut as the rows of a weight beside it.
    module = one.name.rpartition(".")[0]
    for name, other in twin.parameters.items():
        part = record.parameters.get(name)
        if part is None or name == one.name or name.rpartition(".")[0] != module:
            continue
        beside = Index(other.value, exact)
        if not beside.varied or other.value.ndim < 2 or other.value.shape[0] != one.value.shape[0]:
            continue
        at = beside.selection(part.value)
        if at is not None and at.ndim == other.value.ndim:
            rows = at.reshape(len(at), -1)[:, 0] // (other.value.size // len(other.value))
            if len(rows) == mine.value.shape[0]:
                return np.asarray(everything[rows])
    raise ArgumentError(
        f"{one.name!r} has shape {mine.value.shape} on rank {record.rank}, and {one.value.shape} "
        f"in the twin: which part it is cannot be told from its values. Say it by a function "
        f"shard(name, value, rank, world) that returns a rank's part"
    )


def buffers(
    ranks: Sequence[Record], twin: Record, allowed: Tolerances
) -> tuple[list[str], list[str]]:
    """Buffers of floating-point numbers that a step leaves at other values than the twin's, by
    name, and those that it does not change though it changes the twin's. Cut ones are not
    compared."""
    wrong: list[str] = []
    kept: list[str] = []
    for name, one in twin.parameters.items():
        if not one.buffer or one.after.dtype.kind not in "fc":
            continue
        mine = [r.parameters[name] for r in ranks if name in r.parameters]
        mine = [p for p in mine if p.after.shape == one.after.shape]
        if all(allowed.values.near(p.after, one.after) for p in mine):
            continue
        (kept if all(np.array_equal(p.after, p.value) for p in mine) else wrong).append(name)
    return wrong, kept


def loss(ranks: Sequence[Record], twin: Record, allowed: Tolerances) -> tuple[bool, str]:
    """True if the loss of the ranks is the twin's, and how."""
    mine, theirs = [record.loss for record in ranks], twin.loss
    bound = allowed.values.relative * max(1.0, abs(theirs))

    def near(value: float) -> bool:
        return abs(value - theirs) <= bound

    if not all(map(math.isfinite, mine)) or not math.isfinite(theirs):
        return False, f"{mine} on the ranks, {theirs} of the twin: not finite"
    if all(map(near, mine)):
        return True, "equal on all ranks"
    if near(sum(mine) / len(mine)):
        return True, "its mean over the ranks is the twin's"
    if near(sum(mine)):
        return True, "its sum over the ranks is the twin's"
    shown = ", ".join(f"{one:.9g}" for one in mine)
    return False, f"{shown} on ranks 0 to {len(mine) - 1}, {theirs:.9g} of the twin"


__all__ = ["Compared", "Kind", "Tolerances", "buffers", "compared", "loss", "norms", "tolerances"]
