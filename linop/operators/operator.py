"""Base class of linear operators: the rules that each class defines, and the public methods.

An operator is immutable data with a domain and a codomain. A class defines the adjoint rule
(`_adjoint`), the reference interpretation on NumPy arrays (`_interpret`), the normal form
(`_stages`) and the notation (`symbol`). Spaces are checked once, when an operator is built, so that
a malformed one cannot exist. The classes are in `linop.operators.expressions` and
`linop.operators.algebra`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import add, matmul, sub
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, overload

import numpy as np
import scipy  # submodules load on first use: importing them takes as long as all of linop

from linop.caching import attributes, cached_property
from linop.errors import ArgumentError, SpaceError, UndecidableError
from linop.graph import MANY, flattened, postorder
from linop.normal_form.maps import bare_or_dict
from linop.normal_form.movement import Movement
from linop.normal_form.stages import Stages
from linop.operators.scipy_protocol import SciPyProtocol, multiple_of_identity
from linop.planning.network import Network
from linop.planning.placement import Placement
from linop.planning.prediction.cost import Cost, cost
from linop.provenance import Origin, WithOrigin
from linop.spaces.exact import Exact
from linop.spaces.region import LARGEST, integer
from linop.spaces.scalars import Array, Scalar, is_scalar, reciprocal, sparse_dtype
from linop.spaces.space import Order, Space, checked_order
from linop.spaces.tensor import TensorSpace
from linop.spaces.vector import Vector
from linop.svg import Picture

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from linop.backends.engine.base import BoundPlan  # a name alone: nothing here is above

    Domain_co = TypeVar("Domain_co", bound=Space, default=Space, covariant=True)
    Codomain_co = TypeVar("Codomain_co", bound=Space, default=Space, covariant=True)
    Other = TypeVar("Other", bound=Space, default=Space)
else:  # without defaults, which are Python 3.13's
    from typing import TypeVar

    Domain_co, Codomain_co, Other = map(TypeVar, ("Domain_co", "Codomain_co", "Other"))

Arrays = dict[str, Array]


class LinearOperator(WithOrigin, SciPyProtocol, ABC, Generic[Domain_co, Codomain_co]):
    """A linear map ``domain -> codomain``; to type checkers ``LinearOperator[TensorSpace, Space]``
    where the classes of the two are known.

    ``a @ b``, ``a + b``, ``a - b``, ``2 * a``, ``a / 2`` and ``a ** 3`` are composition, sum,
    difference, scalar multiples and power. ``op.H`` is the adjoint for the inner products of the
    spaces: symbolic, so that building it runs nothing, and ``A.H.H is A``. ``op(x)`` and ``op @ x``
    interpret it in this process, one primitive at a time; ``op @ x`` takes flat arrays, shaped ones
    and matrices, too, as SciPy's operators do (`SciPyProtocol`). `compile` returns the plan that
    runs it on workers.

    Args:
        domain, codomain: spaces of one dtype.

    Raises:
        ArgumentError: one of them is no `Space`. SpaceError: their dtypes differ.

    Example:
        >>> X = linop.TensorSpace((3,), linop.Partition(3))
        >>> A = linop.stencil(X, {-1: 1.0, 0: 2.0})
        >>> A.to_matrix().toarray().tolist()
        [[2.0, 0.0, 0.0], [1.0, 2.0, 0.0], [0.0, 1.0, 2.0]]
        >>> (A.H @ np.array([0.0, 0.0, 1.0])).tolist()
        [0.0, 1.0, 2.0]
        >>> (A.H @ A).equals((A.H @ A).H), A.cost().messages
        (True, 2)
    """

    __array_ufunc__ = None  # so that numpy_scalar * op calls __rmul__
    _h: LinearOperator | None = None
    _euclidean: LinearOperator | None = None
    _conjugate: LinearOperator | None = None
    _over_reals: LinearOperator | None = None
    loose = False  # True if the symbol needs parentheses inside a product
    spreads = False  # True if values and stages are made of those of its operands
    depth = 0  # of the expression: 0 without operands
    clinear = True
    """False of operators that are linear over the real numbers alone; PyLops' name."""
    loops = False  # True if it is a time loop, or has one among its operands

    def __init__(self, domain: Domain_co, codomain: Codomain_co) -> None:
        for space in (domain, codomain):
            if not isinstance(space, Space):
                raise ArgumentError(f"an operator maps a Space to a Space; given {space!r}")
        if domain.dtype != codomain.dtype:
            raise SpaceError(
                f"an operator keeps the dtype: domain {domain.dtype}, codomain {codomain.dtype}"
            )
        self.domain = domain
        self.codomain = codomain

    # Rules that each class of operators defines

    @abstractmethod
    def _adjoint(self) -> LinearOperator:
        """The adjoint rule: `euclidean_adjoint`, which calls it once, built from those of the
        operands."""

    def _conj(self) -> LinearOperator:
        """The operator with the complex conjugate matrix; called for complex dtypes alone."""
        return self

    @abstractmethod
    def _interpret(self, arrays: Arrays) -> Arrays:
        """The reference rule: apply the operator to the arrays of all regions of the domain, by
        name, which the callee may overwrite and return."""

    @abstractmethod
    def _stages(self) -> Stages:
        """The normal form, computed from those of the operands."""

    def _cancels(self, other: LinearOperator) -> bool:
        """True if the operator is known to be the inverse of another one."""
        return False

    def _operands(self) -> Sequence[LinearOperator]:
        """The operators that it is built of."""
        return ()

    def _opened(self, given: bool) -> Sequence[LinearOperator] | None:
        """The factors of a product, or the body of a named operator, in the order of application;
        None for other operators. `given`: as for `_flattened`."""
        return None

    def _flattened(self, given: bool = False) -> tuple[LinearOperator, ...]:
        """The factors in the order of application, with named operators expanded.

        Args:
            given: keep named operators whose movement is given (`NamedMovement`) as one factor.
        """
        return flattened((self,), lambda op: op._opened(given))

    @abstractmethod
    def symbol(self, latex: bool = False) -> str:
        """The operator in the paper's notation, as text or as LaTeX."""

    # Public properties and methods

    @property
    def shape(self) -> tuple[int, int]:
        """(codomain.size, domain.size)."""
        return self.codomain.size, self.domain.size

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.codomain.dtype

    @property
    def H(self) -> LinearOperator[Codomain_co, Domain_co]:
        """The adjoint for the inner products of domain and codomain, ``<A x, y> = <x, A.H y>``;
        ``A.H.H is A``. Of Euclidean spaces `euclidean_adjoint`; else with Riesz maps at its ends
        (`linop.riesz`).

        Raises:
            SpaceError: the domain's inner product is of an operator without an inverse.
        """
        if self._h is None:
            made: LinearOperator = self.euclidean_adjoint  # of Euclidean spaces, it sets _h
            if self._h is None:
                from linop.operators.riesz import weighted_adjoint

                made = weighted_adjoint(self)
                made = made if made._h is None else ex.Composition((made,))
                self._h, made._h = made, self
        adjoint: LinearOperator[Codomain_co, Domain_co] | None = self._h  # type: ignore[assignment]
        assert adjoint is not None
        return adjoint

    @property
    def euclidean_adjoint(self) -> LinearOperator[Codomain_co, Domain_co]:
        """The operator of the conjugate transpose of the matrix: the adjoint for Euclidean inner
        products, between the same spaces; the same as ``A.H`` if these are Euclidean."""
        if self._euclidean is None:
            for op in postorder(self, known=lambda op: op._euclidean is not None):
                made = op._adjoint()
                op._euclidean, made._euclidean = made, op
                if op.domain.inner_product is op.codomain.inner_product is None:
                    op._h, made._h = made, op
        found: LinearOperator[Codomain_co, Domain_co] | None
        found = self._euclidean  # type: ignore[assignment]
        assert found is not None
        return found

    def adjoint(self) -> LinearOperator[Codomain_co, Domain_co]:
        """The adjoint, as a method (SciPy's and PyLops' convention)."""
        return self.H

    def conj(self) -> LinearOperator[Domain_co, Codomain_co]:
        """The operator with the complex conjugate matrix; ``A.conj().conj() is A``."""
        if self.dtype.kind != "c":
            return self
        for op in postorder(self, known=lambda op: op._conjugate is not None):
            made = op._conj()
            op._conjugate, made._conjugate = made, op
            if made is not op:
                attributes(made).setdefault("origin", Origin(LinearOperator.conj, (op,), {}))
        assert self._conjugate is not None
        return self._conjugate  # type: ignore[return-value]

    @property
    def T(self) -> LinearOperator[Codomain_co, Domain_co]:
        """The operator of the transpose of the matrix, whichever the inner products are."""
        return self.euclidean_adjoint.conj()

    def over_reals(self) -> LinearOperator:
        """The operator over the real numbers, on rows of real and imaginary parts: from
        ``domain.over_reals()`` to ``codomain.over_reals()``. Its inner products are the real parts
        of the complex ones."""
        if self._over_reals is None:
            self._over_reals = self._form()
        return self._over_reals

    def _form(self) -> LinearOperator:
        """The operator on rows of parts; called once, by `over_reals`."""
        from linop.operators.real_linear import OverReals

        form = OverReals(self)
        attributes(form)["origin"] = Origin(LinearOperator.over_reals, (self,), {})
        return form

    @cached_property
    def stages(self) -> Stages:
        """The normal form: alternating movements and layers of local maps."""
        return self._stages()

    def movement(self) -> Movement:
        """The normal form of an operator composed of memory operators alone: its transfers.

        Raises:
            UndecidableError: it contains local operators.
        """
        found = self.stages.merged
        if found is None:
            local = ", ".join(sorted({call.map.symbol for call in self.stages.calls}))
            raise UndecidableError(
                f"{self!r} is not data movement alone: it contains the local operators {local}; "
                f"see its .stages"
            )
        return found

    def to_matrix(self, order: Order = "global") -> scipy.sparse.csr_array:
        """The matrix as a sparse array of `shape`. Rows and columns are in the order of
        `Space.flatten`. A local operator of unknown matrix is applied to unit vectors. Values of
        float16 and bfloat16, which scipy.sparse lacks, become float64.

        Args:
            order: "regions" for region after region, also in tensor spaces.

        Raises:
            ArgumentError: `order` is neither "global" nor "regions".
        """
        matrix = scipy.sparse.csr_array(self.stages.to_matrix().astype(sparse_dtype(self.dtype)))
        if checked_order(order) == "regions":
            return matrix
        domain, codomain = self.flat_ends
        rows = matrix[codomain.positions(self.codomain)]
        return rows.T.tocsr()[domain.positions(self.domain)].T.tocsr()

    def equals(self, other: LinearOperator) -> bool:
        """True if both operators are the same map: a proof for all vectors, not a sample.

        Coefficients are compared exactly, as rationals, or as integers modulo 2^bits of the dtype.
        Spaces must be equal, too.

        Raises:
            ArgumentError: `other` is no operator.
            UndecidableError: the answer depends on local operators whose matrix is unknown, or
                known up to rounding only.
        """
        if not isinstance(other, LinearOperator):
            raise ArgumentError(f"equals: expected an operator, given {other!r}")
        if self is other:
            return True
        if self.domain != other.domain or self.codomain != other.codomain:
            return False
        if not (self.clinear and other.clinear):
            return self.over_reals().stages.equals(other.over_reals().stages)
        return self.stages.equals(other.stages)

    def simplify(self) -> LinearOperator:
        """An equal operator, reduced by the laws ``K K = K``, ``A* A = I``, … of
        `linop.operators.laws`; the operator itself if none applies."""
        from linop.operators.simplification import in_order, simplified

        return in_order(simplified(self), self.domain, self.codomain)

    def cost(self, network: Network | None = None, placement: Placement | None = None) -> Cost:
        """Messages and bytes that every worker sends and receives, predicted without running
        anything.

        Args:
            network: if given, the time in seconds on this network is predicted, too;
                `linop.simulate` reports it in more detail.
            placement: the machine of each worker; by default all are on one.

        Raises:
            ArgumentError: a worker has no machine.
        """
        return cost(self, network, placement)

    def compile(self, backend: Any, sums: str | None = None) -> BoundPlan:
        """The plan that runs this operator on a backend: ``plan(x)``, ``plan.H(y)``.

        Args:
            sums: of the plan and of its adjoint: "exact": rounded once, so that bits depend on
                neither the order nor the holders of the terms; "tree": in a binary tree over the
                workers; "fixed": one after the other, by worker. By default those of the backend.

        Raises:
            ArgumentError: `backend` is no backend, there are no such sums, or the operator has time
                loops, whose sums are the backend's. DTypeError: exact sums are not defined for its
                dtype.
        """
        if not hasattr(backend, "compile"):
            mend = "make one with linop.backends.get(name)"
            raise ArgumentError(f"compile: expected a backend, given {backend!r}; {mend}")
        plan: BoundPlan = backend.compile(self) if sums is None else backend.compile(self, sums)
        return plan

    def to_scipy(self, order: Order = "global") -> scipy.sparse.linalg.LinearOperator:
        """A SciPy `LinearOperator` of `shape` on flat vectors, in an order of `Space.flatten`. It
        runs in this process, and pickles if this operator does.

        Flat vectors of other dtypes are converted: integers exactly, floats rounded to the nearest
        of `dtype`, so that a float32 operator rounds the float64 vectors of SciPy's solvers. What
        `dtype` does not hold is a DTypeError (`Space.unflatten`).

        Raises:
            ArgumentError: `order` is neither "global" nor "regions".
        """
        from linop.operators.flat_operator import FlatOperator

        return FlatOperator(self, order)

    @overload
    def __call__(self, x: Vector) -> Vector: ...

    @overload
    def __call__(self, x: Any) -> Any: ...

    def __call__(self, x: Any) -> Any:
        """Apply the operator in this process, which must hold all regions.

        Args:
            x: a `Vector` of the domain; or the bare array of its only region, a dict of arrays by
                region name, or None if it has no region. It is not changed.

        Returns:
            A `Vector` of the codomain if `x` is one; otherwise a bare array, a dict or None, as the
            codomain has one region, several or none.

        Raises:
            RegionError, ShapeError, DTypeError: the argument is not in the domain.
        """
        if isinstance(x, np.ndarray) and self._is_matrix(x):  # as SciPy's lobpcg calls functions
            return self.matmat(x)
        vector = x if isinstance(x, Vector) else self.domain.vector({} if x is None else x)
        self.domain.same_as(vector.space, "argument of an operator")
        vector.require_all("applying an operator here")
        arrays = self._interpret({n: a.copy() for n, a in vector.arrays.items()})
        if isinstance(x, Vector):
            return Vector(self.codomain, {r.name: arrays[r.name] for r in self.codomain.regions})
        return bare_or_dict(self.codomain.regions, [arrays[r.name] for r in self.codomain.regions])

    @overload
    def __matmul__(
        self, other: LinearOperator[Other, Any]
    ) -> LinearOperator[Other, Codomain_co]: ...

    @overload
    def __matmul__(self, other: Any) -> Any: ...

    def __matmul__(self, other: Any) -> Any:
        return (
            ex.compose(self, other) if isinstance(other, LinearOperator) else self._applied(other)
        )

    # The algebra

    def __add__(self, other: LinearOperator | Array) -> LinearOperator[Domain_co, Codomain_co]:
        if isinstance(other, np.ndarray):
            other = multiple_of_identity(other, self) * ex.Identity(self.domain)
        if isinstance(other, LinearOperator):
            return ex.add(self, other)
        return self._joined(other, add)  # type: ignore[no-any-return]

    def __radd__(self, other: Array | int) -> LinearOperator[Domain_co, Codomain_co]:
        """``0 + A`` is A, so that ``sum([A, B])`` is their sum."""
        if isinstance(other, np.ndarray):
            return self + other
        if isinstance(other, int):
            return self if other == 0 else NotImplemented
        return self._joined(other, lambda own, left: left + own)

    def __sub__(self, other: LinearOperator | Array) -> LinearOperator[Domain_co, Codomain_co]:
        known = isinstance(other, LinearOperator | np.ndarray)
        return self + (-other) if known else self._joined(other, sub)

    def __rsub__(self, other: Array) -> LinearOperator[Domain_co, Codomain_co]:
        if isinstance(other, np.ndarray):
            return -self + other
        return self._joined(other, lambda own, left: left - own)

    def __neg__(self) -> LinearOperator[Domain_co, Codomain_co]:
        return ex.Scaled(-1, self) if self.clinear else ex.scaled(-1, self)

    @overload
    def __mul__(self, scalar: Scalar | Exact) -> LinearOperator[Domain_co, Codomain_co]: ...

    @overload
    def __mul__(self, scalar: Array | Vector) -> Any: ...

    def __mul__(self, scalar: Any) -> Any:
        if isinstance(scalar, LinearOperator):
            raise ArgumentError("op * op: compose operators with @; * takes a scalar")
        if isinstance(scalar, np.ndarray) and not scalar.ndim:
            scalar = scalar[()]
        if isinstance(scalar, np.ndarray | Vector | list | tuple):
            return self @ scalar
        return self._scaled(scalar) if is_scalar(scalar) else self._joined(scalar, matmul)

    def __rmul__(self, scalar: Scalar | Exact) -> LinearOperator[Domain_co, Codomain_co]:
        scaled: LinearOperator[Domain_co, Codomain_co] = self._scaled(
            scalar[()] if isinstance(scalar, np.ndarray) else scalar
        )
        return scaled

    def _scaled(self, scalar: Any) -> Any:
        if not is_scalar(scalar):
            return NotImplemented
        return ex.scaled(scalar, self)

    def __truediv__(self, scalar: Scalar | Exact) -> LinearOperator[Domain_co, Codomain_co]:
        return self * reciprocal(scalar) if is_scalar(scalar) else NotImplemented

    def __pow__(self, power: int) -> LinearOperator[Domain_co, Codomain_co]:
        if not 0 <= (power := integer(power, "power")) <= LARGEST:
            raise ArgumentError(f"power: expected a whole number from 0, given {power}")
        self.codomain.same_as(self.domain, "power")
        if power <= MANY:
            return ex.compose(*(self,) * power) if power else ex.Identity(self.domain)
        half = self ** (power // 2)
        return half @ half @ self if power % 2 else half @ half

    def __str__(self) -> str:
        return self.symbol()

    def __repr__(self) -> str:
        m, n = self.shape
        text = " ".join(str(self).split())
        return f"<{m}x{n} {type(self).__name__} with dtype={self.dtype.name}: {text}>"

    def draw(self, adjoint: bool = True, workers: Sequence[int] | None = None) -> Picture:
        """The picture of what moves: a column for each worker, boxes for regions with the indices
        that they hold, arrows for the transfers of the normal form, local maps between them; and
        the adjoint, in the same rows. A notebook shows it; ``op.draw().save("op.svg")`` writes it.

        Args:
            adjoint: draw ``op.H``, too.
            workers: those that are drawn; by default all, or of more than 8 the first 6 and the
                last. What is left out is said.

        Raises:
            ArgumentError: a worker is none of the operator's, or more than 32 are given.
            SpaceError: the operator has no adjoint (`H`).
        """
        from linop.pictures.operators import draw

        return draw(self, adjoint, workers)

    def _repr_html_(self) -> str:
        from linop.pictures.html import operator_html

        return operator_html(self)

    def _repr_latex_(self) -> str:
        return f"${self.symbol(latex=True)}$"


TensorOperator: TypeAlias = LinearOperator[TensorSpace, TensorSpace]

# The classes of expressions derive from the one above, and its methods build them.
from linop.operators import expressions as ex  # noqa: E402
