"""Descriptions of spaces, subsets and tensors: strategies that draw them, and builders from them.

A description is plain data (dicts, tuples, strings and numbers), which Hypothesis draws and
shrinks, a failing test prints, and another process rebuilds the same object from. Descriptions of
operators are drawn in the modules of factories.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import reject
from hypothesis import strategies as st

import linop
from linop import Partition, Region, Space, Subset, TensorSpace
from linop.spaces.decomposition import Role
from linop.spaces.region import MEMORIES

try:
    import ml_dtypes  # noqa: F401 - registers bfloat16 with NumPy
except ImportError:
    HALVES: tuple[str, ...] = ("float16",)
else:
    HALVES = ("float16", "bfloat16")

Description = dict[str, Any]
Box = tuple[tuple[int, int], ...]
"""(start, stop) in each dimension."""
PartOf = tuple[str, Box]
"""A subset: the name of a region, and a box in it."""

Placement = tuple[tuple[int, ...]] | tuple[tuple[int, ...], str]
"""The workers that hold a region, and its kind of memory, if that is not the default."""
RegionDescription = tuple[Any, ...]
"""Name, shape, and the items of a `Placement`."""

LARGEST = 9
"""Vectors hold whole numbers from -9 to 9."""

COMPUTED = ("float64", "float32", "complex128", "complex64", "int64", "int32")
"""Dtypes in which products and sums of small whole numbers are exact."""
UNUSUAL = (
    *("uint64", "int8", "uint8", "longdouble"),
    *("int16", "uint16", "uint32", "clongdouble"),
)
"""Further ones, in integers modulo 2^bits: unsigned ones have no negative multiples."""
EVERY = COMPUTED + UNUSUAL
MOVED = EVERY + HALVES
"""Dtypes in which sums of eight numbers from -9 to 9 are exact, as data movement is in any."""
COMPLEX = ("complex128", "complex64")

# Builders


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of a name, bfloat16 included."""
    return np.dtype(name)


def region_of(described: RegionDescription) -> Region:
    """A region from its name, shape, workers and memory."""
    return Region(*described)


def space_of(described: Description) -> Space:
    """A space from its regions and dtype."""
    return Space(map(region_of, described["regions"]), dtype_of(described["dtype"]))


def part_of(space: Space, described: PartOf) -> Subset:
    """A subset of a region of a space, from its description."""
    name, box = described
    return space[name][tuple(slice(a, b) for a, b in box)]


def box_in(region: Region, box: Box) -> Subset:
    """The subset of a region that a box spans."""
    return region[tuple(slice(a, b) for a, b in box)]


def partition_of(described: Description) -> Partition:
    """A partition from its grid and workers."""
    return Partition(described["grid"], described["workers"])


ROLES: dict[str, Role] = {"copies": linop.COPIES, "replicated": linop.REPLICATED}


def tensor_of(described: Description) -> TensorSpace:
    """A tensor space from its global shape, grid, workers, axes, dtype, name, blocks and memory."""
    axes = [ROLES[a] if isinstance(a, str) else a for a in described["axes"]]
    return TensorSpace(
        described["shape"],
        partition_of(described),
        dtype_of(described["dtype"]),
        axes,
        described["name"],
        sizes=dict(described.get("sizes", ())),
        bounds=dict(described.get("bounds", ())),
        memory=described.get("memory", "default"),
    )


def whole_numbers(shape: Sequence[int], dtype: Any, seed: int, most: int = 2) -> np.ndarray:
    """A random array of whole numbers from -most to most, modulo 2^bits in unsigned dtypes; in both
    parts for a complex dtype."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-most, most, shape, endpoint=True)
    if np.dtype(dtype).kind == "c":
        return (values + 1j * rng.integers(-most, most, shape, endpoint=True)).astype(dtype)
    return values.astype(dtype)


# Strategies

seeds = st.integers(0, 2**16)


rarely = st.integers(0, 9).map(lambda k: k == 9)
"""Booleans, True one time in ten; they shrink to False."""


def extents(most: int) -> st.SearchStrategy[int]:
    """Extents of a dimension up to `most`; they shrink to 1. 0 is rare, since one such dimension
    makes a tensor empty."""
    return st.sampled_from((*range(1, most + 1),) * 3 + (0,))


def shapes(ndim: int, most: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of `ndim` dimensions, with extents from 0 to `most`."""
    return st.tuples(*[extents(most)] * ndim)


def holders(workers: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Workers of a region: one, or less often up to three, on which it is replicated."""
    one = st.integers(0, workers - 1).map(lambda w: (w,))
    several = st.sets(st.integers(0, workers - 1), min_size=1, max_size=3)
    return st.one_of(one, one, several.map(lambda held: tuple(sorted(held))))


def placements(workers: int, memories: Sequence[str] = MEMORIES) -> st.SearchStrategy[Placement]:
    """Workers of a region, and one of some kinds of memory."""
    memory = st.sampled_from(memories).map(lambda m: () if m == "default" else (m,))
    return st.tuples(holders(workers), memory).map(lambda drawn: (drawn[0], *drawn[1]))


def orders(workers: int, count: int) -> st.SearchStrategy[tuple[int, ...]]:
    """`count` different workers of `workers`, in any order; they shrink to 0, 1, 2, …"""
    return st.permutations(range(workers)).map(lambda order: tuple(order[:count]))


@st.composite
def spaces(
    draw: st.DrawFn,
    workers: int,
    dtypes: Sequence[str] = MOVED,
    ndim: int | None = None,
    least: int = 1,
    most: int = 3,
    prefix: str = "x",
    memories: Sequence[str] = MEMORIES,
) -> Description:
    """A space of `least` to `most` regions, with equal numbers of dimensions."""
    rank = draw(st.integers(0, 3)) if ndim is None else ndim
    count = draw(st.integers(least, most))
    extent = (0, 6, 4, 3)[rank]
    regions = tuple(
        (f"{prefix}{k}", draw(shapes(rank, extent)), *draw(placements(workers, memories)))
        for k in range(count)
    )
    return {"regions": regions, "dtype": draw(st.sampled_from(dtypes))}


@st.composite
def boxes(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    """A box in a region of this shape, rarely empty; it shrinks to the whole region."""
    box = []
    for n in shape:
        least = 1 if n and not draw(rarely) else 0
        start = draw(st.integers(0, n - least))
        box.append((start, n - draw(st.integers(0, n - least - start))))
    return tuple(box)


@st.composite
def parts(draw: st.DrawFn, space: Description) -> PartOf:
    """A subset of one of the regions of a space."""
    name, shape, *_ = draw(st.sampled_from(space["regions"]))
    return name, draw(boxes(shape))


@st.composite
def pairs(draw: st.DrawFn, space: Description) -> tuple[PartOf, PartOf]:
    """Two disjoint subsets of equal shape, of two regions or of one."""
    a, of_a, *_ = draw(st.sampled_from(space["regions"]))
    # A 0-d region has no two disjoint subsets.
    alike = [r for r in space["regions"] if len(r[1]) == len(of_a) and (of_a or r[0] != a)]
    if not alike:
        reject()
    others = [r for r in alike if r[0] != a]  # preferred: they may be on another worker
    b, of_b, *_ = draw(st.sampled_from(others * 3 + alike))
    axis = draw(st.integers(0, len(of_a) - 1)) if a == b else None
    box_a, box_b = [], []
    for k, (m, n) in enumerate(zip(of_a, of_b, strict=True)):
        most = m // 2 if k == axis else min(m, n)
        extent = draw(st.integers(1 if most and not draw(rarely) else 0, most))
        if k == axis:
            low = draw(st.integers(0, m - 2 * extent))
            high = draw(st.integers(low + extent, m - extent))
            first, second = draw(st.permutations([low, high]))
        else:
            first, second = draw(st.integers(0, m - extent)), draw(st.integers(0, n - extent))
        box_a.append((first, first + extent))
        box_b.append((second, second + extent))
    return (a, tuple(box_a)), (b, tuple(box_b))


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole region of this shape."""
    return tuple((0, n) for n in shape)


@st.composite
def grids(draw: st.DrawFn, workers: int, least: int = 1, most: int = 3) -> tuple[int, ...]:
    """The shape of a grid of at most `workers` workers, with `least` to `most` axes."""
    grid: list[int] = []
    for _ in range(draw(st.integers(least, most))):
        grid.append(draw(st.integers(1, workers // math.prod(grid))))
    return tuple(grid)


@st.composite
def lengths(draw: st.DrawFn, n: int, parts: int) -> tuple[int, ...]:
    """Lengths of `parts` blocks, some possibly empty, with sum n."""
    cuts = sorted(draw(st.lists(st.integers(0, n), min_size=parts - 1, max_size=parts - 1)))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True))


@st.composite
def tensors(
    draw: st.DrawFn,
    workers: int,
    *,
    dtypes: Sequence[str] = MOVED,
    roles: Sequence[str] = ("split", "copies", "replicated"),
    grid: tuple[int, ...] | None = None,
    ndim: int | None = None,
    shape: tuple[int, ...] | None = None,
    fixed: dict[int, str] | None = None,
    uneven: bool = True,
    overlapping: bool = False,
    name: str = "x",
    memories: Sequence[str] = MEMORIES,
) -> Description:
    """A tensor space.

    Args:
        workers: number of workers to choose from.
        dtypes, memories: to choose from.
        grid, ndim, shape: of the partition and the tensor; drawn if None.
        roles: roles of grid axes to choose from: "split", "copies", "replicated".
        fixed: roles of some grid axes, by axis.
        uneven: True if blocks may be unbalanced.
        overlapping: True if blocks may overlap and leave gaps.
        name: of the tensor.
    """
    grid = draw(grids(workers)) if grid is None else grid
    if shape is None:
        rank = draw(st.integers(0, 3)) if ndim is None else ndim
        # Some tensors have fewer elements than workers, or none.
        shape = draw(shapes(rank, (6, 6, 5, 4)[rank]))
    free = list(draw(st.permutations(range(len(shape)))))
    axes: list[Any] = []
    for k in range(len(grid)):
        role: Any = (fixed or {}).get(k) or draw(st.sampled_from(roles))
        if role == "split":
            # A tensor dimension is split by one grid axis at most.
            role = free.pop() if free else "copies"
        axes.append(role)
    cut: Description = {}
    counts = {d: n for d, n in zip(axes, grid, strict=True) if isinstance(d, int)}
    if uneven and draw(st.booleans()):
        cut["sizes"] = tuple((d, draw(lengths(shape[d], p))) for d, p in counts.items())
    elif overlapping and draw(st.booleans()):
        cut["bounds"] = tuple(
            (d, tuple(draw(boxes((shape[d],)))[0] for _ in range(p))) for d, p in counts.items()
        )
    memory = draw(st.sampled_from(memories))
    if memory != "default":
        cut["memory"] = memory
    return {
        "shape": shape,
        "grid": grid,
        "workers": draw(orders(workers, math.prod(grid))),
        "axes": tuple(axes),
        "dtype": draw(st.sampled_from(dtypes)),
        "name": name,
        **cut,
    }
