"""Simplification: an equal expression, reduced by the laws of `linop.operators.laws`.

`simplified` dispatches on the class of an operator; a class without a rule is not simplified, one
of a user registers its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from linop.graph import Rules
from linop.normal_form.primitives import InPlace, joined_in_place
from linop.operators import laws
from linop.operators.expressions import (
    Composition,
    Identity,
    Primitives,
    Scaled,
    Sum,
    Zero,
    compose,
)
from linop.operators.operator import LinearOperator
from linop.spaces.direct_sums import DirectSumSpace
from linop.spaces.exact import Exact
from linop.spaces.space import Space
from linop.spaces.tensor import TensorSpace


def _factors(op: LinearOperator) -> Sequence[LinearOperator]:
    """The factors of a product, first applied first, with named operators expanded."""
    factors = op._flattened()
    return op._operands()[::-1] if factors == (op,) else factors


def _within(op: LinearOperator) -> Sequence[LinearOperator]:
    if not isinstance(op, Composition):
        return op._operands()
    return [factor for factor in _factors(op) if not isinstance(factor, Primitives)]


simplified: Rules[LinearOperator] = Rules("_simplified", lambda op: op, _within)
"""An equal operator; regions may be in another order. The operator itself if no law applies."""


@simplified.register
def _(op: Primitives) -> LinearOperator:
    given = _pieces(op)
    few = laws.reduced_by_laws(given)
    return op if few is given else _composed(few, op.domain, op.codomain)


@simplified.register
def _(op: Composition) -> LinearOperator:
    scalar: Exact = 1
    pieces: list[Any] = []
    changed = False
    for factor in _factors(op):
        simple = factor if isinstance(factor, Primitives) else simplified(factor)
        changed |= simple is not factor
        if isinstance(simple, Scaled):
            scalar, simple, changed = scalar * simple.scalar, simple.operand, True
        if isinstance(simple, Zero):
            return Zero(op.domain, op.codomain)
        for piece in simple._flattened():
            pieces += _pieces(piece)
    kept = without_inverses([piece for piece in pieces if not is_still(piece)])
    reduced = laws.reduced_by_laws(kept)
    if not changed and reduced is kept and len(kept) == len(pieces):
        return op
    return _without_scalar(Scaled(scalar, _composed(reduced, op.domain, op.codomain)))


@simplified.register
def _(op: Sum) -> LinearOperator:
    simple = [in_order(simplified(part), op.domain, op.codomain) for part in op.parts]
    kept = [term for term in simple if not isinstance(term, Zero)]
    if not kept:
        return Zero(op.domain, op.codomain)
    if len(kept) == 1:
        return kept[0]
    unchanged = all(a is b for a, b in zip(kept, op.parts, strict=False))
    return op if unchanged and len(kept) == len(op.parts) else Sum(kept)


@simplified.register
def _(op: Scaled) -> LinearOperator:
    simple = simplified(op.operand)
    return _without_scalar(op if simple is op.operand else Scaled(op.scalar, simple))


def without_inverses(pieces: Sequence[Any]) -> list[Any]:
    """Factors, without those that cancel with their neighbour."""
    kept: list[Any] = []
    for piece in pieces:
        before = kept[-1] if kept else None
        if isinstance(before, LinearOperator) and before._cancels(piece):
            kept.pop()
        else:
            kept.append(piece)
    return kept


def is_still(piece: Any) -> bool:
    """True of an identity between equal spaces."""
    return isinstance(piece, Identity) and piece.domain == piece.codomain


def _without_scalar(op: Scaled) -> LinearOperator:
    """The operand if the scalar is 1, the zero operator if either is 0, else the operator."""
    if op.scalar == 0 or isinstance(op.operand, Zero):
        return Zero(op.domain, op.codomain)
    return op.operand if op.scalar == 1 else op


def _pieces(op: LinearOperator) -> Sequence[Any]:
    """The factors of an operator that `linop.operators.laws` compares."""
    if not isinstance(op, Primitives):
        return (op,)
    return (op.actions,) if isinstance(op.actions, InPlace) else op.actions


def _composed(pieces: Sequence[Any], domain: Space, codomain: Space) -> LinearOperator:
    """The composition of actions and operators, the first applied first; the identity from domain
    to codomain if there are none."""
    space = domain
    factors: list[LinearOperator] = []
    joined = list(joined_in_place(pieces))
    for k, piece in enumerate(joined, 1):
        if isinstance(piece, LinearOperator):
            if piece.domain != space:  # it has another inner product
                factors.append(Identity(space, piece.domain))
            factors.append(piece)
        elif isinstance(piece, InPlace):
            factors.append(Primitives(space, piece, space))
        else:
            made = piece.codomain(space)
            last = k == len(joined) and made == codomain
            factors.append(Primitives(space, [piece], codomain if last else made))
        space = factors[-1].codomain
    return compose(*reversed(factors)) if factors else Identity(domain, codomain)


def in_order(op: LinearOperator, domain: Space, codomain: Space) -> LinearOperator[Any, Any]:
    """The operator composed with identities that put the regions in the order of these spaces, and
    give them their inner products, and the tensors that they are blocks of; a zero operator is
    built in that order."""
    if isinstance(op, Zero):
        return Zero(domain, codomain)
    factors = [op]
    if not _is(op.domain, domain):
        factors.append(Identity(domain, op.domain))
    if not _is(op.codomain, codomain):
        factors.insert(0, Identity(op.codomain, codomain))
    return compose(*factors)


def _is(one: Space, other: Space) -> bool:
    """True if two spaces are equal, and have the same flat vectors and methods."""
    if one is other:
        return True
    if type(one) is not type(other) or one != other:
        return False
    if isinstance(one, TensorSpace) and isinstance(other, TensorSpace):
        return one.made_from == other.made_from
    if isinstance(one, DirectSumSpace) and isinstance(other, DirectSumSpace):
        pairs = zip(one.parts, other.parts, strict=False)
        return len(one.parts) == len(other.parts) and all(_is(a, b) for a, b in pairs)
    return one.regions == other.regions
