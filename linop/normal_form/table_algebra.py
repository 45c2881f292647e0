"""The algebra of lazily evaluated transfer tables: multiples, products, sums, blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from linop.caching import cached_property
from linop.normal_form.boxes import Ints, Table, concatenate, expand, join, pairs
from linop.normal_form.columns import conjugates, multiples, ones
from linop.normal_form.transfer_table import TransferTable, digest_of
from linop.spaces.exact import Exact, text

FAR_MORE = 64
"""Ratio of the transfers of a product to those of its factors above which it stays factored."""


class ScaledTable(TransferTable):
    """A table times a scalar; complex conjugated first if `conjugated`."""

    def __init__(self, of: TransferTable, scalar: Exact, conjugated: bool = False) -> None:
        self.of, self.scalar, self.conjugated = of, scalar, conjugated
        self.depth = of.depth + 1

    def _times(self, t: Table) -> Table:
        coef = conjugates(t.coef) if self.conjugated else t.coef
        return Table(t.dst, t.src, t.at, t.of, t.extent, multiples(coef, self.scalar))

    @cached_property
    def short(self) -> bool:
        return self.of.short

    def _all(self) -> Table:
        return self._times(self.of.rows)

    @cached_property
    def table(self) -> Table:
        # A multiple of a canonical table is canonical.
        return self._times(self.of.table) if self.scalar else super().table

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
        self.depth = max(left.depth, right.depth) + 1

    @cached_property
    def short(self) -> bool:
        if not (self.left.short and self.right.short):
            return False
        left, right = self.left.table, self.right.table
        if len(left) * len(right) <= FAR_MORE * (len(left) + len(right)):
            return True
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
        self.depth = max(term.depth for term in terms) + 1

    @cached_property
    def short(self) -> bool:
        return all(term.short for term in self.terms)

    def _all(self) -> Table:
        return concatenate(*(term.rows for term in self.terms))

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
        self.depth = max((block.depth for block in blocks), default=0) + 1

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


def _digest_of_product(number: Exact, digests: Sequence[bytes]) -> bytes:
    alone = number == 1 and len(digests) == 1
    return digests[0] if alone else digest_of("product", text(number), *digests)


_NONE = np.zeros(0, np.int64)
_NO_BOX = np.zeros((0, 1), np.int64)
EMPTY = Table(_NONE, _NONE, _NO_BOX, _NO_BOX, _NO_BOX, ones(0))
"""The empty table, in one dimension."""
