"""Inner products and norms of every dtype: exact for integers, within rounding for others, and
without overflow or underflow of squares; vectors compared element by element, and as a whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import Region, Space, TensorSpace
from linop.errors import AmbiguousError, ArgumentError, SpaceError
from linop.spaces.inner_products import packed, unpacked
from support.contracts import vectors
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

dtypes = st.sampled_from(vectors.DTYPES)
seeds = st.integers(0, 2**32)
SIZES = st.sampled_from([0, 1, 2, 3, 17, 300])


@given(dtypes, SIZES, seeds)
def test_every_dtype(name: str, size: int, seed: int) -> None:
    space = vectors.space_of(name, size)
    x, y = (vectors.drawn(size, space.dtype, seed + k) for k in (0, 1))
    v, w = space.unflatten(x), space.unflatten(y)
    vectors.is_inner(v.inner(w), x, y)
    vectors.is_norm(v.norm(), x)
    assert v.equals(v.copy())
    assert v.equals(w) is bool((x == y).all())


@pytest.mark.parametrize("size", [8191, 8192, 8193, 20000])
@pytest.mark.parametrize("name", ["int32", "int64", "uint64"])
def test_integers_in_several_chunks(name: str, size: int) -> None:
    space = Space(Region("x", (2, size)), name)
    x, y = (vectors.drawn(2 * size, space.dtype, k) for k in (0, 1))
    found = space.unflatten(x).inner(space.unflatten(y))
    assert found == sum(a * b for a, b in zip(x.tolist(), y.tolist(), strict=True))


@pytest.mark.parametrize("name", vectors.INTEGERS)
def test_the_ends_of_integers(name: str) -> None:
    info = np.iinfo(name)
    for value in (info.min, info.max):
        v = Space(Region("x", 9), name).vector(np.full(9, value, name))
        assert v.inner(v) == 9 * value**2
        assert v.norm() == pytest.approx(3.0 * abs(value), rel=1e-15)


def test_the_issue_s_numbers() -> None:
    v = Space(Region("x", 4), "int64").vector([2**32] * 4)
    assert (v.inner(v), v.norm()) == (2**66, 2.0**33)
    v = Space(Region("x", 5), "int32").vector([2**31 - 1] * 5)
    assert v.inner(v) == 5 * (2**31 - 1) ** 2


@given(
    st.sampled_from(["float64", "complex128", "float32"]),
    st.integers(-1000, 900),
    st.integers(1, 40),
)
def test_norms_of_any_size(name: str, power: int, size: int) -> None:
    space = Space(Region("x", size), name)
    power = power if name != "float32" else power // 10
    v = space.random(size)
    scaled = space.vector(np.asarray(v["x"] * np.ldexp(1.0, power), name))
    if np.isfinite(scaled["x"]).all() and power > -1000:
        wanted = vectors.scaled(power, v.norm())
        assert scaled.norm() == pytest.approx(wanted, rel=1e-13 if name != "float32" else 1e-5)


@given(st.integers(-16000, 16000))
def test_norms_of_long_double(power: int) -> None:
    if np.finfo(np.longdouble).maxexp < 16384:
        pytest.skip("long double is double here")
    x = np.ldexp(np.array([3, 4], np.longdouble), power)
    found = Space(Region("x", 2), np.longdouble).vector(x).norm()
    assert found == np.ldexp(np.longdouble(5), power)


def test_norms_of_what_is_not_finite() -> None:
    space = Space(Region("x", 2))
    assert space.vector([np.inf, 1]).norm() == np.inf
    assert np.isnan(space.vector([np.nan, 1]).norm())
    assert space.zeros().norm() == 0


@given(dtypes, st.integers(0, 40), seeds, st.integers(1, 4))
def test_on_threads(name: str, size: int, seed: int, workers: int) -> None:
    on_threads(workers, vectors.products_of_blocks, name, size, seed)


@needs_mpi
@given(dtypes, st.integers(0, 40), seeds, st.integers(1, 3))
def test_on_ranks(name: str, size: int, seed: int, ranks: int) -> None:
    on_ranks(ranks, vectors.products_of_blocks, name, size, seed)


@given(st.integers(1, 4), st.data())
def test_one_element_differs(workers: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 9))
    where = data.draw(st.integers(0, size - 1))
    on_threads(workers, vectors.one_element_differs, size, where)


@needs_mpi
def test_one_element_differs_on_ranks() -> None:
    on_ranks(3, vectors.one_element_differs, 7, 6)


@given(st.sampled_from(["longdouble", "clongdouble", "float64", "complex128"]), seeds)
def test_numbers_survive_packing(name: str, seed: int) -> None:
    for value in vectors.drawn(9, np.dtype(name), seed):
        number = value.item()
        sent = packed(number)
        parts = sent if isinstance(sent, tuple) else (sent,)
        assert all(type(part) in (int, float, str) for part in parts)
        found = unpacked(sent)
        assert (type(found), found) == (type(number), number)


# Comparisons


def test_vectors_compare_element_by_element() -> None:
    space = Space([Region("a", 2), Region("b", (2, 2))])
    v, w = space.zeros(), space.zeros()
    w["b"][0, 1] = 3
    equal = v == w
    assert (sorted(equal), len(equal)) == (["a", "b"], 2)
    assert equal["a"].tolist() == [True, True]
    assert equal["b"].tolist() == [[True, False], [True, True]]
    assert (v != w)["b"].tolist() == [[False, True], [False, False]]
    assert not equal.all()
    assert equal.any()
    assert (v == 0).all()
    assert not v.equals(w)
    assert v.equals(v.copy())
    assert v.equals(v)
    assert v != None  # noqa: E711
    assert not v.equals(Space(Region("a", 2)).zeros())
    with pytest.raises(AmbiguousError, match=r"v\.equals\(w\) says if they are equal"):
        bool(v == w)
    with pytest.raises(AmbiguousError):
        assert v in [w]
    with pytest.raises(TypeError, match="unhashable"):
        hash(v)
    with pytest.raises(SpaceError, match="the spaces differ"):
        v == Space(Region("a", 2)).zeros()  # noqa: B015
    with pytest.raises(ArgumentError, match=r"v\[name\] == array"):
        v == np.zeros(2)  # noqa: B015
    with pytest.raises(ArgumentError, match="equals: expected a Vector"):
        v.equals(np.zeros(2))  # type: ignore[arg-type]


def test_nan_equals_nothing() -> None:
    v = Space(Region("x", 2)).vector([np.nan, 1])
    assert (v == v)["x"].tolist() == [False, True]
    assert not v.equals(v)


def test_a_vector_of_one_region_is_an_array() -> None:
    v = Space(Region("x", (2, 3))).random(0)
    assert np.asarray(v) is v["x"]
    assert np.array(v) is not v["x"]
    assert np.array_equal(np.array(v), v["x"])
    assert np.asarray(v, np.float32).dtype == np.float32
    assert np.linalg.norm(v) == pytest.approx(v.norm())
    assert np.asarray(v == v).all()
    assert np.all(v == v)
    assert v.__array__(copy=True) is not v["x"]
    assert v.__array__(copy=False) is v["x"]
    with pytest.raises(ValueError, match="needs a copy"):
        v.__array__(np.float32, copy=False)


def test_a_vector_of_several_regions_is_none() -> None:
    X = TensorSpace((6,), linop.Partition((2,)))
    for given_ in (X.zeros(), Space([Region("a", 1), Region("b", 1)]).zeros()):
        with pytest.raises(ArgumentError, match=r"2 regions is not one array: X\.gather\(v\)"):
            np.asarray(given_)
