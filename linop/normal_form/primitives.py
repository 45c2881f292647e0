"""The four memory primitives: allocate, deallocate, clear, add (paper, section 2).

An action names the regions or subsets that it touches, and leaves the rest of the space unchanged.
Each has an adjoint rule, a reference implementation on arrays (`interpret`) and its difference from
the identity (`delta`). `linop.operators.memory` applies actions to spaces, and composes copy and
move.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, ClassVar, overload

import numpy as np

from linop.errors import RegionError
from linop.spaces.region import Region, Subset
from linop.spaces.scalars import Array
from linop.spaces.space import Space

Delta = tuple[Subset, Subset, int]
"""(destination, source, coefficient) of one block of a matrix."""


@dataclass(frozen=True, slots=True)
class Action(ABC):
    """A memory primitive, independent of the space it acts on: base class of the paper's four."""

    letter: ClassVar[str] = "?"

    @property
    @abstractmethod
    def adjoint(self) -> Action:
        """The action whose matrix is the transpose."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Subset | Region, ...]:
        """The regions or subsets that it touches."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of the regions it touches, each once."""

    @property
    def delta(self) -> tuple[Delta, ...]:
        """The blocks of its matrix minus the identity, on regions in both domain and codomain."""
        return ()

    def codomain(self, space: Space) -> Space:
        """The space after the action on `space`; RegionError if it does not fit."""
        return space

    @abstractmethod
    def interpret(self, arrays: dict[str, Array], dtype: np.dtype) -> None:
        """Reference implementation: apply the action in place to a vector's arrays, by name."""

    @property
    def subscript(self) -> str:
        names = [str(part) for part in self.parts]
        return ",".join(names if len(names) <= 4 else [names[0], "…", names[-1]])


@dataclass(frozen=True, slots=True)
class _OfRegions(Action):
    """Base class of the two primitives that change the space: they add or remove whole regions."""

    regions: tuple[Region, ...]

    @property
    def parts(self) -> tuple[Region, ...]:
        return self.regions

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(region.name for region in self.regions)


@dataclass(frozen=True, slots=True)
class Allocate(_OfRegions):
    """A_b: add zero-filled regions to the space (equation 3)."""

    letter: ClassVar[str] = "A"

    @property
    def adjoint(self) -> Action:
        return Deallocate(self.regions)

    def codomain(self, space: Space) -> Space:
        for region in self.regions:
            if region.name in space:
                raise RegionError(f"allocate: the space has a region {region.name!r} already")
        return Space((*space.regions, *self.regions), space.dtype)

    def interpret(self, arrays: dict[str, Array], dtype: np.dtype) -> None:
        for region in self.regions:
            arrays[region.name] = np.zeros(region.shape, dtype)


@dataclass(frozen=True, slots=True)
class Deallocate(_OfRegions):
    """D_b = A_b*: remove regions from the space (equation 4)."""

    letter: ClassVar[str] = "D"

    @property
    def adjoint(self) -> Action:
        return Allocate(self.regions)

    def codomain(self, space: Space) -> Space:
        gone = {space.require(region).region.name for region in self.regions}
        return Space((r for r in space.regions if r.name not in gone), space.dtype)

    def interpret(self, arrays: dict[str, Array], dtype: np.dtype) -> None:
        for region in self.regions:
            del arrays[region.name]


@dataclass(frozen=True, slots=True)
class Clear(Action):
    """K_b: set a subset to zero; self-adjoint (equation 5)."""

    part: Subset
    letter: ClassVar[str] = "K"

    @property
    def adjoint(self) -> Action:
        return self

    @property
    def parts(self) -> tuple[Subset, ...]:
        return (self.part,)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.part.region.name,)

    @property
    def delta(self) -> tuple[Delta, ...]:
        return ((self.part, self.part, -1),)

    def interpret(self, arrays: dict[str, Array], dtype: np.dtype) -> None:
        arrays[self.part.region.name][self.part.index] = 0


@dataclass(frozen=True, slots=True)
class Add(Action):
    """S_{a→b}: add subset a to subset b (equation 6); its adjoint is S_{b→a} (equation 7)."""

    source: Subset
    target: Subset
    letter: ClassVar[str] = "S"

    @property
    def adjoint(self) -> Action:
        return Add(self.target, self.source)

    @property
    def parts(self) -> tuple[Subset, ...]:
        return (self.source, self.target)

    @property
    def names(self) -> tuple[str, ...]:
        source, target = self.source.region.name, self.target.region.name
        return (source,) if source == target else (source, target)

    @property
    def delta(self) -> tuple[Delta, ...]:
        return ((self.target, self.source, 1),)

    def interpret(self, arrays: dict[str, Array], dtype: np.dtype) -> None:
        target = arrays[self.target.region.name][self.target.index]
        target += arrays[self.source.region.name][self.source.index]

    @property
    def subscript(self) -> str:
        return f"{self.source}→{self.target}"


class InPlace(Sequence[Action]):
    """Lazy sequence of `Clear` and `Add` actions, first applied first, stored as two columns.

    `Action` objects are built on access: a halo exchange of thousands of workers has a hundred
    thousand actions, which the garbage collector would visit repeatedly.

    Args:
        targets, sources: of each action; a clear has the same object as both.
    """

    def __init__(self, targets: Iterable[Subset], sources: Iterable[Subset]) -> None:
        self.targets, self.sources = tuple(targets), tuple(sources)

    def __len__(self) -> int:
        return len(self.targets)

    @overload
    def __getitem__(self, k: int) -> Action: ...

    @overload
    def __getitem__(self, k: slice) -> InPlace: ...

    def __getitem__(self, k: int | slice) -> Action | InPlace:
        if isinstance(k, slice):
            return InPlace(self.targets[k], self.sources[k])
        return _in_place(self.targets[k], self.sources[k])

    def __iter__(self) -> Iterator[Action]:
        return map(_in_place, self.targets, self.sources)


def _in_place(target: Subset, source: Subset) -> Action:
    return Clear(target) if target is source else Add(source, target)


def adjoints(actions: Sequence[Action]) -> Sequence[Action]:
    """The adjoints of actions, in reverse order."""
    if isinstance(actions, InPlace):
        return InPlace(actions.sources[::-1], actions.targets[::-1])
    return [action.adjoint for action in reversed(actions)]


def in_columns(actions: Sequence[Action]) -> tuple[Sequence[Subset], Sequence[Subset]]:
    """The targets and the sources of the actions' `delta` blocks, in order. The block of a clear,
    whose coefficient is -1, has the same object as both."""
    if isinstance(actions, InPlace):  # without an object for each
        return actions.targets, actions.sources
    blocks = [block for action in actions for block in action.delta]
    return [target for target, _, _ in blocks], [source for _, source, _ in blocks]


def joined_in_place(factors: Iterable[Any]) -> Iterator[Any]:
    """Some factors, with each run of actions in place as one `InPlace`."""
    for in_place, run in groupby(factors, lambda f: isinstance(f, InPlace | Add | Clear)):
        if in_place:
            columns = [in_columns(f if isinstance(f, InPlace) else (f,)) for f in run]
            yield InPlace(*map(chain.from_iterable, zip(*columns, strict=True)))
        else:
            yield from run


BetweenSpaces = tuple[Space, Sequence[Action], Space]
"""(space before, actions, space after), first applied first. Several actions leave the space
unchanged."""


def independent_batches(product: Iterable[BetweenSpaces]) -> list[list[BetweenSpaces]]:
    """Cut a product of actions, first applied first, into batches whose matrix is I + ΣX.

    A product (I + X_n)···(I + X_1) is I + ΣX exactly if X_j X_i = 0 for all j > i: no action reads
    elements that an earlier one of its batch wrote. Allocating a region that the batch deallocated
    starts a new batch too, since its contents are lost.
    """
    batches: list[list[BetweenSpaces]] = [[]]
    written = _Written()
    gone: set[str] = set()
    for before, actions, after in product:
        first, alone = 0, next(iter(actions), None)
        if isinstance(alone, Allocate) and not gone.isdisjoint(alone.names):
            batches.append([])
            written, gone = _Written(), set()
        elif isinstance(alone, Deallocate):
            gone.update(alone.names)
        for k, (target, source) in enumerate(zip(*in_columns(actions), strict=True)):
            if written.meets(source):
                if k > first:
                    batches[-1].append((before, actions[first:k], before))
                batches.append([])
                first, written, gone = k, _Written(), set()
            written.append(target)
        batches[-1].append((before, actions[first:], after))
    return batches


class _Written:
    """The boxes that a batch writes. Those of a region are a chain of positions, the latest first,
    and not a list each, which the garbage collector would visit. Once a region is read, its boxes
    are kept without repetitions: a recurrence writes the same few ten thousand times."""

    def __init__(self) -> None:
        self._boxes: list[Subset] = []
        self._latest: dict[str, int] = {}
        self._before: list[int] = []
        self._distinct: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], Subset]] = {}

    def append(self, box: Subset) -> None:
        name = box.region.name
        self._before.append(self._latest.get(name, -1))
        self._latest[name] = len(self._boxes)
        self._boxes.append(box)

    def meets(self, box: Subset) -> bool:
        """True if a box was written that shares an element with this one."""
        name = box.region.name
        at = self._latest.pop(name, -1)
        if at >= 0:
            distinct = self._distinct.setdefault(name, {})
            while at >= 0:
                written = self._boxes[at]
                distinct[written.start, written.stop] = written
                at = self._before[at]
        return any(map(box.overlaps, self._distinct.get(name, {}).values()))
