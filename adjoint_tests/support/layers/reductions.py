"""Reductions over dimensions that are cut, beside torch's, as SPMD programs. Needs torch.

Ranks import this module, and no test.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from hypothesis import strategies as st

import linop
from linop import TensorSpace
from linop.backends import Backend
from support.contracts.plans import mine
from support.layers.cases import Case, cut, grids, normal, same

FAMILIES = {
    "sums": ("Sum", "Mean", "Var", "Std"),
    "largest": ("Amax", "Amin", "LogSumExp"),
    "products": ("Prod", "Norm"),
}
KINDS = tuple(kind for kinds in FAMILIES.values() for kind in kinds)


@st.composite
def reductions(draw: Any, most: int, kinds: Sequence[str] = KINDS) -> Case:
    """Any reduction, or one of some, on a grid of at most so many workers, and perhaps one more."""
    kind = draw(st.sampled_from(kinds))
    ndim = draw(st.integers(1, 4))
    shape = tuple(draw(st.integers(1, 5)) for _ in range(ndim))
    dims = draw(st.sets(st.integers(0, ndim - 1)))
    options: dict[str, Any] = {"keepdim": draw(st.booleans())}
    if dims:
        options["dim"] = [d - ndim if draw(st.booleans()) else d for d in sorted(dims)]
        if len(dims) == 1 and draw(st.booleans()):
            options["dim"] = options["dim"][0]
    if kind in ("Var", "Std"):
        options["correction"] = draw(st.sampled_from([0, 1, 0.5]))
    if kind == "Norm":
        options["ord"] = draw(st.sampled_from([2, 1, 3, 0, inf, -inf]))
    P = draw(grids(most, draw(st.integers(1, ndim) | st.just(ndim))))
    left = ndim if options["keepdim"] else ndim - len(dims) if dims else 0
    P_y = draw(grids(most, draw(st.integers(1, left)))) if left and draw(st.booleans()) else None
    places = {"P_y": P_y, "more": draw(st.booleans())}
    return Case(kind, (P,), shape, (), options, places, P_y, seed=draw(st.integers(0, 99)))


def of_torch(kind: str, x: Any, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    """torch's function of that name."""
    dims = list(range(x.ndim)) if dim is None else [dim] if isinstance(dim, int) else dim
    if kind == "Norm":
        return torch.linalg.vector_norm(x, options["ord"], dims, keepdim)
    if kind == "Prod":
        for d in dims:
            x = x.prod(d, keepdim=True)
        return x if keepdim else x.squeeze(dims)
    return getattr(torch, kind.lower())(x, dim=dims, keepdim=keepdim, **options)


def is_torch_s(backend: Backend, case: Case) -> None:
    """The reduction, and its gradient, are torch's."""
    (P,), worker, options = case.partitions, mine(backend), case.options
    whole = normal(case.shape, case.seed)
    if case.seed % 3 == 0:  # with ties, and zeros
        whole = whole.round()
    z = whole.clone().requires_grad_()
    wanted = of_torch(case.layer, z, **options)
    if not wanted.isfinite().all():
        return  # variances of one element
    upstream = normal(tuple(wanted.shape), case.seed + 1)
    wanted.backward(upstream)
    if z.grad is None:  # of torch's norm of order 0
        z.grad = torch.zeros_like(z)
    if not z.grad.isfinite().all():
        return
    X, x, P_y = cut(case.shape, P, case.seed), None, case.places["P_y"]
    if worker in P:
        x = whole[X.slices(worker)].clone().requires_grad_()
    y = getattr(linop.layers, case.layer)(P, **options, P_y=P_y)(x)
    if worker in (P_y or P):
        if P_y is None:
            given = options.get("dim", range(z.ndim))
            dims = {d % z.ndim for d in ([given] if isinstance(given, int) else given)}
            keep = options["keepdim"]
            where = [s for d, s in enumerate(X.slices(worker)) if keep or d not in dims]
            where = [slice(None) if keep and d in dims else s for d, s in enumerate(where)]
        else:
            where = [*TensorSpace(tuple(wanted.shape), P_y).slices(worker)]
        same(y.detach(), wanted.detach()[(*where,)])
        y.backward(upstream[(*where,)])
    else:
        assert y.shape[-1] == 0
        y.sum().backward()
    if worker in P:
        gradient = torch.zeros_like(x) if x.grad is None else x.grad
        assert x.grad is not None or options.get("ord") == 0
        same(gradient, z.grad[X.slices(worker)])
        same(x.detach(), whole[X.slices(worker)])


def workers(case: Case) -> int:
    return case.workers + case.places["more"]
