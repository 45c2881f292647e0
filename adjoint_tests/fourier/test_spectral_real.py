"""Spectral convolutions of real tensors: NumPy's rfftn and irfftn of the whole one, on any blocks,
three ways; and the complex ones of the same fields."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import linop
import linop.testing as lt
from linop import TensorSpace
from linop.errors import ArgumentError, DTypeError, LinopError, ShapeError
from linop.fourier import low_modes, spectral_convolution
from linop.testing.describing import Description, seeds, tensors
from support.contracts.fourier import convolution_of_real, convolves_real_fields
from support.operators.properties import rounding
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads


@st.composite
def convolutions(draw: st.DrawFn, workers: int) -> Description:
    """A real tensor whose first dimension holds channels, or none; others are transformed."""
    ndim = draw(st.integers(1, 3))
    source = draw(tensors(workers, dtypes=("float64", "float32"), ndim=ndim))
    assume(source["shape"][-1])
    mixes = ndim > 1 and draw(st.booleans())
    *rest, last = source["shape"][1:] if mixes else source["shape"]
    modes = (*(draw(st.integers(0, n)) for n in rest), draw(st.integers(0, last // 2 + 1)))
    channels = draw(st.integers(1, 3)) if mixes else None
    return {"source": source, "modes": modes, "channels": channels}


@given(convolutions(6), seeds)
def test_in_one_process(described: Description, seed: int) -> None:
    """Interpreted, and as a matrix; the adjoint by rules, and by transposition."""
    convolves_real_fields(linop.backends.get("reference"), described, seed)
    A, _, _ = convolution_of_real(described, seed)
    assert lt.check_adjoint(A, seed=seed)
    if max(A.shape) <= 60:
        M, T = (op.to_matrix().toarray() for op in (A, A.H))
        assert np.allclose(M.T, T, rtol=0, atol=32 * rounding(A) * max(1, abs(M).max(initial=0)))


@given(convolutions(4), seeds)
def test_on_threads(described: Description, seed: int) -> None:
    on_threads(4, convolves_real_fields, described, seed)


@needs_mpi
@settings(max_examples=8)
@given(convolutions(4), seeds)
def test_on_ranks(described: Description, seed: int) -> None:
    on_ranks(4, convolves_real_fields, described, seed)


@pytest.mark.parametrize("n", [8, 9])
@pytest.mark.parametrize("grid", [(1, 1), (4, 1), (2, 2)])
def test_the_weights_of_a_real_kernel_are_half_of_the_complex_ones(n: int, grid: Any) -> None:
    """All frequencies of a convolution with a kernel of real numbers: the same map of real fields,
    and with the last dimension whole about half of the bytes."""
    X = TensorSpace((6, n), grid)
    kernel = np.random.default_rng(n).normal(size=(6, n))
    A = spectral_convolution(X, np.fft.rfftn(kernel))
    C = spectral_convolution(X.with_dtype(complex), np.fft.fftn(kernel))
    x = X.random(1)
    z = C(C.domain.vector({name: a + 0j for name, a in x.arrays.items()}))
    for name, array in A(x).arrays.items():
        assert np.allclose(array, z[name], rtol=0, atol=1e-12)
    if grid == (4, 1):
        assert A.cost().bytes <= C.cost().bytes * (n // 2 + 1) / n
        assert A.cost().messages <= C.cost().messages


def test_few_frequencies_are_not_followed_by_others() -> None:
    """Of 9 columns, 3 are transformed further and sent."""
    X = TensorSpace((16, 16), (4, 1))
    A = spectral_convolution(X, np.ones((16, 3)))
    whole = spectral_convolution(X, np.ones((16, 9)))
    assert A.cost().bytes * 3 <= whole.cost().bytes


def test_weight_one_is_a_projection() -> None:
    X = TensorSpace((5, 6), (2, 2))
    identity = spectral_convolution(X, np.ones((5, 4)))
    assert np.allclose(identity.to_matrix().toarray(), np.eye(30), atol=rounding(identity))
    P = spectral_convolution(X, np.ones((3, 2)))
    M = P.to_matrix().toarray()
    assert np.allclose(M @ M, M, atol=1e-13) and np.allclose(M, M.T, atol=1e-13)


def test_mistakes_of_real_convolutions_are_named() -> None:
    X, convolution = TensorSpace((4, 6), (2, 1)), spectral_convolution
    cases: list[tuple[Any, type[LinopError], str]] = [
        (lambda: convolution(X, np.ones((4, 5))), ShapeError, r"at most \(4, 4\) of a real tensor"),
        (lambda: convolution(X.with_dtype(int), np.ones((4, 4), int)), DTypeError, "complex one"),
        (lambda: convolution(X, np.ones((4, 3)), (1, 0)), ArgumentError, "increasing order"),
        (
            lambda: convolution(TensorSpace((4, 0), (2, 1)), np.ones((4, 0))),
            ShapeError,
            "the halved dimension 1 of .* has no element",
        ),
        (lambda: low_modes(X, 2), DTypeError, "rfft takes real ones"),
        (
            lambda: linop.rfft(linop.Region("x", 4), codomain=linop.Region("y", 4)),
            ShapeError,
            r"the frequencies are \(3,\) of complex128, or fewer along dimension 0",
        ),
    ]  # fmt: skip
    for call, error, words in cases:
        with pytest.raises(error, match=words):
            call()


@given(st.integers(1, 7), st.integers(1, 3), st.data())
def test_few_frequencies_of_a_region(n: int, m: int, data: st.DataObject) -> None:
    """A shorter codomain has the lowest ones; and back, others are zero."""
    k = data.draw(st.integers(0, n // 2 + 1))
    x, y = linop.Space(linop.Region("x", (m, n))), linop.Space(linop.Region("y", (m, k)), complex)
    F, G = linop.local_operators.rfft(x, y), linop.local_operators.irfft(x, y)
    v, w = x.random(1), y.random(2)
    spread = np.zeros((m, n // 2 + 1), complex)
    spread[:, :k] = w["y"]
    assert np.allclose(F(v)["y"], np.fft.rfftn(v["x"], norm="ortho")[:, :k])
    assert np.allclose(G(w)["x"], np.fft.irfftn(spread, (m, n), (0, 1), norm="ortho"))
    for op in (F, G):
        assert lt.check_exact(op) and lt.check_adjoint(op)
        form = op.over_reals()
        M = form.to_matrix().toarray()
        assert np.allclose(M, form.matmat(np.eye(form.domain.size)), rtol=0, atol=1e-13)
