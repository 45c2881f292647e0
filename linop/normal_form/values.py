"""The values of a program of movements and layers, and which of them stages have to keep.

A value is a sum of movements of other values, or a layer of local maps applied to one. Values are
eliminated by multiplying movements, as long as these do not outgrow the program (`merging`), and
nothing is computed twice: a value that several of the remaining ones need remains, too. Without
local maps nearly always one movement, from argument to result, is left. Stages are made of what
remains by `linop.normal_form.scheduling`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from linop.normal_form.maps import Layer
from linop.normal_form.merging import Merged
from linop.normal_form.stages import Stages
from linop.normal_form.transfer_table import IdentityTable
from linop.spaces.space import Space

SOURCE, TARGET = 0, 1
"""The argument and the result of a program, by number."""
SOURCES = 8
"""Most values that an eliminated one is a sum of, and that are kept for one sum that is not."""

Terms = Mapping[int, Merged]
"""A sum of movements, by the number of the value that each is applied to."""


@dataclass
class Values:
    """The values of a program, by number; of them `SOURCE` is the argument, `TARGET` the result.

    Attributes:
        spaces: of each value.
        kept: values that are not eliminated.
        terms: (value, movement) pairs whose sum each value is.
        layers: for each value that is the result of a layer, its argument and the layer.
    """

    spaces: list[Space]
    kept: set[int]
    terms: list[list[tuple[int, Merged]]] = field(init=False)
    layers: dict[int, tuple[int, Layer]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kept |= {SOURCE, TARGET}
        self.terms = [[] for _ in self.spaces]

    def apply(self, step: Stages | Merged, source: int, target: int) -> None:
        """Add a movement, or stages, applied to a value to another value."""
        if isinstance(step, Stages):
            source, step = self._through(step, source)
        self.terms[target].append((source, step))

    def _through(self, stages: Stages, source: int) -> tuple[int, Merged]:
        """The value before the last movement of stages, and this."""
        movements = stages.spread.movements
        *before, last = movements
        for k, movement in enumerate(before):
            argument = self.new(movement.codomain)
            self.terms[argument].append((source, Merged.of(movement)))
            source = argument
            if stages.layers[k]:
                source = self.new(movements[k + 1].domain)
                self.layers[source] = argument, stages.layers[k]
        return source, Merged.of(last)

    def new(self, space: Space) -> int:
        """A value that is kept."""
        self.spaces.append(space)
        self.terms.append([])
        self.kept.add(len(self.spaces) - 1)
        return len(self.spaces) - 1

    def sources(self, value: int) -> Sequence[int]:
        """The values that a value is computed from."""
        if value in self.layers:
            return (self.layers[value][0],)
        return [source for source, _ in self.terms[value]]


def remaining(values: Values, order: Sequence[int]) -> dict[int, Terms]:
    """The values that remain, in order, with their terms; those of a layer have none.

    Args:
        order: the numbers of all values, each after those that it is computed from.
    """
    uses = _uses(values, order)
    kept = _needed_apart(values, order)
    found: dict[int, Terms] = {}
    known: dict[int, Terms] = {SOURCE: {}}
    for value in order:
        if value == SOURCE:
            continue
        several = uses[value] > 1
        terms = {} if value in values.layers else _substituted(values, value, known, kept)
        short = None if value in kept else _settled(terms, several)
        if short is None:
            kept.add(value)
            found[value] = terms
        else:
            known[value] = short
    return found


def _uses(values: Values, order: Sequence[int]) -> dict[int, int]:
    uses = dict.fromkeys(order, 0)
    for value in order:
        for source in values.sources(value):
            uses[source] += 1
    return uses


def _needed_apart(values: Values, order: Sequence[int]) -> set[int]:
    """The values that are kept anyway, and those that several of the kept ones are made of; but no
    mere other name for a value."""
    kept = set(values.kept)
    ends: dict[int, set[int]] = {value: set() for value in order}
    for value in reversed(order):
        if value not in kept and len(ends[value]) > 1 and not _is_alias(values, value):
            kept.add(value)
        reached = {value} if value in kept else ends[value]
        for source in values.sources(value):
            if len(ends[source]) < 2:
                ends[source] |= reached
    return kept


def _is_alias(values: Values, value: int) -> bool:
    terms = values.terms[value]
    return len(terms) == 1 and isinstance(terms[0][1].movement.transfers, IdentityTable)


def _substituted(values: Values, value: int, known: Mapping[int, Terms], kept: set[int]) -> Terms:
    """The terms of a value, with eliminated values replaced by theirs."""
    found: dict[int, list[Merged]] = {}
    for source, step in values.terms[value]:
        if source in kept:
            found.setdefault(source, []).append(step)
        else:
            for origin, term in known[source].items():
                found.setdefault(origin, []).append(step.after(term))
    return {origin: Merged.sum(terms) for origin, terms in found.items()}


def _settled(terms: Terms, several: bool) -> Terms | None:
    """The terms of a value that is eliminated; None if it is better kept."""
    if len(terms) > SOURCES:
        return None
    short = {source: term.settled(several) for source, term in terms.items()}
    whole = {source: term for source, term in short.items() if term is not None}
    return whole if len(whole) == len(terms) else None
