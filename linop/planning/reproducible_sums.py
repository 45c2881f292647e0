"""Rewriting of stages whose sums are not to depend on the order in which terms arrive, nor on who
has them: option ``sums=`` of `compile`.

A sum M of several terms becomes R M': the movement M' brings every term, in a region of its own, to
the worker that needs the sum, or a share of it, and R, a layer of local maps, sums them there by
one call (`linop.spaces.reproducible_sums`). As a linear map R is (I I … I), so that R M' = M, and
the plans are proven as any others; as a program it is one function of all terms at once. No
instruction of plans, and no road of messages, knows of it.

A worker gets all terms of what it sums: an all-reduce of w workers sums shares, for each of which
the w - 1 others send as many bytes as in a reduce-scatter, and copies these to all. Terms that one
worker has several of are sent apart, since their partial sum would be rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np
import scipy

from linop.normal_form.maps import Call, Layer, LocalMap, Port
from linop.normal_form.movement import Movement
from linop.normal_form.space_tables import Block, box_of, number_of
from linop.normal_form.stages import Stages
from linop.planning.combinations import Combination, shares
from linop.planning.lowering import overlapping
from linop.spaces.exact import Exact
from linop.spaces.region import Region, Subset, as_subset
from linop.spaces.reproducible_sums import SUMS, check_exact
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
        if found.calls:
            movements += found.movements()
            layers.append(tuple(found.calls))
        else:
            movements.append(movement)
        layers += stages.layers[k : k + 1]
    same = len(movements) == len(stages.movements)
    return stages if same else Stages(tuple(movements), tuple(layers))


def _mark(known: set[str]) -> str:
    """Marks that no name of a sum has yet."""
    return "′" * max((1 + name.count("′") for name in known if name.startswith("sum ")), default=0)


class _Split:
    """A movement as terms, sums and copies of these.

    Attributes:
        calls: the sums; none if the movement has no sums that are to be local maps.

    Args:
        name: beginning of the names of the regions between.
    """

    def __init__(self, movement: Movement, how: str, name: str) -> None:
        self._movement, self._how, self._name = movement, how, name
        self.calls: list[Call] = []
        self._before: list[Block] = []
        """Terms to regions of their own."""
        self._after: list[Block] = []
        """Sums to where they are wanted, and all that is no sum."""
        combined: dict[tuple[Term, ...], list[Subset]] = {}
        for target, terms in self._cells():
            if len(terms) < 2 or (len(terms) == 2 and all(abs(c) == 1 for _, c in terms)):
                self._after += [(target, source, c) for source, c in terms]
            else:
                combined.setdefault(terms, []).append(target)
        if combined and how == "exact":
            check_exact(movement.domain.dtype)
        for terms, targets in combined.items():
            self._sum(Combination(terms, tuple(targets)))

    def movements(self) -> list[Movement]:
        """The two movements, before and after the sums."""
        domain, codomain = self._movement.domain, self._movement.codomain
        read = {source.region.name for _, source, _ in self._after}
        stay = [region for region in domain if region.name in read]
        terms = [target.region for target, _, _ in self._before]
        sums = [region for call in self.calls for region in call.map.codomain]
        still: list[Block] = [(as_subset(region), as_subset(region), 1) for region in stay]
        first = Space([*stay, *terms], domain.dtype)
        last = Space([*stay, *sums], domain.dtype)
        return [
            Movement.of_blocks(domain, first, [*still, *self._before]),
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
        shape, dtype = one.targets[0].shape, self._movement.domain.dtype
        name = f"{self._name}.{len(self.calls)}"
        total = Region(name, shape, workers, memory)
        terms = [Region(f"{name} term {k}", shape, workers, memory) for k in range(len(one.terms))]
        pairs = zip(terms, one.terms, strict=True)
        self._before += [(as_subset(region), source, c) for region, (source, c) in pairs]
        self._after += [(target, as_subset(total), 1) for target in one.targets]
        local = _local(Space(terms, dtype), Space([total], dtype), self._how)
        self.calls.append(Call(local, tuple(r.name for r in terms), (name,)))


def _cut(low: Array, high: Array) -> Iterator[tuple[Array, Array]]:
    """(start, stop) of the cells that the ends of some boxes cut their hull into."""
    ends = [np.unique(np.append(a, b)).tolist() for a, b in zip(low.T, high.T, strict=True)]
    for cell in product(*(pairwise(cuts) for cuts in ends)):
        start, stop = np.array(cell, np.int64).reshape(-1, 2).T
        yield start, stop


def _local(terms: Space, total: Space, how: str) -> LocalMap:
    """The sum of all regions of a space, in one call."""
    names = [region.name for region in terms]
    (region,) = total
    function = SUMS[how]

    def forward(arrays: dict[str, Array]) -> Array:
        return function(*(arrays[name] for name in names))

    def backward(array: Array) -> dict[str, Array]:
        return {name: array.copy() for name in names}

    def matrix() -> scipy.sparse.sparray:
        return scipy.sparse.hstack([scipy.sparse.eye_array(region.size)] * len(names)).tocsr()

    port: Port | None = (lambda namespace: (forward, backward)) if how == "tree" else None
    symbol = f"{how} sum of {len(names)}"
    return LocalMap(
        terms, total, forward, backward, symbol, matrix, port, fresh=True, apart=function
    )
