"""The transfers of a movement, made when somebody asks for them: all, or those of some regions.

`Rows` say how a table of transfers comes about (given, a product, a sum, …). Asked for the rows
into a few regions, a product asks its factors for a few rows each, so that a worker of thousands
finds its own part without anybody making the whole table. Regions are numbers here, as in
`linop.boxes`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from linop.boxes import Ints, Table, canonical, concatenate, expand, join
from linop.scalars import Scalar


class Rows(ABC):
    """Transfers, in canonical form whichever way they are asked for: the rows into some regions are
    rows of the whole table, in its order."""

    @abstractmethod
    def _all(self) -> Table:
        """All rows, not yet canonical."""

    @abstractmethod
    def _into(self, dst: Ints) -> Table:
        """The rows into regions, not yet canonical."""

    @abstractmethod
    def _out_of(self, src: Ints) -> Table:
        """The rows out of regions, not yet canonical."""

    @property
    @abstractmethod
    def digest(self) -> bytes:
        """Equal digests mean equal rows; rows that were made in another way may be equal too. Found
        without making the table."""

    @cached_property
    def table(self) -> Table:
        """All rows."""
        return canonical(self._all())

    def into(self, dst: Ints) -> Table:
        """The rows into regions, given by number in increasing order."""
        if "table" in self.__dict__:
            return self.table.take(positions(self.table.dst, dst))
        return canonical(self._into(dst))

    def out_of(self, src: Ints) -> Table:
        """The rows out of regions, given by number in increasing order."""
        if "table" in self.__dict__:
            order = self._by_source
            return self.table.take(np.sort(order[positions(self.table.src[order], src)]))
        return canonical(self._out_of(src))

    @cached_property
    def _by_source(self) -> Ints:
        return np.argsort(self.table.src, kind="stable")

    def counts_into(self, regions: int) -> Ints:
        """How many rows go into each of so many regions."""
        return np.bincount(self.table.dst, minlength=regions)

    def counts_out_of(self, regions: int) -> Ints:
        """How many rows come out of each of so many regions."""
        return np.bincount(self.table.src, minlength=regions)

    def adjoint(self) -> Rows:
        """The ends of every row swapped, and its coefficient conjugated."""
        return Swapped(self)


class Given(Rows):
    """The rows of a table."""

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


class Swapped(Rows):
    """The adjoint of rows."""

    def __init__(self, of: Rows) -> None:
        self.of = of

    def _all(self) -> Table:
        return _swap(self.of.table)

    def _into(self, dst: Ints) -> Table:
        return _swap(self.of.out_of(dst))

    def _out_of(self, src: Ints) -> Table:
        return _swap(self.of.into(src))

    def counts_into(self, regions: int) -> Ints:
        return self.of.counts_out_of(regions)

    def counts_out_of(self, regions: int) -> Ints:
        return self.of.counts_into(regions)

    def adjoint(self) -> Rows:
        return self.of

    @cached_property
    def digest(self) -> bytes:
        return digest_of("adjoint", self.of.digest)


class Scaled(Rows):
    """Rows times a number, conjugated before that or not."""

    def __init__(self, of: Rows, scalar: Scalar, conjugated: bool = False) -> None:
        self.of, self.scalar, self.conjugated = of, scalar, conjugated

    def _times(self, t: Table) -> Table:
        coef = np.conj(t.coef) if self.conjugated else t.coef
        return Table(t.dst, t.src, t.at, t.of, t.extent, coef * self.scalar)

    def _all(self) -> Table:
        return self._times(self.of.table)

    def _into(self, dst: Ints) -> Table:
        return self._times(self.of.into(dst))

    def _out_of(self, src: Ints) -> Table:
        return self._times(self.of.out_of(src))

    @cached_property
    def digest(self) -> bytes:
        return digest_of("scaled", repr((complex(self.scalar), self.conjugated)), self.of.digest)


class Product(Rows):
    """left ∘ right: the boxes intersected in the middle."""

    def __init__(self, left: Rows, right: Rows) -> None:
        self.left, self.right = left, right

    def _all(self) -> Table:
        return join(self.left.table, self.right.table)

    def _into(self, dst: Ints) -> Table:
        left = self.left.into(dst)
        return join(left, self.right.into(np.unique(left.src)))

    def _out_of(self, src: Ints) -> Table:
        right = self.right.out_of(src)
        return join(self.left.out_of(np.unique(right.dst)), right)

    def adjoint(self) -> Rows:
        return Product(self.right.adjoint(), self.left.adjoint())

    @cached_property
    def digest(self) -> bytes:
        return digest_of("product", self.left.digest, self.right.digest)


class Total(Rows):
    """The sum of rows."""

    def __init__(self, terms: Sequence[Rows]) -> None:
        self.terms = tuple(terms)

    def _all(self) -> Table:
        return concatenate(*(term.table for term in self.terms))

    def _into(self, dst: Ints) -> Table:
        return concatenate(*(term.into(dst) for term in self.terms))

    def _out_of(self, src: Ints) -> Table:
        return concatenate(*(term.out_of(src) for term in self.terms))

    @cached_property
    def digest(self) -> bytes:
        return digest_of("sum", *(term.digest for term in self.terms))


class Blocks(Rows):
    """Rows side by side, as the blocks of a larger matrix.

    Args:
        parts: the blocks.
        dst, src: of each block, the new number of each of its regions; no two are the same.
        sizes: how many regions there are in all, (destinations, sources).
    """

    def __init__(
        self,
        parts: Sequence[Rows],
        dst: Sequence[Ints],
        src: Sequence[Ints],
        sizes: tuple[int, int],
    ) -> None:
        self.parts = tuple(parts)
        self.dst, self.src, self.sizes = tuple(dst), tuple(src), sizes

    def _all(self) -> Table:
        return self._gathered([part.table for part in self.parts])

    def _into(self, dst: Ints) -> Table:
        inner = _of_each(self.dst, self.sizes[0], dst)
        asked = zip(self.parts, inner, strict=True)
        return self._gathered([p.into(n) if len(n) else None for p, n in asked])

    def _out_of(self, src: Ints) -> Table:
        inner = _of_each(self.src, self.sizes[1], src)
        asked = zip(self.parts, inner, strict=True)
        return self._gathered([p.out_of(n) if len(n) else None for p, n in asked])

    def _gathered(self, tables: Sequence[Table | None]) -> Table:
        renumbered = [
            Table(dst[t.dst], src[t.src], t.at, t.of, t.extent, t.coef)
            for t, dst, src in zip(tables, self.dst, self.src, strict=True)
            if t is not None and len(t)
        ]
        return concatenate(*renumbered) if renumbered else EMPTY

    @cached_property
    def digest(self) -> bytes:
        columns = [c for pair in zip(self.dst, self.src, strict=True) for c in pair]
        return digest_of("blocks", *(part.digest for part in self.parts), *columns)


def _of_each(numbers: Sequence[Ints], size: int, wanted: Ints) -> list[Ints]:
    """Of each block, the numbers inside of it of the regions wanted, in increasing order."""
    asked = np.zeros(size, bool)
    asked[wanted] = True
    flat = np.concatenate(numbers) if numbers else np.zeros(0, np.int64)
    ends = np.cumsum([len(n) for n in numbers])
    hits = np.flatnonzero(asked[flat])
    pieces = np.split(hits, np.searchsorted(hits, ends[:-1]))
    return [piece - end + len(n) for piece, end, n in zip(pieces, ends, numbers, strict=True)]


_NONE = np.zeros(0, np.int64)
_NO_BOX = np.zeros((0, 1), np.int64)
EMPTY = Table(_NONE, _NONE, _NO_BOX, _NO_BOX, _NO_BOX, np.zeros(0))
"""No rows."""


def positions(keys: Ints, wanted: Ints) -> Ints:
    """Where increasing keys are one of the numbers wanted, in increasing order."""
    first = np.searchsorted(keys, wanted, "left")
    rows, within = expand(np.searchsorted(keys, wanted, "right") - first)
    return first[rows] + within


def table_columns(t: Table) -> tuple[np.ndarray, ...]:
    """What tells canonical tables apart."""
    # + 0: zero has one sign.
    return t.dst, t.src, t.at, t.of, t.extent, t.coef.astype(np.complex128) + 0


def digest_of(*parts: str | bytes | np.ndarray) -> bytes:
    """A digest that is the same on every machine. Each part goes in with its length, so that no two
    lists of parts read the same."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        data = data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def _swap(t: Table) -> Table:
    return Table(t.src, t.dst, t.of, t.at, t.extent, np.conj(t.coef))
