"""The normal form of data movement: a sparse matrix of scaled partial identities, as transfers.

A `Movement` is exact: two compositions of memory operators are equal for all vectors exactly if
their movements are. It gives one of two independent derivations of an adjoint (transpose every
transfer); the other is the adjoint rule of each operator. Local maps are in
`linop.normal_form.stages`; how tables are evaluated is in `linop.normal_form.transfer_table`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy

from linop.caching import cached_property
from linop.errors import SpaceError
from linop.normal_form import boxes
from linop.normal_form.boxes import Table, same_rows
from linop.normal_form.columns import Column, nearest, residues
from linop.normal_form.primitives import BetweenSpaces, independent_batches
from linop.normal_form.space_tables import (
    Block,
    box_of,
    flat_index,
    number_of,
    numbers_in,
    shared_table,
    table_ndim,
    table_of_actions,
    table_of_blocks,
)
from linop.normal_form.table_algebra import (
    FAR_MORE,
    BlockTable,
    ProductTable,
    ScaledTable,
    SumTable,
)
from linop.normal_form.transfer_table import (
    GivenTable,
    IdentityTable,
    TransferTable,
    digest_of,
    table_columns,
)
from linop.provenance import Keeper
from linop.spaces.exact import Exact, shown
from linop.spaces.region import Region, Subset
from linop.spaces.scalars import Scalar, as_exact, sparse_dtype
from linop.spaces.space import Space

ROWS_AT_ONCE = 2**18
"""Approximate number of rows that a comparison of two movements evaluates at a time."""

DEEPEST = 64
"""Nesting of lazily evaluated tables above which a movement is evaluated: evaluation is recursive
in it."""


@dataclass(frozen=True)
class Transfer:
    """One block of a movement: ``target += coefficient * source``, two boxes of equal shape."""

    source: Subset
    target: Subset
    coefficient: Exact

    def __str__(self) -> str:
        scale = "" if self.coefficient == 1 else f"{shown(self.coefficient)} · "
        return f"{self.target} += {scale}{self.source}"


class Movement(Keeper):
    """A linear map between spaces as canonical transfers.

    Transfers are evaluated lazily, all or those of given regions, also after the operations of the
    algebra. Iteration gives `Transfer` objects in canonical order. ``==`` is exact equality of
    operators.

    Args:
        domain, codomain: the spaces; rows number their regions.
        transfers: a lazily evaluated table; or a `Table`, not necessarily canonical.

    Raises:
        SpaceError: the dtypes of the spaces differ.

    Example:
        >>> X = linop.TensorSpace((4,), linop.Partition(2))
        >>> move = linop.shift(X, 1).movement()
        >>> len(move), move.adjoint() == linop.shift(X, -1).movement()
        (2, True)
        >>> print(next(iter(linop.gather(X).movement())))
        x@0[0:2] += x@0
    """

    def __init__(self, domain: Space, codomain: Space, transfers: TransferTable | Table) -> None:
        if domain.dtype != codomain.dtype:
            raise SpaceError(f"a movement keeps the dtype; given {domain.dtype}, {codomain.dtype}")
        self.domain = domain
        self.codomain = codomain
        if isinstance(transfers, TransferTable) and transfers.depth > DEEPEST:
            transfers = transfers.table
        self.transfers = (
            transfers if isinstance(transfers, TransferTable) else GivenTable(transfers)
        )
        self._factors: tuple[Movement, ...] = ()  # never contains self: no reference cycle

    @property
    def factors(self) -> tuple[Movement, ...]:
        """The movements that were composed to give this one, first applied first; or itself."""
        return self._factors or (self,)

    @cached_property
    def table(self) -> Table:
        """All transfers, in canonical order."""
        return self._fitted(self.transfers.table)

    def __len__(self) -> int:
        """Number of transfers."""
        return len(self.table)

    def __iter__(self) -> Iterator[Transfer]:
        return (self.transfer(row) for row in range(len(self.table)))

    def transfer(self, row: int, table: Table | None = None) -> Transfer:
        """The transfer in a row of the whole table, or of one returned by `into` or `out_of`."""
        t = self.table if table is None else table
        return Transfer(
            box_of(self.domain.numbering.at(t.src[row]), t.of[row], t.extent[row]),
            box_of(self.codomain.numbering.at(t.dst[row]), t.at[row], t.extent[row]),
            number_of(t.coef[row]),
        )

    def into(self, regions: boxes.Ints) -> Table:
        """The transfers into regions of the codomain, given by increasing number: the rows of
        `table` for them, in its order, without evaluating the whole table."""
        return self._fitted(self.transfers.into(regions))

    def out_of(self, regions: boxes.Ints) -> Table:
        """The transfers out of regions of the domain, given by increasing number: the rows of
        `table` for them, in its order, without evaluating the whole table."""
        return self._fitted(self.transfers.out_of(regions))

    def _fitted(self, rows: Table) -> Table:
        """Rows padded to the dimensions of the spaces, with integer coefficients modulo 2^bits."""
        rows = rows.of_ndim(table_ndim(self.domain, self.codomain))
        coef = residues(rows.coef, self.domain.dtype)
        return rows if coef is rows.coef else boxes.canonical(replace(rows, coef=coef))

    def __repr__(self) -> str:
        head = "; ".join(str(t) for t, _ in zip(self, range(6), strict=False))
        more = f"; … {len(self)} in all" if len(self) > 6 else ""
        return f"Movement({head}{more})"

    # Construction

    @staticmethod
    def of_blocks(domain: Space, codomain: Space, blocks: Iterable[Block]) -> Movement:
        """The sum of (target, source, coefficient) blocks; regions must be those of the spaces."""
        return Movement(domain, codomain, table_of_blocks(domain, codomain, blocks))

    @staticmethod
    def between(domain: Space, codomain: Space) -> Movement:
        """The identity on the regions common to both spaces, zero elsewhere."""
        same = domain.numbering == codomain.numbering
        return Movement(
            domain,
            codomain,
            IdentityTable(domain.numbering.shapes) if same else shared_table(domain, codomain),
        )

    @staticmethod
    def of_actions(product: Sequence[BetweenSpaces]) -> Movement:
        """The product of actions, first applied first. Each batch of independent actions becomes
        one table; the tables are multiplied as a balanced tree, so that few products are large."""
        batches = []
        for batch in independent_batches(product):
            domain, codomain = batch[0][0], batch[-1][2]
            changes = table_of_actions(domain, codomain, (actions for _, actions, _ in batch))
            table = boxes.concatenate(shared_table(domain, codomain), changes)
            batches.append(Movement(domain, codomain, table))
        while len(batches) > 1:
            pairs = [batches[k : k + 2] for k in range(0, len(batches), 2)]
            batches = [pair[1]._after(pair[0]) if len(pair) == 2 else pair[0] for pair in pairs]
        return batches[0]

    # Algebra

    def adjoint(self) -> Movement:
        """The adjoint: source and target of every transfer exchanged, coefficients conjugated."""
        swapped = Movement(self.codomain, self.domain, self.transfers.adjoint())
        if self._factors:
            swapped._factors = tuple(factor.adjoint() for factor in reversed(self._factors))
        return swapped

    def conj(self) -> Movement:
        """The complex conjugate matrix."""
        other = Movement(
            self.domain, self.codomain, ScaledTable(self.transfers, 1, conjugated=True)
        )
        if self._factors:
            other._factors = tuple(factor.conj() for factor in self._factors)
        return other

    def scale(self, scalar: Scalar | Exact) -> Movement:
        """The matrix times a number."""
        other = Movement(self.domain, self.codomain, ScaledTable(self.transfers, as_exact(scalar)))
        if self._factors:
            other._factors = (*self._factors[:-1], self._factors[-1].scale(scalar))
        return other

    def __matmul__(self, other: Movement) -> Movement:
        """Composition: intersect the boxes in the middle space."""
        self.domain.same_as(other.codomain, "composition of movements")
        product = self._after(other)
        first, last = self.factors[0], other.factors[-1]
        if isinstance(first.transfers, IdentityTable) or isinstance(last.transfers, IdentityTable):
            # An identity may rename or reorder regions; it is merged, and not listed as a factor.
            product._factors = (*other.factors[:-1], first._after(last), *self.factors[1:])
        else:
            product._factors = (*other.factors, *self.factors)
        return product

    def _after(self, other: Movement) -> Movement:
        """The composition self ∘ other as one movement, without a record of its `factors`."""
        right = _reordered(other, other.domain, self.domain)
        if isinstance(self.transfers, IdentityTable):
            return Movement(other.domain, self.codomain, right)
        rows = (
            self.transfers
            if isinstance(right, IdentityTable)
            else ProductTable(self.transfers, right)
        )
        return Movement(other.domain, self.codomain, rows)

    def factored(self) -> tuple[Movement, ...]:
        """Movements whose product this is, first applied first: itself, or several if their
        product may have more than `FAR_MORE` times their transfers (a sum over thousands of
        workers, broadcast to thousands, is a dense all-to-all)."""
        done: list[Movement] = []
        current = self.factors[0]
        for factor in self.factors[1:]:
            if factor._expands(current):
                done.append(current)
                current = factor
            else:
                current = factor @ current
        return (*done, current) if done else (self,)

    def _expands(self, other: Movement) -> bool:
        """True if the table of self ∘ other may have more than `FAR_MORE` times the rows of both;
        estimated from the numbers of rows at each region of the middle space."""
        middle = len(self.domain)
        leaving = self.transfers.counts_out_of(middle)
        coming = _reordered(other, other.domain, self.domain).counts_into(middle)
        return int(leaving @ coming) > FAR_MORE * int(leaving.sum() + coming.sum())

    def __add__(self, other: Movement) -> Movement:
        return Movement.sum((self, other))

    @staticmethod
    def sum(terms: Sequence[Movement]) -> Movement:
        """The sum of movements between equal spaces."""
        domain, codomain = terms[0].domain, terms[0].codomain
        for term in terms[1:]:
            domain.same_as(term.domain, "sum of movements, domains")
            codomain.same_as(term.codomain, "sum of movements, codomains")
        rows = [_reordered(term, domain, codomain) for term in terms]
        return Movement(domain, codomain, SumTable(rows))

    def __sub__(self, other: Movement) -> Movement:
        return self + other.scale(-1)

    @staticmethod
    def direct_sum(movements: Sequence[Movement], domain: Space, codomain: Space) -> Movement:
        """The block-diagonal movement of movements between disjoint subspaces of two spaces."""
        dst = [numbers_in(m.codomain, codomain) for m in movements]
        src = [numbers_in(m.domain, domain) for m in movements]
        # Between layers of thousands of local maps all blocks are identities: one `IdentityTable`.
        if all(isinstance(m.transfers, IdentityTable) for m in movements) and all(
            map(np.array_equal, dst, src)
        ):
            return Movement(domain, codomain, IdentityTable(domain.numbering.shapes))
        sizes = len(codomain), len(domain)
        return Movement(
            domain, codomain, BlockTable([m.transfers for m in movements], dst, src, sizes)
        )

    def beside(self, regions: Sequence[Region]) -> Movement:
        """The direct sum of the identity on some regions and this movement."""
        if not regions:
            return self
        dtype = self.domain.dtype
        same = Space(regions, dtype)
        ends = (Space((*regions, *s.regions), dtype) for s in (self.domain, self.codomain))
        return Movement.direct_sum([Movement.between(same, same), self], *ends)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Movement):
            return NotImplemented
        if self.domain != other.domain or self.codomain != other.codomain:
            return False
        return self.digest == other.digest or self._same_rows(
            Movement(self.domain, self.codomain, _reordered(other, self.domain, self.codomain))
        )

    def _same_rows(self, other: Movement) -> bool:
        """True if two movements between identically ordered spaces have equal tables. Compared a
        few regions at a time: a difference ends it early, and long tables are never held whole."""
        first, many, regions = 0, 1, len(self.codomain)
        while first < regions:
            some = np.arange(first, min(first + many, regions))
            one, two = self.into(some), other.into(some)
            if not same_rows(one, two):
                return False
            first += many
            many = max(1, ROWS_AT_ONCE * many // (len(one) + 1))
        return True

    __hash__ = None  # type: ignore[assignment]

    @property
    def still(self) -> bool:
        """True if this is the identity. Row counts are tested first: they exclude an all-reduce of
        thousands of workers without evaluating its table."""
        if self.domain != self.codomain:
            return False
        if (self.transfers.counts_into(len(self.codomain)) > 1).any():
            return False
        return self == Movement.between(self.domain, self.codomain)

    # Matrix and digests

    def to_matrix(self, dtype: np.dtype[Any] | None = None) -> scipy.sparse.csr_array:
        """The sparse matrix, (codomain.size, domain.size), with coefficients rounded to a dtype: by
        default the spaces', or float64 for floats of 16 bits and fewer, which SciPy lacks.

        Raises:
            DTypeError: the dtype cannot hold a coefficient (`linop.spaces.exact.rounded`).
        """
        rows, columns, coef = self.entries()
        values = nearest(coef, dtype or sparse_dtype(self.domain.dtype))
        shape = (self.codomain.size, self.domain.size)
        return scipy.sparse.csr_array((values, (rows, columns)), shape=shape)

    def entries(self) -> tuple[boxes.Ints, boxes.Ints, Column]:
        """Row indices, column indices and exact values, (nnz,) each, of the matrix's entries."""
        none = [np.zeros(0, np.int64)]
        rows = [flat_index(self.codomain, transfer.target) for transfer in self]
        columns = [flat_index(self.domain, transfer.source) for transfer in self]
        coef = np.repeat(self.table.coef, [len(k) for k in rows])
        return np.concatenate(rows or none), np.concatenate(columns or none), coef

    @cached_property
    def fingerprint(self) -> bytes:
        """A digest of spaces and transfers: equal on all workers that built an equal movement."""
        ends = [repr((s.dtype.str, s.regions)) for s in (self.domain, self.codomain)]
        return digest_of(*ends, *table_columns(self.table))

    @cached_property
    def digest(self) -> bytes:
        """A digest of the movement's construction, computed without its transfers. Equal digests
        mean equal movements; equal movements constructed differently have different digests."""
        return digest_of(self.domain.digest, self.codomain.digest, self.transfers.digest)


def _reordered(movement: Movement, domain: Space, codomain: Space) -> TransferTable:
    """The rows of a movement, renumbered for equal spaces that order regions differently."""
    if (
        movement.domain.numbering == domain.numbering
        and movement.codomain.numbering == codomain.numbering
    ):
        return movement.transfers
    ends = numbers_in(movement.codomain, codomain), numbers_in(movement.domain, domain)
    return BlockTable([movement.transfers], [ends[0]], [ends[1]], (len(codomain), len(domain)))
