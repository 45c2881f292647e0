"""Lazily evaluated transfer tables; the rows of given regions can be evaluated alone.

A `TransferTable` is an expression: a given table, the identity, an adjoint; products, sums and
blocks are in `linop.normal_form.table_algebra`. For the rows into a few regions, a product
evaluates only the rows of its factors that contribute, so that one of thousands of workers finds
its own transfers without the whole table. Regions are given by number, as in
`linop.normal_form.boxes`; spaces do not belong here.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping

import numpy as np

from linop.caching import attributes, cached_property
from linop.normal_form.boxes import Ints, Table, canonical, expand
from linop.normal_form.columns import conjugates, encoded, ones
from linop.spaces.exact import Exact

SHORT = 256
"""Largest table, in rows, that is evaluated entirely when a subset is requested: a halo exchange
over 6 × 6 workers."""


class TransferTable(ABC):
    """A lazily evaluated canonical table. The rows of given regions are those of the whole table,
    in its order, whichever way they are evaluated.

    Attributes:
        depth: nesting of the expression. Evaluation is recursive in it, so it is kept small
            (`linop.normal_form.merging`).
    """

    depth = 1

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

    @property
    def rows(self) -> Table:
        """All rows, canonical or not: the table, if it was evaluated, else what it is made of."""
        known: Table | None = attributes(self).get("table")
        return self._all() if known is None else known

    @cached_property
    def short(self) -> bool:
        """True if a request for some rows evaluates and caches the whole table, because that is
        cheap: all tables it depends on are given, and it is not far longer than they are."""
        return False

    def into(self, dst: Ints) -> Table:
        """The canonical rows into regions, given by number in increasing order."""
        if "table" in attributes(self) or self.short:
            return self.table.take(positions(self.table.dst, dst))
        return canonical(self._into(dst))

    def out_of(self, src: Ints) -> Table:
        """The canonical rows out of regions, given by number in increasing order."""
        if "table" in attributes(self) or self.short:
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
    """The rows of a given table, which need not be canonical, unless that is said."""

    short = True

    def __init__(self, table: Table, canonical: bool = False) -> None:
        self.given = table
        if canonical:
            attributes(self)["table"] = table

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
        self.short = len(extent) <= SHORT

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
        self.depth = of.depth + 1

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


def positions(keys: Ints, wanted: Ints) -> Ints:
    """The indices at which `keys` is one of `wanted`; both are increasing, `wanted` strictly."""
    first = np.searchsorted(keys, wanted, "left")
    rows, within = expand(np.searchsorted(keys, wanted, "right") - first)
    return first[rows] + within


def table_columns(t: Table) -> tuple[str | np.ndarray, ...]:
    """Digest input for a canonical table: equal exactly for equal tables."""
    return t.dst, t.src, t.at, t.of, t.extent, *encoded(t.coef)


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
