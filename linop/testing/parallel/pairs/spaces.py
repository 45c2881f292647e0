"""The spaces between which a program moves tensors, inferred from their values: tensors of ranks
that are replicated, copies, terms of a sum, or blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from linop import Movement, Region, Space
from linop.normal_form.boxes import Ints, row_keys
from linop.normal_form.columns import ones
from linop.testing.parallel.findings import ranks_text
from linop.testing.parallel.lifting.places import (
    UndecidedError,
    local,
    space_of,
    workers_of,
)
from linop.testing.parallel.recording.records import Call
from linop.testing.parallel.twins.locations import BLOCKS, SAME, TERMS, Location, Locations
from linop.testing.parallel.twins.relations import Kind

OWN = "each rank's own"
"""The form of tensors that are no part of one of the twin's."""


class _Held(NamedTuple):
    """A tensor of a rank.

    Attributes:
        whose: what it is a part of: equal for tensors that share elements.
        elements: the positions there of its elements, flat.
    """

    form: str
    rank: int
    position: int
    whose: tuple[Any, ...]
    elements: Ints


class Ends:
    """The space of the arguments, or of the results, of a call on all ranks.

    An element that several ranks hold is one of the space, of a region that is replicated over
    these. Its gradient is either whole on each of these ranks (the tensors are replicated), or each
    has a term of it (they are copies).

    Attributes:
        arrays: the space of the tensors of all ranks.
        embedding: E, from the elements to all that hold them; of terms of a sum, from their sum.
        picking: D, from tensors to the elements: a left inverse of E; of terms, their sum.
        spread: True if an element is held by several ranks.
        told: True if it is known to be that of the twin's tensor.
    """

    def __init__(
        self,
        locations: Locations,
        calls: dict[int, Call],
        side: str,
        chosen: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> None:
        self._locations, self._calls, self._side = locations, calls, side
        letter = "x" if side == "inputs" else "y"
        self.found: list[Location | None] = []
        self.told = True
        held: list[_Held] = []
        for (rank, call), positions, each in zip(calls.items(), chosen, sizes, strict=True):
            numbers = getattr(call, side)
            for k in positions:
                at = locations.at.get((rank, numbers[k])) if k < len(numbers) else None
                self.found.append(at)
                held.append(self._held(at, rank, k, each[k]))
        self._forms = [(one.form, one.rank) for one in held]
        forms = {form for form, _ in self._forms}
        self.sums = side == "outputs" and TERMS in forms
        if self.sums and len(forms) > 1:
            raise UndecidedError("some of its results are terms of a sum, and others are not")
        self.arrays = space_of(
            letter,
            {
                rank: [each[k] for k in positions]
                for rank, positions, each in zip(calls, chosen, sizes, strict=True)
            },
        )
        index, firsts = _labelled(held)
        self.spread = len(firsts) < len(index) and not self.sums
        space, self._element = _elements(letter, held, index, firsts)
        rows = np.arange(len(index))
        columns = self._element[index]
        self.embedding = local("E", space, self.arrays, rows, columns, ones(len(index)))
        self._firsts = np.empty_like(firsts)
        self._firsts[self._element] = firsts
        self.picking = (
            self.embedding.H
            if self.sums
            else local("D", self.arrays, space, np.arange(len(firsts)), self._firsts,
                       ones(len(firsts)))
        )  # fmt: skip

    def _held(self, at: Location | None, rank: int, k: int, size: int) -> _Held:
        """The form of a tensor, and what its elements are a part of, alike on all ranks that hold
        them."""
        every = np.arange(size)
        if at is None or not at.matched:
            self.told = self.told and at is not None
            owner, copied = _first_copy(self._locations, at, rank)
            return _Held(SAME if copied else OWN, rank, k, (OWN, owner, k), every)
        if at.form != TERMS:
            return _Held(at.form, rank, k, (SAME, at.twin), at.selections[rank].ravel())
        if self._side == "inputs":  # each term is an element of its own
            return _Held(TERMS, rank, k, (TERMS, rank, k), every)
        group = next(g for g in at.groups if rank in g)
        return _Held(TERMS, rank, k, (TERMS, group, id(at)), every)

    def element(self, index: int) -> int:
        """The position among the tensors of all ranks of the first copy of an element, given by its
        position in the space of elements."""
        return int(self._firsts[index])

    def ranks_used(self, moved: Movement) -> set[int]:
        """The ranks whose tensors a movement uses: of a broadcast, the root."""
        return set(workers_of(moved.domain)[moved.table.src].tolist())

    def text(self, whole: bool, summed: bool = False, alone: bool = False) -> str:
        """Its form in words.

        Args:
            whole: gradients are whole on every rank that has a copy; False for terms of them.
            summed: tensors of each rank's own are used in no other way than that they are summed.
            alone: those of one rank alone are used.
        """
        words: dict[str, None] = {}
        for form, rank in self._forms:
            ranks = [r for f, r in self._forms if f == form]
            if alone:
                word = "one rank's"
            elif form == SAME and not self.spread:
                word = f"one rank's, {ranks_text((rank,))}"
            elif form == SAME:
                word = "replicated" if whole else "copies"
            elif form == BLOCKS and self.spread:
                word = "replicated blocks" if whole else "copies of blocks"
            elif form == OWN and summed and len(set(ranks)) > 1:
                word = TERMS
            else:
                word = form
            words[word] = None
        return ", ".join(words) or "nothing"

    def representations(self) -> list[bool]:
        """True: gradients are whole on every rank that has a copy. False: terms. What is known of
        the tensors themselves decides, else of those that are computed from them next."""
        if not self.spread:
            return [True]
        known = [at for at in self.found if at is not None and at.gradient is not None]
        if not known and self._side == "outputs":
            known = [
                at
                for rank, call in self._calls.items()
                for number in call.outputs
                for at in self._locations.known_after(rank, number)
            ]
        kinds = {at.gradient.kind for at in known if at.gradient is not None}
        if self._overlapping():
            return [False]
        if kinds and kinds <= {Kind.EQUAL, Kind.FACTOR}:
            return [True]
        if kinds == {Kind.UNSUMMED}:
            return [False]
        return [True, False]

    def _overlapping(self) -> bool:
        """True if these are blocks that share elements, and the ranks' gradients of a shared one
        are terms of the twin's."""
        for at in {id(one): one for one in self.found if one is not None}.values():
            if not at.matched or at.form != BLOCKS:
                continue
            theirs = self._locations.twin.tensors[at.twin].gradient
            mine = {r: t.gradient for r, t in self._locations.tensors(at).items()}
            if theirs is None or any(one is None for one in mine.values()):
                continue
            total, count = np.zeros(theirs.size, theirs.dtype), np.zeros(theirs.size, int)
            for rank, one in mine.items():
                assert one is not None
                np.add.at(total, at.selections[rank].ravel(), one.ravel())
                np.add.at(count, at.selections[rank].ravel(), 1)
            near = self._locations.gradients.near
            if (count > 1).any() and near(total[count > 0], theirs.ravel()[count > 0]):
                return True
        return False


def _labelled(held: Sequence[_Held]) -> tuple[Ints, Ints]:
    """The elements of tensors: for each the number of the element that it is, in the order of
    their first copies; and for each of these the position of its first copy."""
    starts: dict[tuple[Any, ...], int] = {}
    sizes: dict[tuple[Any, ...], int] = {}
    for one in held:
        size = int(one.elements.max(initial=-1)) + 1
        sizes[one.whose] = max(size, sizes.get(one.whose, 0))
    total = 0
    for whose, size in sizes.items():
        starts[whose], total = total, total + size
    keys = _joined(one.elements + starts[one.whose] for one in held)
    _, firsts, which = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(firsts, kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return number[which.reshape(-1)], firsts[order]


def _elements(letter: str, held: Sequence[_Held], index: Ints, firsts: Ints) -> tuple[Space, Ints]:
    """The space of elements, and the position of each in it. Elements whose first copies are in one
    tensor, and that the same ranks hold, are a region.

    Args:
        index, firsts: as `_labelled` returns them.
    """
    ranks = sorted({one.rank for one in held})
    of_tensor = np.repeat(np.arange(len(held)), [len(one.elements) for one in held])
    holds = np.zeros((len(ranks), len(firsts)), np.int64)
    holds[np.array([ranks.index(one.rank) for one in held], np.int64)[of_tensor], index] = 1
    tensor = of_tensor[firsts]
    _, examples, which, many = np.unique(
        row_keys(tensor, *holds), return_index=True, return_inverse=True, return_counts=True
    )
    regions: list[Region] = []
    for example, size in zip(examples.tolist(), many.tolist(), strict=True):
        one = held[int(tensor[example])]
        name = f"{letter.upper()}{one.position}.{one.rank}"
        name += "'" * sum(region.name.rstrip("'") == name for region in regions)
        by = [rank for rank, has in zip(ranks, holds[:, example], strict=True) if has]
        regions.append(Region(name, (size,), by))
    place = np.empty(len(firsts), np.int64)
    place[np.argsort(which.reshape(-1), kind="stable")] = np.arange(len(firsts))
    return Space(regions), place


def _joined(arrays: Iterable[Ints]) -> Ints:
    found = list(arrays)
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _first_copy(locations: Locations, at: Location | None, rank: int) -> tuple[int, bool]:
    """The first rank that has the same values, and whether another one has."""
    if at is None:
        return rank, False
    values = {r: t.value for r, t in locations.tensors(at).items()}
    mine = values[rank]
    same = [
        r
        for r, one in values.items()
        if one is not None and mine is not None and locations.values.near(one, mine)
    ]
    return min(same, default=rank), len(same) > 1
