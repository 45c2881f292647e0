"""Parameters of several parts, as of queries, keys and values, of which each worker has some of
each: the order of their rows in which a worker's block is one, and that of the sequential module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Packing:
    """The order of a parameter's rows by worker, each worker's in the order of the parts.

    Args:
        dim: the dimension of the rows.
        parts: of each part, the lengths of its blocks, by worker.
    """

    dim: int
    parts: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each worker."""
        return tuple(map(sum, zip(*self.parts, strict=True)))

    @property
    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Rows that are beside each other in both orders: where they begin by worker, and in the
        sequential module, and their number."""
        firsts = _starts([sum(part) for part in self.parts])
        starts = [_starts(part) for part in self.parts]
        at = 0
        for worker in range(len(self.parts[0])):
            for part, sizes in enumerate(self.parts):
                yield at, firsts[part] + starts[part][worker], sizes[worker]
                at += sizes[worker]

    def packed(self, whole: Tensor) -> Tensor:
        """A tensor of the sequential module's order, by worker."""
        return torch.cat([whole.narrow(self.dim, at, n) for _, at, n in self.runs], self.dim)

    def unpacked(self, packed: Tensor) -> Tensor:
        """A tensor in the order by worker, in the sequential module's."""
        runs = sorted(self.runs, key=lambda run: (run[1], run[2]))
        return torch.cat([packed.narrow(self.dim, at, n) for at, _, n in runs], self.dim)

    def pieces(self, block: Slices) -> list[tuple[Slices, Slices]]:
        """The parts of a block that are boxes of the sequential module's tensor: each there, and in
        the block.

        Args:
            block: in the order by worker.
        """
        mine, found = block[self.dim], []
        for at, there, n in self.runs:
            first, last = max(at, mine.start), min(at + n, mine.stop)
            if first < last:
                begin = there + first - at
                found.append(
                    (
                        self._along(block, slice(begin, begin + last - first)),
                        self._along(
                            tuple(slice(0, s.stop - s.start) for s in block),
                            slice(first - mine.start, last - mine.start),
                        ),
                    )
                )
        return found

    def row(self, at: int) -> int:
        """The place in the sequential module of a row in the order by worker."""
        return next(there + at - first for first, there, n in self.runs if first <= at < first + n)

    def _along(self, slices: Slices, here: slice) -> Slices:
        return (*slices[: self.dim], here, *slices[self.dim + 1 :])


def _starts(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))
