"""Expressions that the methods of an operator build: identity, zero, memory primitives, local maps,
composition, sum, scalar multiple. Direct sums, stacks and named operators are in
`linop.operators.algebra`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from linop.caching import cached_property
from linop.errors import ArgumentError
from linop.graph import MANY, depth_of, flattened
from linop.normal_form.maps import LocalMap
from linop.normal_form.merging import Merged
from linop.normal_form.movement import Movement
from linop.normal_form.primitives import Action, BetweenSpaces, InPlace, adjoints
from linop.normal_form.stages import Stages
from linop.operators.flow import Demand, Flow, flow_of, interpreted
from linop.operators.notation import (
    Write,
    elided,
    ends_of,
    in_latex,
    starred,
    subscripted,
    written,
)
from linop.operators.operator import Arrays, LinearOperator
from linop.operators.staging import Staging, stages_of
from linop.spaces.exact import Exact, shown, wrapped
from linop.spaces.scalars import as_exact, check_scalar
from linop.spaces.space import Space


class Identity(LinearOperator[Any, Any]):
    """The identity I; the codomain may list the regions of the domain in another order, or have
    another inner product."""

    def __init__(self, space: Space, codomain: Space | None = None) -> None:
        super().__init__(space, space if codomain is None else codomain)

    def _adjoint(self) -> LinearOperator:
        return self if self.domain is self.codomain else Identity(self.codomain, self.domain)

    def _interpret(self, arrays: Arrays) -> Arrays:
        return arrays

    def _stages(self) -> Stages:
        return Stages((Movement.between(self.domain, self.codomain),))

    def symbol(self, latex: bool = False) -> str:
        return "I"


class Zero(LinearOperator[Any, Any]):
    """The zero operator O between two spaces."""

    def _adjoint(self) -> LinearOperator:
        return Zero(self.codomain, self.domain)

    def _interpret(self, arrays: Arrays) -> Arrays:
        zeros: Arrays = self.codomain.zeros().arrays
        return zeros

    def _stages(self) -> Stages:
        return Stages((Movement.of_blocks(self.domain, self.codomain, []),))

    def symbol(self, latex: bool = False) -> str:
        return "O"


class Primitives(LinearOperator[Any, Any]):
    """Memory primitives between two spaces, the first applied first: one of any kind, or many that
    keep the space (clear, add). These are one operator and not a composition, because the halo
    exchange of thousands of workers has about a hundred thousand of them."""

    def __init__(self, domain: Space, actions: Iterable[Action], codomain: Space) -> None:
        super().__init__(domain, codomain)
        self.actions = actions if isinstance(actions, InPlace) else tuple(actions)
        self.between: BetweenSpaces = domain, self.actions, codomain

    def _adjoint(self) -> LinearOperator:
        return Primitives(self.codomain, adjoints(self.actions), self.domain)

    def _interpret(self, arrays: Arrays) -> Arrays:
        for action in self.actions:
            action.interpret(arrays, self.dtype)
        return arrays

    def _stages(self) -> Stages:
        return Stages((Movement.of_actions([self.between]),))

    def symbol(self, latex: bool = False) -> str:
        some = ends_of(self.actions[::-1], most=64)
        texts = [subscripted(a.letter, a.subscript, latex) for a in some]
        return " ".join(elided(texts, len(self.actions), latex))


class Local(LinearOperator[Any, Any]):
    """A linear map inside one worker's memory: a `LocalMap` as an operator."""

    def __init__(self, local: LocalMap) -> None:
        super().__init__(local.domain, local.codomain)
        self.map = local

    def _adjoint(self) -> LinearOperator:
        return Local(self.map.adjoint)

    def _conj(self) -> LinearOperator:
        return Local(self.map.conj)

    def _interpret(self, arrays: Arrays) -> Arrays:
        results = self.map([arrays[r.name] for r in self.domain.regions])
        return {r.name: y for r, y in zip(self.codomain.regions, results, strict=True)}

    def _stages(self) -> Stages:
        return Stages.of_map(self.map)

    def symbol(self, latex: bool = False) -> str:
        name = self.map.symbol
        if not latex:
            return name
        return starred(in_latex(name[:-1]), latex) if name.endswith("*") else in_latex(name)


class Compound(LinearOperator[Any, Any]):
    """An operator built of others. Values that several of them need are computed once: what a
    compound does is the flow (`linop.operators.flow`) that its nodes are spread over."""

    spreads = True

    def __init__(self, domain: Space, codomain: Space, parts: Sequence[LinearOperator]) -> None:
        super().__init__(domain, codomain)
        self.depth = depth_of(parts)
        self.loops = any(part.loops for part in parts)

    @abstractmethod
    def _spread(self, flow: Flow, demand: Demand) -> None:
        """Demand the operands, so that one demand for the operator is met."""

    @abstractmethod
    def _of(self, parts: Sequence[LinearOperator]) -> LinearOperator:
        """The same of other operands, those on rows of real parts."""

    def _form(self) -> LinearOperator:
        if not self.loops:
            return super()._form()  # one node: its stages are known as a whole
        return self._of([part.over_reals() for part in self._operands()])

    @abstractmethod
    def _merged(self, staging: Staging) -> Merged | None:
        """Its movement, merged of those of the operands; None if it has local maps."""

    @abstractmethod
    def _written(self, write: Write) -> str:
        """The operator in the paper's notation, of texts of its operands."""

    @cached_property
    def flow(self) -> Flow:
        """Its nodes as values computed from one another, each once."""
        return flow_of(
            self,
            lambda op: op._operands() if op.spreads else None,
            lambda op, flow, demand: op._spread(flow, demand),
        )

    def _interpret(self, arrays: Arrays) -> Arrays:
        return interpreted(self.flow, arrays, self.dtype)

    def _stages(self) -> Stages:
        return stages_of(self)

    def symbol(self, latex: bool = False) -> str:
        return written(self, latex)


class Composition(Compound):
    """The product of operators, the last one applied first. Built by ``@`` or `compose`, which
    check the spaces.

    Attributes:
        parts: the factors as given; products among them are nodes of their own.
    """

    def __init__(self, factors: Sequence[LinearOperator]) -> None:
        self.parts = tuple(factors)
        super().__init__(self.parts[-1].domain, self.parts[0].codomain, self.parts)
        counts = (f._count if isinstance(f, Composition) else 1 for f in self.parts)
        self._count: int = sum(counts)

    @cached_property
    def factors(self) -> tuple[LinearOperator, ...]:
        """The factors, those of nested products included; these stay nested if the product has
        more than `MANY`."""
        return flattened(
            self.parts,
            lambda op: op.parts if isinstance(op, Composition) and _is_short(op) else None,
        )

    def _operands(self) -> Sequence[LinearOperator]:
        return self.parts

    def _adjoint(self) -> LinearOperator:
        return Composition([part.euclidean_adjoint for part in reversed(self.parts)])

    def _conj(self) -> LinearOperator:
        return Composition([part.conj() for part in self.parts])

    def _spread(self, flow: Flow, demand: Demand) -> None:
        source = demand.source
        for part in self.parts[:0:-1]:
            middle = flow.wire(part.codomain)
            flow.apply(part, source, middle)
            source = middle
        flow.apply(self.parts[0], source, demand.target, demand.scalar)

    def _of(self, parts: Sequence[LinearOperator]) -> LinearOperator:
        return Composition(parts)

    def _opened(self, given: bool) -> Sequence[LinearOperator] | None:
        return self.parts[::-1] if self._count <= MANY else None

    def _merged(self, staging: Staging) -> Merged | None:
        return staging.product(self)

    def _written(self, write: Write) -> str:
        return write.product(self.parts, " ", Composition)


def _is_short(op: LinearOperator) -> bool:
    return isinstance(op, Composition | Sum) and op._count <= MANY


class Sum(Compound):
    """The sum of operators with equal domains and codomains.

    Attributes:
        parts: the terms as given; sums among them are nodes of their own.

    Raises:
        SpaceError: domains or codomains differ.
    """

    loose = True

    def __init__(self, terms: Sequence[LinearOperator]) -> None:
        self.parts = tuple(terms)
        super().__init__(terms[0].domain, terms[0].codomain, self.parts)
        for term in terms[1:]:
            self.domain.same_as(term.domain, "sum of operators, domains")
            self.codomain.same_as(term.codomain, "sum of operators, codomains")
        self._count: int = sum(t._count if isinstance(t, Sum) else 1 for t in self.parts)

    @cached_property
    def terms(self) -> tuple[LinearOperator, ...]:
        """The terms, those of nested sums included; these stay nested if the sum has more than
        `MANY`."""
        return flattened(
            self.parts, lambda op: op.parts if isinstance(op, Sum) and _is_short(op) else None
        )

    def _operands(self) -> Sequence[LinearOperator]:
        return self.parts

    def _adjoint(self) -> LinearOperator:
        return Sum([part.euclidean_adjoint for part in self.parts])

    def _conj(self) -> LinearOperator:
        return Sum([part.conj() for part in self.parts])

    def _spread(self, flow: Flow, demand: Demand) -> None:
        for part in self.parts:
            flow.apply(part, demand.source, demand.target, demand.scalar)

    def _of(self, parts: Sequence[LinearOperator]) -> LinearOperator:
        return Sum(parts)

    def _merged(self, staging: Staging) -> Merged | None:
        return staging.sum(self)

    def _written(self, write: Write) -> str:
        return write.sum(self.parts, Sum)


class Scaled(Compound):
    """A scalar times an operator. The scalar is stored exactly (modulo 2^bits in integer dtypes),
    and rounded to the dtype when arrays are multiplied by it."""

    def __init__(self, scalar: Exact, operand: LinearOperator) -> None:
        if isinstance(operand, Scaled):
            scalar, operand = scalar * operand.scalar, operand.operand
        super().__init__(operand.domain, operand.codomain, (operand,))
        self.scalar: Exact = wrapped(scalar, operand.dtype)
        self.operand: LinearOperator = operand

    def _operands(self) -> Sequence[LinearOperator]:
        return (self.operand,)

    def _adjoint(self) -> LinearOperator:
        return Scaled(self.scalar.conjugate(), self.operand.euclidean_adjoint)

    def _conj(self) -> LinearOperator:
        return Scaled(self.scalar.conjugate(), self.operand.conj())

    def _spread(self, flow: Flow, demand: Demand) -> None:
        scalar = self.scalar * demand.scalar
        flow.apply(self.operand, demand.source, demand.target, scalar)

    def _of(self, parts: Sequence[LinearOperator]) -> LinearOperator:
        return Composition((Scaled(self.scalar, Identity(self.codomain)).over_reals(), *parts))

    def _merged(self, staging: Staging) -> Merged | None:
        return staging.multiple(self)

    def _written(self, write: Write) -> str:
        number = "-" if self.scalar == -1 else f"{shown(self.scalar, write.latex)} "
        return number + write.factor(self.operand)


def compose(*factors: LinearOperator) -> LinearOperator[Any, Any]:
    """The product of operators, the last one applied first. Real results of a factor become complex
    ones where the next one takes these (`linop.real`).

    Raises:
        SpaceError: the codomain of a factor is not the domain of the factor to its left.
        ArgumentError: a factor is no operator.
    """
    for factor in factors:
        if not isinstance(factor, LinearOperator):
            raise ArgumentError(f"compose: expected an operator, given {factor!r}")
    if len(factors) == 1:
        return factors[0]
    for left, right in pairwise(factors):
        if left.domain != right.codomain:
            if left.domain.dtype != right.codomain.dtype:
                return _composed_of_parts(factors)
            left, right = _end(left, -1), _end(right, 0)
            what = f"composition ({left}) @ ({right}): left domain, right codomain"
            left.domain.same_as(right.codomain, what)
    if not all(factor.clinear for factor in factors):
        return _composed_of_parts(factors)
    return Composition(factors)


def _composed_of_parts(factors: Sequence[LinearOperator]) -> LinearOperator:
    """`compose`, of factors of which some are linear over the real numbers alone."""
    from linop.operators.real_linear import embedded

    found = [factors[-1]]
    for left in factors[-2::-1]:
        right = embedded(found[0], left.domain)
        if left.domain != right.codomain:
            hint = ""
            if (left.domain.dtype.kind, right.codomain.dtype.kind) == ("f", "c"):
                hint = "; linop.real(space) takes the real part"
            left, right = _end(left, -1), _end(right, 0)
            what = f"composition ({left}) @ ({right}): left domain, right codomain{hint}"
            left.domain.same_as(right.codomain, what)
        found[:1] = [left, right]
    return over_reals_of(
        lambda parts, *ends: Composition(parts), found, factors[-1].domain, factors[0].codomain
    )


def add(*terms: LinearOperator) -> LinearOperator[Any, Any]:
    """The sum of operators; of real and complex codomains, to the complex one.

    Raises:
        SpaceError: domains or codomains differ.
    """
    if len({term.codomain.dtype for term in terms}) == 1 and all(t.clinear for t in terms):
        return Sum(terms)
    from linop.operators.real_linear import add

    return add(terms)


def over_reals_of(
    make: Callable[[Sequence[LinearOperator], Space, Space], LinearOperator],
    ops: Sequence[LinearOperator],
    domain: Space,
    codomain: Space,
) -> LinearOperator[Any, Any]:
    """``make(ops, domain, codomain)``; over the real numbers, if one of the operators is linear
    over these alone."""
    if all(op.clinear for op in ops):
        return make(ops, domain, codomain)
    from linop.operators.real_linear import RealLinear

    forms = [op.over_reals() for op in ops]
    return RealLinear(make(forms, domain.over_reals(), codomain.over_reals()), domain, codomain)


def scaled(scalar: Any, op: LinearOperator) -> LinearOperator[Any, Any]:
    """A multiple of an operator; complex ones of real operators have a complex codomain.

    Raises:
        ArgumentError: not a finite number. DTypeError: a number that the dtype does not hold.
    """
    number = as_exact(scalar)
    if op.clinear and not (number.imag and op.dtype.kind == "f"):
        return Scaled(check_scalar(scalar, op.dtype), op)
    from linop.operators import real_linear

    return real_linear.scaled(number, op)


def _end(op: LinearOperator, at: int) -> LinearOperator:
    """The first or the last factor of a product; another operator itself."""
    while isinstance(op, Composition):
        op = op.parts[at]
    return op
