"""Factories of collectives and halo exchanges (paper, section 3), on any block decompositions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st

import linop
from linop import LinearOperator
from linop.testing.describing import (
    MOVED,
    Description,
    grids,
    orders,
    rarely,
    tensor_of,
    tensors,
)
from linop.testing.factories.registry import operator_factory


@st.composite
def _tensor_and_target(draw: st.DrawFn, workers: int, source: Description) -> Description:
    """A tensor space with the global shape and dtype of `source`, in any blocks."""
    return draw(
        tensors(
            workers,
            dtypes=(source["dtype"],),
            shape=source["shape"],
            overlapping=True,
            name=draw(st.sampled_from(["x", "y"])),
        )
    )


def disjoint(workers: int, **kwargs: Any) -> st.SearchStrategy[Description]:
    """A tensor whose blocks do not overlap: no grid axis holds several copies."""
    return tensors(workers, roles=("split", "replicated"), **kwargs).filter(_no_copies)


def _no_copies(described: Description) -> bool:
    axes = zip(described["axes"], described["grid"], strict=True)
    return all(role != "copies" or n == 1 for role, n in axes)


@st.composite
def acting(
    draw: st.DrawFn, /, workers: int, role: str, most: int = 3, **kwargs: Any
) -> Description:
    """A tensor whose longest grid axis has the given role, nine times in ten.

    Args:
        most: largest number of grid axes.
    """
    grid = draw(grids(workers, most=most))
    fixed = {} if kwargs.get("shape") == () or draw(rarely) else {grid.index(max(grid)): role}
    return draw(tensors(workers, grid=grid, fixed=fixed, **kwargs))


@st.composite
def _repartitions(draw: st.DrawFn, workers: int) -> Description:
    source = draw(disjoint(workers))
    return {"source": source, "target": draw(_tensor_and_target(workers, source))}


@operator_factory(_repartitions)
def repartition(source: Any, target: Any) -> LinearOperator:
    return linop.repartition(tensor_of(source), tensor_of(target))


@st.composite
def _disjoint_grids(draw: st.DrawFn, workers: int) -> Description:
    """A repartition from the lower half of the workers to the upper half, often with fewer elements
    than workers."""
    if workers < 2:
        reject()
    half = workers // 2
    shape = (draw(st.integers(0, 5)), draw(st.integers(1, 3)))
    source = draw(disjoint(half, shape=shape, dtypes=MOVED))
    grid = draw(grids(half, 1, 2))
    others = draw(orders(half, math.prod(grid)))
    return {"source": source, "grid": grid, "workers": tuple(w + half for w in others)}


@operator_factory(_disjoint_grids)
def repartition_to_other_workers(source: Any, grid: Any, workers: Any) -> LinearOperator:
    return linop.repartition(tensor_of(source), linop.Partition(grid, workers))


@st.composite
def _scatters(draw: st.DrawFn, workers: int) -> Description:
    source = draw(
        tensors(workers, roles=("split",), grid=(1,), uneven=False).filter(
            lambda t: "copies" not in t["axes"] or t["shape"] == ()
        )
    )
    return {"source": source, "target": draw(_tensor_and_target(workers, source))}


@operator_factory(_scatters)
def scatter(source: Any, target: Any) -> LinearOperator:
    return linop.scatter(tensor_of(source), tensor_of(target))


@st.composite
def _gathers(draw: st.DrawFn, workers: int) -> Description:
    return {"source": draw(disjoint(workers)), "worker": draw(st.integers(0, workers - 1))}


@operator_factory(_gathers)
def gather(source: Any, worker: Any) -> LinearOperator:
    return linop.gather(tensor_of(source), worker)


@st.composite
def _folded(draw: st.DrawFn, workers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A grid, and a smaller one that matches it for a broadcast: axes of extent 1, and axes
    missing on the left."""
    large = draw(grids(workers))
    small = tuple(n if draw(st.booleans()) else 1 for n in large)
    ones = next((k for k, n in enumerate(small) if n > 1), len(small) - 1)
    return large, small[draw(st.integers(0, ones)) :]


@st.composite
def _broadcasts(draw: st.DrawFn, workers: int) -> Description:
    large, small = draw(_folded(workers))
    src, dest = draw(st.booleans()), draw(st.booleans())
    source = draw(tensors(workers, grid=small[::-1] if src else small))
    return {
        "source": source,
        "grid": large[::-1] if dest else large,
        "workers": draw(orders(workers, math.prod(large))),
        "transpose_src": src,
        "transpose_dest": dest,
    }


@operator_factory(_broadcasts)
def broadcast(
    source: Any, grid: Any, workers: Any, transpose_src: Any, transpose_dest: Any
) -> LinearOperator:
    X, partition = tensor_of(source), linop.Partition(grid, workers)
    return linop.broadcast(X, partition, transpose_src, transpose_dest)


@st.composite
def _sum_reductions(draw: st.DrawFn, workers: int) -> Description:
    large, small = draw(_folded(workers))
    src, dest = draw(st.booleans()), draw(st.booleans())
    padded = (1,) * (len(large) - len(small)) + small
    summed = {k: "copies" for k, (m, n) in enumerate(zip(padded, large, strict=True)) if m < n}
    last = len(large) - 1
    source = draw(
        tensors(
            workers,
            grid=large[::-1] if src else large,
            fixed={last - k: role for k, role in summed.items()} if src else summed,
        )
    )
    return {
        "source": source,
        "grid": small[::-1] if dest else small,
        "workers": draw(orders(workers, math.prod(small))),
        "transpose_src": src,
        "transpose_dest": dest,
    }


@operator_factory(_sum_reductions)
def sum_reduce(
    source: Any, grid: Any, workers: Any, transpose_src: Any, transpose_dest: Any
) -> LinearOperator:
    Y, partition = tensor_of(source), linop.Partition(grid, workers)
    return linop.sum_reduce(Y, partition, transpose_src, transpose_dest)


@st.composite
def _copies(draw: st.DrawFn, workers: int) -> Description:
    """A tensor with copies, and some of the grid axes that hold them; None for all."""
    source = draw(acting(workers, "copies"))
    held = [k for k, role in enumerate(source["axes"]) if role == "copies"]
    chosen = draw(st.none() | st.just(tuple(k for k in held if draw(st.booleans()))))
    return {"source": source, "grid_axes": chosen}


@operator_factory(_copies)
def all_reduce(source: Any, grid_axes: Any) -> LinearOperator:
    return linop.all_reduce(tensor_of(source), grid_axes)


@operator_factory(_copies)
def ring_all_reduce(source: Any, grid_axes: Any) -> LinearOperator:
    return linop.ring_all_reduce(tensor_of(source), grid_axes)


@st.composite
def _splits(draw: st.DrawFn, workers: int) -> Description:
    """A tensor, and some of the grid axes that split it; None for all."""
    source = draw(acting(workers, "split", ndim=draw(st.sampled_from([1, 2, 3, 0]))))
    split = [k for k, role in enumerate(source["axes"]) if isinstance(role, int)]
    chosen = draw(st.none() | st.just(tuple(k for k in split if draw(st.booleans()))))
    return {"source": source, "grid_axes": chosen}


@operator_factory(_splits)
def all_gather(source: Any, grid_axes: Any) -> LinearOperator:
    return linop.all_gather(tensor_of(source), grid_axes)


@st.composite
def _rings(draw: st.DrawFn, workers: int) -> Description:
    """A tensor, and one of the grid axes that split it."""
    source = draw(acting(workers, "split", ndim=draw(st.integers(1, 3))))
    split = [k for k, role in enumerate(source["axes"]) if isinstance(role, int)]
    if not split:
        reject()
    return {"source": source, "grid_axis": draw(st.sampled_from(split))}


@operator_factory(_rings, pure=False)
def ring_all_gather(source: Any, grid_axis: Any) -> LinearOperator:
    return linop.ring_all_gather(tensor_of(source), grid_axis)


@operator_factory(_splits)
def all_gather_replicated(source: Any, grid_axes: Any) -> LinearOperator:
    return linop.all_gather(tensor_of(source), grid_axes, into=linop.REPLICATED)


@st.composite
def _reduce_scatters(draw: st.DrawFn, workers: int) -> Description:
    source = draw(acting(workers, "copies", ndim=draw(st.integers(1, 3))))
    held = [k for k, role in enumerate(source["axes"]) if role == "copies"]
    free = [d for d in range(len(source["shape"])) if d not in source["axes"]]
    most = min(len(held), len(free))
    count = draw(st.integers(0 if draw(rarely) else min(1, most), most))
    axes = tuple(draw(st.permutations(held))[:count])
    return {"source": source, "grid_axes": axes, "dims": tuple(draw(st.permutations(free))[:count])}


@operator_factory(_reduce_scatters)
def reduce_scatter(source: Any, grid_axes: Any, dims: Any) -> LinearOperator:
    return linop.reduce_scatter(tensor_of(source), grid_axes, dims)


@st.composite
def _all_to_alls(draw: st.DrawFn, workers: int) -> Description:
    ndim = draw(st.integers(2, 3))
    source = draw(acting(workers, "split", ndim=ndim).filter(lambda t: set(t["axes"]) & {0, 1, 2}))
    free = [d for d in range(len(source["shape"])) if d not in source["axes"]]
    split = [k for k, role in enumerate(source["axes"]) if isinstance(role, int)]
    if not free:
        reject()
    dim = draw(st.sampled_from(free))
    return {"source": source, "grid_axis": draw(st.sampled_from(split)), "dim": dim}


@operator_factory(_all_to_alls)
def all_to_all(source: Any, grid_axis: Any, dim: Any) -> LinearOperator:
    return linop.all_to_all(tensor_of(source), grid_axis, dim)


@st.composite
def _shifts(draw: st.DrawFn, workers: int) -> Description:
    source = draw(acting(workers, draw(st.sampled_from(["split", "copies"]))))
    axes = [k for k, role in enumerate(source["axes"]) if role != "replicated"]
    if not axes:
        reject()
    return {
        "source": source,
        "steps": draw(st.integers(-3, 3)),
        "grid_axis": draw(st.sampled_from(axes)),
        "periodic": draw(st.booleans()),
    }


@operator_factory(_shifts)
def shift(source: Any, steps: Any, grid_axis: Any, periodic: Any) -> LinearOperator:
    return linop.shift(tensor_of(source), steps, grid_axis, periodic)


@st.composite
def kernels(draw: st.DrawFn, ndim: int) -> Description:
    """A sliding kernel: kernel_size, stride, padding, dilation, each one number per dimension."""

    def numbers(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(least, most)) for _ in range(ndim))

    return {
        "kernel_size": numbers(1, 4),
        "stride": numbers(1, 3),
        "padding": numbers(0, 2),
        "dilation": numbers(1, 2),
    }


def fits(n: int, size: int, padding: int, dilation: int) -> bool:
    """True if a sliding kernel has an output on n inputs."""
    return n + 2 * padding >= dilation * (size - 1) + 1


@st.composite
def halos(
    draw: st.DrawFn,
    workers: int,
    dtypes: Sequence[str] = MOVED,
    roles: Sequence[str] = ("split", "copies", "replicated"),
    uneven: bool = True,
) -> Description:
    """A tensor, and a sliding kernel that has an output on it."""
    ndim = draw(st.integers(1, 3))
    kernel = draw(kernels(ndim))
    columns = zip(*(kernel[k] for k in ("kernel_size", "padding", "dilation")), strict=True)
    least = [max(0, d * (size - 1) + 1 - 2 * p) for size, p, d in columns]
    shape = tuple(n + draw(st.integers(0, (11, 5, 3)[ndim - 1])) for n in least)
    options: dict[str, Any] = {"dtypes": dtypes, "shape": shape, "roles": roles, "uneven": uneven}
    return {"source": draw(acting(workers, "split", **options)), **kernel}


@operator_factory(halos)
def halo_exchange(source: Any, **kernel: Any) -> LinearOperator:
    return linop.halo_exchange(tensor_of(source), **kernel)


@operator_factory(halos)
def halo_exchange_in_place(source: Any, **kernel: Any) -> LinearOperator:
    return linop.halo_exchange(tensor_of(source), **kernel, in_place=True)
