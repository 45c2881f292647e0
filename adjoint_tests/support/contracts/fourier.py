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
