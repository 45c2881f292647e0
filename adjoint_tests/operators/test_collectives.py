"""Every collective against a model of its own: what it means for the global array.

A model gives the array that each worker must hold in the end, from the arrays that the workers hold
at first, their coordinates and NumPy. Of linop it uses `Partition` and `TensorSpace.slices` alone.
The data are whole numbers, and compared with ``==``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import linop
from linop import COPIES, REPLICATED, LinearOperator, Partition, Region, Space, TensorSpace
from linop.errors import ArgumentError, LinopError, PartitionError, RegionError, ShapeError
from linop.spaces.blocks import is_disjoint
from linop.testing.describing import (
    COMPUTED,
    Description,
    grids,
    orders,
    seeds,
    spaces,
    tensor_of,
    tensors,
)
from support.operators.properties import held, same_arrays

WORKERS = 8
Held = dict[int, np.ndarray]
"""The array that each worker holds."""


def results_in(op: LinearOperator, seed: int, wanted: Callable[[Held], Mapping[int, Any]]) -> None:
    """The operator, applied to whole numbers, gives each worker what the model says."""
    x = op.domain.integers(seed)
    given, model = held(op(x)), wanted(held(x))
    assert given.keys() == model.keys()
    for worker, array in given.items():
        same_arrays(array, np.asarray(model[worker], op.dtype))


def along(partition: Partition, worker: int, grid_axes: Sequence[int]) -> list[int]:
    """The workers that differ from this one in their coordinates along these axes alone."""
    at: list[Any] = list(partition.coordinates(worker))
    for axis in grid_axes:
        at[axis] = slice(None)
    return [int(w) for w in np.ravel(partition.grid[tuple(at)])]


def sums_along(partition: Partition, grid_axes: Sequence[int]) -> Callable[[Held], Held]:
    """Every worker has the sum over the workers along these axes."""
    lines = {w: along(partition, w, grid_axes) for w in partition.workers}
    return lambda y: {w: sum((y[v] for v in line), 0 * y[w]) for w, line in lines.items()}


def joined(X: TensorSpace, x: Held, workers: Sequence[int]) -> np.ndarray:
    """The global array, as far as these workers hold it; zeros elsewhere."""
    whole = np.zeros(X.global_shape, X.dtype)
    for worker in workers:
        whole[X.slices(worker)] = x[worker]
    return whole


def pieces(Y: TensorSpace, whole: np.ndarray) -> Held:
    """Blocks of the global array, by worker of a tensor space."""
    return {w: whole[Y.slices(w)] for w in Y.partition.workers}


def split_axes(described: Description) -> list[int]:
    """The grid axes that split a dimension."""
    return [k for k, role in enumerate(described["axes"]) if isinstance(role, int)]


def free_dims(described: Description) -> list[int]:
    """The dimensions that no grid axis splits."""
    return [d for d in range(len(described["shape"])) if d not in described["axes"]]


def whole_tensors(shape: Any = None, **kwargs: Any) -> st.SearchStrategy[Description]:
    """Tensors without copies, each element of which is in one block."""
    drawn = tensors(WORKERS, dtypes=COMPUTED, roles=("split", "replicated"), shape=shape, **kwargs)
    return drawn.filter(lambda t: is_disjoint(tensor_of(t)))


# From blocks to other blocks


@given(space=spaces(WORKERS, COMPUTED, ndim=2), to=st.integers(0, 7), seed=seeds)
def test_send_recv_is_a_copy(space: Description, to: int, seed: int) -> None:
    X = Space([Region(*r) for r in space["regions"]], space["dtype"])
    new = Region("new", (sent := X.regions[0]).shape, to)
    Y = Space([*X, new], X.dtype)
    x, y = X.integers(seed), Y.integers(seed)
    for before in (x, y):  # out of place, and in place
        after = linop.send_recv(before.space, sent, new)(before)
        assert all((after[r.name] == before[r.name]).all() for r in X)
        same_arrays(after["new"], before[sent.name])
    back = linop.send_recv(Y, sent, new).H(y)
    same_arrays(back[sent.name], y[sent.name] + y["new"])
    assert not back["new"].any()


@given(data=st.data(), seed=seeds)
def test_repartition_keeps_the_global_array(data: st.DataObject, seed: int) -> None:
    source, overlap = data.draw(whole_tensors()), data.draw(st.booleans())
    like = {"dtypes": (source["dtype"],), "shape": source["shape"], "overlapping": overlap}
    X, Y = tensor_of(source), tensor_of(data.draw(tensors(WORKERS, **like)))
    P = linop.repartition(X, Y)
    assert (P.domain, P.codomain) == (X, Y)
    results_in(P, seed, lambda x: pieces(Y, joined(X, x, X.partition.workers)))
    if is_disjoint(Y) and not overlap:
        assert (linop.repartition(Y, X) @ P).equals(linop.identity(X))


@pytest.mark.parametrize("there", [(4, 5, 6, 7), (2, 3, 4, 5), (3, 2, 1, 0)])
def test_repartition_to_disjoint_and_overlapping_workers(there: tuple[int, ...]) -> None:
    X = TensorSpace((3, 7), Partition((4,)), sizes={0: (0, 2, 0, 1)})
    Y = TensorSpace((3, 7), Partition((2, 2), there), sizes={1: (6, 1)})
    P = linop.repartition(X, Y)
    results_in(P, 3, lambda x: pieces(Y, joined(X, x, range(4))))
    assert (P.H @ P).equals(linop.identity(X))
    assert (P @ P.H).equals(linop.identity(Y))


@given(data=st.data(), worker=st.integers(0, 7), seed=seeds)
def test_scatter_and_gather(data: st.DataObject, worker: int, seed: int) -> None:
    Y = tensor_of(data.draw(whole_tensors()))
    grid = Partition((1,) * Y.ndim, [worker])
    X = TensorSpace(Y.global_shape, grid, Y.dtype, name=Y.name, memory=Y.memory)
    S, G = linop.scatter(X, Y), linop.gather(Y, worker)
    results_in(S, seed, lambda x: pieces(Y, x[worker]))
    results_in(G, seed, lambda y: {worker: joined(Y, y, Y.partition.workers)})
    assert (G @ S).equals(linop.identity(X))
    assert G.equals(S.H)


# Copies: broadcast and sum-reduction


@st.composite
def foldings(draw: st.DrawFn) -> tuple[Partition, Partition, bool, bool]:
    """A small grid, a large one that it is broadcast to, and whether to reverse each before."""
    large = draw(grids(WORKERS))
    small = tuple(n if draw(st.booleans()) else 1 for n in large)
    while small[:1] == (1,) and draw(st.booleans()):
        small = small[1:]
    flips = draw(st.booleans()), draw(st.booleans())
    few, many = (s[::-1] if flip else s for s, flip in zip((small, large), flips, strict=True))
    few_workers, many_workers = (draw(orders(WORKERS, math.prod(s))) for s in (few, many))
    return Partition(few, few_workers), Partition(many, many_workers), *flips


def meeting(small: Partition, large: Partition, *flips: bool) -> dict[int, int]:
    """The worker of the small grid that each one of the large grid meets."""
    few = small.grid.T if flips[0] else small.grid
    many = large.grid.T if flips[1] else large.grid
    matched = np.broadcast_to(few, many.shape)
    return dict(zip(many.ravel().tolist(), matched.ravel().tolist(), strict=True))


@given(data=st.data(), folding=foldings(), seed=seeds)
def test_broadcast_copies_as_numpy_broadcasts(data: st.DataObject, folding: Any, seed: int) -> None:
    small, large, *flips = folding
    source = data.draw(tensors(WORKERS, dtypes=COMPUTED, grid=small.shape))
    X = tensor_of({**source, "workers": small.workers})
    B, meets = linop.broadcast(X, large, *flips), meeting(*folding)
    results_in(B, seed, lambda x: {w: x[source] for w, source in meets.items()})
    R = linop.sum_reduce(B.codomain, small, *flips[::-1])
    assert R.equals(B.H)
    assert B.equals(R.H)


@given(data=st.data(), folding=foldings(), seed=seeds)
def test_sum_reduce_sums_what_meets(data: st.DataObject, folding: Any, seed: int) -> None:
    small, large, flip_small, flip_large = folding
    ndim, meets = large.ndim, meeting(*folding)
    few = (1,) * (ndim - small.ndim) + (small.shape[::-1] if flip_small else small.shape)
    few = few[::-1] if flip_large else few
    fixed = {k: "copies" for k in range(ndim) if few[k] < large.shape[k]}
    source = data.draw(tensors(WORKERS, dtypes=COMPUTED, grid=large.shape, fixed=fixed))
    Y = tensor_of({**source, "workers": large.workers})
    R = linop.sum_reduce(Y, small, transpose_src=flip_large, transpose_dest=flip_small)
    senders = {w: [s for s, to in meets.items() if to == w] for w in small.workers}
    results_in(R, seed, lambda y: {w: sum(y[s] for s in many) for w, many in senders.items()})


EXAMPLES: dict[int, tuple[Any, ...]] = {
    # Of DistDL's page on sum-reduction: source grid, destination grid, transposed?, and sums over
    # the source's workers.
    1: ((4,), (1,), {}, lambda a: a.sum(0, keepdims=True)),
    2: ((2, 3), (1,), {}, lambda a: a.sum((0, 1))[None]),
    3: ((3, 4), (3, 1), {}, lambda a: a.sum(1, keepdims=True)),
    4: ((4, 4, 3), (1, 1, 3), {}, lambda a: a.sum((0, 1), keepdims=True)),
    7: ((3, 4), (1, 3), {"transpose_src": True}, lambda a: a.sum(1)[None]),
    8: ((3, 4), (4, 1), {"transpose_dest": True}, lambda a: a.sum(0)[:, None]),
    61: ((1, 3), (3, 1), {"transpose_src": True}, lambda a: a.swapaxes(0, 1)),
    62: ((1, 3), (3, 1), {"transpose_dest": True}, lambda a: a.swapaxes(0, 1)),
}


@pytest.mark.parametrize("number", EXAMPLES)
def test_reduction_rules_by_example(number: int) -> None:
    source, destination, flips, sums = EXAMPLES[number]
    Y = TensorSpace((2, 3), Partition(source), axes=[COPIES] * len(source))
    small = Partition(destination, range(5, 5 + math.prod(destination)))
    values = np.arange(Y.partition.size * 6.0).reshape(*source, 2, 3)
    y = Y.vector({Y.region(w).name: values[Y.partition.coordinates(w)] for w in Y.workers})
    given, wanted = held(linop.sum_reduce(Y, small, **flips)(y)), sums(values)
    assert wanted.shape == (*destination, 2, 3)
    for worker in small.workers:
        same_arrays(given[worker], wanted[small.coordinates(worker)])


REFUSED = {
    5: ((3, 3, 2), (1, 1, 3), "grid axis 2 does not match: 3 in the destination grid 1×1×3, 2 in "),
    6: ((1, 3), (3, 1), "grid axis 0 does not match: 3 in the destination grid 3×1, 1 in "),
}


@pytest.mark.parametrize("number", REFUSED)
def test_reduction_rules_refuse(number: int) -> None:
    source, destination, message = REFUSED[number]
    Y, X = (TensorSpace((), Partition(g), axes=[COPIES] * len(g)) for g in (source, destination))
    with pytest.raises(PartitionError, match=re.escape("sum_reduce: " + message)):
        linop.sum_reduce(Y, X.partition)
    with pytest.raises(PartitionError, match=message.replace("destination", "source")):
        linop.broadcast(X, Y.partition)


def test_transposed_the_worker_at_i_j_stands_at_j_i() -> None:
    X = TensorSpace((4, 6), Partition((2, 3)))
    for flip in ({"transpose_src": True}, {"transpose_dest": True}):
        B = linop.broadcast(X, Partition((3, 2), range(6, 12)), **flip)
        Y: Any = B.codomain
        x = X.scatter(np.arange(24.0).reshape(4, 6))
        y = held(B(x))
        for i, j in np.ndindex(2, 3):
            at_i_j, at_j_i = X.partition.worker((i, j)), Y.partition.worker((j, i))
            same_arrays(y[at_j_i], x[f"x@{at_i_j}"])
        assert (Y.axes, Y.gather(B(x)).tolist()) == ((1, 0), X.gather(x).tolist())


@given(described=tensors(WORKERS, dtypes=COMPUTED), chosen=st.sets(st.integers(0, 2)), seed=seeds)
def test_all_reduce_sums_the_copies(described: Description, chosen: set[int], seed: int) -> None:
    Y = tensor_of(described)
    axes = [k for k, role in enumerate(Y.axes) if role is COPIES and k in chosen]
    sums = sums_along(Y.partition, axes)
    A, ring = linop.all_reduce(Y, axes), linop.ring_all_reduce(Y, axes)
    results_in(A, seed, sums)
    results_in(ring, seed, sums)
    assert A.domain == A.codomain == ring.codomain == Y
    assert A.equals(A.H)
    assert A.equals(ring)
    assert ring.equals(ring.H)


@given(described=tensors(WORKERS, dtypes=COMPUTED, roles=("split", "replicated")), seed=seeds)
def test_replicated_into_copies_costs_no_message(described: Description, seed: int) -> None:
    V = tensor_of(described)
    assume(is_disjoint(V))
    axes = [k for k, role in enumerate(V.axes) if role is REPLICATED]
    roles = [COPIES if role is REPLICATED else role for role in V.axes]
    cuts = dict(enumerate(V.bounds))
    Y = TensorSpace(V.global_shape, V.partition, V.dtype, roles, "c", bounds=cuts)
    E = linop.repartition(V, Y)
    assert E.cost().messages == 0
    results_in(E, seed, lambda x: x)
    results_in(E.H, seed, sums_along(V.partition, axes))
    assert (E @ E.H).equals(linop.all_reduce(Y, axes))


# Along lines of workers


@given(data=st.data(), into=st.sampled_from([COPIES, REPLICATED]), seed=seeds)
def test_all_gather_joins_blocks(data: st.DataObject, into: Any, seed: int) -> None:
    X = tensor_of(described := data.draw(tensors(WORKERS, dtypes=COMPUTED)))
    axes = [k for k in split_axes(described) if data.draw(st.booleans())]
    dims, workers = [X.axes[k] for k in axes], X.partition.workers
    G = linop.all_gather(X, axes, into)

    def boxes(gathered: bool) -> dict[int, Any]:
        return {
            w: tuple(slice(None) if (d in dims) == gathered else s for d, s in enumerate(at))
            for w, at in zip(workers, map(X.slices, workers), strict=True)
        }

    lines, kept, cut = {w: along(X.partition, w, axes) for w in workers}, boxes(True), boxes(False)
    results_in(G, seed, lambda x: {w: joined(X, x, lines[w])[kept[w]] for w in workers})
    if into is REPLICATED:
        assert G.H.cost().messages == 0
        results_in(G.H, seed, lambda y: {w: y[w][cut[w]] for w in workers})
    elif "sizes" not in described:
        assert G.H.equals(linop.reduce_scatter(G.codomain, axes, dims))


@given(data=st.data(), seed=seeds)
def test_reduce_scatter_sums_and_cuts(data: st.DataObject, seed: int) -> None:
    described = data.draw(tensors(WORKERS, dtypes=COMPUTED, ndim=data.draw(st.integers(1, 3))))
    Y, free = tensor_of(described), free_dims(described)
    copied = [k for k, role in enumerate(Y.axes) if role is COPIES]
    axes = data.draw(st.permutations(copied))[: data.draw(st.integers(0, len(free)))]
    dims = data.draw(st.permutations(free))[: len(axes)]

    def wanted(y: Held) -> Held:
        result = {}
        for w, part in sums_along(Y.partition, axes)(y).items():
            for k, d in zip(axes, dims, strict=True):
                part = np.array_split(part, Y.partition.shape[k], d)[Y.partition.coordinates(w)[k]]
            result[w] = part
        return result

    results_in(linop.reduce_scatter(Y, axes, dims), seed, wanted)


@given(data=st.data(), seed=seeds)
def test_all_to_all_joins_one_dimension_and_cuts_another(data: st.DataObject, seed: int) -> None:
    described = data.draw(tensors(WORKERS, dtypes=COMPUTED, ndim=3, fixed={0: "split"}))
    assume(free_dims(described))
    X, axis = tensor_of(described), data.draw(st.sampled_from(split_axes(described)))
    P, old, new = X.partition, X.axes[axis], data.draw(st.sampled_from(free_dims(described)))

    def wanted(x: Held) -> Held:
        lines = {w: np.concatenate([x[v] for v in along(P, w, [axis])], old) for w in P.workers}
        cut = {w: np.array_split(line, P.shape[axis], new) for w, line in lines.items()}
        return {w: cut[w][P.coordinates(w)[axis]] for w in P.workers}

    T = linop.all_to_all(X, axis, new)
    results_in(T, seed, wanted)
    assert (T.H @ T).equals(linop.identity(X))


def test_shift_goes_to_higher_coordinates() -> None:
    X = TensorSpace(3, Partition(3), np.int64)
    x = X.scatter(np.array([5, 6, 7]))
    for periodic, wanted in ((True, [7, 5, 6]), (False, [0, 5, 6])):
        y = held(linop.shift(X, 1, periodic=periodic)(x))
        assert [y[w].item() for w in range(3)] == wanted


@given(data=st.data(), steps=st.integers(-9, 9), periodic=st.booleans(), seed=seeds)
def test_shift_moves_blocks(data: st.DataObject, steps: int, periodic: bool, seed: int) -> None:
    X = tensor_of(data.draw(tensors(WORKERS, dtypes=COMPUTED)))
    assume(axes := [k for k, role in enumerate(X.axes) if role is not REPLICATED])
    n = X.partition.shape[axis := data.draw(st.sampled_from(axes))]

    def wanted(x: Held) -> Held:
        result = {}
        for w in X.partition.workers:
            line, k = along(X.partition, w, [axis]), X.partition.coordinates(w)[axis] - steps
            result[w] = x[line[k % n]] if periodic or 0 <= k < n else np.zeros_like(x[w])
        return result

    S = linop.shift(X, steps, axis, periodic)
    results_in(S, seed, wanted)
    if periodic:
        assert (S.H @ S).equals(linop.identity(X))


# Rejected, with the reason

SPLIT = TensorSpace((4, 6), Partition((2, 2)))
COPIED = TensorSpace((4, 6), Partition((2, 2)), axes=[0, COPIES])
SHARED = TensorSpace((4, 6), Partition((2, 2)), axes=[0, REPLICATED])
PAIR = Space([Region("a", 3, 0), Region("b", 2, 1)])

BAD: list[tuple[type[LinopError], Callable[[], Any], str]] = [
    (ArgumentError, lambda: linop.broadcast(PAIR, Partition(2)), "broadcast: expected a TensorS"),
    (PartitionError, lambda: linop.broadcast(SPLIT, Partition(4)),
     "the source grid 2×2 has more axes (2) than the destination grid 4 (1)"),
    (PartitionError, lambda: linop.broadcast(SPLIT, Partition((2, 3))),
     "grid axis 1 does not match: 2 in the source grid 2×2, 3 in the destination grid 2×3"),
    (PartitionError, lambda: linop.sum_reduce(SPLIT, Partition((2, 1))),
     "grid axis 1 of the source (2×2) is to be summed, but it does not hold independent copies: "),
    (PartitionError, lambda: linop.all_reduce(SPLIT, 0), "0 does not hold independent copies: it"),
    (PartitionError, lambda: linop.ring_all_reduce(COPIED, [1, -1]), "name an axis twice"),
    (PartitionError, lambda: linop.all_gather(COPIED, 1), "axis 1 splits nothing: it is COPIES"),
    (ArgumentError, lambda: linop.all_gather(SPLIT, into=0), "COPIES or REPLICATED; given 0"),
    (ArgumentError, lambda: linop.reduce_scatter(COPIED, 1, [1, 0]), "2 dims for 1 grid axes"),
    (PartitionError, lambda: linop.repartition(COPIED, Partition(4)), "which to take is not said"),
    (PartitionError, lambda: linop.repartition(SPLIT, TensorSpace((4, 5), Partition(2), np.int32)),
     "global shape (4, 5) and dtype int32 given, (4, 6) and float64 expected"),
    (PartitionError, lambda: linop.scatter(SPLIT, Partition(4)), "on workers (0, 1, 2, 3); expect"),
    (PartitionError, lambda: linop.shift(SHARED, 1, 1), "all workers hold the same block"),
    (ShapeError, lambda: linop.send_recv(PAIR, *PAIR), "shapes (3,) and (2,) must be equal"),
    (RegionError, lambda: linop.send_recv(PAIR, Region("c", 2, 0), PAIR["b"]), "'c'"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "attempt", "message"), BAD)
def test_bad_input_is_named(error: Any, attempt: Callable[[], Any], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        attempt()


def test_a_wrong_model_is_noticed() -> None:
    with pytest.raises(AssertionError):
        results_in(linop.shift(SPLIT, 1), 0, lambda x: x)
