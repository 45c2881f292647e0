"""The identity of distributed vectors, and their inner products summed over all workers.

Each worker holds a block of such a vector. Its name is a number of 64 bits that all workers derive
alike: from the space and the order in which a backend made vectors of it, and from there through
arithmetic and plans. It rides with every sum over workers, so that products of different vectors
are never added.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from zlib import crc32

from linop.spaces.scalars import Scalar

if TYPE_CHECKING:
    from linop.spaces.space import Space
    from linop.spaces.vector import Vector

Partials = Sequence[Mapping[int, Scalar]]
"""Partial inner products, each a mapping by worker."""
_MASK = 2**64 - 1
_FACTOR = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, as in multiplicative hashing."""
_SHOWN = 120


@dataclass(frozen=True, slots=True)
class Distributed:
    """The part of a vector that is the same on all workers.

    Attributes:
        sums: sums partial inner products over all workers: of a function that computes this
            worker's, and may raise; of vectors of these names. Collective.
        name: equal on all workers for the blocks of one vector; see the module.
        made: describes the origin of the vector.
        run: applies an operator to the vector on all workers, which compiles it once. Collective.
    """

    sums: Callable[[Callable[[], Partials], Asked], list[Scalar]]
    name: int
    made: Callable[[], str]
    run: Callable[[Any, Vector], Vector]

    def derived(self, operation: str, *others: Distributed | None) -> Distributed:
        """Identity of a result of arithmetic on this vector and others."""
        name = mixed(self.name, _operation(operation))
        for other in others:
            name = mixed(name, 0 if other is None else other.name)
        return Distributed(self.sums, name, self.made, self.run)


class Asked:
    """Inner products that a worker asks for, compared with what the others ask for.

    Args:
        what: the operation, as "norm".
        pairs: the two vectors of each product; None for one that is not distributed.
    """

    def __init__(
        self, what: str, pairs: Sequence[tuple[Distributed | None, Distributed | None]]
    ) -> None:
        self._what = what
        self._pairs = pairs

    @property
    def key(self) -> int:
        """Number of 64 bits, equal on all workers that ask for the same."""
        key = _operation(self._what) + len(self._pairs)
        for v, w in self._pairs:
            # The order matters, of the two and of the pairs.
            two = (0 if v is None else v.name) * _FACTOR + (0 if w is None else w.name)
            key = mixed(key, two & _MASK)
        return key

    def __str__(self) -> str:
        made = dict.fromkeys(one.made() for pair in self._pairs for one in pair if one is not None)
        return f"({self._what} of {'; '.join(made)})"


@lru_cache(maxsize=4096)
def _operation(name: str) -> int:
    """Number of an operation."""
    return crc32(name.encode())


def first_name(space: Space, epoch: int, number: int) -> int:
    """Name of a vector that a backend made.

    Args:
        epoch: number of plans that all workers had compiled.
        number: number of the vector among those of its space since then.
    """
    return mixed(mixed(code_of(space), epoch), number)


def origin(space: Space, number: int) -> str:
    """Origin of a vector that a backend made, in words."""
    regions = ", ".join(f"{region.name!r} {region.shape}" for region in space.regions[:8])
    text = f"{regions} of {space.dtype}"[:_SHOWN]
    return f"vector {number} of the space of {text}, or computed from it"


def mixed(name: int, other: int) -> int:
    """A number of 64 bits from two; the order matters."""
    name = ((name ^ other) * _FACTOR + other) & _MASK
    return name ^ (name >> 29)


@lru_cache(maxsize=64)
def code_of(space: Space) -> int:
    """Number of 64 bits, equal for equal spaces, in any order of their regions."""
    said = repr((space.dtype.str, sorted(map(repr, space.regions))))
    return int.from_bytes(hashlib.sha256(said.encode()).digest()[:8], "little")
