"""Tensors of the forward passes of all ranks, side by side, each beside the tensor of the twin of
which it is a copy, a block or a term, and their gradients compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from linop.testing.parallel.recording.records import FORWARD, Call, Record, Tensor
from linop.testing.parallel.twins.relations import (
    Groups,
    Index,
    Relation,
    Scale,
    partitions,
    related,
)

SAME, BLOCKS, TERMS = "replicated", "blocks", "terms of a sum"
"""Forms of tensors of several ranks, beside one of the twin."""

Key = tuple[str, str, str, int, str, int]
"""The name, module and line of a call, its occurrence, and the position among the arguments or
results."""


@dataclass
class Location:
    """A tensor of the program, on the ranks that have it.

    Attributes:
        numbers: by rank, of the tensors.
        twin: the number of the twin's tensor; -1 if there is none with these values.
        form: `SAME`, `BLOCKS` or `TERMS`.
        groups: of ranks that hold the terms of one sum, if these are terms.
        selections: by rank, positions of the elements in the twin's tensor, flat.
        gradient: the relation of the gradients to the twin's; None if it cannot be told.
        order: the number of the call that used or made it first, on the first rank.
    """

    key: Key
    numbers: dict[int, int]
    order: int
    twin: int = -1
    form: str = ""
    groups: Groups = ()
    selections: dict[int, np.ndarray] = field(default_factory=dict)
    gradient: Relation | None = None

    @property
    def matched(self) -> bool:
        return self.twin >= 0


class Locations:
    """All locations, in the order of the forward pass.

    Args:
        ranks: records by rank.
        groups: partitions of ranks that the program's collectives have.
    """

    def __init__(
        self,
        ranks: Sequence[Record],
        twin: Record,
        values: Scale,
        gradients: Scale,
        groups: Sequence[Groups],
    ) -> None:
        self.ranks, self.twin = {one.rank: one for one in ranks}, twin
        self.values, self.gradients, self.groups = values, gradients, groups
        self._indexes = {
            one.number: Index(one.value, values)
            for one in twin.tensors
            if one.value is not None and one.value.dtype.kind in "fc" and one.value.size
        }
        self._about = _first_uses(twin)
        self.used = {rank: uses(record) for rank, record in self.ranks.items()}
        self.all = self._found()
        self.at: dict[tuple[int, int], Location] = {
            (rank, number): one for one in self.all for rank, number in one.numbers.items()
        }

    def _found(self) -> list[Location]:
        keyed: dict[Key, dict[int, tuple[int, int]]] = {}
        for rank, record in self.ranks.items():
            for key, number, order in keys(record):
                keyed.setdefault(key, {})[rank] = number, order
        found: list[Location] = []
        for key, each in keyed.items():
            found += self._of(key, each)
        return sorted(found, key=lambda one: one.order)

    def _of(self, key: Key, each: dict[int, tuple[int, int]]) -> Iterator[Location]:
        """The location of some ranks; one for each rank, if they compute other tensors of the twin
        by the same line, as the stages of a pipeline do."""
        numbers = {rank: number for rank, (number, _) in each.items()}
        one = Location(key, numbers, min(order for _, order in each.values()))
        tensors = self.tensors(one)
        if any(t.value is None or t.value.dtype.kind not in "fc" for t in tensors.values()):
            return
        self._match(one, tensors)
        if not one.matched and len(each) > 1:
            apart = [a for rank in each for a in self._of(key, {rank: each[rank]})]
            if all(alone.matched for alone in apart):
                yield from apart
                return
        yield one

    def known_after(self, rank: int, number: int) -> list[Location]:
        """The first tensors that are computed from one, on a rank, whose gradients are known beside
        the twin's."""
        found, waiting, done = [], [number], {number}
        while waiting:
            for call in self.used[rank].get(waiting.pop(), ()):
                for output in call.outputs:
                    at = self.at.get((rank, output))
                    if at is not None and at.gradient is not None:
                        found.append(at)
                    elif output not in done:
                        done.add(output)
                        waiting.append(output)
        return found

    def tensors(self, one: Location) -> dict[int, Tensor]:
        return {rank: self.ranks[rank].tensors[number] for rank, number in one.numbers.items()}

    def _match(self, one: Location, tensors: dict[int, Tensor]) -> None:
        values = {rank: t.value for rank, t in tensors.items() if t.value is not None}
        constant = all(self._is_constant(value) for value in values.values())
        for number in self._candidates(one, next(iter(tensors.values()))):
            index = self._indexes[number]
            found = {}
            for rank, value in values.items():
                at = index.selection(value)
                if at is None:
                    break
                found[rank] = at
            else:
                whole = all(at.size == index.flat.size for at in found.values())
                if constant and not whole and not self._is_constant(index.flat):
                    continue  # such as zeros, of which many tensors have some
                one.twin, one.form, one.selections = number, SAME if whole else BLOCKS, found
                break
        else:
            self._match_terms(one, values)
        if one.matched:
            one.gradient = self._gradient(one, tensors)

    def _is_constant(self, value: np.ndarray) -> bool:
        with np.errstate(invalid="ignore", over="ignore"):
            return bool(value.size) and bool(np.ptp(np.abs(value)) <= self.values.least)

    def _match_terms(self, one: Location, values: dict[int, np.ndarray]) -> None:
        shapes = {value.shape for value in values.values()}
        if len(values) < 2 or len(shapes) != 1 or not next(iter(values.values())).size > 1:
            return
        for partition in partitions(sorted(values), self.groups):
            with np.errstate(over="ignore", invalid="ignore"):
                sums = {group: sum(values[r] for r in group) for group in partition}
            if all(np.abs(total).max() <= self.values.least for total in sums.values()):
                continue
            for number, index in self._indexes.items():
                found: dict[int, np.ndarray] = {}
                for group, total in sums.items():
                    at = index.selection(np.asarray(total))
                    if at is None:
                        break
                    found |= dict.fromkeys(group, at)
                else:
                    one.twin, one.form, one.groups = number, TERMS, partition
                    one.selections = found
                    return

    def _candidates(self, one: Location, tensor: Tensor) -> Iterator[int]:
        """Tensors of the twin, those first that are called alike."""
        name, module = one.key[0], one.key[1]
        position = one.key[4:]
        value = tensor.value
        shape = None if value is None else value.shape

        def unlike(number: int) -> tuple[bool, ...]:
            theirs = self.twin.tensors[number]
            about, beside = self._about.get(number, (("", ""), ("", -1)))
            named = theirs.parameter != tensor.parameter
            return (named, about != (name, module), about[1] != module,
                    self._indexes[number].whole.shape != shape, beside != position)  # fmt: skip

        yield from sorted(self._indexes, key=unlike)

    def _gradient(self, one: Location, tensors: dict[int, Tensor]) -> Relation | None:
        theirs = self.twin.tensors[one.twin].gradient
        if theirs is None:
            return None
        expected = {rank: theirs.ravel()[at] for rank, at in one.selections.items()}
        given = {rank: t.gradient for rank, t in tensors.items()}
        return related(given, expected, self.gradients, self.groups)


def keys(record: Record) -> Iterator[tuple[Key, int, int]]:
    """For each tensor of the forward pass outside of `autograd.Function`s: its key, its number, and
    the number of the call that used or made it first."""
    seen: Counter[tuple[str, str, str]] = Counter()
    done: set[int] = set()
    for call in record.calls:
        if call.inside >= 0 or call.phase != FORWARD:
            continue
        called = call.name, call.module, call.line
        seen[called] += 1
        for side, numbers in (("in", call.inputs), ("out", call.outputs)):
            for position, number in enumerate(numbers):
                if number not in done:
                    done.add(number)
                    yield (*called, seen[called], side, position), number, call.number


def _first_uses(record: Record) -> dict[int, tuple[tuple[str, str], tuple[str, int]]]:
    """The name and module of the call that made or first used each tensor, and which of its
    arguments or results the tensor is."""
    found: dict[int, tuple[tuple[str, str], tuple[str, int]]] = {}
    for call in record.calls:
        for side, numbers in (("in", call.inputs), ("out", call.outputs)):
            for position, number in enumerate(numbers):
                found.setdefault(number, ((call.name, call.module), (side, position)))
    return found


def made_by(record: Record) -> dict[int, Call]:
    """The calls that made tensors, by their numbers."""
    return {number: call for call in record.calls if call.inside < 0 for number in call.outputs}


def uses(record: Record) -> dict[int, list[Call]]:
    """The calls that use tensors, by their numbers."""
    found: dict[int, list[Call]] = {}
    for call in record.calls:
        if call.inside < 0 and call.phase == FORWARD:
            for number in call.inputs:
                found.setdefault(number, []).append(call)
    return found
