"""Algebraic laws of the memory primitives (paper, section 2), and the rewrite that applies them.

A product is a list of factors, the first applied first. A factor is an `Action` on a region or a
pair of subsets, many in place (`InPlace`), or an opaque object, which no law moves an action
across. Actions on different regions commute, so a law for two neighbours also holds for an action
and the last one before it that shares a region with it. A law is one row of `LAWS`: it compares
the part that the later action reads with the part that the earlier one writes. Those of an
allocation, deallocation or clear are the same: its region or subset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, compress, groupby
from typing import Any

from linop.normal_form.primitives import Add, Allocate, Clear, Deallocate, InPlace
from linop.spaces.region import Part, Region, Subset, as_subset

Factor = Any
"""An `Action`, an `InPlace` of several, or an opaque object (a barrier)."""

LATER, EARLIER, NEITHER, CLEARED = "the later", "the earlier", "neither", "a clear of the region"
"""The product of two actions by a law: one of them, the identity, or a clear."""


def _clear_clear(after: Subset, before: Subset) -> str | None:
    """K_b K_c = K_b and K_c K_b = K_b if b contains c."""
    if before.contains(after):
        return EARLIER
    return LATER if after.contains(before) else None


def _deallocate_allocate(after: Region, before: Region) -> str | None:
    """D_b A_b = I."""
    return NEITHER if after == before else None


def _allocate_deallocate(after: Region, before: Region) -> str | None:
    """A_b D_b = K_b."""
    return CLEARED if after == before else None


def _lost(after: Part, before: Part) -> str | None:
    """D_b K_b = D_b, D_b S_{a→b} = D_b and K_b S_{a→b} = K_b: a dead write is dropped."""
    return LATER if _holds(after, before) else None


def _of_zero(after: Part, before: Part) -> str | None:
    """K_b A_b = A_b, S_{b→a} A_b = A_b and S_{b→a} K_b = K_b: clearing or adding zeros is
    dropped."""
    return EARLIER if _holds(before, after) else None


def _holds(whole: Part, part: Part) -> bool:
    """True if `whole` contains every element of `part`."""
    if whole is part:
        return True
    if type(whole) is Subset:
        return whole.contains(part if type(part) is Subset else as_subset(part))
    # A whole region: mostly the same object.
    region = part.region if type(part) is Subset else part
    return region is whole or region == whole or not part.size


Law = Callable[[Any, Any], str | None]

LAWS: dict[tuple[type[Any], type[Any]], Law] = {
    (Clear, Clear): _clear_clear,
    (Deallocate, Allocate): _deallocate_allocate,
    (Allocate, Deallocate): _allocate_deallocate,
    (Deallocate, Clear): _lost,
    (Deallocate, Add): _lost,
    (Clear, Add): _lost,
    (Clear, Allocate): _of_zero,
    (Add, Allocate): _of_zero,
    (Add, Clear): _of_zero,
}
"""By the classes of the later and the earlier of two actions, the law for their product: it returns
the product, by the part that the later reads and that the earlier writes, or None if it does not
apply."""


def reduced_by_laws(factors: Sequence[Factor]) -> Sequence[Factor]:
    """An equal product, after all laws, applied until none shortens it; `factors` itself if none
    applies. Consecutive actions in place are one `InPlace`.

    The length of a product is its number of factors plus that of the regions they allocate or
    deallocate: ``D_{b,a} A_{a,d}`` is reduced to ``D_b A_d``. What is between two opaque objects is
    reduced independently of the rest.
    """
    found: list[Factor] = []
    changed = False
    for opaque, run in groupby(factors, _is_opaque):
        given = list(run)
        reduced = given if opaque else _reduced_run(given)
        changed |= reduced is not given
        found += reduced
    return found if changed else factors


def _reduced_run(factors: list[Factor]) -> list[Factor]:
    """`reduced_by_laws` of a product without opaque objects."""
    while True:
        rows: Iterator[Row] = chain.from_iterable(map(_rows, factors))
        while (product := _Product.reduced(rows)).exposed:
            rows = product.rows()
        joined = list(product.factors())
        if _length(joined) >= _length(factors):
            return factors
        factors = joined
        if not product.refused:
            return factors


def _is_opaque(factor: Factor) -> bool:
    return not isinstance(factor, Allocate | Deallocate | InPlace | Add | Clear)


def _length(factors: Sequence[Factor]) -> int:
    return sum(map(_length_of, factors))


def _length_of(factor: Factor) -> int:
    if type(factor) is InPlace:
        return len(factor)
    several = type(factor) is Allocate or type(factor) is Deallocate
    return 1 + len(factor.regions) if several else 1


Row = tuple[type[Any], Any, Any, str, str, bool]
"""An action as its class, the parts that it writes and reads, the names of their regions, and
whether it is a factor by itself."""


def _rows(factor: Factor) -> Iterator[Row]:
    """The actions of a factor. Allocations and deallocations are one per region, since laws compare
    single regions."""
    kind = type(factor)
    if kind is Allocate or kind is Deallocate:
        alone = len(factor.regions) == 1
        for region in factor.regions:
            yield kind, region, region, region.name, region.name, alone
    elif kind is InPlace:
        for b, a in zip(factor.targets, factor.sources, strict=True):
            yield Clear if a is b else Add, b, a, b.region.name, a.region.name, True
    else:
        yield from _rows(InPlace(factor.parts[-1:], factor.parts[:1]))


_JOINED: dict[type[Any] | None, type[Any]] = {Add: InPlace, Clear: InPlace}
"""The class of a run of actions, where it is not the actions' own."""


class _Product:
    """A product under reduction, in columns: the garbage collector would visit an object for each
    action repeatedly.

    Attributes:
        exposed: an action was removed between two others to which a law may now apply, so that
            another sweep is needed.
        refused: a law was not applied since it would not have shortened the product.
    """

    def __init__(self) -> None:
        self.exposed = False
        self.refused = False
        self._kinds: list[type[Any] | None] = []  # None: removed
        self._alone: list[bool] = []
        self._cleared: set[int] = set()  # clears in the place of one of several allocations
        self._targets: list[Any] = []
        self._sources: list[Any] = []
        self._names: list[str] = []  # of the regions that action k writes, at 2k, and reads, 2k + 1
        # The actions on a region are a chain of such positions, the latest first; -1 ends it.
        self._latest: dict[str, int] = {}
        self._before: list[int] = []

    @staticmethod
    def reduced(rows: Iterable[Row]) -> _Product:
        """One sweep: each action against the last one before it that shares a region with it."""
        product = _Product()
        for row in rows:
            product._multiply(*row)
        return product

    def rows(self) -> Iterator[Row]:
        """The actions that are left."""
        for k in self._in_order():
            kind, names = self._kinds[k], self._names[2 * k : 2 * k + 2]
            assert kind is not None
            yield kind, self._targets[k], self._sources[k], names[0], names[1], self._alone[k]

    def factors(self) -> Iterator[Factor]:
        """The product that is left, with runs of allocations, of deallocations and of actions in
        place joined to one factor each."""
        order = self._in_order()
        for kind, run in groupby(order, lambda k: _JOINED.get(self._kinds[k], self._kinds[k])):
            rows = list(run)
            written = tuple(self._targets[k] for k in rows)
            if kind is InPlace:
                yield InPlace(written, tuple(self._sources[k] for k in rows))
            else:
                assert kind is not None
                yield kind(written)

    def _in_order(self) -> list[int]:
        """The positions of the actions that are left. A clear in the place of one of several
        allocations comes before those of the others, which it commutes with."""
        order: list[int] = []
        for k in compress(range(len(self._kinds)), self._kinds):
            at = len(order)
            while k in self._cleared and at and self._kinds[order[at - 1]] is Allocate:
                at -= 1
            order.insert(at, k)
        return order

    def _multiply(
        self, kind: type[Any], target: Any, source: Any, written: str, read: str, alone: bool
    ) -> None:
        among = False  # several allocations
        while (last := self._last(written, read)) >= 0:
            result = self._by_law(kind, target, source, last)
            # A clear in the middle of both factors would not shorten the product.
            if result == CLEARED and not (alone or self._alone[last]):
                self.refused, result = True, None
            if result is None:
                break
            if result == EARLIER:
                return
            # No later action shares a region with the result, so it commutes to the end, and is
            # reduced against the actions before the one that it replaces.
            self._remove(last)
            if result == NEITHER:
                return
            if result == CLEARED:
                kind, target = Clear, as_subset(target)
                source, among = target, not alone
        if among:
            self._cleared.add(len(self._kinds))
        self._append(kind, target, source, written, read)
        self._alone.append(alone)

    def _last(self, written: str, read: str) -> int:
        """The last action on a region of one of these names; -1 if there is none."""
        last = self._alive(written)
        return last if read is written else max(last, self._alive(read))

    def _alive(self, name: str) -> int:
        at = self._latest.get(name, -1)
        # Removed actions are at the end: the replacement of one is appended after it.
        while at >= 0 and self._kinds[at >> 1] is None:
            at = self._latest[name] = self._before[at]
        return at >> 1

    def _by_law(self, kind: type[Any], target: Any, source: Any, last: int) -> str | None:
        before = self._kinds[last]
        if kind is Add and before is Clear and self._targets[last] == target:
            if self._copied_back(target, source):
                return NEITHER
        law = LAWS.get((kind, before))  # type: ignore[arg-type]
        return None if law is None else law(source, self._targets[last])

    def _copied_back(self, a: Subset, b: Subset) -> bool:
        """True if the law S_{b→a} K_a S_{a→b} Z_b = S_{a→b} Z_b applies to S_{b→a} and the actions
        before it, K_a included, where Z_b allocates or clears b: a copy from a to b and back."""
        history = self._history(a.region.name, b.region.name)
        _, copied, zeroed = (next(history, None) for _ in range(3))
        return (
            copied is not None
            and zeroed is not None
            and self._kinds[copied] is Add
            and (self._sources[copied], self._targets[copied]) == (a, b)
            and self._kinds[zeroed] in (Allocate, Clear)
            and _holds(self._targets[zeroed], b)
        )

    def _history(self, one: str, other: str) -> Iterator[int]:
        """The actions on regions of these names, latest first."""
        at = [self._latest.get(one, -1), self._latest.get(other, -1)]
        while (last := max(at) >> 1) >= 0:
            if self._kinds[last] is not None:
                yield last
            at = [self._before[k] if k >> 1 == last else k for k in at]

    def _remove(self, last: int) -> None:
        self._kinds[last] = None
        names = self._names[2 * last], self._names[2 * last + 1]
        self.exposed |= any(self._latest[name] >> 1 > last for name in names)

    def _append(self, kind: type[Any], target: Any, source: Any, written: str, read: str) -> None:
        latest, at = self._latest, len(self._before)
        self._kinds.append(kind)
        self._targets.append(target)
        self._sources.append(source)
        self._names += written, read
        self._before += latest.get(written, -1), latest.get(read, -1)
        latest[written], latest[read] = at, at + 1
