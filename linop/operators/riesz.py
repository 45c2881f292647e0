"""Riesz maps of spaces, adjoints for inner products, and inner products of operators.

The Riesz map of a space is the operator G of its inner product <v, w> = v^H G w. It takes a vector
v to the coefficients of the functional <v, ·>, so that the adjoint of A: X -> Y is
A* = G_X^-1 A^H G_Y (paper, section 2, footnote 3). A^H is `LinearOperator.euclidean_adjoint`, by
the rules of the classes. Riesz maps are written at the ends of an expression alone, and only where
they do not cancel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from linop.caching import attributes, cached_property
from linop.errors import ArgumentError, SpaceError, expect
from linop.normal_form.diagonals import multiplication
from linop.normal_form.maps import LocalMap
from linop.operators.algebra import DirectSum, Named
from linop.operators.chebyshev import chebyshev_inverse
from linop.operators.expressions import Composition, Identity, Local, Scaled, compose
from linop.operators.notation import subscripted
from linop.operators.operator import LinearOperator
from linop.operators.simplification import is_still, simplified, without_inverses
from linop.provenance import records_origin
from linop.spaces.differences import side_by_side
from linop.spaces.exact import Exact
from linop.spaces.region import Subset
from linop.spaces.scalars import Array, as_exact, reciprocal
from linop.spaces.space import Space
from linop.spaces.vector import Vector
from linop.spaces.weighted import Diagonal, InnerProduct, Joined, not_renamed


class OfOperator(InnerProduct):
    """<v, w> = v^H G w of an operator G; see `inner_product`."""

    def __init__(self, G: LinearOperator, inverse: LinearOperator | None) -> None:
        self.G, self.inverse = G, inverse

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(self.G.stages.digest).digest()

    def fitted(self, space: Space) -> InnerProduct:
        if not space.has_regions_of(self.G.domain):
            raise SpaceError(
                f"inner product of {self.G!r}, which is of other regions\n"
                f"{side_by_side(self.G.domain, space)}"
            )
        return self

    def agrees(self, space: Space, other: Space) -> bool:
        inner = other.inner_product
        return isinstance(inner, OfOperator) and _is(self.G, inner.G)

    def weighed(self, vector: Vector) -> Mapping[str, Array]:
        given = Vector(self.G.domain, vector.arrays, vector.shared)
        image: Vector = self.G(given) if given.shared is None else given.shared.run(self.G, given)
        return image.arrays

    def renamed(self, names: Mapping[str, str]) -> InnerProduct:
        raise not_renamed(names)

    def __str__(self) -> str:
        return f"of {self.G}"


def _is(one: LinearOperator, other: LinearOperator) -> bool:
    """True if two operators are the same, or were unpickled from the same."""
    if one is other:
        return True
    return (
        one.stages.digest == other.stages.digest
        and all(call.map.matrix is not None for call in one.stages.calls)
        and one.equals(other)
    )


def inner_product(
    G: LinearOperator, inverse: Any = None, *, spectrum: tuple[float, float] | None = None
) -> InnerProduct:
    """The inner product <v, w> = v^H G w, for ``Space(…, inner=…)``, ``TensorSpace(…, inner=…)``
    and ``space.with_inner(…)``.

    Args:
        G: Hermitian and positive definite, from the Euclidean space of these regions to itself.
            `linop.testing.check_self_adjoint` tests that it is Hermitian; it is not tested here.
        inverse: the operator G^-1; or, if G is of one region, a function that solves G x = b for
            flat arrays, as `scipy.sparse.linalg.factorized` returns it. Without one, vectors have
            inner products, but operators on the space no adjoints.
        spectrum: instead of an inverse, bounds of the eigenvalues of G, the least and the largest:
            the inverse is a Chebyshev polynomial of G, to the precision of the dtype. Its degree
            grows with the root of their ratio, so that G is to be well conditioned, as a mass
            matrix is.

    Raises:
        ArgumentError: G is no operator, or `inverse` neither an operator nor a function; or both
            `inverse` and `spectrum` are given; or the bounds are not positive and in order.
        SpaceError: G is no endomorphism of a Euclidean space, or `inverse` not of the same space.

    Example:
        >>> x = linop.Region("x", 2)
        >>> G = linop.local_operators.matrix(np.array([[2.0, 1.0], [1.0, 2.0]]), x, x)
        >>> V = linop.Space(x, inner=linop.inner_product(G, spectrum=(1, 3)))
        >>> v = V.vector(np.array([1.0, 1.0]))
        >>> v.inner(v)
        6.0
    """
    if not isinstance(G, LinearOperator):
        raise ArgumentError(f"inner_product: expected an operator G, given {G!r}")
    space = G.domain
    space.same_as(G.codomain, "inner_product: domain and codomain of G")
    space.same_as(space.euclidean, "inner_product: space of G, which has to be Euclidean")
    if inverse is not None and spectrum is not None:
        raise ArgumentError("inner_product: give an inverse or bounds of the spectrum, not both")
    if spectrum is not None:
        inverse = chebyshev_inverse(G, *spectrum)
    elif inverse is not None and not isinstance(inverse, LinearOperator):
        inverse = _solver(space, inverse)
    if inverse is not None:
        space.same_as(inverse.domain, "inner_product: spaces of G and of its inverse")
        space.same_as(inverse.codomain, "inner_product: spaces of G and of its inverse")
    return OfOperator(G, inverse)


def _solver(space: Space, solve: Any) -> LinearOperator:
    """A function that solves for flat arrays, as an operator of the space of one region.

    Raises:
        ArgumentError: it is no function. SpaceError: the space has several regions.
    """
    if not callable(solve):
        raise ArgumentError(
            f"inner_product: inverse is an operator or a function that solves; given {solve!r}"
        )
    if len(space) != 1:
        raise SpaceError(
            f"inner_product: a function solves for the array of one region, and G is of "
            f"{len(space)}: give an operator as inverse, or the bounds of the spectrum of G"
        )

    solved = partial(_solved, solve)
    return Local(LocalMap(space, space, solved, solved, "G⁻¹"))


def _solved(solve: Any, x: Array) -> Array:
    return np.asarray(solve(x.reshape(-1)), x.dtype).reshape(x.shape)


class Riesz(Named):
    """The Riesz map of a space, or its inverse."""

    def __init__(self, space: Space, body: LinearOperator, inverted: bool) -> None:
        super().__init__("G", getattr(space, "name", ""), body)
        self.space, self.inverted = space, inverted

    def _opened(self, given: bool) -> Sequence[LinearOperator] | None:
        return None  # one factor, which cancels with its inverse

    def _adjoint(self) -> LinearOperator:
        return self

    def _conj(self) -> LinearOperator:
        weights = isinstance(self.space.inner_product, Diagonal)
        return self if weights else super()._conj()

    def _cancels(self, other: LinearOperator) -> bool:
        inverse = isinstance(other, Riesz) and other.inverted != self.inverted
        return inverse and self.space == other.domain

    def symbol(self, latex: bool = False) -> str:
        base = subscripted(self.name, self.subscript, latex) if self.subscript else self.name
        if not self.inverted:
            return base
        return f"{base}^{{-1}}" if latex else f"{base}⁻¹"


@simplified.register
def _(op: Riesz) -> LinearOperator:
    return op


@records_origin
def riesz(space: Space, *, inverse: bool = False) -> LinearOperator[Any, Any]:
    """G: space -> space, the Riesz map: <v, w> = <G v, w> of Euclidean inner products; the identity
    if the space is Euclidean. A gradient, which is a vector g with f(x + h) ≈ f(x) + <g, h>, is
    G^-1 times the partial derivatives.

    Args:
        inverse: True for G^-1.

    Raises:
        ArgumentError: `space` is no `Space`. SpaceError: the inverse is not known.

    Example:
        >>> V = linop.Space(linop.Region("x", 2), inner=np.array([1.0, 4.0]))
        >>> linop.riesz(V).todense().tolist()
        [[1.0, 0.0], [0.0, 4.0]]
        >>> linop.riesz(V, inverse=True).todense().tolist()
        [[1.0, 0.0], [0.0, 0.25]]
    """
    expect("riesz", space, Space)
    known: dict[bool, LinearOperator] = attributes(space).setdefault("_riesz", {})
    if inverse not in known:
        known[inverse] = _riesz(space, inverse=bool(inverse))
    return known[inverse]


def _riesz(space: Space, inverse: bool) -> LinearOperator:
    inner = space.inner_product
    if inner is None:
        return Identity(space)
    if isinstance(inner, OfOperator):
        body = _relabelled(_operator_of(space, inner, inverse), space)
    elif isinstance(inner, Joined):
        body = DirectSum([riesz(part, inverse=inverse) for part in inner.parts], space, space)
    else:
        body = _of_weights(space, expect("inner product", inner, Diagonal), inverse)
    return Riesz(space, body, inverse)


def _operator_of(space: Space, inner: OfOperator, inverse: bool) -> LinearOperator:
    """G, or its inverse.

    Raises:
        SpaceError: the inverse is not known.
    """
    if not inverse:
        return inner.G
    if inner.inverse is None:
        raise SpaceError(
            f"the inner product of the space {space} is {inner}, whose inverse is not known, and "
            f"adjoints need it: give it as linop.inner_product(G, inverse), or the bounds of the "
            f"spectrum, linop.inner_product(G, spectrum=(least, largest))"
        )
    return inner.inverse


def _of_weights(space: Space, inner: Diagonal, inverse: bool) -> LinearOperator:
    if inner.number is not None:
        return Scaled(_weight(inner.number, inverse), Identity(space))
    blocks: list[LinearOperator] = []
    for region in space.regions:
        weights, own = inner.of(space, region), Space(region, space.dtype)
        if weights.size and (weights == weights.flat[0]).all():  # exact, and recognised
            blocks.append(Scaled(_weight(weights.flat[0], inverse), Identity(own)))
        else:
            values = (1 / weights if inverse else weights).astype(space.dtype)
            blocks.append(Local(multiplication(values, own, "g⁻¹" if inverse else "g")))
    return DirectSum(blocks, space, space)


def _weight(number: Any, inverse: bool) -> Exact:
    return reciprocal(number) if inverse else as_exact(number)


def _relabelled(op: LinearOperator, space: Space) -> LinearOperator:
    """An operator on another space of the same regions."""
    return compose(Identity(op.codomain, space), op, Identity(space, op.domain))


# Adjoints


def weighted_adjoint(op: LinearOperator) -> LinearOperator:
    """G_X^-1 A^H G_Y, without what cancels: A^H itself of spaces of one uniform weight, and of data
    movement between elements of equal weights.

    Raises:
        SpaceError: the inverse of G_X is not known.
    """
    X, Y, back = op.domain, op.codomain, op.euclidean_adjoint
    ratio = _uniform(Y, X)
    if ratio == 1 or _between_equal_weights(op):
        return back
    if ratio is not None:
        return back * ratio
    inner = back.factors if isinstance(back, Composition) else (back,)
    factors = [riesz(X, inverse=True), *inner, riesz(Y)]
    kept = without_inverses([factor for factor in factors if not is_still(factor)])
    return compose(*kept) if kept else Identity(Y, X)


def _uniform(Y: Space, X: Space) -> Exact | None:
    """The quotient of the weights of two spaces, each of one weight for all elements; else None."""
    numbers: list[Exact] = []
    for space in (Y, X):
        inner = space.inner_product
        number = inner.number if isinstance(inner, Diagonal) else 1 if inner is None else None
        if number is None:
            return None
        numbers.append(as_exact(number))
    return numbers[0] * reciprocal(numbers[1])


def _between_equal_weights(op: LinearOperator) -> bool:
    """True if an operator is data movement, each element of which has the weight of those that it
    goes to."""
    X, Y = op.domain, op.codomain
    if not all(isinstance(space.inner_product, Diagonal) for space in (X, Y)):
        return False
    movement = op.stages.merged
    return movement is not None and all(
        np.array_equal(_weights(X, t.source), _weights(Y, t.target)) for t in movement
    )


def _weights(space: Space, part: Subset) -> Array:
    inner = expect("inner product", space.inner_product, Diagonal)
    region = space[part.region.name]  # without the dimension of real parts, if it has that
    box: Any = (*part.slices[: region.ndim], ...)
    found: Array = inner.of(space, region)[box]
    return found


def between_euclidean(op: LinearOperator) -> LinearOperator[Any, Any]:
    """The operator between the Euclidean spaces of the same regions, whose adjoint is the conjugate
    transpose; itself if its spaces are Euclidean. The same one each time."""
    X, Y = op.domain.euclidean, op.codomain.euclidean
    if X is op.domain and Y is op.codomain:
        return op
    if "euclidean" not in op.kept:
        op.kept["euclidean"] = compose(Identity(op.codomain, Y), op, Identity(X, op.domain))
    found: LinearOperator = op.kept["euclidean"]
    return found
