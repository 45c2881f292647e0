"""A plan of a distributed Fourier transform computes NumPy's; on any backend."""

from __future__ import annotations

from typing import Any

import numpy as np

import linop
from linop.backends import Backend
from linop.testing.describing import Description, tensor_of
from support.contracts.plans import mine


def computes_numpy_s(backend: Backend, described: Description, route: Any, seed: int) -> None:
    """Forward, in the blocks of X; and back."""
    X, here = tensor_of(described), mine(backend)
    plan = linop.fft(X, route=route).compile(backend)
    x = np.random.default_rng(seed).normal(size=(2, *X.global_shape))
    x = (x[0] + 1j * x[1]).astype(X.dtype)
    whole = np.fft.fftn(x, norm="ortho") if x.size and x.ndim else x
    if here not in X.partition:
        assert plan(None) is None and plan.H(None) is None
        return
    mine_of_it = (*X.slices(here), ...)
    given = x[mine_of_it].copy()
    y = plan(given)
    near = 64 * np.finfo(X.dtype).eps * np.abs(x).max(initial=1.0) * max(1, x.ndim)
    assert np.allclose(y, whole[mine_of_it], rtol=0, atol=near)
    assert np.allclose(plan.H(y), x[mine_of_it], rtol=0, atol=near)
    assert (given == x[mine_of_it]).all()  # the argument is not changed
    kept, out = y.copy(), np.empty_like(y)
    assert plan(given, out=out) is out and (out == kept).all()
    plan.start(2 * given)
    assert np.allclose(plan.finish(), 2 * kept, rtol=0, atol=2 * near)
    assert (y == kept).all() and not np.may_share_memory(plan(given), y)
    assert plan(given, out=given) is given and (given == kept).all()


def computes_numpy_s_of_real(backend: Backend, description: Description, seed: int) -> None:
    """Plans of rfft and irfft give what the operators give, three times."""
    options = {k: v for k, v in description.items() if k not in ("source", "inverse")}
    X, here = tensor_of(description["source"]), mine(backend)
    for make in (linop.rfft, linop.irfft):
        op = make(X, **options)
        plan = op.compile(backend)
        for one, A in ((plan, op), (plan.H, op.H)):
            for k in range(3):
                x = A.domain.random(seed + k)
                wanted = A(x)
                (held,) = [x[r.name] for r in A.domain.on(here)] or [None]
                found = one(held)
                for region in A.codomain.on(here):
                    y = wanted[region.name]
                    near = 256 * np.finfo(y.dtype).eps * (1 + np.abs(y).max(initial=0))
                    assert np.allclose(found, y, rtol=0, atol=near)


def convolution_of_real(
    described: Description, seed: int
) -> tuple[linop.LinearOperator, np.ndarray, np.ndarray]:
    """A spectral convolution of real tensors, an argument, and its image by NumPy's transforms."""
    X, modes, channels = tensor_of(described["source"]), described["modes"], described["channels"]
    rng = np.random.default_rng(seed)
    mixed = () if channels is None else (X.global_shape[0], channels)
    weights = rng.normal(size=(2, *mixed, *modes))
    x = rng.normal(size=X.global_shape).astype(X.dtype)
    weights = (weights[0] + 1j * weights[1]).astype(np.result_type(X.dtype, np.complex64))
    Y = X
    if channels is not None:
        bounds, shape = {d: X.bounds[d] for d in range(1, X.ndim)}, (channels, *X.global_shape[1:])
        Y = linop.TensorSpace(
            shape, X.partition, X.dtype, X.axes, "y", bounds=bounds, memory=X.memory
        )
    of = None if channels is None else 0
    A = linop.fourier.spectral_convolution(X, weights, channels=of, codomain=Y)
    wanted = np.zeros(Y.global_shape)
    if x.size:
        axes, first = tuple(range(X.ndim - len(modes), X.ndim)), len(mixed) // 2
        z = np.fft.rfftn(x, axes=axes)
        low = [np.fft.fftfreq(m, 1 / m).astype(int) if m else np.zeros(0, int) for m in modes]
        low[-1] = np.arange(modes[-1])
        kept = z[np.ix_(*[np.arange(n) for n in z.shape[:first]], *low)]
        kept = kept * weights if of is None else (kept[:, None] * weights).sum(0)
        spread = np.zeros((*kept.shape[:first], *z.shape[first:]), complex)
        spread[np.ix_(*[np.arange(n) for n in kept.shape[:first]], *low)] = kept
        wanted = np.fft.irfftn(spread, [x.shape[d] for d in axes], axes)
    return A, x, wanted


def convolves_real_fields(backend: Backend, described: Description, seed: int) -> None:
    """A plan of a spectral convolution of real tensors, three times; its adjoint by an inner
    product; in another dtype of arguments an error."""
    A, x, wanted = convolution_of_real(described, seed)
    X, Y = A.domain, A.codomain
    assert isinstance(X, linop.TensorSpace) and isinstance(Y, linop.TensorSpace)
    plan = A.compile(backend)
    xs, ys = X.scatter(x), Y.scatter(wanted.astype(Y.dtype))
    size = 1 + np.abs(wanted).max(initial=0) + np.abs(x).max(initial=0)
    near = 512 * np.finfo(X.dtype).eps * size * max(1, x.size)
    for k in range(3):
        found = plan(backend.vector(X, k * xs))
        for name, array in found.arrays.items():
            assert array.dtype == X.dtype
            assert np.allclose(array, k * ys[name], rtol=0, atol=near)
    y = backend.vector(Y, Y.random(seed))
    one, other = plan(backend.vector(X, xs)).inner(y), backend.vector(X, xs).inner(plan.H(y))
    assert abs(one - other) <= near * max(1, x.size)
