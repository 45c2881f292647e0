"""Operators compared by their normal forms: exactly, or up to the rounding of their factors."""

from __future__ import annotations

from linop import LinearOperator, Movement
from linop.operators.named_movement import NamedMovement
from linop.spaces.exact import Exact, inverse
from linop.testing.parallel.lifting.places import coefficient, largest


def normal(op: LinearOperator) -> NamedMovement:
    """An operator by its normal form, which is computed once."""
    return NamedMovement("N", "", op.movement(), lambda: op)


def same(found: LinearOperator, wanted: LinearOperator, allowed: float = 0.0) -> bool:
    """True if two operators are equal.

    Args:
        allowed: the share of the largest entry by which others may differ; 0 for exact equality.
    """
    if found.equals(wanted):
        return True
    return bool(allowed) and not differs(
        (found - wanted).movement(), allowed * largest(wanted.movement())[2]
    )


def differs(gap: Movement, allowed: float) -> bool:
    """True if an entry of a difference is larger than a number."""
    return largest(gap)[2] > allowed


def multiple(found: LinearOperator, wanted: LinearOperator, allowed: float = 0.0) -> Exact:
    """k such that an operator is k times another one; 1 if there is none, or it is zero."""
    here, there = found.movement(), wanted.movement()
    row, column, size = largest(there)
    if not size:
        return 1
    k = coefficient(here, row, column) * inverse(coefficient(there, row, column))
    return k if k and same(found, k * wanted, allowed) else 1
