"""Rewriting of stages whose sums are not to depend on the order in which terms arrive, nor on who
has them: option ``sums=`` of `compile`.

An exact sum M of several terms becomes R M': the movement M' brings every term, in a region of its
own, to the worker that needs the sum, or a share of it, and R, a layer of local maps, sums them
there by one call (`linop.spaces.reproducible_sums`). As a linear map R is (I I … I), so that
R M' = M, and the plans are proven as any others; as a program it is one function of all terms.

A tree is a product of movements, of which none adds more than two terms: those of neighbours, then
sums of neighbours. So there is nothing new in it but that nothing merges these movements.

No instruction of plans, and no road of messages, knows of either. A worker gets all terms of what
it sums: an all-reduce of w workers sums shares, for each of which the w - 1 others send as many
bytes as in a reduce-scatter, and copies these to all. Terms that one worker has several of are sent
apart, since their partial sum would be rounded, or be none of the tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import numpy as np
import scipy

from linop.normal_form.maps import Call, Layer, LocalMap
from linop.normal_form.movement import Movement
from linop.normal_form.space_tables import Block, box_of, number_of
from linop.normal_form.stages import Stages
from linop.planning.combinations import Combination, factors, shares
from linop.planning.lowering import overlapping
from linop.spaces.exact import Exact
from linop.spaces.region import Region, Subset, as_subset
from linop.spaces.reproducible_sums import check_exact, exact_sum
from linop.spaces.scalars import Array
from linop.spaces.space import Space

SMALL = 1 << 15
"""Bytes of a sum that all its receivers form, rather than shares of it."""
Term = tuple[Subset, Exact]


def reproducible(stages: Stages, how: str) -> Stages:
    """Stages with the sums of their movements as local maps; the same object if none has any.

    A movement is the product of all that is between two local maps, so that a sum of sums is one.
    Sums of two terms, whose order does not matter, stay as they are, unless a coefficient is
    neither 1 nor -1; so do those of integers, which are exact.

    Args:
        how: "exact" or "tree".

    Raises:
        DTypeError: an exact sum of numbers that it is not defined for.
    """
    if stages.domain.dtype.kind in "iub":
        return stages
    movements: list[Movement] = []
    layers: list[Layer] = []
    known = {r.name for m in stages.movements for space in (m.domain, m.codomain) for r in space}
    for k, movement in enumerate(stages.movements):
        found = _Split(movement, how, f"sum {k}" + _mark(known))
        made = found.movements()
        movements += made
        layers += [tuple(found.calls), *[()] * (len(made) - 2)] if len(made) > 1 else []
        layers += stages.layers[k : k + 1]
    same = len(movements) == len(stages.movements)
    return stages if same else Stages(tuple(movements), tuple(layers))


def _mark(known: set[str]) -> str:
    """Marks that no name of a sum has yet."""
    return "′" * max((1 + name.count("′") for name in known if name.startswith("sum ")), default=0)


class _Split:
    """A movement as terms, sums and copies of these.

    Attributes:
        calls: the exact sums.

    Args:
        name: beginning of the names of the regions between.
    """

    def __init__(self, movement: Movement, how: str, name: str) -> None:
        self._movement, self._how, self._name = movement, how, name
        self.calls: list[Call] = []
        self._sums = 0
        self._levels: list[list[Block]] = []
        """Blocks moved before `_after`, the last first: terms to regions of their own; sums of two
        of a tree."""
        self._after: list[Block] = []
        """Sums to where they are wanted, and all that is no sum."""
        combined: dict[tuple[Term, ...], list[Subset]] = {}
        for target, terms in self._cells():
            if len(terms) < 2 or (len(terms) == 2 and all(c in (1, -1) for _, c in terms)):
                self._after += [(target, source, c) for source, c in terms]
            else:
                combined.setdefault(terms, []).append(target)
        if combined and how == "exact":
            check_exact(movement.domain.dtype)
        for terms, targets in combined.items():
            self._sum(Combination(terms, tuple(targets)))

    def movements(self) -> list[Movement]:
        """The movements, first applied first; of exact sums there are two, with these between. The
        movement itself, if it has no sums that are to be formed otherwise."""
        if not self._sums:
            return [self._movement]
        if not self.calls:
            return [*factors(self._movement, [*self._levels[::-1], self._after])]
        domain, codomain = self._movement.domain, self._movement.codomain
        (before,) = self._levels
        read = {source.region.name for _, source, _ in self._after}
        stay = [region for region in domain if region.name in read]
        terms = [target.region for target, _, _ in before]
        sums = [region for call in self.calls for region in call.map.codomain]
        still: list[Block] = [(as_subset(region), as_subset(region), 1) for region in stay]
        first = Space([*stay, *terms], domain.dtype)
        last = Space([*stay, *sums], domain.dtype)
        return [
            Movement.of_blocks(domain, first, [*still, *before]),
            Movement.of_blocks(last, codomain, self._after),
        ]

    def _cells(self) -> Iterator[tuple[Subset, tuple[Term, ...]]]:
        """Disjoint boxes of the codomain, with the terms that are added there, in the order of the
        workers that have them."""
        domain, codomain, t = self._movement.domain, self._movement.codomain, self._movement.table
        holders, first, _ = domain.numbering.holders
        order = np.lexsort((*t.of.T[::-1], t.src, holders[first[t.src]], t.dst))
        bounds = np.flatnonzero(np.diff(t.dst[order])) + 1
        for rows in np.split(order, bounds) if len(order) else []:
            region = codomain.numbering.at(int(t.dst[rows[0]]))
            low, high = t.at[rows], t.at[rows] + t.extent[rows]
            for group in overlapping(low, high):
                for start, stop in _cut(low[group], high[group]):
                    inside = group[
                        ((low[group] <= start) & (high[group] >= stop)).all(axis=1)
                    ].tolist()
                    if not inside:
                        continue
                    terms = []
                    for k in inside:
                        row = int(rows[k])
                        source = domain.numbering.at(int(t.src[row]))
                        at = t.of[row] + start - t.at[row]
                        terms.append((box_of(source, at, stop - start), number_of(t.coef[row])))
                    yield box_of(region, start, stop - start), tuple(terms)

    def _sum(self, one: Combination) -> None:
        """Add the blocks and the maps of a sum."""
        size = one.targets[0].size * self._movement.domain.dtype.itemsize
        workers = sorted({worker for worker, _ in one.receivers})
        memories = {memory for _, memory in one.receivers}
        if size > SMALL and len(workers) > 1:
            parts = shares(one, len(workers))
            for part, worker in zip(parts, workers, strict=False):
                self._at(part, (worker,), one.receivers[0][1])
        elif len(memories) == 1:
            self._at(one, tuple(workers), memories.pop())
        else:
            for target in one.targets:
                self._at(Combination(one.terms, (target,)), target.workers, target.memory)

    def _at(self, one: Combination, workers: tuple[int, ...], memory: str) -> None:
        """A sum that some workers form, each of them all of it."""
        name = f"{self._name}.{self._sums}"
        self._sums += 1
        total = Region(name, one.targets[0].shape, workers, memory)
        if self._how == "tree":
            self._tree(one, total)
            return
        space = Space([_like(total, f"term {k}") for k in range(len(one.terms))], self._dtype)
        pairs = zip(space, one.terms, strict=True)
        self._level(0).extend((as_subset(region), source, c) for region, (source, c) in pairs)
        self._after += [(target, as_subset(total), 1) for target in one.targets]
        local = _exactly(space, Space([total], self._dtype))
        self.calls.append(Call(local, tuple(region.name for region in space), (name,)))

    def _tree(self, one: Combination, total: Region) -> None:
        """A sum of two at a time. Terms with coefficients are scaled first, by themselves."""
        levels: list[list[Block]] = []
        terms = list(one.terms)
        plain = all(c in (1, -1) for _, c in terms)
        while len(terms) > 1 or not levels:
            pairs = [terms[k : k + 2] for k in range(0, len(terms), 2)]
            if not levels and not plain:
                pairs = [[term] for term in terms]
            many, number = len(pairs), len(levels)
            sums = [_like(total, f"level {number}.{k}") if many > 1 else total for k in range(many)]
            made = [as_subset(region) for region in sums]
            levels.append(
                [(to, *term) for to, pair in zip(made, pairs, strict=True) for term in pair]
            )
            terms = [(box, 1) for box in made]
        last = levels.pop()
        (target, *others) = one.targets
        if not others and (target.workers, target.memory) == (total.workers, total.memory):
            self._after += [(target, source, c) for _, source, c in last]
        else:
            levels.append(last)
            self._after += [(each, as_subset(total), 1) for each in one.targets]
        for number, blocks in enumerate(reversed(levels)):
            self._level(number).extend(blocks)

    @property
    def _dtype(self) -> np.dtype[Any]:
        return self._movement.domain.dtype

    def _level(self, number: int) -> list[Block]:
        """Blocks of so many movements before the last but one."""
        while len(self._levels) <= number:
            self._levels.append([])
        return self._levels[number]


def _like(region: Region, what: str) -> Region:
    return Region(f"{region.name} {what}", region.shape, region.workers, region.memory)


def _cut(low: Array, high: Array) -> Iterator[tuple[Array, Array]]:
    """(start, stop) of the cells that the ends of some boxes cut their hull into."""
    if (low == low[0]).all() and (high == high[0]).all():  # as most are: no cell but these boxes
        yield low[0], high[0]
        return
    ends = [np.unique(np.append(a, b)).tolist() for a, b in zip(low.T, high.T, strict=True)]
    for cell in product(*(pairwise(cuts) for cuts in ends)):
        start, stop = np.array(cell, np.int64).reshape(-1, 2).T
        yield start, stop


def _exactly(terms: Space, total: Space) -> LocalMap:
    """The exact sum of all regions of a space."""
    names = [region.name for region in terms]
    (region,) = total

    def forward(arrays: dict[str, Array]) -> Array:
        return exact_sum(*(arrays[name] for name in names))

    def backward(array: Array) -> dict[str, Array]:
        return {name: array.copy() for name in names}

    def matrix() -> scipy.sparse.sparray:
        return scipy.sparse.hstack([scipy.sparse.eye_array(region.size)] * len(names)).tocsr()

    symbol = f"exact sum of {len(names)}"
    return LocalMap(terms, total, forward, backward, symbol, matrix, fresh=True, apart=exact_sum)
