"""Operators that are linear over the real numbers: between a real and a complex space, or on
complex ones, as a real part or a complex conjugate.

Such an operator is an ordinary one on rows of real parts (`linop.spaces.real_parts`), seen as one
between the spaces whose parts these are. There, taking a part is data movement, and the adjoint is
that for the real inner products Re <v, w>. So nothing below knows of two dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy

from linop.caching import attributes
from linop.errors import DTypeError, SpaceError, UndecidableError, expect
from linop.normal_form.movement import Movement
from linop.normal_form.real_parts import stages_over_reals
from linop.normal_form.stages import Stages
from linop.operators.expressions import Identity, Scaled, Sum, compose, over_reals_of
from linop.operators.named_movement import NamedMovement, out_of_place
from linop.operators.operator import Arrays, LinearOperator
from linop.operators.simplification import simplified
from linop.provenance import Origin, records_origin
from linop.spaces.exact import Exact
from linop.spaces.real_parts import arrays_in_parts, arrays_of_parts, complex_of, parts_of
from linop.spaces.region import Region, Subset
from linop.spaces.space import Order, Space


class OverReals(LinearOperator[Any, Any]):
    """An operator, of one dtype, on rows of real parts."""

    def __init__(self, operand: LinearOperator) -> None:
        super().__init__(operand.domain.over_reals(), operand.codomain.over_reals())
        self.operand = operand
        self.loose = operand.loose

    def _adjoint(self) -> LinearOperator:
        return self.operand.euclidean_adjoint.over_reals()

    def _interpret(self, arrays: Arrays) -> Arrays:
        results = self.operand._interpret(arrays_of_parts(arrays, self.operand.dtype))
        return arrays_in_parts(results)

    def _stages(self) -> Stages:
        return stages_over_reals(self.operand.stages)

    def symbol(self, latex: bool = False) -> str:
        return self.operand.symbol(latex)


class RealLinear(LinearOperator[Any, Any]):
    """An operator on rows of real parts, as one between the spaces whose parts these are.

    Args:
        form: the operator on rows of parts.
        domain, codomain: each of the real dtype of `form`, or of the complex one with such parts.
    """

    clinear = False

    def __init__(self, form: LinearOperator, domain: Space, codomain: Space) -> None:
        form.domain.same_as(domain.over_reals(), "domain over the reals")
        form.codomain.same_as(codomain.over_reals(), "codomain over the reals")
        self.domain, self.codomain = domain, codomain
        self.form = form
        self.loose, self.loops = form.loose, form.loops

    @property
    def dtype(self) -> np.dtype[Any]:
        """The complex one, if domain or codomain is complex."""
        return np.result_type(self.domain.dtype, self.codomain.dtype)

    def _form(self) -> LinearOperator:
        return self.form

    def _originated(self) -> None:
        # So that the form pickles as this operator's, wherever it stands.
        known = attributes(self.form)
        known.setdefault("origin", Origin(LinearOperator.over_reals, (self,), {}))

    def _adjoint(self) -> LinearOperator:
        return RealLinear(self.form.euclidean_adjoint, self.codomain, self.domain)

    def conj(self) -> LinearOperator:
        """x -> conj(A conj(x)), of which the matrix, if there is one, is the conjugate."""
        made: LinearOperator = self
        if self.codomain.dtype.kind == "c":
            made = conj(self.codomain) @ made
        return made @ conj(self.domain) if self.domain.dtype.kind == "c" else made

    def _interpret(self, arrays: Arrays) -> Arrays:
        results = self.form._interpret(arrays_in_parts(arrays))
        return arrays_of_parts(results, self.codomain.dtype)

    def _stages(self) -> Stages:
        return self.form.stages

    def symbol(self, latex: bool = False) -> str:
        return self.form.symbol(latex)

    def to_matrix(self, order: Order = "global") -> scipy.sparse.csr_array:
        """The matrix M of x -> M x on a real domain, as `LinearOperator.to_matrix`.

        Raises:
            UndecidableError: the domain is complex: over the complex numbers there is no matrix.
        """
        if self.domain.dtype.kind == "c":
            raise UndecidableError(
                f"{self!r} is linear over the real numbers alone, and has no complex matrix; "
                f".over_reals().to_matrix() is its real one, of real and imaginary parts"
            )
        real = self.form.to_matrix(order)
        return real if self.codomain.dtype.kind != "c" else real[0::2] + 1j * real[1::2]


def add(terms: Sequence[LinearOperator]) -> LinearOperator:
    """The sum of operators, of which some are real-linear; a real codomain becomes complex if that
    of another is.

    Raises:
        SpaceError: domains or codomains differ otherwise.
    """
    wide = next((t.codomain for t in terms if t.codomain.dtype.kind == "c"), terms[0].codomain)
    same = [embedded(term, wide) for term in terms]
    for term in same[1:]:
        same[0].domain.same_as(term.domain, "sum of operators, domains")
        same[0].codomain.same_as(term.codomain, "sum of operators, codomains")
    return over_reals_of(lambda parts, *ends: Sum(parts), same, same[0].domain, same[0].codomain)


def scaled(scalar: Exact, op: LinearOperator) -> LinearOperator:
    """A multiple of a real-linear operator, or a complex multiple of one with a real codomain; its
    codomain is complex.

    Raises:
        DTypeError: no complex dtype has parts of the codomain's. SpaceError: its inner product is
            of a real operator.
    """
    if not scalar.imag:
        return RealLinear(op.over_reals() * scalar, op.domain, op.codomain)
    wide = op.codomain
    if wide.dtype.kind != "c":
        wide = wide.with_dtype(complex_of(wide.dtype))
        if (wide.inner_product is None) != (op.codomain.inner_product is None):
            raise SpaceError(
                f"a complex multiple of {op!r}, whose codomain has the inner product of a real "
                f"operator: give the complex space its own, and go there by linop.real(space)"
                f".euclidean_adjoint; or begin from codomain.euclidean"
            )
    return compose(Scaled(scalar, Identity(wide)), embedded(op, wide))


def embedded(op: LinearOperator, codomain: Space) -> LinearOperator:
    """An operator whose results are seen as complex ones if they are the real parts of the
    codomain's; else the operator itself."""
    if codomain.dtype.kind != "c" or op.codomain.dtype != parts_of(codomain.dtype)[1]:
        return op
    if op.codomain != codomain.with_dtype(op.codomain.dtype):
        return op
    return compose(real(codomain).euclidean_adjoint, op)


def between_parts(op: LinearOperator, domain: Space, codomain: Space) -> LinearOperator:
    """A complex operator of real arguments, or its real part, where these spaces are real."""
    if codomain.dtype.kind != "c":
        op = compose(real(op.codomain), op)
    return op if domain.dtype.kind == "c" else compose(op, real(op.domain).euclidean_adjoint)


@records_origin
def real(space: Space) -> LinearOperator:
    """The real part, from a complex space to the space of the same regions over its real dtype. The
    adjoint, for the real inner products, takes real vectors as complex ones.

    Raises:
        DTypeError: the space is not complex.

    Example:
        >>> X = linop.TensorSpace((2,), linop.Partition(2), complex)
        >>> A = linop.real(X)
        >>> (A @ np.array([1 + 2j, 3 - 1j])).tolist()
        [1.0, 3.0]
        >>> (A.H @ np.array([5.0, 6.0])).tolist()
        [(5+0j), (6+0j)]
    """
    return _part(space, 0, "Re")


@records_origin
def imag(space: Space) -> LinearOperator:
    """The imaginary part, as `real`; the adjoint takes real vectors times i.

    Example:
        >>> X = linop.TensorSpace((2,), linop.Partition(2), complex)
        >>> (linop.imag(X) @ np.array([1 + 2j, 3 - 1j])).tolist()
        [2.0, -1.0]
    """
    return _part(space, 1, "Im")


@records_origin
def conj(space: Space) -> LinearOperator:
    """The complex conjugate, which is linear over the real numbers and its own adjoint.

    Raises:
        DTypeError: the space is not complex.

    Example:
        >>> X = linop.TensorSpace((2,), linop.Partition(2), complex)
        >>> C = linop.conj(X)
        >>> (C @ np.array([1 + 2j, 3 - 1j])).tolist()
        [(1-2j), (3+1j)]
        >>> (C @ C).equals(linop.identity(X))
        True
    """
    rows = _complex("conj", space).over_reals()
    whole = [(_columns(r, 0), _columns(r, 0), 1) for r in rows.regions]
    whole += [(_columns(r, 1), _columns(r, 1), -1) for r in rows.regions]
    given = Movement.of_blocks(rows, rows, whole)

    def build() -> LinearOperator:
        both = (real(space), imag(space))
        pairs = [part.over_reals().H @ part.over_reals() for part in both]
        return pairs[0] - pairs[1]

    return RealLinear(NamedMovement("conj", "", given, build), space, space)


def _part(space: Space, part: int, name: str) -> LinearOperator:
    """The movement of one part of each number."""
    rows = _complex(name, space).over_reals()
    target = space.with_dtype(rows.dtype)
    column = target.over_reals()
    pairs = [
        (_columns(a, part), _columns(b, 0))
        for a, b in zip(rows.regions, column.regions, strict=True)
    ]
    given = Movement.of_blocks(rows, column, [(b, a, 1) for a, b in pairs])
    moved = NamedMovement(name, "", given, lambda: out_of_place(rows, column, pairs))
    return RealLinear(moved, space, target)


def _columns(region: Region, part: int) -> Subset:
    """One part of each number of a region."""
    return region[(..., slice(part, part + 1))]


def _complex(what: str, space: Space) -> Space:
    if expect(what, space, Space).dtype.kind != "c":
        raise DTypeError(f"{what}: a complex space expected, given one of dtype {space.dtype}")
    return space


@simplified.register
def _(op: RealLinear) -> LinearOperator:
    form = simplified(op.form)
    return op if form is op.form else RealLinear(form, op.domain, op.codomain)
