"""Values beyond the edges of a dimension, as runs of the indices that they are copies of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np

from linop.errors import ArgumentError, ShapeError
from linop.local_operators.sliding_sums import Run
from linop.spaces.numbering import Ints

Boundary = Literal["zero", "periodic", "reflect", "symmetric", "edge"]
"""Names of `numpy.pad`; ``zero`` and ``periodic`` are its ``constant`` and ``wrap``."""


def boundaries(given: Any, ndim: int) -> tuple[Boundary, ...]:
    """The boundary of each dimension.

    Raises:
        ArgumentError: an unknown name. ShapeError: another number of them.
    """
    names: tuple[Any, ...] = (given,) * ndim if isinstance(given, str) else tuple(given)
    known = get_args(Boundary)
    if unknown := [name for name in names if name not in known]:
        raise ArgumentError(f"stencil: boundary {unknown[0]!r} given; there are {', '.join(known)}")
    if len(names) != ndim:
        raise ShapeError(f"stencil: {len(names)} boundaries for {ndim} dimensions: {names}")
    return names


def runs(start: int, stop: int, n: int, boundary: Boundary) -> tuple[Run, ...]:
    """The elements of a dimension of extent n that the positions from `start` to `stop` take, which
    may lie beyond it: runs from ``at``, counted from `start`. Positions in no run are zero."""
    if not n:
        return ()
    first, last = max(start, 0), min(stop, n)
    inside = [Run(first - start, first, last - first)] if first < last else []
    if boundary == "zero":
        return tuple(inside)
    beyond = [np.arange(start, min(stop, 0)), np.arange(max(start, n), stop)]
    copied = [run for at in beyond for run in _progressions(at - start, _taken(at, n, boundary))]
    return (*inside, *copied)


def _taken(at: Ints, n: int, boundary: Boundary) -> Ints:
    """The indices that positions are copies of."""
    if boundary == "edge" or n == 1:
        return np.clip(at, 0, n - 1)
    if boundary == "periodic":
        return at % n
    period = 2 * n - 2 if boundary == "reflect" else 2 * n
    folded: Ints = np.minimum(at % period, period - (boundary == "symmetric") - at % period)
    return folded


def _progressions(at: Ints, of: Ints) -> Iterator[Run]:
    """Runs of consecutive positions; those whose indices neither rise nor fall by one are alone."""
    if not len(at):
        return
    cuts = [0, *(np.flatnonzero(np.diff(of, 2)) + 2).tolist(), len(of)]
    for a, b in pairwise(cuts):
        step = int(of[a + 1] - of[a]) if b - a > 1 else 1
        if step in (1, -1):
            yield Run(int(at[a]), int(of[a]), b - a, step)
        else:
            yield from (Run(int(at[k]), int(of[k]), 1) for k in range(a, b))


def spans(found: Sequence[Run]) -> list[tuple[int, int]]:
    """The range (start, stop) of the indices of each run."""
    ends = ((run.of, run.of + run.stride * (run.count - 1)) for run in found)
    return [(min(pair), max(pair) + 1) for pair in ends]
