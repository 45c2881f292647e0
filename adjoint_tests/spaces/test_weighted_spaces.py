"""Spaces with inner products: weights in every form, norms, equality, copies, errors."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import Region, Space, TensorSpace
from linop.errors import ArgumentError, DTypeError, LinopError, RegionError, ShapeError, SpaceError
from support.contracts.weighted_spaces import powers_of_two

FLOATS = ("float64", "float32", "complex128", "complex64", "longdouble", "float16")
seeds = st.integers(0, 2**16)


def blocks(shape: tuple[int, int], workers: int, dtype: str, inner: Any) -> TensorSpace:
    return TensorSpace(shape, linop.Partition((workers,)), dtype, inner=inner)


def blocks_of(X: Space, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array.astype(X.dtype) for name, array in arrays.items()}


@given(st.integers(0, 5), st.integers(1, 4), st.integers(1, 3), st.sampled_from(FLOATS), seeds)
def test_inner_products_of_weights(n: int, m: int, workers: int, dtype: str, seed: int) -> None:
    """The same exactly, in every form of the weights, and on every partition."""
    weights = 2.0 ** np.random.default_rng(seed).integers(-2, 3, (n, m))
    X = blocks((n, m), workers, dtype, weights)
    v, w = X.integers(seed), X.integers(seed + 1)
    x, y = (X.gather(one).astype(np.clongdouble) for one in (v, w))
    wanted = (x.conj() * weights * y).sum()
    plain = X.euclidean
    by_region = {r.name: weights[X.block(r)] for r in X.regions}
    real = plain.with_dtype(np.zeros((), dtype).real.dtype)
    for inner in (weights, by_region, real.vector(blocks_of(real, by_region))):
        Y = plain.with_inner(inner)
        assert Y == X
        assert Y.inner(Y.vector(v.arrays), Y.vector(w.arrays)) == wanted
    assert abs(v.norm() ** 2 - (abs(x) ** 2 * weights).sum()) <= 1e-6 * (1 + v.norm() ** 2)
    assert np.linalg.norm(v) == v.norm()
    assert np.vdot(v, w) == wanted
    other = linop.repartition(X, linop.Partition((1, 2))).codomain
    assert other.scatter(X.gather(v)).inner(other.scatter(X.gather(w))) == wanted


@given(seeds, st.sampled_from(["float64", "complex64"]))
def test_norms_do_not_overflow(seed: int, dtype: str) -> None:
    X = Space(Region("x", 5), dtype, inner=[0.25, 0.5, 1, 2, 4])
    v = X.random(seed)
    large = np.finfo(dtype).max / 1e3
    assert (v * large).norm() == pytest.approx(v.norm() * large, rel=1e-6)


def test_equality_and_hashes() -> None:
    X = Space([Region("x", 2), Region("y", 3)], inner={"x": [1.0, 2], "y": 3.0})
    same = Space([Region("y", 3), Region("x", 2)], inner={"x": [1.0, 2], "y": [3.0, 3, 3]})
    assert X == same
    assert hash(X) == hash(same)
    others = X.euclidean, X.with_inner(3.0), X.with_inner({"x": [1.0, 4], "y": 3.0})
    for other in others:
        assert other != X
        assert other.has_regions_of(X)
        assert len({X, other}) == 2
        assert X.digest != other.digest
    for space in (X, *others):
        space.digest, hash(space)
        again = pickle.loads(pickle.dumps(space))
        assert again == space
        assert again.digest == space.digest
    assert X.euclidean.euclidean is X.euclidean
    assert X.with_inner(None) == X.euclidean
    T = blocks((4, 2), 2, "float64", 2.0)
    assert T.made_from != T.euclidean.made_from
    assert T.in_memory("host").inner_product is not None


def test_weights_are_copied_and_rounded() -> None:
    weights = np.array([0.1, 0.2])
    X = Space(Region("x", 2), "float32", inner=weights)
    weights[0] = 7
    one = X.vector(np.array([1, 0], np.float32))
    assert one.inner(one) == float(np.float32(0.1))
    assert X.with_dtype("float64").inner_product is not None
    assert X.with_dtype("int64").inner_product is None
    assert abs(one).space.inner_product is not None


def test_text() -> None:
    X = Space(Region("x", 2), inner=[1.0, 2.0])
    assert repr(X) == "Space(x[2]@0, dtype=float64, inner=positive weights)"
    assert repr(blocks((2, 2), 1, "float64", 0.5)).endswith("name='x', inner=weight 0.5)")
    assert "; inner product: positive weights" in X._repr_html_()
    with pytest.raises(SpaceError) as found:
        X.zeros() + X.euclidean.zeros()
    assert str(found.value) == (
        "vector arithmetic: the spaces differ\n  inner product positive weights  ≠  Euclidean\n"
        "linop.identity(X, Y) maps one to the other; X.euclidean and X.with_inner(…) are spaces of "
        "the same regions"
    )


WRONG: list[tuple[Any, type[LinopError], str]] = [
    ([1.0, 0.0], ArgumentError, r"positive and finite weights expected, given 0.0 at \(1,\)"),
    ([1.0, -2.0], ArgumentError, "given -2.0"),
    ([np.nan, 1], ArgumentError, "given nan"),
    ([np.inf, 1], ArgumentError, "given inf"),
    (0.0, ArgumentError, "given 0.0"),
    ([1.0, 2, 3], ShapeError, r"inner: weights of shape \(3,\) given, \(2,\) expected"),
    ({"x": [1.0, 2, 3]}, ShapeError, r"of shape \(3,\) given for region 'x', \(2,\) expected"),
    ({"y": 1.0}, RegionError, "unknown region 'y'"),
    ({}, RegionError, "are missing"),
    ([1j, 1], DTypeError, "numbers of dtype float64 expected"),
    ("weights", DTypeError, "numbers of dtype float64 expected"),
]


@pytest.mark.parametrize(("inner", "kind", "text"), WRONG)
def test_errors(inner: Any, kind: type[LinopError], text: str) -> None:
    with pytest.raises(kind, match=text):
        Space(Region("x", 2), inner=inner)
    with pytest.raises(kind, match=text):
        Space(Region("x", 2)).with_inner(inner)


def test_errors_of_dtypes_and_shapes() -> None:
    with pytest.raises(DTypeError, match="a floating dtype expected, given int64"):
        Space(Region("x", 2), "int64", inner=2.0)
    with pytest.raises(ArgumentError, match="positive and finite"):  # it is zero in this dtype
        Space(Region("x", 2), "float32", inner=1e-60)
    with pytest.raises(DTypeError, match="does not hold every number"):
        Space(Region("x", 2), "float32", inner=1e60)
    with pytest.raises(ShapeError, match=r"\(4, 2\) expected"):
        blocks((4, 2), 2, "float64", np.ones((2, 2)))
    with pytest.raises(ShapeError, match="numbers or arrays by region name expected"):
        Space([Region("x", 2), Region("y", 2)], inner=[1.0, 2.0])


def test_direct_sums() -> None:
    X, Y = Space(Region("x", 2), inner=[1.0, 2.0]), blocks((2, 2), 2, "float64", None)
    both = linop.direct_sum(linop.identity(X), linop.identity(Y)).domain
    v = both.scatter([1.0, 1.0], np.ones((2, 2)))
    assert v.inner(v) == 7
    assert both.inner_product is not None
    w = both.with_inner(1.0).scatter([1.0, 1.0], np.ones((2, 2)))
    assert w.inner(w) == 6
    assert both.gather(v)[0].inner(both.gather(v)[0]) == 3
    renamed = linop.block_diag(linop.identity(X), linop.identity(X)).domain
    assert renamed.unflatten(np.ones(4)).inner(renamed.unflatten(np.ones(4))) == 6


def test_replicated_and_copied_blocks() -> None:
    weights = np.array([1.0, 2, 4])
    grid = linop.Partition((3,))
    copies, one = (
        TensorSpace(3, grid, axes=[axis], inner=weights)
        for axis in (linop.COPIES, linop.REPLICATED)
    )
    assert copies.scatter(np.ones(3)).norm() ** 2 == pytest.approx(21)
    assert one.scatter(np.ones(3)).norm() ** 2 == pytest.approx(7)
    assert powers_of_two(one, 0).keys() == {"x@0"}
