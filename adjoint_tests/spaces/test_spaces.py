"""Regions, subsets, spaces and vectors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import Region, Space, Subset, Vector
from linop.errors import RegionError, SpaceError
from linop.spaces.region import as_subset
from linop.testing.describing import (
    COMPUTED,
    MOVED,
    Description,
    box_in,
    boxes,
    seeds,
    shapes,
    space_of,
    spaces,
)
from support.operators.properties import same_arrays, same_vectors

# Regions


@given(shapes(3), st.sets(st.integers(0, 9), min_size=1))
def test_a_region_says_what_it_is(shape: tuple[int, ...], workers: set[int]) -> None:
    region = Region("x", list(shape), workers)
    assert (region.name, region.shape, region.ndim) == ("x", shape, 3)
    assert region.size == math.prod(shape)
    assert region.workers == tuple(sorted(workers))
    assert region.replicated == (len(workers) > 1)
    assert region == Region("x", shape, sorted(workers, reverse=True))
    assert hash(region) == hash(Region("x", shape, workers))


def test_a_region_by_default_is_on_worker_0() -> None:
    assert Region("x", 3) == Region("x", (3,), 0) == Region("x", (3,), [0])
    assert Region("x", ()).size == 1


# Subsets


@given(shapes(2), st.data())
def test_indexing_is_numpys(shape: tuple[int, ...], data: st.DataObject) -> None:
    def bound(n: int) -> st.SearchStrategy[int | None]:
        return st.none() | st.integers(-n, n)

    index = tuple(slice(data.draw(bound(n)), data.draw(bound(n))) for n in shape)
    if any(k.indices(n)[0] > k.indices(n)[1] for k, n in zip(index, shape, strict=True)):
        with pytest.raises(IndexError, match="ends before it starts"):
            Region("x", shape)[index]
        return
    subset = Region("x", shape)[index]
    numbers = np.arange(math.prod(shape)).reshape(shape)
    same_arrays(numbers[subset.slices], numbers[index])
    assert subset.shape == numbers[index].shape
    assert subset.size == numbers[index].size
    assert subset.whole == (subset.shape == shape)


def test_open_bounds_and_ellipses_fill_what_is_left_out() -> None:
    x = Region("x", (4, 5, 6))
    assert x[1:] == x[1:4, :, :] == x[1:, ...] == Subset(x, (1, 0, 0), (4, 5, 6))
    assert x[..., 2:3] == x[:, :, 2:3]
    assert x[1:2, ..., 2:3] == x[1:2, :, 2:3]
    assert x[..., :, :, :] == x[...] == x[:] == x[()] == as_subset(x)
    assert x[-3:-1] == x[1:3]
    assert x[1:1].size == 0
    assert x[0:4:1] == x[:]
    scalar = Region("s", ())
    assert scalar[...] == scalar[()] == as_subset(scalar)


@given(shapes(2, 5), st.data())
def test_overlaps_and_contains_are_set_relations(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    region = Region("x", shape)
    a, b = (box_in(region, data.draw(boxes(shape))) for _ in range(2))

    def elements(subset: Subset) -> set[int]:
        return set(np.arange(region.size).reshape(shape)[subset.slices].ravel().tolist())

    assert a.overlaps(b) == bool(elements(a) & elements(b))
    assert a.contains(b) == (elements(b) <= elements(a))
    other = box_in(Region("y", shape), data.draw(boxes(shape)))
    assert not a.overlaps(other)
    assert a.contains(other) == (other.size == 0)


def test_a_subset_prints_as_it_is_indexed() -> None:
    x = Region("x", (4, 5))
    assert str(x[1:3, :]) == "x[1:3, 0:5]"
    assert str(x[:, :]) == str(x) == "x"
    assert x[1:3].workers == x.workers


# Spaces


@given(spaces(8, COMPUTED, least=0, most=4))
def test_a_space_is_the_direct_sum_of_its_regions(described: Description) -> None:
    space = space_of(described)
    assert space.size == sum(region.size for region in space.regions)
    assert space.workers == tuple(sorted({w for r in space for w in r.workers}))
    assert len(space) == len(space.regions)
    for region in space:
        assert space[region.name] is region
        assert region in space
        assert region.name in space
    for worker in range(8):
        assert space.on(worker) == tuple(r for r in space.regions if worker in r.workers)
    backwards = Space(reversed(space.regions), space.dtype)
    assert backwards == space
    assert hash(backwards) == hash(space)


def test_spaces_differ_in_regions_or_dtype() -> None:
    a, b = Region("a", 2), Region("b", 2)
    assert Space([a, b]) == Space([b, a])
    assert Space([a, b]) != Space([a])
    assert Space([a]) != Space([a], np.float32)
    assert Space([a]) != Space([Region("a", 2, 1)])
    assert Space([a]) != Space([Region("a", 3)])
    assert Space([a]) != "a"
    assert Space(a) == Space([a])
    assert Space([]).size == 0


@pytest.mark.parametrize("name", MOVED)
def test_dtypes_of_spaces(name: str) -> None:
    space = Space(Region("x", (2, 3)), np.dtype(name))
    assert space.dtype == np.dtype(name)
    assert repr(space) == f"Space(x[2, 3]@0, dtype={np.dtype(name).name})"
    for vector in (space.zeros(), space.random(1), space.integers(2)):
        same_arrays(vector["x"] * 0, np.zeros((2, 3), name))


def test_bfloat16_where_the_arrays_have_it() -> None:
    pytest.importorskip("ml_dtypes")
    space = Space(Region("x", 4), np.dtype("bfloat16"))
    v = space.vector(np.arange(4).astype("bfloat16"))
    assert v.inner(v) == 0 + 1 + 4 + 9
    for twice in (2 * v, v + v, v / 0.5, (4 * v) * 0.5):
        assert twice["x"].dtype == space.dtype
        assert twice["x"].tolist() == [0, 2, 4, 6]
    op = linop.move(space, space["x"], Region("y", 4, 1))
    assert linop.testing.check_exact(op)
    same_arrays(op(v)["y"], v["x"])


# Vectors


@given(spaces(8, COMPUTED, least=0), seeds)
def test_vectors_are_a_vector_space(described: Description, seed: int) -> None:
    space = space_of(described)
    v, w = space.integers(seed), space.integers(seed + 1)
    for total, elementwise in (
        (v + w, np.add),
        (v - w, np.subtract),
        (2 * v, lambda a, b: 2 * a),
        (v * -3, lambda a, b: -3 * a),
        (-v, lambda a, b: -a),
        ((2 * v) / 2 if space.dtype.kind in "fc" else v, lambda a, b: a),
    ):
        assert isinstance(total, Vector)
        for name in v.arrays:
            wanted = elementwise(v[name], w[name])
            same_arrays(total[name], np.asarray(wanted, space.dtype))
    assert (v - v).norm() == 0
    same_vectors(np.int64(2) * v, 2 * v)
    same_vectors(space.zeros() + v, v)


@given(spaces(8, COMPUTED, least=0), seeds)
def test_the_inner_product_is_the_space_s(described: Description, seed: int) -> None:
    """A replicated region counts once; complex ones are conjugate-linear on the left."""
    space = space_of(described)
    v, w = space.integers(seed), space.integers(seed + 1)
    wanted = sum(
        complex(np.conj(a).item() * b.item()) if space.dtype.kind == "c" else int(a) * int(b)
        for name in v.arrays
        for a, b in zip(v[name].ravel(), w[name].ravel(), strict=True)
    )
    assert v.inner(w) == space.inner(v, w) == wanted
    assert v.inner(w) == np.conj(w.inner(v))
    assert v.norm() == math.sqrt(abs(v.inner(v)))
    assert v.inner(w) == np.vdot(space.flatten(v), space.flatten(w)) or not space.size
    if space.dtype.kind == "c":
        assert (1j * v).inner(w) == -1j * v.inner(w)
        assert v.inner(1j * w) == 1j * v.inner(w)


def test_low_precision_is_summed_in_double() -> None:
    space = Space(Region("x", 4096), np.float16)
    ones = space.vector(np.ones(4096, np.float16))
    assert ones.inner(ones) == 4096  # beyond 2048 half precision cannot count on
    wide = Space(Region("x", 2), np.int32)
    large = wide.vector(np.array([2**30, 2**30], np.int32))
    assert large.inner(large) == 2**61


@given(spaces(8, MOVED, least=0), seeds)
def test_flat_vectors(described: Description, seed: int) -> None:
    space = space_of(described)
    v = space.random(seed)
    flat = space.flatten(v)
    assert flat.shape == (space.size,)
    assert flat.dtype == space.dtype
    same_vectors(space.unflatten(flat), v)
    for region in space:
        start = space.offsets[region.name]
        same_arrays(flat[start : start + region.size].reshape(region.shape), v[region.name])
    back = space.unflatten(flat)
    for array in back.arrays.values():
        array[...] = 0
    same_arrays(space.flatten(v), flat)


@given(spaces(4, MOVED, least=0), seeds)
def test_random_vectors_are_repeatable(described: Description, seed: int) -> None:
    space = space_of(described)
    same_vectors(space.random(seed), space.random(seed))
    whole = space.integers(seed)
    same_vectors(whole, space.integers(seed))
    for array in whole.arrays.values():
        assert isinstance(array, np.ndarray)
        parts = (array.real, array.imag) if space.dtype.kind == "c" else (array,)
        for part in parts:
            assert (np.abs(part.astype(float)) <= 9).all()
            assert (part == part.astype(int)).all()


def test_random_vectors_of_unsigned_integers() -> None:
    values = Space(Region("x", 100), np.uint8).random(0)["x"]
    assert values.min() >= 0
    assert values.max() <= 9


def test_a_vector_keeps_the_arrays_it_is_given() -> None:
    space = Space([Region("a", 2), Region("b", ())])
    a = np.arange(2.0)
    v = space.vector({"a": a, "b": 3})
    assert v["a"] is a
    same_arrays(v["b"], np.array(3.0))
    copied = v.copy()
    copied["a"][0] = 7
    assert v["a"][0] == 0
    assert Space(Region("a", 2)).vector(a)["a"] is a
    same_arrays(Space(Region("a", 2)).vector([1, 2])["a"], np.array([1.0, 2.0]))


def test_a_numpy_scalar_is_an_array_without_dimensions() -> None:
    """Which is what NumPy's functions make of one: ``2 * np.array(1.0)``."""
    space = Space(Region("s", ()))
    same_arrays(space.vector(2 * np.array(1.0))["s"], np.array(2.0))
    assert linop.identity(space)(2 * np.array(1.0)) == 2


def test_arithmetic_keeps_scalars_arrays() -> None:
    """NumPy's functions take the element out of an array without dimensions."""
    space = Space(Region("s", ()), np.complex128)
    v = space.vector(1 + 2j)
    for w in (v, v + v, v - v, 2 * v, v / 2, -v, v.copy(), space.integers(0), space.random(0)):
        assert isinstance(w["s"], np.ndarray)
        assert linop.identity(space)(w)["s"] == w["s"]


def test_a_part_of_a_vector_is_no_whole() -> None:
    space = Space([Region("a", 2), Region("b", 2, 1)])
    part = space.vector({"a": np.ones(2)})
    whole = space.zeros()
    assert "a" in part
    assert "b" not in part
    with pytest.raises(RegionError, match=r"region 'b' is not held here; .* \['a'\]"):
        part["b"]
    for what in (lambda: part.inner(part), part.norm, lambda: space.flatten(part)):
        with pytest.raises(SpaceError, match="one worker's part"):
            what()
    with pytest.raises(SpaceError, match=r"one side holds \['a'\], the other \['a', 'b'\]"):
        part + whole
    same_arrays((part + part)["a"], 2 * np.ones(2))


@pytest.mark.parametrize("other", [None, "2", [2], np.ones(2)])
def test_vectors_times_what_is_no_number(other: Any) -> None:
    with pytest.raises(TypeError):
        Space(Region("x", 2)).zeros() * other
