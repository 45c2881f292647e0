"""Tables of transfers between spaces: conversion of subsets to rows, and of rows to subsets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import chain, compress
from typing import Any

import numpy as np

from linop.normal_form.boxes import Ints, Table
from linop.normal_form.columns import column, ones
from linop.normal_form.primitives import Action, in_columns
from linop.spaces.exact import Exact, exact
from linop.spaces.numbering import padded
from linop.spaces.region import Region, Subset
from linop.spaces.scalars import Scalar
from linop.spaces.space import Space

Block = tuple[Subset, Subset, Exact | Scalar]
"""(target, source, coefficient) of one block."""


def table_of_blocks(domain: Space, codomain: Space, blocks: Iterable[Block]) -> Table:
    """The table of the sum of blocks, not canonical."""
    # Three lists instead of a tuple per block, which the garbage collector would visit.
    targets: list[Subset] = []
    sources: list[Subset] = []
    numbers: list[Exact] = []
    for target, source, coefficient in blocks:
        targets.append(target)
        sources.append(source)
        numbers.append(exact(coefficient))
    dst = [codomain.numbering.index[target.region.name] for target in targets]
    return table_of(domain, codomain, dst, targets, sources, numbers)


def table_of_actions(domain: Space, codomain: Space, groups: Iterable[Sequence[Action]]) -> Table:
    """The table of the sum of actions' `delta` blocks between regions that these spaces have, not
    canonical."""
    columns = [in_columns(actions) for actions in groups]
    targets, sources = (list(chain.from_iterable(side)) for side in zip(*columns, strict=True))
    src, dst = domain.numbering.index, codomain.numbering.index
    held = [
        t.region.name in dst and s.region.name in src for t, s in zip(targets, sources, strict=True)
    ]
    if not all(held):
        targets, sources = list(compress(targets, held)), list(compress(sources, held))
    signs = [-1 if t is s else 1 for t, s in zip(targets, sources, strict=True)]
    numbers = [dst[target.region.name] for target in targets]
    return table_of(domain, codomain, numbers, targets, sources, signs)


def table_of(
    domain: Space,
    codomain: Space,
    dst: Sequence[int],
    targets: Sequence[Subset],
    sources: Sequence[Subset],
    numbers: Iterable[Exact],
) -> Table:
    """The table of the sum of blocks in columns, not canonical. Of the targets only the boxes are
    used; `dst` numbers their regions in the codomain."""
    ndim, index = table_ndim(domain, codomain), domain.numbering.index
    at = padded([target.start for target in targets], ndim, 0)
    of = padded([source.start for source in sources], ndim, 0)
    stop = padded([target.stop for target in targets], ndim, 1)
    src = np.array([index[source.region.name] for source in sources], np.int64)
    return Table(np.array(dst, np.int64), src, at, of, stop - at, column(numbers))


def shared_table(domain: Space, codomain: Space) -> Table:
    """The table of the identity on the regions common to both spaces."""
    if domain.numbering == codomain.numbering:
        dst = src = np.arange(len(domain))
    else:
        src = np.flatnonzero([region in codomain for region in domain.regions])
        dst = np.array([codomain.numbering.index[domain.regions[k].name] for k in src], np.int64)
    extent = domain.numbering.shapes[src]
    zeros = np.zeros_like(extent)
    return Table(dst, src, zeros, zeros, extent, ones(len(dst))).of_ndim(
        table_ndim(domain, codomain)
    )


def table_ndim(*spaces: Space) -> int:
    """Number of dimensions of a table between spaces: at least one, also for 0-d regions."""
    return max(int(space.numbering.shapes.shape[1]) for space in spaces)


def numbers_in(subspace: Space, whole: Space) -> Ints:
    """The number in `whole` of each region of a subspace."""
    return np.array([whole.numbering.index[region.name] for region in subspace.regions], np.int64)


def box_of(region: Region, start: Any, extent: Any) -> Subset:
    """The subset of a region in a row of a table: start and extent, padded."""
    low = tuple(start[: region.ndim].tolist())
    return Subset(region, low, tuple(map(int.__add__, low, extent.tolist())))


def number_of(coefficient: Any) -> Exact:
    """An entry of a column as an exact Python number."""
    return int(coefficient) if isinstance(coefficient, np.int64) else coefficient


def flat_index(space: Space, subset: Subset) -> Ints:
    """Positions of a subset's elements in the flat vector of a space, in C order."""
    axes = np.ix_(*(np.arange(s.start, s.stop) for s in subset.slices))
    strides = np.cumprod([1, *reversed(subset.region.shape[1:])])[::-1]
    terms = (axis * stride for axis, stride in zip(axes, strides, strict=False))
    index = reduce(np.add, terms, np.zeros((), np.int64))
    return np.ravel(index) + space.offsets[subset.region.name]
