"""Positions of each worker's block of a sequence, and the parts of a matrix of attention between
two blocks: pure arithmetic, nothing is sent here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

from linop.spaces.partition import balanced

Segments = tuple[tuple[int, int], ...]
"""Ranges (start, stop) of positions of the sequence, ascending: a worker's block, in its order."""


class Kind(Enum):
    """Of a part of the matrix of attention under a causal mask."""

    FULL = "every row takes all columns"
    DIAGONAL = "rows and columns are the same positions"
    PARTIAL = "a mask says which"


class Part(NamedTuple):
    """A part of the matrix of attention between a block of queries and one of keys."""

    rows: slice
    """Of this worker's queries, by their number in the block."""
    columns: slice
    """Of the keys, likewise."""
    kind: Kind


def in_order(sizes: Sequence[int]) -> list[Segments]:
    """A sequence in consecutive blocks of so many tokens: the segments of each worker."""
    stops = accumulate(sizes)
    return [((stop - n, stop),) for stop, n in zip(stops, sizes, strict=True)]


def zigzag(length: int, workers: int) -> list[Segments]:
    """A sequence in twice as many balanced chunks as workers, of which worker w has the w-th and
    the w-th last: under a causal mask all workers have nearly as much to do."""
    chunks = [ends for (ends,) in in_order(balanced(length, 2 * workers))]
    return [_joined(chunks[w], chunks[2 * workers - 1 - w]) for w in range(workers)]


def _joined(first: tuple[int, int], second: tuple[int, int]) -> Segments:
    if first[1] == second[0]:
        return ((first[0], second[1]),)
    return tuple(ends for ends in (first, second) if ends[0] < ends[1]) or (first,)


def size(segments: Segments) -> int:
    """The number of tokens of a block."""
    return sum(stop - start for start, stop in segments)


def positions(segments: Segments) -> list[int]:
    """Positions in the sequence of a block's tokens."""
    return [p for start, stop in segments for p in range(start, stop)]


def parts(rows: Segments, columns: Segments, causal: bool) -> list[Part]:
    """The parts of the matrix of attention between two blocks that are not zero.

    Args:
        rows: positions of the queries.
        columns: positions of the keys.
        causal: True if queries take keys at their own position and before alone.
    """
    every = slice(0, size(rows)), slice(0, size(columns))
    if not (every[0].stop and every[1].stop):
        return []
    if not causal:
        return [Part(*every, Kind.FULL)]
    if rows == columns:
        return [Part(*every, Kind.DIAGONAL)]
    found: list[Part] = []
    for segment, block in zip(rows, _local(rows), strict=True):
        for part in _of_rows(segment, block, columns):
            last = found[-1] if found else None
            if last and part.kind is last.kind is Kind.FULL and part.columns == last.columns:
                found[-1] = Part(slice(last.rows.start, block.stop), part.columns, Kind.FULL)
            else:
                found.append(part)
    return found


def _of_rows(segment: tuple[int, int], block: slice, columns: Segments) -> Iterator[Part]:
    """The parts of one range of rows."""
    first, last = segment
    if first == last:
        return
    full, partial = 0, []
    for (start, stop), own in zip(columns, _local(columns), strict=True):
        if stop <= first + 1:
            full = own.stop
        elif start < last:
            same = (start, stop) == segment
            partial.append(Part(block, own, Kind.DIAGONAL if same else Kind.PARTIAL))
    if full:
        yield Part(block, slice(0, full), Kind.FULL)
    yield from partial


def _local(segments: Segments) -> list[slice]:
    stops = list(accumulate(stop - start for start, stop in segments))
    return [slice(end - (b - a), end) for end, (a, b) in zip(stops, segments, strict=True)]


def work(rows: Segments) -> int:
    """The number of pairs of query and key of a block of queries under a causal mask."""
    return sum((stop * (stop + 1) - start * (start + 1)) // 2 for start, stop in rows)
