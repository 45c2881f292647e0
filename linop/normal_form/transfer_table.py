"""Lazily evaluated transfer tables; the rows of given regions can be evaluated alone.

A `TransferTable` is an expression (a given table, a product, a sum, …). For the rows into a few
regions, a product evaluates only the rows of its factors that contribute, so that one of thousands
of workers finds its own transfers without the whole table. Regions are given by number, as in
`linop.normal_form.boxes`; spaces do not belong here.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import numpy as np

from linop.normal_form.boxes import Ints, Table, canonical, concatenate, expand, join, pairs
from linop.normal_form.columns import conjugates, encoded, multiples, ones
from linop.spaces.exact import Exact, text

FAR_MORE = 64
"""Ratio of the transfers of a product to those of its factors above which it stays factored."""


class TransferTable(ABC):
    """A lazily evaluated canonical table. The rows of given regions are those of the whole table,
    in its order, whichever way they are evaluated."""

    @abstractmethod
    def _all(self) -> Table:
        """All rows, not yet canonical."""

    @abstractmethod
    def _into(self, dst: Ints) -> Table:
        """The rows into given regions, not yet canonical."""

    @abstractmethod
    def _out_of(self, src: Ints) -> Table:
        """The rows out of given regions, not yet canonical."""

    @property
    @abstractmethod
    def digest(self) -> bytes:
        """SHA-256 of the expression, computed without the table. Equal digests mean equal rows;
        equal rows of different expressions may have different digests."""

    @property
    def scaled_digests(self) -> tuple[Exact, tuple[bytes, ...]]:
        """A scalar, and the digests of the rows whose product this is: independent of the
        association of products and of the position of scalars in them."""
        return 1, (self.digest,)

    @cached_property
    def table(self) -> Table:
        """All rows."""
        return canonical(self._all())

    @cached_property
    def short(self) -> bool:
        """True if a request for some rows evaluates and caches the whole table, because that is
        cheap: all tables it depends on are given, and it is not far longer than they are."""
        return False

    def into(self, dst: Ints) -> Table:
        """The canonical rows into regions, given by number in increasing order."""
        if "table" in self.__dict__ or self.short:
            return self.table.take(positions(self.table.dst, dst))
        return canonical(self._into(dst))

    def out_of(self, src: Ints) -> Table:
        """The canonical rows out of regions, given by number in increasing order."""
        if "table" in self.__dict__ or self.short:
            order = self._by_source
            return self.table.take(np.sort(order[positions(self.table.src[order], src)]))
        return canonical(self._out_of(src))

    @property
    def uncut(self) -> Mapping[int, int]:
        """Extents, by dimension, of the dimensions known to be uncut: all boxes start at 0 on both
        sides and have the full extent. These rows are others ⊗ I, and not empty."""
        return {}

    def without(self, uncut: Collection[int]) -> TransferTable:
        """The rows with extent 1 in some of the dimensions in `uncut`."""
        raise NotImplementedError(f"{type(self).__name__} knows no dimension as uncut")

    @cached_property
    def _by_source(self) -> Ints:
        return np.argsort(self.table.src, kind="stable")

    def counts_into(self, regions: int) -> Ints:
        """(regions,) number of rows into each destination region."""
        return np.bincount(self.table.dst, minlength=regions)

    def counts_out_of(self, regions: int) -> Ints:
        """(regions,) number of rows out of each source region."""
        return np.bincount(self.table.src, minlength=regions)

    def adjoint(self) -> TransferTable:
        """The adjoint: ends of every row exchanged, coefficients conjugated."""
        return AdjointTable(self)


class GivenTable(TransferTable):
    """The rows of a given table, which need not be canonical."""

    short = True

    def __init__(self, table: Table) -> None:
        self.given = table

    def _all(self) -> Table:
        return self.given

    def _into(self, dst: Ints) -> Table:
        return self.given.take(np.isin(self.given.dst, dst))

    def _out_of(self, src: Ints) -> Table:
        return self.given.take(np.isin(self.given.src, src))

    @cached_property
    def digest(self) -> bytes:
        return digest_of("given", *table_columns(self.table))


class IdentityTable(TransferTable):
    """The identity: each region to the region of the same number.

    Args:
        extent: (n, d) shapes of the regions, padded with ones.
    """

    def __init__(self, extent: Ints) -> None:
        self.extent = extent

    def _all(self) -> Table:
        return self._into(np.arange(len(self.extent)))

    def _into(self, dst: Ints) -> Table:
        extent = self.extent[dst]
        zeros = np.zeros_like(extent)
        return Table(dst, dst, zeros, zeros, extent, ones(len(dst)))

    def _out_of(self, src: Ints) -> Table:
        return self._into(src)

    def counts_into(self, regions: int) -> Ints:
        return np.asarray((self.extent > 0).all(axis=1), np.int64)

    def counts_out_of(self, regions: int) -> Ints:
        return self.counts_into(regions)

    def adjoint(self) -> TransferTable:
        return self

    @cached_property
    def uncut(self) -> Mapping[int, int]:
        if not self.extent.all():
            return {}
        same = (self.extent == self.extent[:1]).all(axis=0)
        return {d: int(self.extent[0, d]) for d in np.flatnonzero(same).tolist()}

    def without(self, uncut: Collection[int]) -> TransferTable:
        extent = self.extent.copy()
        extent[:, list(uncut)] = 1
        return IdentityTable(extent)

    @cached_property
    def digest(self) -> bytes:
        return digest_of("same", self.extent)


class AdjointTable(TransferTable):
    """The adjoint of rows."""

    def __init__(self, of: TransferTable) -> None:
        self.of = of

    @cached_property
    def short(self) -> bool:
        return self.of.short

    def _all(self) -> Table:
        return swap(self.of.table)

    def _into(self, dst: Ints) -> Table:
        return swap(self.of.out_of(dst))

    def _out_of(self, src: Ints) -> Table:
        return swap(self.of.into(src))

    def counts_into(self, regions: int) -> Ints:
        return self.of.counts_out_of(regions)

    def counts_out_of(self, regions: int) -> Ints:
        return self.of.counts_into(regions)

    def adjoint(self) -> TransferTable:
        return self.of

    @property
    def uncut(self) -> Mapping[int, int]:
        return self.of.uncut

    def without(self, uncut: Collection[int]) -> TransferTable:
        return AdjointTable(self.of.without(uncut))

    @cached_property
    def digest(self) -> bytes:
        return digest_of("adjoint", self.of.digest)


class ScaledTable(TransferTable):
    """A table times a scalar; complex conjugated first if `conjugated`."""

    def __init__(self, of: TransferTable, scalar: Exact, conjugated: bool = False) -> None:
        self.of, self.scalar, self.conjugated = of, scalar, conjugated

    def _times(self, t: Table) -> Table:
        coef = conjugates(t.coef) if self.conjugated else t.coef
        return Table(t.dst, t.src, t.at, t.of, t.extent, multiples(coef, self.scalar))

    @cached_property
    def short(self) -> bool:
        return self.of.short

    def _all(self) -> Table:
        return self._times(self.of.table)

    def _into(self, dst: Ints) -> Table:
        return self._times(self.of.into(dst))

    def _out_of(self, src: Ints) -> Table:
        return self._times(self.of.out_of(src))

    @property
    def uncut(self) -> Mapping[int, int]:
        return self.of.uncut

    def without(self, uncut: Collection[int]) -> TransferTable:
        return ScaledTable(self.of.without(uncut), self.scalar, self.conjugated)

    @property
    def scaled_digests(self) -> tuple[Exact, tuple[bytes, ...]]:
        if self.conjugated:
            return self.scalar, (digest_of("conjugated", self.of.digest),)
        number, digests = self.of.scaled_digests
        return self.scalar * number, digests

    @cached_property
    def digest(self) -> bytes:
        return _digest_of_product(*self.scaled_digests)


class ProductTable(TransferTable):
    """The product left ∘ right: boxes intersected in the middle space."""

    def __init__(self, left: TransferTable, right: TransferTable) -> None:
        self.left, self.right = left, right

    @cached_property
    def short(self) -> bool:
        if not (self.left.short and self.right.short):
            return False
        left, right = self.left.table, self.right.table
        return pairs(left, right) <= FAR_MORE * (len(left) + len(right))

    def _all(self) -> Table:
        return join(self.left.table, self.right.table)

    def _into(self, dst: Ints) -> Table:
        left = self.left.into(dst)
        return join(left, self.right.into(np.unique(left.src)))

    def _out_of(self, src: Ints) -> Table:
        right = self.right.out_of(src)
        return join(self.left.out_of(np.unique(right.dst)), right)

    def adjoint(self) -> TransferTable:
        return ProductTable(self.right.adjoint(), self.left.adjoint())

    @cached_property
    def uncut(self) -> Mapping[int, int]:
        right = self.right.uncut
        return {d: n for d, n in self.left.uncut.items() if right.get(d) == n}

    def without(self, uncut: Collection[int]) -> TransferTable:
        return ProductTable(self.left.without(uncut), self.right.without(uncut))

    @property
    def scaled_digests(self) -> tuple[Exact, tuple[bytes, ...]]:
        (one, left), (other, right) = self.left.scaled_digests, self.right.scaled_digests
        return one * other, left + right

    @cached_property
    def digest(self) -> bytes:
        return _digest_of_product(*self.scaled_digests)


class SumTable(TransferTable):
    """The sum of rows."""

    def __init__(self, terms: Sequence[TransferTable]) -> None:
        self.terms = tuple(terms)

    @cached_property
    def short(self) -> bool:
        return all(term.short for term in self.terms)

    def _all(self) -> Table:
        return concatenate(*(term.table for term in self.terms))

    def _into(self, dst: Ints) -> Table:
        return concatenate(*(term.into(dst) for term in self.terms))

    def _out_of(self, src: Ints) -> Table:
        return concatenate(*(term.out_of(src) for term in self.terms))

    @cached_property
    def digest(self) -> bytes:
        return digest_of("sum", *sorted(term.digest for term in self.terms))


class BlockTable(TransferTable):
    """Tables as disjoint blocks of a larger matrix.

    Args:
        blocks: the tables.
        dst, src: for each block, the new numbers of its regions; all distinct.
        sizes: total numbers of regions, (destinations, sources).
    """

    def __init__(
        self,
        blocks: Sequence[TransferTable],
        dst: Sequence[Ints],
        src: Sequence[Ints],
        sizes: tuple[int, int],
    ) -> None:
        self.blocks = tuple(blocks)
        self.dst, self.src, self.sizes = tuple(dst), tuple(src), sizes

    @cached_property
    def short(self) -> bool:
        return all(block.short for block in self.blocks)

    def _all(self) -> Table:
        return self._renumbered([(k, block.table) for k, block in enumerate(self.blocks)])

    def _into(self, dst: Ints) -> Table:
        asked = _by_block(*self._numbers_dst, dst)
        return self._renumbered([(k, self.blocks[k].into(inner)) for k, inner in asked])

    def _out_of(self, src: Ints) -> Table:
        asked = _by_block(*self._numbers_src, src)
        return self._renumbered([(k, self.blocks[k].out_of(inner)) for k, inner in asked])

    @cached_property
    def _numbers_dst(self) -> tuple[Ints, Ints]:
        return _block_numbers(self.dst, self.sizes[0])

    @cached_property
    def _numbers_src(self) -> tuple[Ints, Ints]:
        return _block_numbers(self.src, self.sizes[1])

    def _renumbered(self, tables: Sequence[tuple[int, Table]]) -> Table:
        """Concatenated rows of blocks (block number, table), with the regions renumbered."""
        renumbered = [
            Table(self.dst[k][t.dst], self.src[k][t.src], t.at, t.of, t.extent, t.coef)
            for k, t in tables
            if len(t)
        ]
        return concatenate(*renumbered) if renumbered else EMPTY

    def counts_into(self, regions: int) -> Ints:
        counts = np.zeros(regions, np.int64)
        for block, dst in zip(self.blocks, self.dst, strict=True):
            counts[dst] = block.counts_into(len(dst))
        return counts

    def counts_out_of(self, regions: int) -> Ints:
        counts = np.zeros(regions, np.int64)
        for block, src in zip(self.blocks, self.src, strict=True):
            counts[src] = block.counts_out_of(len(src))
        return counts

    @cached_property
    def digest(self) -> bytes:
        columns = [c for pair in zip(self.dst, self.src, strict=True) for c in pair]
        return digest_of("blocks", *(block.digest for block in self.blocks), *columns)


def _block_numbers(numbers: Sequence[Ints], size: int) -> tuple[Ints, Ints]:
    """For each of `size` regions, its block and its number in that block; -1 if in none."""
    many = np.array([len(n) for n in numbers], np.int64)
    block, inner = np.full(size, -1), np.full(size, -1)
    if len(numbers):
        flat = np.concatenate(numbers)
        block[flat], inner[flat] = expand(many)
    return block, inner


def _by_block(block: Ints, inner: Ints, wanted: Ints) -> list[tuple[int, Ints]]:
    """Regions grouped by block: (block, increasing numbers in the block)."""
    blocks = np.unique(block[wanted])
    return [(int(k), np.sort(inner[wanted[block[wanted] == k]])) for k in blocks if k >= 0]


_NONE = np.zeros(0, np.int64)
_NO_BOX = np.zeros((0, 1), np.int64)
EMPTY = Table(_NONE, _NONE, _NO_BOX, _NO_BOX, _NO_BOX, ones(0))
"""The empty table, in one dimension."""


def positions(keys: Ints, wanted: Ints) -> Ints:
    """The indices at which `keys` is one of `wanted`; both are increasing, `wanted` strictly."""
    first = np.searchsorted(keys, wanted, "left")
    rows, within = expand(np.searchsorted(keys, wanted, "right") - first)
    return first[rows] + within


def table_columns(t: Table) -> tuple[str | np.ndarray, ...]:
    """Digest input for a canonical table: equal exactly for equal tables."""
    return t.dst, t.src, t.at, t.of, t.extent, *encoded(t.coef)


def _digest_of_product(number: Exact, digests: Sequence[bytes]) -> bytes:
    alone = number == 1 and len(digests) == 1
    return digests[0] if alone else digest_of("product", text(number), *digests)


def digest_of(*items: str | bytes | np.ndarray) -> bytes:
    """SHA-256 of a list of items, the same on every machine. Each item is prefixed with its length,
    so that different lists have different input."""
    digest = hashlib.sha256()
    for item in items:
        data = item.encode() if isinstance(item, str) else item
        data = data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def swap(t: Table) -> Table:
    """The adjoint of a table, not canonical."""
    return Table(t.src, t.dst, t.of, t.at, t.extent, conjugates(t.coef))
