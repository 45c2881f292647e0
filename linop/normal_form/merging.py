"""Movements merged of others by the algebra, as long as they do not outgrow these.

Products and sums are evaluated lazily while they are nested in few levels. Deeper ones are
evaluated, so that no walk over a table's expression is deep; if then there are far more transfers
than in what was merged, or coefficients too long to compute with, the value is better computed in
several stages, and is not merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from linop.normal_form.columns import outgrown
from linop.normal_form.movement import DEEPEST, Movement
from linop.normal_form.transfer_table import GivenTable
from linop.spaces.exact import Exact

DEEP = 6
"""Nesting of a lazily evaluated table above which it is evaluated."""
FEW = 3
"""Nesting up to which a long table that is used several times may stay unevaluated."""
GROWTH = 16
"""Ratio of the transfers of a merged movement to those of what it is merged from, above which it is
not merged."""


class Merged(NamedTuple):
    """A movement, and the number of transfers by which its growth is measured."""

    movement: Movement
    size: int

    @staticmethod
    def of(movement: Movement) -> Merged:
        """A movement that is not merged of others."""
        rows = movement.transfers
        given = len(rows.given) if isinstance(rows, GivenTable) else 0
        return Merged(movement, max(given, _width(movement)))

    def after(self, right: Merged) -> Merged:
        """The product self ∘ right."""
        return Merged(self.movement @ right.movement, max(self.size, right.size))

    def power(self, n: int) -> Merged | None:
        """The product of n > 0 of these, by squaring; None if it has outgrown them on the way."""
        half = self if n < 2 else self.power(n // 2)
        if n < 2 or half is None:
            return half
        both = half.after(half).settled(several=True)
        if both is None or n % 2 == 0:
            return both
        return self.after(both).settled(several=False)

    def scale(self, scalar: Exact) -> Merged:
        """The multiple."""
        return self._replace(movement=self.movement.scale(scalar))

    @staticmethod
    def sum(terms: Sequence[Merged]) -> Merged:
        """The sum."""
        if len(terms) == 1:
            return terms[0]
        total = Movement.sum([term.movement for term in terms])
        return Merged(total, sum(term.size for term in terms))

    def settled(self, several: bool) -> Merged | None:
        """The movement, evaluated if it is nested deeply or used several times; None if it has
        outgrown what it is merged from.

        Args:
            several: it is used several times. A long table that is used once may stay nested, up
                to `DEEPEST`.
        """
        rows, dtype = self.movement.transfers, self.movement.domain.dtype
        if rows.depth <= (1 if several else DEEP):
            return self
        if not rows.short:
            return self if rows.depth <= (FEW if several else DEEPEST) else None
        table = self.movement.table
        if len(table) > GROWTH * self.size or outgrown(table.coef, dtype):
            return None
        ends = self.movement.domain, self.movement.codomain
        whole = Movement(*ends, GivenTable(table, canonical=True))
        # The growth of what is used several times is measured anew: the sum of sizes would count
        # it repeatedly.
        return Merged(whole, _width(whole) if several else self.size)


def _width(movement: Movement) -> int:
    return max(len(movement.domain), len(movement.codomain), 1)
