"""Expressions that the methods of an operator build: identity, zero, memory primitives,
composition, sum, scalar multiple. Direct sums, stacks and named operators are in
`linop.operators.algebra`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from itertools import groupby

import numpy as np

from linop.errors import ArgumentError
from linop.normal_form.movement import Movement
from linop.normal_form.primitives import Action, BetweenSpaces, InPlace, adjoints
from linop.normal_form.stages import Stages
from linop.operators.notation import joined_symbols, parenthesised, subscripted
from linop.operators.operator import Arrays, LinearOperator
from linop.spaces.exact import Exact, rounded, shown, wrapped
from linop.spaces.space import Space


class Identity(LinearOperator):
    """The identity I; the codomain may list the regions of the domain in another order."""

    def __init__(self, space: Space, codomain: Space | None = None) -> None:
        super().__init__(space, codomain or space)

    def _adjoint(self) -> LinearOperator:
        return self if self.domain is self.codomain else Identity(self.codomain, self.domain)

    def _interpret(self, arrays: Arrays) -> Arrays:
        return arrays

    def _stages(self) -> Stages:
        return Stages((Movement.between(self.domain, self.codomain),))

    def symbol(self, latex: bool = False) -> str:
        return "I"


class Zero(LinearOperator):
    """The zero operator O between two spaces."""

    def _adjoint(self) -> LinearOperator:
        return Zero(self.codomain, self.domain)

    def _interpret(self, arrays: Arrays) -> Arrays:
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

    def _interpret(self, arrays: Arrays) -> Arrays:
        for factor in reversed(self.factors):
            arrays = factor._interpret(arrays)
        return arrays

    def _flattened(self, given: bool = False) -> Iterator[LinearOperator]:
        for factor in reversed(self.factors):
            yield from factor._flattened(given)

    def _stages(self) -> Stages:
        pieces: list[Stages] = []
        for kind, group in groupby(self._flattened(given=True), type):
            if kind is Primitives:
                between = [op.between for op in group if isinstance(op, Primitives)]
                pieces.append(Stages((Movement.of_actions(between),)))
            else:
                pieces += [factor.stages for factor in group]
        return reduce(lambda right, left: left.after(right), pieces)

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

    def _interpret(self, arrays: Arrays) -> Arrays:
        results = (t._interpret({n: a.copy() for n, a in arrays.items()}) for t in self.terms)
        total = next(results)
        for result in results:
            for name, array in result.items():
                total[name] += array
        return total

    def _stages(self) -> Stages:
        return Stages.sum([term.stages for term in self.terms])

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

    def _interpret(self, arrays: Arrays) -> Arrays:
        result, factor = self.operand._interpret(arrays), rounded(self.scalar, self.dtype)
        for array in result.values():
            np.multiply(array, factor, out=array)
        return result

    def _stages(self) -> Stages:
        return self.operand.stages.scale(self.scalar)

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
