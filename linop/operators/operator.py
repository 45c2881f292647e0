"""Base class of linear operators, and the closure of the algebra: identity, zero, memory
primitives, composition, sum, scalar multiple.

An operator is immutable data with a domain and a codomain. A class defines the adjoint rule
(`_adjoint`), the reference interpretation on NumPy arrays (`_run`), the normal form (`_stages`) and
the notation (`symbol`). Spaces are checked once, when an operator is built, so that a malformed one
cannot exist. Operators that need nothing new of these rules are composed in other modules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, reduce
from itertools import groupby
from typing import Any, overload

import numpy as np
import scipy  # submodules load on first use: importing them takes as long as all of linop

from linop.errors import ArgumentError, SpaceError, UndecidableError
from linop.normal_form.maps import bare_or_dict
from linop.normal_form.movement import Movement
from linop.normal_form.primitives import Action, Add, Clear, InPlace, Placed, adjoints
from linop.normal_form.stages import Stages
from linop.operators import laws
from linop.operators.notation import joined_symbols, parenthesised, subscripted
from linop.planning.cost import Cost, cost
from linop.planning.network import Network
from linop.provenance import Remembering, remembered
from linop.spaces.exact import Exact, rounded, shown, wrapped
from linop.spaces.region import LARGEST, integer
from linop.spaces.scalars import Array, Scalar, check_scalar, is_scalar, reciprocal, sparse_dtype
from linop.spaces.space import Space, Vector

Arrays = dict[str, Array]


class LinearOperator(Remembering, ABC):
    """A linear map ``domain -> codomain``.

    ``a @ b``, ``a + b``, ``a - b``, ``2 * a``, ``a / 2`` and ``a ** 3`` are composition, sum,
    difference, scalar multiples and power. ``op.H`` is the adjoint: symbolic, so that building it
    runs nothing, and ``A.H.H is A``. ``op(x)`` and ``op @ x`` interpret it in this process, one
    primitive at a time; `compile` returns the plan that runs it on workers.

    Args:
        domain, codomain: spaces of one dtype.

    Raises:
        ArgumentError: one of them is no `Space`. SpaceError: their dtypes differ.
    """

    __array_ufunc__ = None  # so that numpy_scalar * op calls __rmul__
    _h: LinearOperator | None = None
    loose = False  # True if the symbol needs parentheses inside a product

    def __init__(self, domain: Space, codomain: Space) -> None:
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
        """The adjoint rule: the adjoint, built from those of the operands. Called once, by `H`."""

    def _conj(self) -> LinearOperator:
        """The operator with the complex conjugate matrix; called for complex dtypes alone."""
        return self

    @abstractmethod
    def _run(self, arrays: Arrays) -> Arrays:
        """The reference rule: apply the operator to the arrays of all regions of the domain, by
        name, which the callee may overwrite and return."""

    @abstractmethod
    def _stages(self) -> Stages:
        """The normal form, computed from those of the operands."""

    def _simplified(self) -> LinearOperator:
        return self

    def _program(self, known: bool = False) -> Iterator[LinearOperator]:
        """The factors in the order of application, with named operators expanded.

        Args:
            known: keep named operators whose movement is given (`Known`) as one factor.
        """
        yield self

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
    def H(self) -> LinearOperator:
        """The adjoint; ``A.H.H is A``."""
        if self._h is None:
            self._h = self._adjoint()
            self._h._h = self
        return self._h

    def adjoint(self) -> LinearOperator:
        """The adjoint, as a method (SciPy's and PyLops' convention)."""
        return self.H

    @remembered
    def conj(self) -> LinearOperator:
        """The operator with the complex conjugate matrix."""
        return self if self.dtype.kind != "c" else self._conj()

    @property
    def T(self) -> LinearOperator:
        """The transpose: the adjoint without conjugation."""
        return self.H.conj()

    @cached_property
    def stages(self) -> Stages:
        """The normal form: alternating movements and layers of local maps."""
        return self._stages()

    def movement(self) -> Movement:
        """The normal form of an operator composed of memory operators alone: its transfers.

        Raises:
            UndecidableError: it contains local operators.
        """
        if not self.stages.pure:
            local = ", ".join(sorted({call.map.symbol for call in self.stages.calls}))
            raise UndecidableError(
                f"{self!r} is not data movement alone: it contains the local operators {local}; "
                f"see its .stages"
            )
        return self.stages.movements[0]

    def to_matrix(self) -> scipy.sparse.csr_array:
        """The matrix as a sparse array of `shape`. Rows and columns follow the spaces' regions,
        each flattened in C order. A local operator of unknown matrix is applied to unit vectors.
        Values of float16 and bfloat16, which scipy.sparse lacks, become float64."""
        return scipy.sparse.csr_array(self.stages.to_matrix().astype(sparse_dtype(self.dtype)))

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
        alike = self.domain == other.domain and self.codomain == other.codomain
        return alike and self.stages.equals(other.stages)

    def simplify(self) -> LinearOperator:
        """An equal operator, reduced by the laws ``K K = K``, ``A* A = I``, … of
        `linop.operators.laws`; the operator itself if none applies."""
        return _ordered(self._simplified(), self.domain, self.codomain)

    def cost(self, network: Network | None = None) -> Cost:
        """Messages and bytes that every worker sends and receives, predicted without running
        anything.

        Args:
            network: if given, the time in seconds on this network is predicted, too;
                `linop.simulate` reports it in more detail.
        """
        return cost(self, network)

    def compile(self, backend: Any) -> Any:
        """The plan that runs this operator on a backend: ``plan(x)``, ``plan.H(y)``.

        Raises:
            ArgumentError: `backend` is no backend.
        """
        if not hasattr(backend, "compile"):
            mend = "make one with linop.backends.get(name)"
            raise ArgumentError(f"compile: expected a backend, given {backend!r}; {mend}")
        return backend.compile(self)

    def to_scipy(self) -> scipy.sparse.linalg.LinearOperator:
        """A SciPy `LinearOperator` of `shape` on flat vectors: all regions in order, each in C
        order. It runs in this process."""
        return scipy.sparse.linalg.LinearOperator(
            self.shape, matvec=self._on_flat, rmatvec=self.H._on_flat, dtype=self.dtype
        )

    def _on_flat(self, x: Array) -> Array:
        return self.codomain.flatten(self(self.domain.unflatten(x)))

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
        vector = x if isinstance(x, Vector) else self.domain.vector({} if x is None else x)
        self.domain.same_as(vector.space, "argument of an operator")
        vector.require_all("applying an operator here")
        arrays = self._run({n: a.copy() for n, a in vector.arrays.items()})
        if isinstance(x, Vector):
            return Vector(self.codomain, {r.name: arrays[r.name] for r in self.codomain.regions})
        return bare_or_dict(self.codomain.regions, [arrays[r.name] for r in self.codomain.regions])

    @overload
    def __matmul__(self, other: LinearOperator) -> LinearOperator: ...

    @overload
    def __matmul__(self, other: Any) -> Any: ...

    def __matmul__(self, other: Any) -> Any:
        return compose(self, other) if isinstance(other, LinearOperator) else self(other)

    # The algebra

    def __add__(self, other: LinearOperator) -> LinearOperator:
        return Sum((self, other)) if isinstance(other, LinearOperator) else NotImplemented

    def __sub__(self, other: LinearOperator) -> LinearOperator:
        return Sum((self, -other)) if isinstance(other, LinearOperator) else NotImplemented

    def __neg__(self) -> LinearOperator:
        return Scaled(-1, self)

    def __mul__(self, scalar: Scalar | Exact) -> LinearOperator:
        if isinstance(scalar, LinearOperator):
            raise ArgumentError("op * op: compose operators with @; * takes a scalar")
        if not is_scalar(scalar):
            return NotImplemented
        return Scaled(check_scalar(scalar, self.dtype), self)

    __rmul__ = __mul__

    def __truediv__(self, scalar: Scalar | Exact) -> LinearOperator:
        return self * reciprocal(scalar) if is_scalar(scalar) else NotImplemented

    def __pow__(self, power: int) -> LinearOperator:
        if not 0 <= (power := integer(power, "power")) <= LARGEST:
            raise ArgumentError(f"power: expected a whole number from 0, given {power}")
        self.codomain.same_as(self.domain, "power")
        return compose(*(self,) * power) if power else Identity(self.domain)

    def __str__(self) -> str:
        return self.symbol()

    def __repr__(self) -> str:
        m, n = self.shape
        return f"<{m}x{n} {type(self).__name__} with dtype={self.dtype.name}: {self}>"

    def _repr_latex_(self) -> str:
        return f"${self.symbol(latex=True)}$"


class Identity(LinearOperator):
    """The identity I; the codomain may list the regions of the domain in another order."""

    def __init__(self, space: Space, codomain: Space | None = None) -> None:
        super().__init__(space, codomain or space)

    def _adjoint(self) -> LinearOperator:
        return self if self.domain is self.codomain else Identity(self.codomain, self.domain)

    def _run(self, arrays: Arrays) -> Arrays:
        return arrays

    def _stages(self) -> Stages:
        return Stages((Movement.between(self.domain, self.codomain),))

    def symbol(self, latex: bool = False) -> str:
        return "I"


class Zero(LinearOperator):
    """The zero operator O between two spaces."""

    def _adjoint(self) -> LinearOperator:
        return Zero(self.codomain, self.domain)

    def _run(self, arrays: Arrays) -> Arrays:
        return self.codomain.zeros().arrays

    def _stages(self) -> Stages:
        return Stages((Movement.of_blocks(self.domain, self.codomain, []),))

    def symbol(self, latex: bool = False) -> str:
        return "O"


class Primitives(LinearOperator):
    """Memory primitives between two spaces, the first applied first: one of any kind, or many that
    keep the space (clear, add). These are one operator and not a composition, because the halo
    exchange of thousands of workers has about a hundred thousand of them."""

    def __init__(self, domain: Space, actions: Iterable[Action], codomain: Space) -> None:
        super().__init__(domain, codomain)
        self.actions = actions if isinstance(actions, InPlace) else tuple(actions)
        self.placed: Placed = domain, self.actions, codomain

    def _adjoint(self) -> LinearOperator:
        return Primitives(self.codomain, adjoints(self.actions), self.domain)

    def _run(self, arrays: Arrays) -> Arrays:
        for action in self.actions:
            action.run(arrays, self.dtype)
        return arrays

    def _stages(self) -> Stages:
        return Stages((Movement.of_program([self.placed]),))

    def _simplified(self) -> LinearOperator:
        few = laws.reduce_program(self.actions)
        return _placed(few, self.domain, self.codomain) if len(few) < len(self.actions) else self

    def symbol(self, latex: bool = False) -> str:
        return " ".join(subscripted(a.letter, a.subscript, latex) for a in self.actions[::-1])


class Composition(LinearOperator):
    """The product of operators, the last one applied first. Built by ``@`` or `compose`, which
    check the spaces."""

    def __init__(self, factors: Sequence[LinearOperator]) -> None:
        super().__init__(factors[-1].domain, factors[0].codomain)
        self.factors = tuple(factors)

    def _adjoint(self) -> LinearOperator:
        return Composition([factor.H for factor in reversed(self.factors)])

    def _conj(self) -> LinearOperator:
        return Composition([factor.conj() for factor in self.factors])

    def _run(self, arrays: Arrays) -> Arrays:
        for factor in reversed(self.factors):
            arrays = factor._run(arrays)
        return arrays

    def _program(self, known: bool = False) -> Iterator[LinearOperator]:
        for factor in reversed(self.factors):
            yield from factor._program(known)

    def _stages(self) -> Stages:
        pieces: list[Stages] = []
        for kind, run in groupby(self._program(known=True), type):
            if kind is Primitives:
                placed = [op.placed for op in run if isinstance(op, Primitives)]
                pieces.append(Stages((Movement.of_program(placed),)))
            else:
                pieces += [factor.stages for factor in run]
        return reduce(lambda right, left: left.after(right), pieces)

    def _simplified(self) -> LinearOperator:
        scalar: Exact = 1
        steps: list[Any] = []
        changed = False
        for factor in self._program():
            simple = factor if isinstance(factor, Primitives) else factor._simplified()
            changed |= simple is not factor
            if isinstance(simple, Scaled):
                scalar, simple, changed = scalar * simple.scalar, simple.operand, True
            if isinstance(simple, Zero):
                return Zero(self.domain, self.codomain)
            for step in simple._program():
                steps += step.actions if isinstance(step, Primitives) else (step,)
        kept = [step for step in steps if not isinstance(step, Identity)]
        reduced = laws.reduce_program(kept)
        if not changed and len(reduced) == len(steps):
            return self
        return Scaled(scalar, _placed(reduced, self.domain, self.codomain))._simplest()

    def symbol(self, latex: bool = False) -> str:
        return joined_symbols(self.factors, " ", latex)


class Sum(LinearOperator):
    """The sum of operators with equal domains and codomains; a sum among the terms is flattened.

    Raises:
        SpaceError: domains or codomains differ.
    """

    loose = True

    def __init__(self, terms: Sequence[LinearOperator]) -> None:
        super().__init__(terms[0].domain, terms[0].codomain)
        for term in terms[1:]:
            self.domain.same_as(term.domain, "sum of operators, domains")
            self.codomain.same_as(term.codomain, "sum of operators, codomains")
        flat = [t for term in terms for t in (term.terms if isinstance(term, Sum) else (term,))]
        self.terms: tuple[LinearOperator, ...] = tuple(flat)

    def _adjoint(self) -> LinearOperator:
        return Sum([term.H for term in self.terms])

    def _conj(self) -> LinearOperator:
        return Sum([term.conj() for term in self.terms])

    def _run(self, arrays: Arrays) -> Arrays:
        results = (t._run({n: a.copy() for n, a in arrays.items()}) for t in self.terms)
        total = next(results)
        for result in results:
            for name, array in result.items():
                total[name] += array
        return total

    def _stages(self) -> Stages:
        return Stages.sum([term.stages for term in self.terms])

    def _simplified(self) -> LinearOperator:
        simple = [term._simplified() for term in self.terms]
        kept = [term for term in simple if not isinstance(term, Zero)]
        if not kept:
            return Zero(self.domain, self.codomain)
        if len(kept) == 1:
            return kept[0]
        unchanged = all(a is b for a, b in zip(kept, self.terms, strict=False))
        return self if unchanged and len(kept) == len(self.terms) else Sum(kept)

    def symbol(self, latex: bool = False) -> str:
        text = " + ".join(term.symbol(latex) for term in self.terms)
        return text.replace("+ -", "- ")


class Scaled(LinearOperator):
    """A scalar times an operator. The scalar is stored exactly (modulo 2^bits in integer dtypes),
    and rounded to the dtype when arrays are multiplied by it."""

    def __init__(self, scalar: Exact, operand: LinearOperator) -> None:
        super().__init__(operand.domain, operand.codomain)
        if isinstance(operand, Scaled):
            scalar, operand = scalar * operand.scalar, operand.operand
        self.scalar: Exact = wrapped(scalar, operand.dtype)
        self.operand: LinearOperator = operand

    def _adjoint(self) -> LinearOperator:
        return Scaled(self.scalar.conjugate(), self.operand.H)

    def _conj(self) -> LinearOperator:
        return Scaled(self.scalar.conjugate(), self.operand.conj())

    def _run(self, arrays: Arrays) -> Arrays:
        result, factor = self.operand._run(arrays), rounded(self.scalar, self.dtype)
        for array in result.values():
            np.multiply(array, factor, out=array)
        return result

    def _stages(self) -> Stages:
        return self.operand.stages.scale(self.scalar)

    def _simplified(self) -> LinearOperator:
        simple = self.operand._simplified()
        return (self if simple is self.operand else Scaled(self.scalar, simple))._simplest()

    def _simplest(self) -> LinearOperator:
        if self.scalar == 0 or isinstance(self.operand, Zero):
            return Zero(self.domain, self.codomain)
        return self.operand if self.scalar == 1 else self

    def symbol(self, latex: bool = False) -> str:
        number = "-" if self.scalar == -1 else f"{shown(self.scalar, latex)} "
        return number + parenthesised(self.operand, latex)


def compose(*factors: LinearOperator) -> LinearOperator:
    """The product of operators, the last one applied first.

    Raises:
        SpaceError: the codomain of a factor is not the domain of the factor to its left.
        ArgumentError: a factor is no operator.
    """
    if len(factors) == 1:
        return factors[0]
    flat: list[LinearOperator] = []
    for factor in factors:
        if not isinstance(factor, LinearOperator):
            raise ArgumentError(f"compose: expected an operator, given {factor!r}")
        inner = factor.factors if isinstance(factor, Composition) else (factor,)
        if flat:
            left, right = flat[-1], inner[0]
            if left.domain != right.codomain:
                what = f"composition ({left}) @ ({right}): left domain, right codomain"
                left.domain.same_as(right.codomain, what)
        flat += inner
    return Composition(flat)


def _placed(steps: Sequence[Any], domain: Space, codomain: Space) -> LinearOperator:
    """A program (actions and opaque operators, the first applied first) as a composition; the
    identity from domain to codomain if it is empty."""
    space = domain
    factors: list[LinearOperator] = []
    for here, some in groupby(steps, lambda step: isinstance(step, Add | Clear)):
        run = list(some)
        for step in [Primitives(space, run, space)] if here else run:
            if isinstance(step, LinearOperator):
                factors.append(step)
            else:
                factors.append(Primitives(space, [step], step.codomain(space)))
            space = factors[-1].codomain
    return compose(*reversed(factors)) if factors else Identity(domain, codomain)


def _ordered(op: LinearOperator, domain: Space, codomain: Space) -> LinearOperator:
    """The operator composed with identities that put the regions in the order of these spaces."""
    factors = [op]
    if op.domain.regions != domain.regions:
        factors.append(Identity(domain, op.domain))
    if op.codomain.regions != codomain.regions:
        factors.insert(0, Identity(op.codomain, codomain))
    return compose(*factors)
