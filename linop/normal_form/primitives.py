"""The four memory primitives, as actions on whatever space they are placed in (paper, section 2).

An action says what it does to memory and nothing about the rest of the space. Each has one adjoint
rule, one reference rule (`run`, on real arrays) and one difference from the identity (`delta`);
`linop.operators.memory` places actions in spaces, and composes copy and move out of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, overload

import numpy as np

from linop.errors import RegionError
from linop.spaces.region import Region, Subset
from linop.spaces.scalars import Array
from linop.spaces.space import Space

Delta = tuple[Subset, Subset, int]
"""Destination, source, coefficient: one block of a matrix."""


@dataclass(frozen=True, slots=True)
class Action(ABC):
    """What a memory primitive does. Subclasses are the four of the paper."""

    letter: ClassVar[str] = "?"

    @property
    @abstractmethod
    def adjoint(self) -> Action:
        """The action whose matrix is the transpose."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Subset | Region, ...]:
        """The memory it touches."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of the regions it touches, each once."""

    @property
    def delta(self) -> tuple[Delta, ...]:
        """The blocks in which its matrix differs from the identity on the memory that stays."""
        return ()

    def codomain(self, space: Space) -> Space:
        """The space after the action."""
        return space

    @abstractmethod
    def run(self, arrays: dict[str, Array], dtype: np.dtype) -> None:
        """Do it, in place, to the arrays of a vector: the reference rule."""

    @property
    def subscript(self) -> str:
        names = [str(part) for part in self.parts]
        return ",".join(names if len(names) <= 4 else [names[0], "…", names[-1]])


@dataclass(frozen=True, slots=True)
class Allocate(Action):
    """A_b: brings zero-filled regions into the space (equation 3)."""

    regions: tuple[Region, ...]
    letter: ClassVar[str] = "A"

    @property
    def adjoint(self) -> Action:
        return Deallocate(self.regions)

    @property
    def parts(self) -> tuple[Region, ...]:
        return self.regions

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(region.name for region in self.regions)

    def codomain(self, space: Space) -> Space:
        for region in self.regions:
            if region.name in space:
                raise RegionError(f"allocate: the space has a region {region.name!r} already")
        return Space((*space.regions, *self.regions), space.dtype)

    def run(self, arrays: dict[str, Array], dtype: np.dtype) -> None:
        for region in self.regions:
            arrays[region.name] = np.zeros(region.shape, dtype)


@dataclass(frozen=True, slots=True)
class Deallocate(Action):
    """D_b = A_b*: takes regions out of the space (equation 4)."""

    regions: tuple[Region, ...]
    letter: ClassVar[str] = "D"

    @property
    def adjoint(self) -> Action:
        return Allocate(self.regions)

    @property
    def parts(self) -> tuple[Region, ...]:
        return self.regions

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(region.name for region in self.regions)

    def codomain(self, space: Space) -> Space:
        gone = {space.require(region).region.name for region in self.regions}
        return Space((r for r in space.regions if r.name not in gone), space.dtype)

    def run(self, arrays: dict[str, Array], dtype: np.dtype) -> None:
        for region in self.regions:
            del arrays[region.name]


@dataclass(frozen=True, slots=True)
class Clear(Action):
    """K_b: sets a part to zero; self-adjoint (equation 5)."""

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

    def run(self, arrays: dict[str, Array], dtype: np.dtype) -> None:
        arrays[self.part.region.name][self.part.index] = 0


@dataclass(frozen=True, slots=True)
class Add(Action):
    """S_{a→b}: adds part a to part b (equation 6); its adjoint is S_{b→a} (equation 7)."""

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

    def run(self, arrays: dict[str, Array], dtype: np.dtype) -> None:
        target = arrays[self.target.region.name][self.target.index]
        target += arrays[self.source.region.name][self.source.index]

    @property
    def subscript(self) -> str:
        return f"{self.source}→{self.target}"


class InPlace(Sequence[Action]):
    """Clears and adds, first applied first, as two columns; each is made when it is looked at. A
    halo of thousands of workers has a hundred thousand, and the garbage collector would look at
    all of them again and again.

    Args:
        targets, sources: of each action; the same object twice for a clear.
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
    """The adjoints of actions, in the other order."""
    if isinstance(actions, InPlace):
        return InPlace(actions.sources[::-1], actions.targets[::-1])
    return [action.adjoint for action in reversed(actions)]


def deltas(actions: Sequence[Action]) -> Iterator[Delta]:
    """The blocks in which the matrices of actions differ from the identity, one after the other."""
    if isinstance(actions, InPlace):
        signs = (-1 if t is s else 1 for t, s in zip(actions.targets, actions.sources, strict=True))
        return zip(actions.targets, actions.sources, signs, strict=True)
    return (delta for action in actions for delta in action.delta)


Placed = tuple[Space, Sequence[Action], Space]
"""Actions, first applied first, between the space before them and the space after them. Where there
are several, all leave the space as it is."""


def independent_runs(placed: Iterable[Placed]) -> list[list[Placed]]:
    """Cut a program of actions, first applied first, into runs whose matrix is I + ΣX.

    A product (I + X_n)···(I + X_1) is I + ΣX exactly if X_j X_i = 0 for all j > i: no action reads
    what an earlier one of its run wrote. A region that comes back after it was deallocated starts a
    new run too, since its contents do not pass through.
    """
    runs: list[list[Placed]] = [[]]
    written: defaultdict[str, list[Subset]] = defaultdict(list)
    gone: set[str] = set()
    for before, actions, after in placed:
        first = 0
        for k, action in enumerate(actions):
            blocks = action.delta
            stale = type(action) is Allocate and any(r.name in gone for r in action.regions)
            for _, source, _ in blocks:
                boxes = written.get(source.region.name)
                stale = stale or (boxes is not None and any(map(source.overlaps, boxes)))
            if stale:
                if k > first:
                    runs[-1].append((before, actions[first:k], before))
                runs.append([])
                first, written, gone = k, defaultdict(list), set()
            for target, _, _ in blocks:
                written[target.region.name].append(target)
            if type(action) is Deallocate:
                gone.update(region.name for region in action.regions)
        runs[-1].append((before, actions[first:], after))
    return runs
