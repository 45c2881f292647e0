"""Spaces, partitions and vectors as text and as HTML tables, for notebooks. Tables set no colours,
so that they read in light and dark, and show a few rows of many; a tensor space has its picture
below."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from linop.spaces.differences import inner_text
from linop.spaces.region import Region, memory_mark
from linop.spaces.scalars import Array
from linop.svg import escaped

if TYPE_CHECKING:
    from linop.spaces.partition import Partition
    from linop.spaces.space import Space
    from linop.spaces.tensor import TensorSpace
    from linop.spaces.vector import Vector

_MOST, _FIRST = 10, 8
"""Rows and columns up to which all are shown; of more, how many first ones, before the last."""


def space_html(space: Space) -> str:
    """A table of a space's regions."""
    numbers = _some(len(space))
    regions = ["" if k is None else space.numbering.at(k) for k in numbers]
    rows = [_region_cells(region) for region in regions]
    caption = f"{type(space).__name__} of {_many(len(space), 'region')}, {_elements(space)}"
    caption += _inner(space)
    return table(caption, ("region", "shape", "workers"), rows)


def tensor_html(X: TensorSpace) -> str:
    """A table of a tensor space's blocks: their shapes, and their indices in the tensor; and the
    picture of the tensor."""
    rows = []
    for k in _some(len(X)):
        region = "" if k is None else X.numbering.at(k)
        ranges = "" if isinstance(region, str) else _ranges(X.block(region))
        rows.append([*_region_cells(region), "…" if k is None else ranges])
    caption = (
        f"TensorSpace {X.name} of shape {X.global_shape}, dtype {X.dtype.name}, on a grid "
        f"of workers of shape {X.partition.shape}, whose axes are {_axes(X)}{_inner(X)}"
    )
    from linop.spaces.pictures import blocks_picture  # not before it is asked for

    shown = table(caption, ("block", "shape", "workers", "indices"), rows)
    return f"<div>{shown}{blocks_picture(X)._repr_html_()}</div>"


def partition_html(partition: Partition) -> str:
    """A table of a grid's workers: the last axis from left to right, the others downwards."""
    lines = partition.grid.reshape(-1, partition.shape[-1] if partition.ndim else 1)
    across = _some(lines.shape[1])
    before = partition.shape[:-1]
    rows = []
    for k in _some(len(lines)):
        at = "…" if k is None else ", ".join(str(int(i)) for i in np.unravel_index(k, before))
        workers = ["…" if k is None or j is None else str(lines[k, j]) for j in across]
        rows.append([at, *workers] if before else workers)
    heads = ["…" if j is None else str(j) for j in across]
    caption = f"Partition of shape {partition.shape}: {_many(partition.size, 'worker')}"
    return table(caption, ["", *heads] if before else heads, rows)


def vector_html(vector: Vector) -> str:
    """A table of the regions of a vector that are held here, with some of their values."""
    names = list(vector.arrays)
    rows = []
    for k in _some(len(names)):
        region = "" if k is None else vector.space[names[k]]
        values = "…" if k is None else _values(vector.arrays[names[k]])
        rows.append([*_region_cells(region), values])
    return table(_vector_title(vector), ("region", "shape", "workers", "values"), rows)


def vector_text(vector: Vector) -> str:
    """A vector in one line: sizes, dtype, and some values."""
    names = list(vector.arrays)
    shown = [
        "…"
        if k is None
        else f"{names[k]}{list(vector.space[names[k]].shape)} = {_values(vector.arrays[names[k]])}"
        for k in _some(len(names))
    ]
    return f"<{_vector_title(vector)}: {', '.join(shown)}>"


def _vector_title(vector: Vector) -> str:
    held, all_of_them = len(vector.arrays), len(vector.space)
    part = "" if held == all_of_them else f", {held} of {all_of_them} regions here"
    return f"Vector of {_elements(vector.space)}{part}"


def _elements(space: Space) -> str:
    return f"{_many(space.size, 'element')}, dtype {space.dtype.name}"


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _values(array: Array) -> str:
    if not isinstance(array, np.ndarray):
        return f"(a {type(array).__module__} array)"  # on a device, from where it is not copied
    text = np.array2string(array, threshold=6, edgeitems=2, precision=4, max_line_width=10**9)
    return " ".join(text.split())


def _axes(X: TensorSpace) -> str:
    said = (f"dimension {axis}" if isinstance(axis, int) else repr(axis) for axis in X.axes)
    return ", ".join(said) or "none"


def _ranges(slices: Sequence[slice]) -> str:
    return ", ".join(f"{s.start}:{s.stop}" for s in slices)


def _region_cells(region: Region | str) -> list[str]:
    if isinstance(region, str):
        return ["…"] * 3
    workers = [*map(str, region.workers)]
    few = workers if len(workers) <= _MOST else [*workers[:_FIRST], "…", workers[-1]]
    return [region.name, str(region.shape), ", ".join(few) + memory_mark(region)]


def _inner(space: Space) -> str:
    """The inner product as the end of a caption."""
    return "" if space.inner_product is None else f"; inner product: {inner_text(space)}"


def _some(many: int) -> list[int | None]:
    """The numbers from 0; of more than a few, the first ones, None, and the last."""
    return [*range(many)] if many <= _MOST else [*range(_FIRST), None, many - 1]


def table(caption: str, head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table of texts, which are escaped; without a head if that is empty."""

    def cells(texts: Iterable[str], tag: str) -> Iterator[str]:
        return (f"<{tag}>{escaped(text)}</{tag}>" for text in texts)

    titles = "".join(cells(head, "th"))
    lines = [f"<tr>{titles}</tr>"] if titles else []
    lines += [f"<tr>{''.join(cells(row, 'td'))}</tr>" for row in rows]
    return f"<table><caption>{escaped(caption)}</caption>{''.join(lines)}</table>"
