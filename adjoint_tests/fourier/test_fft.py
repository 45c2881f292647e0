"""Fourier transforms of tensors in blocks, beside NumPy's of the whole tensor."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import linop
from linop import COPIES, Partition, Region, Space, TensorSpace
from linop.fourier.layouts import Layouts
from linop.testing.describing import COMPLEX, Description, seeds, tensor_of, tensors
from linop.testing.factories import describe
from support.contracts import repeated_calls
from support.contracts.fourier import computes_numpy_s
from support.contracts.proofs import proven_on_ranks
from support.operators.properties import rounding
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

SCALE = {"ortho": 0.5, "backward": 0.0, "forward": 1.0}
"""The power of 1/n by which a transform is scaled."""
norms = st.sampled_from(list(SCALE))
routes = st.sampled_from(["auto", "slab", "pencil"])


def waves(shape: tuple[int, ...], grid: tuple[int, ...], *axes: Any) -> TensorSpace:
    return TensorSpace(shape, Partition(grid), complex, axes=axes or None)


@given(st.data(), tensors(8, dtypes=COMPLEX), norms, routes)
def test_transforms_of_any_blocks_are_numpy_s(
    data: st.DataObject, described: Description, norm: Any, route: Any
) -> None:
    X = tensor_of(described)
    axes = data.draw(st.sets(st.sampled_from(range(X.ndim))).map(tuple) if X.ndim else st.just(()))
    out = data.draw(st.sampled_from(["same", "transposed"]))
    F = linop.fft(X, axes, norm, out=out, route=route)
    x = np.random.default_rng(data.draw(seeds)).normal(size=(2, *X.global_shape))
    x = (x[0] + 1j * x[1]).astype(X.dtype)
    whole = x if 0 in x.shape else np.fft.fftn(x, axes=axes, norm=norm)
    near(F.codomain.gather(F(X.scatter(x))), whole)
    n = max(1, math.prod(X.global_shape[d] for d in axes))
    back = X.gather(F.H(F(X.scatter(x))))
    near(back, x * float(max(n, 1)) ** (1 - 2 * SCALE[norm]))
    assert out == "transposed" or F.codomain is X


def near(given: np.ndarray, wanted: np.ndarray) -> None:
    size = np.abs(wanted).max(initial=1.0)
    assert np.allclose(given, wanted, rtol=0, atol=64 * np.finfo(given.dtype).eps * size)


def test_copies_are_transformed_by_themselves() -> None:
    X = waves((6, 5), (2, 3), COPIES, 0)
    x = X.random(1)
    for route in ("slab", "pencil"):
        y = linop.fft(X, route=route)(x)
        for copy in X.partition.grid:
            parts = [np.concatenate([v[X.region(w).name] for w in copy]) for v in (x, y)]
            near(parts[1], np.fft.fftn(parts[0], norm="ortho"))


@given(tensors(4, dtypes=("complex128",), shape=(3, 2, 2)), st.permutations(range(3)))
def test_adjoint_of_an_orthonormal_transform_is_its_inverse(
    described: Description, order: list[int]
) -> None:
    """As matrices: F* F = I. The matrix is NumPy's, for blocks that hold no copies."""
    X = tensor_of(described)
    F = linop.fft(X, order[:2])
    A = F.to_matrix().toarray()
    assert np.allclose(A.conj().T @ A, np.eye(X.size), atol=rounding(F))
    assert np.allclose((F.H @ F).to_matrix().toarray(), np.eye(X.size), atol=rounding(F))


@given(tensors(8, dtypes=("complex64",)), st.sampled_from(["slab", "pencil"]))
def test_repartitions_of_a_route_are_permutations(described: Description, way: Any) -> None:
    """Exactly: M* M = I between layouts that hold every element once."""
    layouts = Layouts(tensor_of(described))
    spaces = [layouts.space(cuts) for cuts, _ in layouts.route(way, range(layouts.X.ndim))]
    for before, after in pairwise(spaces):
        M = layouts.move(before, after)
        assert (M.H @ M).equals(linop.identity(before))


# Communication


@given(st.tuples(*[st.integers(1, 9)] * 3), st.integers(1, 8))
def test_a_slab_route_sends_the_least(shape: tuple[int, ...], workers: int) -> None:
    """There and back, each worker sends what others need of its rows, and nothing else."""
    X = waves(shape, (workers,))
    for out, times in (("transposed", 1), ("same", 2)):
        F = linop.fft(X, out=out)
        T = linop.fft(X, out="transposed").codomain
        stays = sum(overlap(X.slices(w), T.slices(w)) for w in X.partition.workers)
        assert F.cost().bytes == times * 16 * (math.prod(shape) - stays)
        assert F.cost().stages <= times


def overlap(a: tuple[slice, ...], b: tuple[slice, ...]) -> int:
    """Number of elements in both of two boxes."""
    pairs = zip(a, b, strict=True)
    return math.prod(max(0, min(s.stop, t.stop) - max(s.start, t.start)) for s, t in pairs)


def test_dimensions_that_are_whole_need_no_messages() -> None:
    assert linop.fft(waves((4, 6, 5), (4,)), (1, 2)).cost().messages == 0


def test_routes_of_a_grid_of_two_axes() -> None:
    """A slab has two repartitions, of least volume; a pencil three, of fewest messages."""
    X = waves((16, 16, 16), (4, 4))
    slab, pencil = (linop.fft(X, route=route).cost() for route in ("slab", "pencil"))
    assert (slab.stages, pencil.stages) == (2, 3)
    assert slab.bytes < pencil.bytes and slab.messages > pencil.messages
    assert slab.messages == 2 * 16 * 15
    assert slab.bytes == 2 * 16**4 * 15 // 16


@pytest.mark.parametrize(("per_byte", "latency", "best"), [(1e-6, 0, "slab"), (0, 1, "pencil")])
def test_the_route_is_chosen_for_the_network(per_byte: float, latency: float, best: Any) -> None:
    X = waves((16, 16, 16), (4, 4))
    network = linop.planning.Network(latency, per_byte, 0, 0)
    chosen = linop.fft(X, network=network)
    assert chosen.stages.digest == linop.fft(X, route=best).stages.digest


def test_a_slab_that_leaves_workers_idle_is_not_chosen() -> None:
    """64 planes of 2: 62 of 64 workers would wait."""
    X = waves((64, 64, 2), (8, 8))
    assert linop.fft(X).stages.digest == linop.fft(X, route="pencil").stages.digest


def test_the_result_may_be_cut_in_another_way() -> None:
    X, Y = waves((6, 5, 4), (4,)), waves((6, 5, 4), (2, 2), 2, 0)
    F, x = linop.fft(X, codomain=Y), X.random(3)
    assert F.codomain is Y
    near(Y.gather(F(x)), np.fft.fftn(X.gather(x), norm="ortho"))
    T = linop.fft(X, out="transposed").codomain
    assert linop.fft(X, codomain=T).cost().stages == 1


# Workers


@given(tensors(4, dtypes=COMPLEX, memories=("default",)), routes, seeds)
def test_transforms_on_threads(described: Description, route: Any, seed: int) -> None:
    on_threads(4, computes_numpy_s, described, route, seed)


@needs_mpi
@settings(max_examples=8)
@given(tensors(4, dtypes=COMPLEX, memories=("default",)), routes, seeds)
def test_transforms_on_ranks(described: Description, route: Any, seed: int) -> None:
    on_ranks(4, computes_numpy_s, described, route, seed)


@needs_mpi
@settings(max_examples=5)
@given(describe("distributed_fft", 3), seeds)
def test_large_messages_go_where_local_transforms_read_them(
    description: Description, seed: int
) -> None:
    """Through shared memory, in any order of the ranks: proven; and repeated calls are right."""
    what = "distributed_fft", description, seed
    for contract in (proven_on_ranks, repeated_calls.of_the_catalogue):
        on_ranks(3, repeated_calls.as_if_large, True, contract, *what)


# Regions


def test_one_region_is_transformed_as_by_the_local_operator() -> None:
    x = Region("x", (3, 4))
    for domain in (x, Space(x, "complex64")):
        F = linop.fft(domain, 1, "forward")
        assert F.equals(linop.local_operators.fft(domain, axes=1, norm="forward"))
        assert F.codomain.regions[0].name == "x^"


@given(st.integers(0, 3), st.integers(0, 3), st.sets(st.integers(-2, 1)), norms, seeds)
def test_local_transforms_along_axes(
    rows: int, columns: int, axes: set[int], norm: Any, seed: int
) -> None:
    axes = {d % 2 for d in axes}
    F = linop.local_operators.fft(Region("x", (rows, columns)), axes=tuple(axes), norm=norm)
    x = F.domain.random(seed)["x"]
    wanted = np.fft.fftn(x, axes=tuple(axes), norm=norm) if x.size and axes else x
    near(F(x), wanted)
    near(F.to_matrix() @ x.ravel(), wanted.ravel())
