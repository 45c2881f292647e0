"""How tensors of several ranks are related to one tensor of the twin, by their values.

Values are drawn at random and compared in high precision, so elements that are equal by chance are
few; where a value occurs several times, an order of elements is preferred that is a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product

import numpy as np

Groups = tuple[tuple[int, ...], ...]
"""A partition of ranks into groups."""
Arrays = Mapping[int, np.ndarray | None]
"""By rank."""


class Kind(StrEnum):
    """The closed list of relations between a gradient and the twin's."""

    EQUAL = "equal"
    FACTOR = "a factor"
    UNSUMMED = "terms that were not summed"
    WRONG_RANKS = "a sum over the wrong ranks"
    SHARD = "the gradient of another shard"
    NONE = "no gradient"
    STATISTICS = "statistics per rank"
    OTHER = "other"


@dataclass(frozen=True)
class Relation:
    """How values of some ranks are related to expected ones.

    Attributes:
        factor: of `FACTOR` that is the same on all ranks, and of sums of terms.
        factors: of `FACTOR` by rank, if they differ.
        options: partitions of the ranks over whose groups terms give the expected values, each with
            the factor by which they are too large.
        sums: of `FACTOR` by rank, options by which it may be terms as well, such as where a
            gradient has so few degrees of freedom that each is a multiple of any other.
    """

    kind: Kind
    factor: float = 1.0
    factors: Mapping[int, float] = field(default_factory=dict)
    options: tuple[tuple[Groups, float], ...] = ()
    sums: tuple[tuple[Groups, float], ...] = ()

    @property
    def groups(self) -> Groups:
        return self.options[0][0] if self.options else ()

    def like(self, other: Relation, scale: Scale) -> bool:
        """True if both are factors, and equal up to rounding."""
        if self.kind is not Kind.FACTOR or other.kind is not Kind.FACTOR:
            return False
        mine, theirs = self.factors or {-1: self.factor}, other.factors or {-1: other.factor}
        allowed = 1e-6 + 2 * scale.of_factors
        return mine.keys() == theirs.keys() and all(
            abs(k - theirs[r]) <= allowed * abs(theirs[r]) for r, k in mine.items()
        )

    def as_terms(self, others: Iterable[Relation]) -> Relation:
        """As terms that were not summed, if it may be that, as another relation is."""
        known = [option for one in others if one.kind is Kind.UNSUMMED for option in one.options]
        for groups, k in self.sums:
            if any(groups == each and abs(k - other) < 1e-6 for each, other in known):
                return Relation(Kind.UNSUMMED, k, options=((groups, k),))
        return self

    def preferring(self, groups: Groups) -> Relation:
        """With these groups first, if they are among the options."""
        found = [one for one in self.options if one[0] == groups]
        if not found:
            return self
        rest = tuple(one for one in self.options if one[0] != groups)
        return Relation(self.kind, found[0][1], self.factors, (*found, *rest))


@dataclass(frozen=True)
class Scale:
    """Errors that are rounding.

    Attributes:
        relative: of the largest expected element.
        least: of everything.
    """

    relative: float
    least: float

    @property
    def of_factors(self) -> float:
        """The relative error of a factor, which is found from many elements."""
        return self.relative / 8

    def near(self, a: np.ndarray, b: np.ndarray) -> bool:
        """True if two arrays are equal up to rounding."""
        if a.shape != b.shape:
            return False
        if not a.size:
            return True
        with np.errstate(invalid="ignore", over="ignore"):
            gap = np.where(a == b, 0, np.abs(a - b)).max()
        largest = np.abs(b[np.isfinite(b)]).max(initial=0.0)
        return bool(gap <= self.relative * largest + self.least)


def related(
    given: Arrays, expected: Mapping[int, np.ndarray], scale: Scale, groups: Sequence[Groups] = ()
) -> Relation:
    """The relation of values by rank to expected ones.

    Args:
        groups: partitions of ranks that are tried first.
    """
    ranks = sorted(expected)
    zeros = {r: np.zeros_like(expected[r]) for r in ranks}
    found = {r: zeros[r] if (value := given.get(r)) is None else value for r in ranks}
    if any(found[r].shape != expected[r].shape for r in ranks):
        return Relation(Kind.OTHER)
    if all(scale.near(found[r], expected[r]) for r in ranks):
        return Relation(Kind.EQUAL)
    if all(scale.near(found[r], zeros[r]) for r in ranks):
        return Relation(Kind.NONE)
    factors = {r: factor(found[r], expected[r], scale) for r in ranks}
    if all(one is not None for one in factors.values()):
        plain = {r: rounded(one, scale) for r, one in factors.items() if one is not None}
        sums = _sums(found, expected, scale, groups)
        same = max(plain.values()) - min(plain.values()) <= 1e-6 * max(map(abs, plain.values()))
        if same:
            return Relation(Kind.FACTOR, plain[ranks[0]])
        # One rank has it all; or any number is a multiple of a single one.
        alone = 0.0 in [round(k, 9) for k in plain.values()]
        single = all(one.size == 1 for one in expected.values())
        if sums and ((alone and abs(sums[0][1] - 1) < 1e-6) or (single and _is_simple(sums[0][1]))):
            return Relation(Kind.UNSUMMED, sums[0][1], options=sums)
        return Relation(Kind.FACTOR, factors=plain, sums=sums)
    if sums := _sums(found, expected, scale, groups):
        return Relation(Kind.UNSUMMED, sums[0][1], options=sums)
    if _rearranged(found, expected, scale):
        return Relation(Kind.SHARD)
    return Relation(Kind.OTHER)


def rounded(k: float, scale: Scale) -> float:
    """A factor; a fraction of small numbers, if it is one up to rounding."""
    for bottom in range(1, 9):
        near = round(k * bottom) / bottom
        if abs(k - near) <= scale.of_factors * abs(near):
            return near
    return float(k)


def _is_simple(k: float) -> bool:
    """True for small whole numbers, and one over them."""
    return any(x > 0.5 and abs(x - round(x)) < 1e-6 for x in (k, 1 / k)) if k else False


def factor(given: np.ndarray, expected: np.ndarray, scale: Scale) -> float | None:
    """k such that the values are k times the expected ones."""
    square = float((np.abs(expected) ** 2).sum())
    if square <= scale.least**2 * max(expected.size, 1):
        return 1.0 if scale.near(given, expected) else None
    k = float((given * expected.conj()).sum().real) / square
    return k if scale.near(given, k * expected) else None


def _sums(
    given: Mapping[int, np.ndarray],
    expected: Mapping[int, np.ndarray],
    scale: Scale,
    groups: Sequence[Groups],
) -> tuple[tuple[Groups, float], ...]:
    """Partitions over whose groups the values sum up to the expected ones, with a factor."""
    found = []
    for partition in partitions(sorted(expected), groups):
        factors = []
        for group in partition:
            wanted = expected[group[0]]
            if len(group) < 2 or not all(scale.near(expected[r], wanted) for r in group):
                break
            k = factor(sum(given[r] for r in group), wanted, scale)  # type: ignore[arg-type]
            if k is None or abs(k) < 1e-9:
                break
            factors.append(k)
        else:
            if max(factors) - min(factors) <= 1e-6 * max(map(abs, factors)):
                found.append((partition, factors[0]))
    return tuple(sorted(found, key=lambda one: abs(one[1] - 1) > 1e-6))


def related_to_a_block(
    given: Mapping[int, np.ndarray], whole: np.ndarray, scale: Scale, groups: Sequence[Groups] = ()
) -> Relation | None:
    """The relation of values by rank to blocks of a tensor, of which it is not known which block
    belongs to which rank; None if they are neither blocks nor terms of blocks, up to a factor."""
    ranks = sorted(given)
    if not np.abs(whole).max(initial=0.0) > scale.least or len({given[r].shape for r in ranks}) > 1:
        return None
    alone = tuple((r,) for r in ranks)
    for partition in (alone, *partitions(ranks, groups)):
        totals = (sum(given[r] for r in group) for group in partition)
        factors = [_factor_of_a_block(np.asarray(one), whole, scale) for one in totals]
        found = [k for k in factors if k is not None]
        if len(found) < len(partition) or max(found) - min(found) > 1e-6 * max(map(abs, found)):
            continue
        k = found[0]
        if partition is not alone:
            return Relation(Kind.UNSUMMED, k, options=((partition, k),))
        return Relation(Kind.EQUAL if abs(k - 1) < 1e-6 else Kind.FACTOR, k)
    return None


def _factor_of_a_block(given: np.ndarray, whole: np.ndarray, scale: Scale) -> float | None:
    """k such that values are k times a block of a tensor that is not zero."""
    for block in blocks(given.shape, whole.shape):
        if np.abs(whole[block]).max(initial=0.0) > scale.least:
            k = factor(given, whole[block], scale)
            if k is not None and abs(k) > 1e-9:
                return k
    return None


def partitions(ranks: Sequence[int], first: Sequence[Groups] = ()) -> Iterator[Groups]:
    """Partitions of ranks into groups of one size, as the axes of meshes have them."""
    done = set()
    n = len(ranks)
    made = [*first, (tuple(ranks),)]
    for size in range(2, n):
        if n % size == 0:
            for stride in (s for s in range(1, n // size + 1) if n % (size * s) == 0):
                made.append(
                    tuple(
                        tuple(ranks[base + offset + stride * k] for k in range(size))
                        for base in range(0, n, size * stride)
                        for offset in range(stride)
                    )
                )
    for one in made:
        partition = tuple(sorted(one))
        if partition not in done and sorted(r for group in partition for r in group) == [*ranks]:
            done.add(partition)
            yield partition


def joined(groups: Iterable[tuple[int, ...]]) -> Groups:
    """The groups over which sums are, that were taken over some groups one after the other."""
    found: list[set[int]] = []
    for group in groups:
        one = set(group)
        for other in [each for each in found if each & one]:
            one |= other
            found.remove(other)
        found.append(one)
    return tuple(sorted(tuple(sorted(one)) for one in found))


def _rearranged(
    given: Mapping[int, np.ndarray], expected: Mapping[int, np.ndarray], scale: Scale
) -> bool:
    """True if all elements are expected ones, of other places or ranks."""
    everything = np.concatenate([expected[r].ravel() for r in sorted(expected)])
    if np.iscomplexobj(everything) or everything.size < 4:
        return False
    index = Index(everything, scale)
    return all(index.has(given[r].ravel()) for r in given)


class Index:
    """The elements of a tensor, sorted, to be found by their values."""

    def __init__(self, whole: np.ndarray, scale: Scale) -> None:
        self.whole = whole
        flat = whole.ravel()
        self.flat = flat
        self.order = np.argsort(flat, kind="stable")
        self.sorted = flat[self.order]
        self.scale, self.largest = scale, _largest_ordinary(flat)
        self.gap = scale.relative * self.largest + scale.least
        with np.errstate(invalid="ignore"):
            steps = np.diff(self.sorted)
        self.distinct = 1.0 + float((steps > self.gap).sum()) if flat.size else 0.0

    @property
    def varied(self) -> bool:
        """True if at least half of the elements differ from each other."""
        return self.distinct * 2 >= self.flat.size

    def positions(self, values: np.ndarray) -> np.ndarray | None:
        """Positions of values in C order; None if one is not there."""
        if not self.flat.size or not np.isfinite(values).all():
            return None
        at = np.searchsorted(self.sorted, values)
        low, high = np.clip(at - 1, 0, None), np.clip(at, None, self.flat.size - 1)
        nearer = np.abs(self.sorted[low] - values) < np.abs(self.sorted[high] - values)
        nearest = np.where(nearer, low, high)
        if np.any(np.abs(self.sorted[nearest] - values) > self.gap):
            return None
        return np.asarray(self.order[nearest])

    def has(self, values: np.ndarray) -> bool:
        return self.positions(values) is not None

    def _near(self, part: np.ndarray, block: np.ndarray) -> bool:
        """True if a part is a block, up to rounding. What masks fill in is no scale of others."""
        with np.errstate(invalid="ignore", over="ignore"):
            gap = np.where(part == block, 0, np.abs(part - block))
        size = np.where(np.isfinite(block), np.abs(block), 0)
        return bool((gap <= self.gap + self.scale.relative * size * (size > self.largest)).all())

    def selection(self, part: np.ndarray) -> np.ndarray | None:
        """For each element of a part its position in the whole, flat; None if it is no part."""
        whole = self.whole
        if part.size > whole.size or not part.size or part.dtype.kind != whole.dtype.kind:
            return None
        if part.shape == whole.shape and self._near(part, whole):
            return np.arange(whole.size).reshape(whole.shape)
        finite = part[np.isfinite(part)]
        if np.iscomplexobj(whole) or part.size < 2 or not finite.size:
            return None
        peak = finite[np.abs(finite).argmax()]
        if not self.has(np.array([peak])):
            return None
        if part.size == whole.size and self._near(part.reshape(whole.shape), whole):
            return np.arange(whole.size).reshape(part.shape)
        for block in blocks(part.shape, whole.shape):
            if self._near(part, whole[block]):
                return np.arange(whole.size).reshape(whole.shape)[block]
        if not self.varied or bool((part == part.flat[0]).all()):
            return None  # such as zeros, of which many tensors have some
        found = self.positions(part.ravel())
        if found is None or len(set(found.tolist())) * 2 < found.size:
            return None
        return found.reshape(part.shape)


def _largest_ordinary(values: np.ndarray) -> float:
    """The largest absolute value but for infinities and those large numbers by which masks stand
    for them."""
    size = np.abs(values)
    usual = size[np.isfinite(size) & (size > 0)]
    most = 1e4 * float(np.median(usual)) if usual.size else 0.0
    return float(usual[usual <= most].max(initial=0.0))


def blocks(part: tuple[int, ...], whole: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Slices of a shape that have another one: contiguous, or every k-th along a dimension."""
    if len(part) != len(whole) or any(a > b for a, b in zip(part, whole, strict=True)):
        return
    cut = [d for d, (a, b) in enumerate(zip(part, whole, strict=True)) if a != b]
    if not cut or len(cut) > 2:
        return
    ways = []
    for d in cut:
        offsets = [slice(k, k + part[d]) for k in range(whole[d] - part[d] + 1)]
        step = -(-whole[d] // part[d]) if part[d] else 1
        if step > 1:
            offsets += [slice(k, None, step) for k in range(step)
                        if len(range(k, whole[d], step)) == part[d]]  # fmt: skip
        ways.append(offsets)
    for chosen in product(*ways):
        found = [slice(None)] * len(whole)
        for d, one in zip(cut, chosen, strict=True):
            found[d] = one
        yield tuple(found)
