"""Direct sums, stacks and named compositions as operators, and their constructors.

Identity, zero, composition, sum and scalar multiple, which the methods of `LinearOperator` return,
are in `linop.operators.expressions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from linop.errors import ArgumentError
from linop.normal_form.merging import Merged
from linop.normal_form.stages import Stages
from linop.operators.expressions import Compound, Identity, Zero, add, compose, over_reals_of
from linop.operators.flow import Demand, Flow
from linop.operators.memory import deallocate
from linop.operators.notation import Write, in_latex, starred, subscripted
from linop.operators.operator import LinearOperator
from linop.operators.simplification import in_order, simplified
from linop.operators.staging import Staging
from linop.provenance import records_origin
from linop.spaces.direct_sums import joined_space
from linop.spaces.space import Space


class DirectSum(Compound):
    """The block-diagonal operator diag(A, B, …), from the direct sum of the domains to the direct
    sum of the codomains, whose regions' names must differ.

    Args:
        domain, codomain: spaces of the same regions, such as a `TensorSpace` of which each block
            has a part; by default the direct sums.
    """

    loose = True

    def __init__(
        self,
        blocks: Sequence[LinearOperator],
        domain: Space | None = None,
        codomain: Space | None = None,
    ) -> None:
        self.blocks = tuple(blocks)
        domain = joined_space([b.domain for b in blocks]) if domain is None else domain
        codomain = joined_space([b.codomain for b in blocks]) if codomain is None else codomain
        super().__init__(domain, codomain, self.blocks)

    def _operands(self) -> Sequence[LinearOperator]:
        return self.blocks

    def _adjoint(self) -> LinearOperator:
        return DirectSum(
            [block.euclidean_adjoint for block in self.blocks], self.codomain, self.domain
        )

    def _conj(self) -> LinearOperator:
        return DirectSum([block.conj() for block in self.blocks], self.domain, self.codomain)

    def _spread(self, flow: Flow, demand: Demand) -> None:
        for block in self.blocks:
            source = flow.part(demand.source, block.domain)
            target = flow.part(demand.target, block.codomain, into=True)
            flow.apply(block, source, target, demand.scalar)

    def _of(self, parts: Sequence[LinearOperator]) -> LinearOperator:
        return DirectSum(parts, self.domain.over_reals(), self.codomain.over_reals())

    def _merged(self, staging: Staging) -> Merged | None:
        if staging.shares(self):
            return None
        blocks = [block.stages for block in self.blocks]
        return staging.apart(self, Stages.direct_sum(blocks, self.domain, self.codomain))

    def _written(self, write: Write) -> str:
        return write.product(self.blocks, r" \oplus " if write.latex else " ⊕ ")


class Steps(Compound):
    """The composition of operators, first applied last, that runs as it is written: the data
    movements of two factors are never made into one."""

    def __init__(self, factors: Sequence[LinearOperator]) -> None:
        for after, before in pairwise(factors):
            before.codomain.same_as(after.domain, "in_steps")
        self.factors = tuple(factors)
        super().__init__(factors[-1].domain, factors[0].codomain, self.factors)

    def _operands(self) -> Sequence[LinearOperator]:
        return self.factors

    def _adjoint(self) -> LinearOperator:
        return Steps([factor.euclidean_adjoint for factor in reversed(self.factors)])

    def _conj(self) -> LinearOperator:
        return Steps([factor.conj() for factor in self.factors])

    def _spread(self, flow: Flow, demand: Demand) -> None:
        source = demand.source
        for factor in self.factors[:0:-1]:
            middle = flow.wire(factor.codomain, fixed=True)
            flow.apply(factor, source, middle)
            source = middle
        flow.apply(self.factors[0], source, demand.target, demand.scalar)

    def _of(self, parts: Sequence[LinearOperator]) -> LinearOperator:
        return Steps(parts)

    def _merged(self, staging: Staging) -> Merged | None:
        return None

    def _written(self, write: Write) -> str:
        return write.product(self.factors, r" \cdot " if write.latex else " · ")


class Named(Compound):
    """An operator printed under a name, such as a collective. It equals `body`.

    Args:
        name, subscript: the symbol.
        body: the operator that runs, and whose domain and codomain it has.
        starred: True if the symbol gets a star: it is the adjoint of the operator of that name.
    """

    def __init__(
        self, name: str, subscript: str, body: LinearOperator, starred: bool = False
    ) -> None:
        super().__init__(body.domain, body.codomain, (body,))
        self.name = name
        self.subscript = subscript
        self.body = body
        self.starred = starred

    def _operands(self) -> Sequence[LinearOperator]:
        return (self.body,)

    def _opened(self, given: bool) -> Sequence[LinearOperator] | None:
        return (self.body,)

    def _adjoint(self) -> LinearOperator:
        return Named(self.name, self.subscript, self.body.euclidean_adjoint, not self.starred)

    def _conj(self) -> LinearOperator:
        return Named(self.name, self.subscript, self.body.conj(), self.starred)

    def _spread(self, flow: Flow, demand: Demand) -> None:
        flow.apply(self.body, demand.source, demand.target, demand.scalar)

    def _of(self, parts: Sequence[LinearOperator]) -> LinearOperator:
        return Named(self.name, self.subscript, parts[0], self.starred)

    def _merged(self, staging: Staging) -> Merged | None:
        return staging.product(self)

    def _written(self, write: Write) -> str:
        return self.symbol(write.latex)

    def symbol(self, latex: bool = False) -> str:
        name = in_latex(self.name) if latex else self.name
        base = subscripted(self.name, self.subscript, latex) if self.subscript else name
        return starred(base, latex) if self.starred else base


@simplified.register
def _(op: DirectSum) -> LinearOperator:
    simple = [simplified(block) for block in op.blocks]
    if all(isinstance(block, Identity) for block in simple):
        return Identity(op.domain, op.codomain)
    unchanged = all(a is b for a, b in zip(simple, op.blocks, strict=True))
    return op if unchanged else DirectSum(simple, op.domain, op.codomain)


@simplified.register
def _(op: Named) -> LinearOperator:
    simple = simplified(op.body)
    return op if simple is op.body else simple


def expanded(op: LinearOperator) -> LinearOperator:
    """The body of a `Named` operator; any other operator unchanged."""
    return op.body if isinstance(op, Named) else op


@records_origin
def identity(space: Space, codomain: Space | None = None) -> LinearOperator:
    """The identity operator I: space -> space.

    Args:
        codomain: a space of the same regions with another inner product, if the two are not equal;
            the adjoint is then not the inverse.

    Raises:
        SpaceError: it has other regions, or another dtype.

    Example:
        >>> X = linop.TensorSpace((4,), linop.Partition(2))
        >>> A = linop.identity(X) + linop.stencil(X, {1: 1.0})
        >>> (A @ np.arange(4.0)).tolist()
        [1.0, 3.0, 5.0, 3.0]
    """
    if codomain is not None and not space.has_regions_of(codomain):
        space.same_as(codomain, "identity")
    return Identity(space, codomain)


@records_origin
def zero(domain: Space, codomain: Space) -> LinearOperator:
    """The zero operator O: domain -> codomain.

    Example:
        >>> X = linop.TensorSpace((4,), linop.Partition(2))
        >>> O = linop.zero(X, linop.TensorSpace((2,), linop.Partition(2)))
        >>> O.shape, O.H.shape, O.cost().messages
        ((2, 4), (4, 2), 0)
    """
    return Zero(domain, codomain)


@records_origin
def direct_sum(
    *ops: LinearOperator, domain: Space | None = None, codomain: Space | None = None
) -> LinearOperator:
    """The block-diagonal operator diag(A, B, …), from the direct sum of the domains to the direct
    sum of the codomains, which remember the spaces that they are of (`DirectSumSpace`).

    Args:
        ops: the blocks.
        domain, codomain: the space that a side is, if its regions are the blocks of a `TensorSpace`
            Y, for instance: flat vectors and matrices are then in the order of Y's tensor, not
            region after region. The inner product is Y's, too.

    Raises:
        RegionError: two domains or two codomains share the name of a region; `block_diag` renames
            them.
        SpaceError: dtypes differ; or `domain` or `codomain` has other regions than the blocks.
        ArgumentError: an argument is no operator, or there is none.

    Example:
        >>> X = linop.TensorSpace((4,), linop.Partition(2))
        >>> blocks = [linop.local_operators.diagonal([2.0, 3.0], region) for region in X]
        >>> D = linop.direct_sum(*blocks, domain=X, codomain=X)
        >>> (D @ np.ones(4)).tolist()
        [2.0, 3.0, 2.0, 3.0]
    """
    _check_operators("direct_sum", ops)
    sides = joined_space([op.domain for op in ops]), joined_space([op.codomain for op in ops])
    for given, joined in zip((domain, codomain), sides, strict=True):
        if given is not None and not joined.has_regions_of(given):
            joined.same_as(given, "direct_sum")
    if len(ops) == 1 and domain is codomain is None:
        return ops[0]
    return over_reals_of(DirectSum, ops, domain or sides[0], codomain or sides[1])


@records_origin
def in_steps(*ops: LinearOperator) -> LinearOperator:
    """The composition A B …, run in the steps in which it is written, and its adjoint in the steps'
    adjoints. ``A @ B`` is the same map, and runs as the one data movement that it is.

    Raises:
        SpaceError: an operator's domain is not the codomain of the next one.
        ArgumentError: an argument is no operator, or there is none.

    Example:
        >>> X = linop.TensorSpace((4,), linop.Partition(4))
        >>> step = linop.shift(X, 1)
        >>> (step @ step).cost().stages, linop.in_steps(step, step).cost().stages
        (1, 2)
        >>> linop.in_steps(step, step).equals(step @ step)
        True
    """
    _check_operators("in_steps", ops)
    if len(ops) == 1:
        return ops[0]
    return over_reals_of(
        lambda factors, *ends: Steps(factors), ops, ops[-1].domain, ops[0].codomain
    )


@records_origin
def hstack(*ops: LinearOperator) -> LinearOperator:
    """The block row [A B …] = Σ A_i D_i, from the direct sum of the domains to the common codomain.
    D_i deallocates the regions of all domains but the i-th.

    Raises:
        RegionError: two domains share the name of a region. SpaceError: codomains differ.
    """
    _check_operators("hstack", ops)
    domain = joined_space([op.domain for op in ops])
    return total([op @ restricted(domain, op.domain) for op in ops])


@records_origin
def vstack(*ops: LinearOperator) -> LinearOperator:
    """The block column [A; B; …] = Σ D_i* A_i, from the common domain to the direct sum of the
    codomains. D_i* allocates the regions of all codomains but the i-th.

    Raises:
        RegionError: two codomains share the name of a region. SpaceError: domains differ.
    """
    _check_operators("vstack", ops)
    codomain = joined_space([op.codomain for op in ops])
    return total([restricted(codomain, op.codomain).euclidean_adjoint @ op for op in ops])


def restricted(space: Space, part: Space) -> LinearOperator:
    """The restriction from a space to some of its regions: deallocates the others."""
    rest = [region for region in space.regions if region.name not in part]
    op = deallocate(space, *rest) if rest else Identity(space)
    return op if op.codomain == part else compose(Identity(op.codomain, part), op)


def within(op: LinearOperator, space: Space) -> LinearOperator:
    """An operator on some regions of a space; the others are unchanged."""
    rest = Space((r for r in space.regions if r.name not in op.domain), space.dtype)
    beside = DirectSum([op, Identity(rest)]) if rest.regions else op
    return in_order(beside, space, beside.codomain)


def total(ops: Sequence[LinearOperator]) -> LinearOperator:
    return ops[0] if len(ops) == 1 else add(*ops)


def _check_operators(what: str, ops: Sequence[LinearOperator]) -> None:
    for op in ops:
        if not isinstance(op, LinearOperator):
            raise ArgumentError(f"{what}: expected operators, given {op!r}")
    if not ops:
        raise ArgumentError(f"{what}: expected at least one operator")
