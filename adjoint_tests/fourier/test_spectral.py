"""Spectral convolutions beside NumPy's transforms of the whole tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import Partition, TensorSpace
from linop.errors import ArgumentError
from linop.fourier import low_modes, spectral_convolution
from linop.testing.describing import tensor_of
from linop.testing.factories import describe
from support.operators.properties import rounding


def frequencies(n: int, m: int) -> np.ndarray:
    """The m lowest of n, by their places in a transform: those of NumPy's `fftfreq`."""
    return np.fft.fftfreq(m, 1 / m).astype(int) % n if m else np.zeros(0, int)


def expected(x: np.ndarray, weights: np.ndarray, channels: int | None) -> np.ndarray:
    """By index arrays; axis 0 holds channels, if there are any."""
    axes = tuple(range(0 if channels is None else 1, x.ndim))
    if 0 in x.shape:
        return np.zeros((*(() if channels is None else (channels,)), *(x.shape[d] for d in axes)))
    modes = weights.shape[-len(axes) :]
    kept = [frequencies(x.shape[d], m) for d, m in zip(axes, modes, strict=True)]
    first = [] if channels is None else [np.arange(x.shape[0])]
    low = np.fft.fftn(x, axes=axes)[np.ix_(*first, *kept)]
    low = low * weights if channels is None else (low[:, None] * weights).sum(0)
    spread = np.zeros((*low.shape[: len(first)], *(x.shape[d] for d in axes)), complex)
    spread[np.ix_(*[np.arange(n) for n in low.shape[: len(first)]], *kept)] = low
    return np.fft.ifftn(spread, axes=axes)


@given(describe("spectral_convolution", 8), st.integers(0, 99))
def test_spectral_convolutions_are_numpy_s(described: Any, seed: int) -> None:
    X, channels = tensor_of(described["source"]), described["channels"]
    A = linop.testing.factories.build("spectral_convolution", described)
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=X.global_shape) + 1j * rng.normal(size=X.global_shape)).astype(X.dtype)
    mixed = () if channels is None else (X.global_shape[0], channels)
    shape = *mixed, *described["modes"]
    weights = linop.testing.describing.whole_numbers(shape, X.dtype, described["seed"])
    wanted = expected(x, weights, channels)
    size = 8 * max(1.0, np.abs(wanted).max(initial=0), np.abs(x).max(initial=0))
    shape_of = A.H.H.domain
    assert shape_of == X
    Y = X if channels is None else _like(X, channels)
    given = Y.gather(Y.vector(A(X.scatter(x)).arrays))
    assert np.allclose(given, wanted, rtol=0, atol=rounding(A) * size)


def _like(X: TensorSpace, channels: int) -> TensorSpace:
    bounds = {d: X.bounds[d] for d in range(1, X.ndim)}
    shape = channels, *X.global_shape[1:]
    return TensorSpace(shape, X.partition, X.dtype, X.axes, "y", bounds=bounds, memory=X.memory)


def test_frequencies_that_do_not_count_are_not_sent() -> None:
    """Of 16 columns, 3 are sent; a transform sends all. The rows that follow are cut to 4 as soon
    as they are transformed, before they return."""
    X = TensorSpace((16, 16), Partition((4,)), complex)
    A = spectral_convolution(X, np.ones((4, 4)))
    assert A.cost().bytes == 2 * linop.fft(X, out="transposed").cost().bytes // 4
    assert low_modes(X, 4).codomain.global_shape == (4, 4)
    assert low_modes(X, (16, 4)).cost().bytes == low_modes(X, 4).cost().bytes


def test_all_frequencies_with_weight_one_are_the_identity() -> None:
    X = TensorSpace((5, 6), Partition((2, 2)), complex)
    A = spectral_convolution(X, np.ones((5, 6)))
    assert np.allclose(A.to_matrix().toarray(), np.eye(30), atol=rounding(A))


def test_axes_are_in_the_order_of_the_weights() -> None:
    X = TensorSpace((4, 4), Partition((2,)), complex)
    with pytest.raises(ArgumentError, match=r"increasing order expected.*\(1, 0\)"):
        spectral_convolution(X, np.ones((4, 4)), axes=(1, 0))
