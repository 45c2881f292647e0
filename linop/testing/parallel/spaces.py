"""The spaces between which a program moves tensors, inferred from their values: tensors of ranks
that are replicated, copies, terms of a sum, or blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp

from linop.testing.parallel.findings import ranks_text
from linop.testing.parallel.lifting import operator, space_of
from linop.testing.parallel.locations import BLOCKS, SAME, TERMS, Location, Locations
from linop.testing.parallel.matrices import Matrix, UndecidedError
from linop.testing.parallel.recording.records import Call
from linop.testing.parallel.relations import Kind

OWN = "each rank's own"
"""The form of tensors that are no part of one of the twin's."""


class Ends:
    """The space of the arguments, or of the results, of a call on all ranks.

    An element that several ranks hold is one of the space. Its gradient is either whole on each of
    these ranks (the tensors are replicated), or each has a term of it (they are copies).

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
        keys: list[list[Any]] = []
        self.found: list[Location | None] = []
        self.told = True
        self._forms: list[tuple[str, int]] = []
        for (rank, call), positions, each in zip(calls.items(), chosen, sizes, strict=True):
            numbers = getattr(call, side)
            for k in positions:
                at = locations.at.get((rank, numbers[k])) if k < len(numbers) else None
                self.found.append(at)
                form, of = self._element_keys(at, rank, k, each[k])
                self._forms.append((form, rank))
                keys.append(of)
        forms = {form for form, _ in self._forms}
        self.sums = side == "outputs" and TERMS in forms
        if self.sums and len(forms) > 1:
            raise UndecidedError("some of its results are terms of a sum, and others are not")
        labels: dict[Any, int] = {}
        news: dict[int, list[int]] = {rank: [] for rank in calls}
        for (_, rank), each in zip(self._forms, keys, strict=True):
            before = len(labels)
            for key in each:
                labels.setdefault(key, len(labels))
            news[rank].append(len(labels) - before)
        index = np.array([labels[key] for each in keys for key in each], int)
        self.spread = len(labels) < len(index) and not self.sums
        ones = np.ones(len(index))
        E = sp.csr_matrix((ones, (np.arange(len(index)), index)), shape=(len(index), len(labels)))
        firsts = np.unique(index, return_index=True)[1]
        shape = len(labels), len(index)
        D = sp.csr_matrix((np.ones(shape[0]), (np.arange(shape[0]), firsts)), shape=shape)
        self.arrays = space_of(
            letter,
            {
                rank: [each[k] for k in positions]
                for rank, positions, each in zip(calls, chosen, sizes, strict=True)
            },
        )
        elements = space_of(letter.upper(), news)
        self._of_column = [r for r, each in zip((r for _, r in self._forms), keys, strict=True)
                           for _ in each]  # fmt: skip
        self.embedding = operator(E, elements, self.arrays)
        self.picking = self.embedding.H if self.sums else operator(D, self.arrays, elements)

    def _element_keys(
        self, at: Location | None, rank: int, k: int, size: int
    ) -> tuple[str, list[Any]]:
        """The form of a tensor, and what its elements are called, alike on all ranks that hold
        them."""
        if at is None or not at.matched:
            self.told = self.told and at is not None
            owner, copied = _first_copy(self._locations, at, rank)
            return SAME if copied else OWN, [(owner, k, e) for e in range(size)]
        if at.form != TERMS:
            return at.form, [(at.twin, int(e)) for e in at.selections[rank].ravel()]
        if self._side == "inputs":  # each term is an element of its own
            return TERMS, [(rank, k, e) for e in range(size)]
        group = next(g for g in at.groups if rank in g)
        return TERMS, [(group, id(at), e) for e in range(size)]

    def ranks_used(self, M: Matrix) -> set[int]:
        """The ranks whose tensors a movement uses: of a broadcast, the root."""
        return {self._of_column[k] for k in sp.csr_matrix(M).nonzero()[1]}

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
