"""Losses beside torch's, as SPMD programs. Needs torch.

Ranks import this module, and no test.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

import linop
from linop.backends import Backend
from support.contracts.plans import mine
from support.layers.cases import WIDE, Case, cut, grids, normal, same

CLASSES = ("NLLLoss", "CrossEntropyLoss")


IGNORED = -7


@st.composite
def losses(draw: Any, most: int) -> Case:
    """Any loss, on a grid of at most so many workers; there may be one more."""
    kind = draw(
        st.sampled_from(
            [
                *("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "KLDivLoss"),
                *("BCELoss", "BCEWithLogitsLoss"),
                *(2 * CLASSES),
            ]
        )
    )
    ndim = draw(st.integers(2 if kind in CLASSES else 1, 4))
    shape = tuple(draw(st.integers(1, 5)) for _ in range(ndim))
    options: dict[str, Any] = {}
    reductions = ["mean", "sum", "none", *(["batchmean"] if kind == "KLDivLoss" else [])]
    options["reduction"] = draw(st.sampled_from(reductions))
    if kind == "SmoothL1Loss":
        options["beta"] = draw(st.sampled_from([0.0, 0.5]))
    if kind == "HuberLoss":
        options["delta"] = 0.5
    if kind == "KLDivLoss":
        options["log_target"] = draw(st.booleans())
    if kind in CLASSES:
        options["ignore_index"] = draw(st.sampled_from([IGNORED, 0]))
    probable = options.get("ignore_index") == IGNORED and draw(st.booleans())
    if kind == "CrossEntropyLoss":
        options["label_smoothing"] = draw(st.sampled_from([0.0, 0.2]))
    # Drawn from the seed: tensors are no small description.
    weights = {"weight": draw(st.booleans()), "pos_weight": draw(st.booleans())}
    places = {"weights": weights, "probable": probable, "more": draw(st.booleans())}
    seed = draw(st.integers(0, 99))
    P = draw(grids(most, draw(st.integers(1, ndim))))
    return Case(kind, (P,), shape, (), options, places, seed=seed)


def uniform(shape: tuple[int, ...], seed: int) -> Any:
    """Numbers between 0 and 1."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=WIDE)


def data(case: Case) -> tuple[Any, Any, dict[str, Any]]:
    """The input, the target, and the arguments."""
    shape, seed, kind = case.shape, case.seed, case.layer
    options, weights = dict(case.options), case.places["weights"]
    x, t = normal(shape, seed), uniform(shape, seed + 1)
    if kind == "BCELoss":
        x = uniform(shape, seed)
    if kind in ("BCELoss", "BCEWithLogitsLoss") and weights["weight"]:
        options["weight"] = uniform((1, *shape[1:]), seed + 2)
    if kind == "BCEWithLogitsLoss" and weights["pos_weight"]:
        options["pos_weight"] = uniform(shape[-1:], seed + 3)
    if kind == "KLDivLoss" and options["log_target"]:
        t = t.log()
    if kind in CLASSES:
        if weights["weight"]:
            options["weight"] = uniform(shape[1:2], seed + 2)
        if kind == "NLLLoss" or not case.places["probable"]:
            t = (t[:, 0] * shape[1]).long()
            t[uniform(tuple(t.shape), seed + 4) > 0.8] = options["ignore_index"]
    return x, t, options


def is_torch_s(backend: Backend, case: Case) -> None:
    """The loss, and its gradient, are those of torch.nn."""
    (P,), worker = case.partitions, mine(backend)
    whole, target, options = data(case)
    z = whole.clone().requires_grad_()
    wanted = getattr(torch.nn, case.layer)(**options)(z, target)
    none = case.options["reduction"] == "none"
    upstream = normal(tuple(wanted.shape), case.seed + 5)
    if not wanted.isfinite().all():
        return  # where nothing counts, the mean is not a number
    wanted.backward(upstream)
    X, x, t = cut(case.shape, P, case.seed), None, None
    if worker in P:
        where = X.slices(worker)
        x = whole[where].clone().requires_grad_()
        fewer = target.ndim < whole.ndim
        there = (where[0], *where[2:]) if fewer else where
        t = target[there]
        if none:
            there = (where[0], *where[2:]) if wanted.ndim < whole.ndim else where
            wanted, upstream = wanted[there], upstream[there]
    loss = getattr(linop.layers, case.layer)(P, **options)
    y = loss(x, t)
    if worker in P or not none:
        same(y.detach(), wanted.detach())
        y.backward(upstream)
    else:
        assert y.shape[-1] == 0
        y.sum().backward()
    if worker in P:
        same(x.grad, z.grad[where])
        same(x.detach(), whole[where])


def workers(case: Case) -> int:
    return case.workers + case.places["more"]


WORDS = (
    "targets from 0 to 3, or ignore_index=-100, expected",
    "between 0 and 1",
    "targets from 0 to 3, or ignore_index=-100, expected",
    "between 0 and 1",
    "a target of shape (2, 3)",
    "float64; convert one of them",
    "int64 expected",
    "weight of shape (3,) for 4 classes",
    "reduction='most'",
    "HuberLoss",
    "label_smoothing=2.0",
)
