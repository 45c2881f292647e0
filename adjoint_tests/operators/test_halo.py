"""Halo geometry and halo exchange, against the paper's figures and against brute force.

The model writes down which inputs every single output touches, cuts the outputs over the workers,
and takes what each needs from the global array. Whole numbers, compared with ``==``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import linop
from linop import COPIES, HaloDim, Partition, TensorSpace
from linop.errors import ArgumentError, LinopError, PartitionError, ShapeError
from linop.testing.describing import (
    COMPUTED,
    Description,
    grids,
    seeds,
    tensor_of,
    tensors,
    whole_numbers,
)
from support.operators.catalogue import halos, kernels
from support.operators.properties import held, same_arrays

WORKERS = 8
Indices = list[int]
Held = dict[int, np.ndarray]


# The model


def reaches(n: int, parts: int, size: int, stride: int, padding: int, dilation: int) -> list[Any]:
    """By block: the indices from the first to the last that its outputs touch, padding included."""
    windows = [
        [o * stride - padding + j * dilation for j in range(size)] for o in range(n + 2 * padding)
    ]
    outputs = [touched for touched in windows if touched[-1] < n + padding]
    result = []
    for mine in np.array_split(np.arange(len(outputs)), parts):
        touched = [i for o in mine for i in outputs[o]]
        result.append(list(range(min(touched), max(touched) + 1)) if touched else [])
    return result


def cuts(n: int, parts: int) -> list[Indices]:
    """Balanced blocks of n indices."""
    return [block.tolist() for block in np.array_split(np.arange(n), parts)]


def block_numbers(X: TensorSpace, worker: int) -> list[int]:
    """Which block of each dimension a worker has."""
    at = X.partition.coordinates(worker)
    return [at[X.axes.index(d)] if d in X.axes else 0 for d in range(X.ndim)]


def inputs(X: TensorSpace, kernel: Description) -> list[list[Indices]]:
    """By dimension and block: the indices of the tensor that its outputs need."""
    columns = zip(X.global_shape, *(kernel[k] for k in KERNEL), strict=True)
    parts = [X.partition.shape[X.axes.index(d)] if d in X.axes else 1 for d in range(X.ndim)]
    return [
        [[i for i in reach if 0 <= i < n] for reach in reaches(n, p, *row)]
        for p, (n, *row) in zip(parts, columns, strict=True)
    ]


def needs(X: TensorSpace, kernel: Description) -> dict[int, list[Indices]]:
    """By worker and dimension: the indices of the tensor that it needs."""
    needed = inputs(X, kernel)
    return {
        w: [dim[k] for dim, k in zip(needed, block_numbers(X, w), strict=True)]
        for w in X.partition.workers
    }


def wholes(X: TensorSpace, x: Held) -> Held:
    """By worker: the global array that it and the holders of the same copy have together."""
    copied = [k for k, role in enumerate(X.axes) if role is COPIES]
    result = {}
    for worker in x:
        at: list[Any] = [slice(None)] * X.partition.ndim
        for k in copied:
            at[k] = X.partition.coordinates(worker)[k]
        whole = np.zeros(X.global_shape, X.dtype)
        for other in np.ravel(X.partition.grid[tuple(at)]).tolist():
            whole[X.slices(other)] = x[other]
        result[worker] = whole
    return result


KERNEL = ("kernel_size", "stride", "padding", "dilation")
exchanges = halos(WORKERS, COMPUTED)


def exchange_of(described: Description, **options: Any) -> Any:
    """The tensor, the kernel and the operator."""
    X, kernel = tensor_of(described["source"]), {k: described[k] for k in KERNEL}
    return X, kernel, linop.halo_exchange(X, **kernel, **options)


# Geometry: appendix B and brute force

FIGURES: dict[str, tuple[tuple[int, int], dict[str, int], list[tuple[int, ...]]]] = {
    # Input length and workers; kernel; by worker: start, stop, halos, paddings, unused.
    "B2": ((11, 3), {"kernel_size": 5, "padding": 2}, [
        (0, 6, 0, 2, 2, 0, 0, 0), (2, 10, 2, 2, 0, 0, 0, 0), (6, 11, 2, 0, 0, 2, 0, 0)]),
    "B3": ((11, 3), {"kernel_size": 5}, [
        (0, 7, 0, 3, 0, 0, 0, 0), (3, 9, 1, 1, 0, 0, 0, 0), (5, 11, 3, 0, 0, 0, 0, 0)]),
    # The figure's indices run from 0 to 9, whatever its caption says.
    "B4": ((10, 3), {"kernel_size": 2, "stride": 2}, [
        (0, 4, 0, 0, 0, 0, 0, 0), (4, 8, 0, 1, 0, 0, 0, 0), (8, 10, 0, 0, 0, 0, 1, 0)]),
    "B5": ((20, 6), {"kernel_size": 2, "stride": 2}, [
        (0, 4, 0, 0, 0, 0, 0, 0), (4, 8, 0, 0, 0, 0, 0, 0), (8, 12, 0, 1, 0, 0, 0, 0),
        (12, 16, 0, 2, 0, 0, 1, 0), (16, 18, 0, 1, 0, 0, 2, 0), (18, 20, 0, 0, 0, 0, 1, 0)]),
}  # fmt: skip


@pytest.mark.parametrize("figure", FIGURES)
def test_the_figures_of_appendix_b(figure: str) -> None:
    (n, parts), kernel, rows = FIGURES[figure]
    wanted = [HaloDim(*row) for row in rows]
    geometry = linop.halo_geometry(n, Partition(parts), **kernel)
    assert geometry == {w: (dim,) for w, dim in enumerate(wanted)}
    X = TensorSpace(n, Partition(parts), np.int64)
    y = held(linop.halo_exchange(X, **kernel)(X.scatter(np.arange(n))))
    assert [a.tolist() for a in y.values()] == [list(range(h.start, h.stop)) for h in wanted]


def same_geometry(dim: HaloDim, n: int, reach: Indices, own: Indices) -> None:
    """Inputs that a worker needs in one dimension, counted index by index."""
    needed = [i for i in reach if 0 <= i < n]
    first, behind = (own[0], own[-1] + 1) if own else (n, n)  # empty blocks are the last ones
    assert list(range(dim.start, dim.stop)) == needed
    assert 0 <= dim.start <= dim.stop <= n
    assert dim.left_halo == sum(i < first for i in needed)
    assert dim.right_halo == sum(i >= behind for i in needed)
    assert dim.left_padding == sum(i < 0 for i in reach)
    assert dim.right_padding == sum(i >= n for i in reach)
    if needed:
        assert dim.left_unused == sum(i < needed[0] for i in own)
        assert dim.right_unused == sum(i > needed[-1] for i in own)
    else:
        assert dim.left_unused + dim.right_unused == len(own)


@st.composite
def layers(draw: st.DrawFn) -> Description:
    """A kernel that fits a tensor, whose first dimensions a grid cuts."""
    ndim = draw(st.integers(1, 2))
    kernel = draw(kernels(ndim))
    columns = zip(*(kernel[k] for k in ("kernel_size", "padding", "dilation")), strict=True)
    least = [max(0, d * (size - 1) + 1 - 2 * p) for size, p, d in columns]
    shape = tuple(n + draw(st.integers(0, 14 // ndim)) for n in least)
    return {"shape": shape, "grid": draw(grids(WORKERS, 1, ndim)), "kernel": kernel}


def line(n: int, workers: int, size: int, stride: int, padding: int) -> Description:
    """A layer of one dimension."""
    kernel = {"kernel_size": (size,), "stride": (stride,), "padding": (padding,), "dilation": (1,)}
    return {"shape": (n,), "grid": (workers,), "kernel": kernel}


@given(layer=layers())
@example(line(11, 8, 1, 3, 0))  # needs of worker 3 begin behind its own block
@example(line(1, 5, 1, 1, 2))  # worker 0 needs nothing but padding
def test_geometry_is_what_the_outputs_touch(layer: Description) -> None:
    shape, kernel, partition = layer["shape"], layer["kernel"], Partition(layer["grid"])
    geometry = linop.halo_geometry(shape, partition, **kernel)
    assert list(geometry) == list(partition.workers)
    X = TensorSpace(shape, partition)
    for worker, dims in geometry.items():
        assert len(dims) == len(shape)
        for d, (dim, k) in enumerate(zip(dims, block_numbers(X, worker), strict=True)):
            parts = partition.shape[d] if d < partition.ndim else 1
            row = [kernel[name][d] for name in KERNEL]
            reach = reaches(shape[d], parts, *row)[k]
            same_geometry(dim, shape[d], reach, cuts(shape[d], parts)[k])


# The exchange


@given(described=exchanges, seed=seeds)
def test_everyone_gets_what_its_outputs_need(described: Description, seed: int) -> None:
    X, kernel, H = exchange_of(described)
    assert H.domain == X
    x = X.integers(seed)
    given_, whole = held(H(x)), wholes(X, held(x))
    for worker, needed in needs(X, kernel).items():
        same_arrays(given_.pop(worker), whole[worker][np.ix_(*needed)])
    assert not given_


@given(described=exchanges, seed=seeds)
def test_in_place_it_fills_the_halo_and_keeps_the_bulk(described: Description, seed: int) -> None:
    X, kernel, H = exchange_of(described, in_place=True)
    E = H.domain
    assert H.codomain == E
    e, x = E.integers(seed), held(X.integers(seed + 1))  # the halos hold garbage at first

    def within(worker: int, box: Sequence[Any]) -> Any:
        columns = zip(box, E.slices(worker), strict=True)
        return np.ix_(*(np.array(indices, int) - s.start for indices, s in columns))

    bulk = {w: within(w, [range(s.start, s.stop) for s in X.slices(w)]) for w in x}
    for worker, array in held(e).items():
        array[bulk[worker]] = x[worker]
    given_, whole = held(H(e)), wholes(X, x)
    for worker, needed in needs(X, kernel).items():
        same_arrays(given_[worker][bulk[worker]], x[worker])
        same_arrays(given_[worker][within(worker, needed)], whole[worker][np.ix_(*needed)])


@given(described=exchanges)
def test_the_adjoint_adds_back_as_often_as_it_was_given(described: Description) -> None:
    X, kernel, H = exchange_of(described)
    Y = H.codomain
    back = held(H.H(Y.vector({r.name: np.ones(r.shape, X.dtype) for r in Y})))
    times = [
        np.array([sum(i in block for block in blocks) for i in range(n)], int)
        for n, blocks in zip(X.global_shape, inputs(X, kernel), strict=True)
    ]
    whole = reduce(np.multiply.outer, times)
    for worker in X.partition.workers:
        same_arrays(back[worker], whole[X.slices(worker)].astype(X.dtype))


def test_corners_arrive_by_way_of_neighbours() -> None:
    X = TensorSpace((4, 4, 4), Partition((2, 2, 2)), np.int64)
    values = np.arange(64).reshape(4, 4, 4)
    H = linop.halo_exchange(X, 3, padding=1)
    y = held(H(X.scatter(values)))
    assert (y[0] == values[:3, :3, :3]).all()  # the last of worker 7, across the corner
    assert (y[7] == values[1:, 1:, 1:]).all()
    for d in range(3):
        ends = messages(H, d)
        assert len(ends) == 8
        for sender, receiver in ends:
            there, here = X.partition.coordinates(sender), X.partition.coordinates(receiver)
            assert [k for k in range(3) if there[k] != here[k]] == [d]


def messages(H: Any, dim: int) -> list[tuple[int, int]]:
    """The (sender, receiver) of every exchange along a dimension, by its buffers."""
    (stage,) = (f for f in H.body.factors if str(f) == f"C_{{E{dim}}}")
    buffers = {r.name: r.workers for r in stage.domain if r.name[0] in "sr"}
    sends = [name for name in buffers if name.startswith("s")]
    return [(*buffers[name], *buffers["r" + name[1:]]) for name in sends]


def test_a_halo_comes_from_further_workers_too() -> None:
    X = TensorSpace(6, Partition(6), np.int64)
    H = linop.halo_exchange(X, 7, padding=3)
    y = held(H(X.scatter(np.arange(6))))
    assert y[0].tolist() == [0, 1, 2, 3]
    assert y[3].tolist() == [0, 1, 2, 3, 4, 5]
    assert {a for a, b in messages(H, 0) if b == 0} == {1, 2, 3}
    few = TensorSpace(2, Partition(4), np.int64)  # two workers have no elements, but outputs
    z = held(linop.halo_exchange(few, 2, padding=2)(few.scatter(np.array([5, 6]))))
    assert [a.tolist() for a in z.values()] == [[5], [5, 6], [6], []]


# Equations 10 to 12


def stages(op: Any) -> list[str]:
    """The factors of a composition, in print, without the buffers that come and go."""
    return [str(f) for f in op.body.factors if str(f)[0] not in "AD"]


def test_one_dimension_reads_as_equation_10() -> None:
    H = linop.halo_exchange(TensorSpace(6, Partition(2)), 3, padding=1, in_place=True)
    assert (str(H), str(H.H)) == ("H", "H*")
    buffers = "{s0:1→0,s0:0→1,r0:1→0,r0:0→1}"
    eq_10 = "K_{T0} C_{U0} C_{E0} C_{P0} K_{S0}"
    adjoint = "K_{S0}* C_{P0}* C_{E0}* C_{U0}* K_{T0}*"
    assert str(H.body) == f"D_{buffers} {eq_10} A_{buffers}"
    assert str(H.H.body) == f"D_{buffers} {adjoint} A_{buffers}"


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("in_place", [True, False])
def test_dimensions_nest_as_in_equations_11_and_12(ndim: int, in_place: bool) -> None:
    X = TensorSpace((4,) * ndim, Partition((2,) * ndim))
    H = linop.halo_exchange(X, 3, padding=1, in_place=in_place)
    names = ("K_{{T{}}}", "C_{{U{}}}", "C_{{E{}}}", "C_{{P{}}}", "K_{{S{}}}")
    wanted = [name.format(d) for d in reversed(range(ndim)) for name in names]
    if not in_place:
        wanted = ["C_{trim}", *wanted, "C_{bulk}"]
    assert stages(H) == wanted
    assert stages(H.H) == [name + "*" for name in reversed(wanted)]


def test_without_neighbours_nothing_is_exchanged() -> None:
    for X in (TensorSpace(6, Partition(1)), TensorSpace((2, 6), Partition(2), axes=[0])):
        H = linop.halo_exchange(X, (1, 3)[2 - X.ndim :])
        assert stages(H) == ["C_{trim}", "C_{bulk}"]
        assert H.cost().messages == 0


# Sliding kernels on many workers


def distributed(layer: Description, weights: np.ndarray) -> tuple[TensorSpace, TensorSpace, Any]:
    """The input and output blocks, and local convolutions after a halo exchange."""
    options = {k: v for k, v in layer["kernel"].items() if k != "kernel_size"}
    partition = Partition(layer["grid"])
    X = TensorSpace(layer["shape"], partition, np.int64)
    Y = TensorSpace(slid(np.zeros(X.global_shape, int), weights, **options).shape, partition,
                    np.int64, name="y")  # fmt: skip
    H = linop.halo_exchange(X, **layer["kernel"])
    local = []
    for worker, dims in linop.halo_geometry(X.global_shape, partition, **layer["kernel"]).items():
        options["padding"] = [(dim.left_padding, dim.right_padding) for dim in dims]
        source, target = H.codomain[f"x@{worker}"], Y.region(worker)
        local.append(linop.local_operators.convolution(weights, linop.Space(source, np.int64),
                                       linop.Space(target, np.int64), **options))  # fmt: skip
    return X, Y, linop.direct_sum(*local) @ H


def slid(a: np.ndarray, weights: np.ndarray, stride: Any, padding: Any, dilation: Any) -> Any:
    """The sliding product of a kernel with the whole array."""
    padded = np.pad(a, [(p, p) for p in padding])
    columns = zip(padded.shape, weights.shape, stride, dilation, strict=True)
    out = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in columns]
    result = np.zeros(out, a.dtype)
    for at in np.ndindex(weights.shape):
        columns = zip(at, dilation, out, stride, strict=True)
        box = tuple(slice(i * d, i * d + (m - 1) * s + 1, s) for i, d, m, s in columns)
        result += weights[at] * padded[box]
    return result


@given(layer=layers(), seed=seeds)
def test_a_distributed_convolution_is_the_one_worker_convolution(
    layer: Description, seed: int
) -> None:
    weights = whole_numbers(layer["kernel"]["kernel_size"], np.int64, seed, 9)
    X, Y, C = distributed(layer, weights)
    values = whole_numbers(X.global_shape, np.int64, seed + 1, 9)
    options = {k: v for k, v in layer["kernel"].items() if k != "kernel_size"}
    wanted = slid(values, weights, **options)
    same_arrays(Y.gather(C(X.scatter(values))), wanted)
    one = Partition((1,) * X.ndim)
    X_0, Y_0 = (TensorSpace(Z.global_shape, one, np.int64, name="z") for Z in (X, Y))
    alone = linop.local_operators.convolution(weights, X_0, Y_0, **options)
    same_arrays(alone(values), wanted)
    # Proven for all vectors: the matrices are known.
    assert (C @ linop.scatter(X_0, X)).equals(linop.scatter(Y_0, Y) @ alone)


@given(data=st.data(), in_place=st.booleans())
def test_widths_of_each_side(data: st.DataObject, in_place: bool) -> None:
    X = tensor_of(data.draw(tensors(WORKERS, dtypes=COMPUTED)))
    sides = st.tuples(st.integers(0, 5), st.integers(0, 5))
    widths = [data.draw(sides) for _ in range(X.ndim)]
    H = linop.halo_exchange(X, widths=widths, in_place=in_place)
    bounds = [
        tuple((max(a - x, 0), min(b + y, n)) if a < b else (a, b) for a, b in cuts)
        for cuts, n, (x, y) in zip(X.bounds, X.global_shape, widths, strict=True)
    ]
    assert list(H.codomain.bounds) == bounds
    x = {r.workers[0]: whole_numbers(r.shape, X.dtype, k, 9) for k, r in enumerate(X.regions)}
    whole = wholes(X, {w: x[X.region(w).workers[0]] for w in X.partition.workers})
    given = {X.region(w).name: x[w] for w in x}
    if in_place:
        given = {r.name: np.zeros(r.shape, X.dtype) for r in H.domain.regions}
        for w, block in x.items():
            inside = [
                slice(a.start - b.start, a.stop - b.start)
                for a, b in zip(X.slices(w), H.domain.slices(w), strict=True)
            ]
            given[H.domain.region(w).name][(*inside, ...)] = block
    found = H(H.domain.vector(given))
    for worker in x:
        region = H.codomain.region(worker)
        assert (found[region.name] == whole[worker][(*H.codomain.slices(worker), ...)]).all()


# Rejected, with the reason

X = TensorSpace((6, 4), Partition((2, 2)))
LINE = TensorSpace(6, Partition(3))
GAP = TensorSpace(6, Partition(2), bounds={0: ((0, 2), (3, 6))})
OVERLAP = TensorSpace(6, Partition(2), bounds={0: ((0, 4), (3, 6))})
FOLLOW = "halo_exchange: the blocks of X must follow one another"

BAD: dict[str, tuple[Callable[[], Any], type[LinopError], str]] = {
    "no tensor": (lambda: linop.halo_exchange(linop.Space([]), 3), ArgumentError,
                  "halo_exchange: expected a TensorSpace, given "),
    "no output": (lambda: linop.halo_exchange(X, (1, 3), 1, 0, 2), ShapeError,
                  "dimension 1 of extent 4: a kernel of size 3, dilation 2 and padding 0 does not "
                  "fit; there is no output"),
    "too few": (lambda: linop.halo_geometry((6, 4), Partition(2), 3, padding=[1]), ShapeError,
                "padding: 1 numbers for 2 dimensions: (1,)"),
    "no kernel": (lambda: linop.halo_exchange(X, (3, 0)), ShapeError,
                  "kernel_size: (3, 0); each is at least 1"),
    "grid": (lambda: linop.halo_geometry(6, Partition((2, 2)), 3), PartitionError,
             "grid axis 1 of Partition((2, 2)) splits dimension 1, which a tensor of shape (6,)"),
    "no grid": (lambda: linop.halo_geometry(6, "x", 3), ArgumentError, "expected a Partition,"),
    "turned": (lambda: linop.halo_exchange(linop.shift(LINE, 1).codomain, 3), PartitionError,
               FOLLOW),
    "dropped": (lambda: linop.halo_exchange(linop.shift(LINE, 1, periodic=False).codomain, 3),
                PartitionError, FOLLOW),
    "gap": (lambda: linop.halo_exchange(GAP, 3), PartitionError, FOLLOW),
    "overlap": (lambda: linop.halo_exchange(OVERLAP, 3), PartitionError, FOLLOW),
    "negative": (lambda: linop.halo_exchange(X, 3, 1, -1), LinopError, "padding: "),
    "both": (lambda: linop.halo_exchange(X, 3, widths=1), ArgumentError,
             "halo_exchange: give a kernel (kernel_size, stride, padding, dilation) or widths"),
    "neither": (lambda: linop.halo_exchange(X), ArgumentError, "halo_exchange: give a kernel"),
    "stride": (lambda: linop.halo_exchange(X, stride=2, widths=1), ArgumentError,
               "halo_exchange: give a kernel"),
    "widths": (lambda: linop.halo_exchange(X, widths=[(1, 2)]), ShapeError,
               "widths: [(1, 2)] for 2 dimensions; numbers from 0 expected"),
    "below": (lambda: linop.halo_exchange(X, widths=-1), ShapeError, "widths: -1 for 2 dimensions"),
    "half": (lambda: linop.halo_exchange(X, 2.5), LinopError, "kernel_size: "),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_parameters_are_named(case: str) -> None:
    attempt, error, message = BAD[case]
    with pytest.raises(error, match=re.escape(message)):
        attempt()


def test_a_wrong_geometry_is_noticed() -> None:
    with pytest.raises(AssertionError):
        same_geometry(HaloDim(0, 6, 0, 1, 2, 0, 0, 0), 11, list(range(-2, 6)), [0, 1, 2, 3])
