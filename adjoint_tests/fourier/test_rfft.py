"""Fourier transforms of real tensors in blocks, beside NumPy's rfftn and irfftn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import linop
import linop.testing as lt
from linop import COPIES, Partition, Region, Space, TensorSpace
from linop.errors import ArgumentError, DTypeError, LinopError, PartitionError, ShapeError
from linop.testing.describing import Description, seeds, tensor_of
from linop.testing.factories import describe
from support.contracts.fourier import computes_numpy_s_of_real
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

described = describe("distributed_rfft", 4)


@given(described, seeds)
def test_transforms_of_any_blocks_are_numpy_s(description: Description, seed: int) -> None:
    """And the one is the inverse of the other."""
    options = {k: v for k, v in description.items() if k not in ("source", "inverse")}
    X, axes = tensor_of(description["source"]), options["axes"]
    F, G = linop.rfft(X, **options), linop.irfft(X, **options)
    assert G.domain.made_from == F.codomain.made_from and G.codomain is X
    x = X.random(seed)
    if COPIES in X.axes:
        near(X, G(F(x)), x)
        return
    whole = X.gather(x)
    wanted = rfftn(whole, axes, options["norm"])
    found = F.codomain.gather(F(x))
    assert found.shape == wanted.shape
    size = np.abs(wanted).max(initial=1)
    assert np.allclose(found, wanted, rtol=0, atol=64 * np.finfo(X.dtype).eps * size)
    y = F.codomain.random(seed)
    lengths = [X.global_shape[d] for d in axes]
    back = G.codomain.gather(G(y))
    if back.size:
        right = np.fft.irfftn(F.codomain.gather(y), lengths, axes, norm=options["norm"])
        size = np.abs(right).max(initial=1)
        assert np.allclose(back, right, rtol=0, atol=64 * np.finfo(X.dtype).eps * size)
    near(X, G(F(x)), x)


def rfftn(x: np.ndarray, axes: Any, norm: Any) -> np.ndarray:
    """NumPy's, which refuses arrays without elements."""
    if x.size:
        return np.asarray(np.fft.rfftn(x, axes=axes, norm=norm))
    last = axes[-1]
    return np.zeros([n // 2 + 1 if d == last else n for d, n in enumerate(x.shape)], complex)


def near(X: TensorSpace, found: Any, wanted: Any) -> None:
    for region in X.regions:
        a, b = found[region.name], wanted[region.name]
        assert np.allclose(
            a, b, rtol=0, atol=256 * np.finfo(X.dtype).eps * (1 + np.abs(b).max(initial=0))
        )


def test_half_of_the_frequencies_are_sent() -> None:
    """Of a tensor whose last dimension is whole, as FFTW's slabs of real data."""
    for n in (8, 16):
        X = TensorSpace((n, n, n), Partition((4,)))
        half = TensorSpace((n, n, n // 2 + 1), Partition((4,)), complex)
        others = linop.fft(half, (0, 1))
        assert linop.rfft(X).cost().bytes == others.cost().bytes
        assert linop.irfft(X).cost().bytes == others.cost().bytes
        full = linop.fft(X.with_dtype(complex)).cost().bytes
        assert linop.rfft(X).cost().bytes <= full * (n // 2 + 1) / n


def test_the_result_may_stay_or_be_cut_in_another_way() -> None:
    X = TensorSpace((6, 5, 4), Partition((4,)))
    F = linop.rfft(X, out="transposed")
    assert F.cost().stages == 1
    Y = TensorSpace((6, 5, 3), Partition((2, 2)), complex, (2, 0))
    G = linop.rfft(X, codomain=Y)
    assert G.codomain is Y and linop.irfft(X, domain=Y).domain is Y
    x = X.random(1)
    assert np.allclose(Y.gather(G(x)), np.fft.rfftn(X.gather(x), norm="ortho"))
    assert np.allclose(X.gather(linop.irfft(X, domain=Y)(G(x))), X.gather(x))


@given(st.integers(1, 6), st.integers(0, 4), st.booleans(), st.sampled_from(["ortho", "backward"]))
def test_regions_are_transformed_as_by_the_local_operators(
    n: int, m: int, single: bool, norm: Any
) -> None:
    x = Space(Region("x", (m, n)), "float32" if single else "float64")
    F, G = linop.rfft(x, -1, norm), linop.irfft(x, -1, norm)
    assert F.codomain.regions[0].name == "x^" and F.codomain.regions[0].shape == (m, n // 2 + 1)
    given_ = x.random(n)["x"]
    y = F(given_)
    assert y.dtype == F.codomain.dtype == ("complex64" if single else "complex128")
    eps = 64 * np.finfo(x.dtype).eps * max(1, n)
    if m:
        assert np.allclose(y, np.fft.rfft(given_, norm=norm), rtol=0, atol=eps * 9)
    for op in (F, G):
        assert lt.check_exact(op)
        M = op.over_reals().to_matrix().toarray()
        units = np.eye(op.over_reals().domain.size, dtype=x.dtype)
        columns = op.over_reals().matmat(units)
        assert np.allclose(M, columns, rtol=0, atol=eps)
    assert lt.check_equal(G @ F, linop.identity(x))


def test_mistakes_are_named() -> None:
    X = TensorSpace((4, 6), Partition((2,)))
    x = Region("x", 4)
    overlap = TensorSpace((4, 6), Partition((2,)), bounds={0: [(0, 3), (1, 4)]})
    for call, error, words in [
        (lambda: linop.rfft(X.with_dtype(complex)), DTypeError, "a real one expected"),
        (lambda: linop.irfft(X.with_dtype(int)), DTypeError, "irfft: .* a real one expected"),
        (lambda: linop.rfft(X, ()), ArgumentError, "an axis to transform along expected"),
        (lambda: linop.rfft(X, 2), ArgumentError, "of a tensor of 2 dimensions"),
        (lambda: linop.rfft(X, out="there"), ArgumentError, "out is 'same' or 'transposed'"),
        (lambda: linop.rfft(X, norm="half"), ArgumentError, "norm is one of"),
        (lambda: linop.irfft(X, norm="half"), ArgumentError, "norm is one of"),
        (lambda: linop.rfft(overlap), PartitionError, "overlap"),
        (lambda: linop.rfft(X, codomain=X), LinopError, "rfft|fft"),
        (lambda: linop.rfft(TensorSpace((4, 0), Partition((2,)))), ArgumentError, "no element"),
        (lambda: linop.rfft(Region("x", 0)), ShapeError, "no element"),
        (lambda: linop.irfft(x, domain=Region("y", 4)), ShapeError, r"\(3,\) of complex128"),
    ]:  # fmt: skip
        with pytest.raises(error, match=words):
            call()


def test_poisson_s_equation_in_half_of_the_work() -> None:
    n = 8
    X = TensorSpace((n, n), Partition((2, 2)))
    F, G = linop.rfft(X), linop.irfft(X)
    line = 2 - 2 * np.cos(2 * np.pi * np.arange(n) / n)
    D = line[:, None] + line[: n // 2 + 1]
    u = X.gather(X.random(2))
    u -= u.mean()
    f = sum(2 * u - np.roll(u, 1, d) - np.roll(u, -1, d) for d in range(2))
    y = F.codomain.gather(F(X.scatter(f)))
    y = np.divide(y, D, out=np.zeros_like(y), where=D != 0)
    assert np.allclose(X.gather(G(F.codomain.scatter(y))), u)
    assert math.isclose(X.scatter(u).norm(), np.linalg.norm(u))


@given(described, seeds)
def test_transforms_on_threads(description: Description, seed: int) -> None:
    on_threads(4, computes_numpy_s_of_real, description, seed)


@needs_mpi
@settings(max_examples=8)
@given(described, seeds)
def test_transforms_on_ranks(description: Description, seed: int) -> None:
    on_ranks(4, computes_numpy_s_of_real, description, seed)
