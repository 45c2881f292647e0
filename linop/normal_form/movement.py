"""The normal form of data movement: a sparse matrix of scaled partial identities, as transfers.

A `Movement` is exact: two compositions of memory operators are equal for all vectors exactly if
their movements are. It gives one of two independent derivations of an adjoint (transpose every
transfer); the other is the adjoint rule of each operator. Local maps are in
`linop.normal_form.stages`; how tables are evaluated is in `linop.normal_form.rows`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import chain
from typing import Any

import numpy as np
import scipy

from linop.errors import SpaceError
from linop.normal_form import boxes
from linop.normal_form.boxes import Table, same_rows
from linop.normal_form.columns import Column, column, nearest, ones, residues
from linop.normal_form.primitives import Placed, deltas, independent_runs
from linop.normal_form.rows import (
    FAR_MORE,
    Blocks,
    Given,
    Product,
    Rows,
    Same,
    Scaled,
    Total,
    digest_of,
    table_columns,
)
from linop.provenance import Keeper
from linop.spaces.exact import Exact, exact, shown
from linop.spaces.region import Region, Subset
from linop.spaces.scalars import Scalar, as_exact, sparse_dtype
from linop.spaces.space import Space

AT_ONCE = 2**18
"""Approximate number of rows that a comparison of two movements evaluates at a time."""

Block = tuple[Subset, Subset, Exact | Scalar]
"""(target, source, coefficient) of one block."""


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
        rows: a lazily evaluated table of transfers; or a `Table`, not necessarily canonical.

    Raises:
        SpaceError: the dtypes of the spaces differ.
    """

    def __init__(self, domain: Space, codomain: Space, rows: Rows | Table) -> None:
        if domain.dtype != codomain.dtype:
            raise SpaceError(f"a movement keeps the dtype; given {domain.dtype}, {codomain.dtype}")
        self.domain = domain
        self.codomain = codomain
        self.rows = rows if isinstance(rows, Rows) else Given(rows)
        self._parts: tuple[Movement, ...] = ()  # never contains self: no reference cycle

    @property
    def parts(self) -> tuple[Movement, ...]:
        """The movements that were composed to give this one, first applied first; or itself."""
        return self._parts or (self,)

    @cached_property
    def table(self) -> Table:
        """All transfers, in canonical order."""
        return self._fitted(self.rows.table)

    def __len__(self) -> int:
        """Number of transfers."""
        return len(self.table)

    def __iter__(self) -> Iterator[Transfer]:
        return (self.transfer(row) for row in range(len(self.table)))

    def transfer(self, row: int, table: Table | None = None) -> Transfer:
        """The transfer in a row of the whole table, or of one returned by `into` or `out_of`."""
        t = self.table if table is None else table
        return Transfer(
            _box(self.domain.at(t.src[row]), t.of[row], t.extent[row]),
            _box(self.codomain.at(t.dst[row]), t.at[row], t.extent[row]),
            number_of(t.coef[row]),
        )

    def into(self, regions: boxes.Ints) -> Table:
        """The transfers into regions of the codomain, given by increasing number: the rows of
        `table` for them, in its order, without evaluating the whole table."""
        return self._fitted(self.rows.into(regions))

    def out_of(self, regions: boxes.Ints) -> Table:
        """The transfers out of regions of the domain, given by increasing number: the rows of
        `table` for them, in its order, without evaluating the whole table."""
        return self._fitted(self.rows.out_of(regions))

    def _fitted(self, rows: Table) -> Table:
        """Rows padded to the dimensions of the spaces, with integer coefficients modulo 2^bits."""
        rows = rows.of_ndim(_ndim(self.domain, self.codomain))
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
        return Movement(domain, codomain, _table(domain, codomain, blocks))

    @staticmethod
    def between(domain: Space, codomain: Space) -> Movement:
        """The identity on the regions common to both spaces, zero elsewhere."""
        same = domain.ordered_as(codomain)
        return Movement(
            domain, codomain, Same(domain.shapes) if same else _shared(domain, codomain)
        )

    @staticmethod
    def of_program(placed: Sequence[Placed]) -> Movement:
        """The product of actions, first applied first. Each run of independent actions becomes one
        table; the tables are multiplied as a balanced tree, so that few products are large."""
        factors = []
        for run in independent_runs(placed):
            domain, codomain = run[0][0], run[-1][2]
            src, dst = domain.index, codomain.index
            blocks = (
                block
                for _, actions, _ in run
                for block in deltas(actions)
                if block[0].region.name in dst and block[1].region.name in src
            )
            table = boxes.concatenate(_shared(domain, codomain), _table(domain, codomain, blocks))
            factors.append(Movement(domain, codomain, table))
        while len(factors) > 1:
            pairs = [factors[k : k + 2] for k in range(0, len(factors), 2)]
            factors = [pair[1]._after(pair[0]) if len(pair) == 2 else pair[0] for pair in pairs]
        return factors[0]

    # Algebra

    def adjoint(self) -> Movement:
        """The adjoint: source and target of every transfer exchanged, coefficients conjugated."""
        swapped = Movement(self.codomain, self.domain, self.rows.adjoint())
        if self._parts:
            swapped._parts = tuple(part.adjoint() for part in reversed(self._parts))
        return swapped

    def conj(self) -> Movement:
        """The complex conjugate matrix."""
        other = Movement(self.domain, self.codomain, Scaled(self.rows, 1, conjugated=True))
        if self._parts:
            other._parts = tuple(part.conj() for part in self._parts)
        return other

    def scale(self, scalar: Scalar | Exact) -> Movement:
        """The matrix times a number."""
        other = Movement(self.domain, self.codomain, Scaled(self.rows, as_exact(scalar)))
        if self._parts:
            other._parts = (*self._parts[:-1], self._parts[-1].scale(scalar))
        return other

    def __matmul__(self, other: Movement) -> Movement:
        """Composition: intersect the boxes in the middle space."""
        self.domain.same_as(other.codomain, "composition of movements")
        product = self._after(other)
        first, last = self.parts[0], other.parts[-1]
        if isinstance(first.rows, Same) or isinstance(last.rows, Same):
            # An identity may rename or reorder regions; it is merged, and not listed as a part.
            product._parts = (*other.parts[:-1], first._after(last), *self.parts[1:])
        else:
            product._parts = (*other.parts, *self.parts)
        return product

    def _after(self, other: Movement) -> Movement:
        """The composition self ∘ other as one movement, without a record of its `parts`."""
        right = _reordered(other, other.domain, self.domain)
        if isinstance(self.rows, Same):
            return Movement(other.domain, self.codomain, right)
        rows = self.rows if isinstance(right, Same) else Product(self.rows, right)
        return Movement(other.domain, self.codomain, rows)

    def factored(self) -> tuple[Movement, ...]:
        """Movements whose product this is, first applied first: itself, or several if their
        product may have more than `FAR_MORE` times their transfers (a sum over thousands of
        workers, broadcast to thousands, is a dense all-to-all)."""
        done: list[Movement] = []
        current = self.parts[0]
        for part in self.parts[1:]:
            if part._expands(current):
                done.append(current)
                current = part
            else:
                current = part @ current
        return (*done, current) if done else (self,)

    def _expands(self, other: Movement) -> bool:
        """True if the table of self ∘ other may have more than `FAR_MORE` times the rows of both;
        estimated from the numbers of rows at each region of the middle space."""
        middle = len(self.domain)
        leaving = self.rows.counts_out_of(middle)
        coming = _reordered(other, other.domain, self.domain).counts_into(middle)
        return int(leaving @ coming) > FAR_MORE * int(leaving.sum() + coming.sum())

    def __add__(self, other: Movement) -> Movement:
        self.domain.same_as(other.domain, "sum of movements, domains")
        self.codomain.same_as(other.codomain, "sum of movements, codomains")
        right = _reordered(other, self.domain, self.codomain)
        return Movement(self.domain, self.codomain, Total((self.rows, right)))

    def __sub__(self, other: Movement) -> Movement:
        return self + other.scale(-1)

    @staticmethod
    def direct_sum(movements: Sequence[Movement], domain: Space, codomain: Space) -> Movement:
        """The block-diagonal movement of movements between disjoint subspaces of two spaces."""
        dst = [_numbers(m.codomain, codomain) for m in movements]
        src = [_numbers(m.domain, domain) for m in movements]
        # Between layers of thousands of local maps all blocks are identities: one `Same`.
        if all(isinstance(m.rows, Same) for m in movements) and all(map(np.array_equal, dst, src)):
            return Movement(domain, codomain, Same(domain.shapes))
        sizes = len(codomain), len(domain)
        return Movement(domain, codomain, Blocks([m.rows for m in movements], dst, src, sizes))

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
            many = max(1, AT_ONCE * many // (len(one) + 1))
        return True

    __hash__ = None  # type: ignore[assignment]

    @property
    def still(self) -> bool:
        """True if this is the identity. Row counts are tested first: they exclude an all-reduce of
        thousands of workers without evaluating its table."""
        if self.domain != self.codomain:
            return False
        if (self.rows.counts_into(len(self.codomain)) > 1).any():
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
        rows = [_flat_index(self.codomain, transfer.target) for transfer in self]
        columns = [_flat_index(self.domain, transfer.source) for transfer in self]
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
        return digest_of(self.domain.digest, self.codomain.digest, self.rows.digest)


def _table(domain: Space, codomain: Space, blocks: Iterable[Block]) -> Table:
    # Three lists instead of a tuple per block, which the garbage collector would visit.
    targets: list[Subset] = []
    sources: list[Subset] = []
    numbers: list[Exact] = []
    for target, source, coefficient in blocks:
        targets.append(target)
        sources.append(source)
        numbers.append(exact(coefficient))
    dst = [codomain.index[target.region.name] for target in targets]
    return table_of(domain, codomain, dst, targets, sources, numbers)


def table_of(
    domain: Space,
    codomain: Space,
    dst: Sequence[int],
    targets: Sequence[Subset],
    sources: Sequence[Subset],
    numbers: Iterable[Exact],
) -> Table:
    """The table of blocks given by columns, of which only the boxes of `targets` are used: their
    regions are those of the numbers `dst`."""
    ndim, index = _ndim(domain, codomain), domain.index
    at = _corners([target.start for target in targets], ndim, 0)
    of = _corners([source.start for source in sources], ndim, 0)
    stop = _corners([target.stop for target in targets], ndim, 1)
    src = np.array([index[source.region.name] for source in sources], np.int64)
    return Table(np.array(dst, np.int64), src, at, of, stop - at, column(numbers))


def _corners(corners: Sequence[tuple[int, ...]], ndim: int, beyond: int) -> boxes.Ints:
    """Corners of boxes as rows, (n, ndim); `beyond` fills the dimensions that a box lacks."""
    rows = np.full((len(corners), ndim), beyond, np.int64)
    ndims = np.fromiter(map(len, corners), np.int64, len(corners))
    given = np.arange(ndim) < ndims[:, None]
    rows[given] = np.fromiter(chain.from_iterable(corners), np.int64, int(ndims.sum()))
    return rows


def _shared(domain: Space, codomain: Space) -> Table:
    """The table of the identity on the regions common to both spaces."""
    if domain.ordered_as(codomain):
        dst = src = np.arange(len(domain))
    else:
        src = np.flatnonzero([region in codomain for region in domain.regions])
        dst = np.array([codomain.index[domain.regions[k].name] for k in src], np.int64)
    extent = domain.shapes[src]
    zeros = np.zeros_like(extent)
    return Table(dst, src, zeros, zeros, extent, ones(len(dst))).of_ndim(_ndim(domain, codomain))


def _ndim(*spaces: Space) -> int:
    """Number of dimensions of a table between spaces: at least one, also for 0-d regions."""
    return max(int(space.shapes.shape[1]) for space in spaces)


def _numbers(part: Space, whole: Space) -> boxes.Ints:
    """The number in `whole` of each region of the subspace `part`."""
    return np.array([whole.index[region.name] for region in part.regions], np.int64)


def _reordered(movement: Movement, domain: Space, codomain: Space) -> Rows:
    """The rows of a movement, renumbered for equal spaces that order regions differently."""
    if movement.domain.ordered_as(domain) and movement.codomain.ordered_as(codomain):
        return movement.rows
    ends = _numbers(movement.codomain, codomain), _numbers(movement.domain, domain)
    return Blocks([movement.rows], [ends[0]], [ends[1]], (len(codomain), len(domain)))


def _box(region: Region, start: Any, extent: Any) -> Subset:
    low = tuple(start[: region.ndim].tolist())
    return Subset(region, low, tuple(map(int.__add__, low, extent.tolist())))


def number_of(coefficient: Any) -> Exact:
    """An entry of a column as an exact Python number."""
    return int(coefficient) if isinstance(coefficient, np.int64) else coefficient


def _flat_index(space: Space, subset: Subset) -> boxes.Ints:
    """Positions of a subset's elements in the flat vector of a space, in C order."""
    axes = np.ix_(*(np.arange(s.start, s.stop) for s in subset.slices))
    strides = np.cumprod([1, *reversed(subset.region.shape[1:])])[::-1]
    terms = (axis * stride for axis, stride in zip(axes, strides, strict=False))
    index = reduce(np.add, terms, np.zeros((), np.int64))
    return np.ravel(index) + space.offsets[subset.region.name]
