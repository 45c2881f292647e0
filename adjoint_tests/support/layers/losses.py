"""Losses beside torch's, as SPMD programs. Needs torch.

Ranks import this module, and no test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

import linop
from linop import Partition
from linop.backends import Backend
from support.contracts.plans import mine
from support.layers.cases import WIDE, Case, cut, grids, normal, same

CLASSES = ("NLLLoss", "CrossEntropyLoss")
ROWS = (
    "CosineEmbeddingLoss",
    "TripletMarginLoss",
    "TripletMarginWithDistanceLoss",
    "MultiMarginLoss",
    "MultiLabelMarginLoss",
    "MultiLabelSoftMarginLoss",
)
"""Losses whose results lack the last dimension."""
ELEMENTWISE = (
    *("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "KLDivLoss", "BCELoss"),
    *("BCEWithLogitsLoss", "PoissonNLLLoss", "SoftMarginLoss", "HingeEmbeddingLoss"),
    *("MarginRankingLoss", "GaussianNLLLoss"),
)
_MOST = {"CosineEmbeddingLoss": 2, "MultiMarginLoss": 2, "MultiLabelMarginLoss": 2, "CTCLoss": 3}
"""The most dimensions of an input."""
EVERY = *ELEMENTWISE, *CLASSES, *ROWS, "CTCLoss"
FAMILIES = {
    "elements": ELEMENTWISE,
    "classes": CLASSES,
    "vectors": ROWS[:3],
    "margins": ROWS[3:],
    "sequences": ("CTCLoss",),
}
_DIFFERENTIABLE = {
    **dict.fromkeys(("MSELoss", "MarginRankingLoss", "CosineEmbeddingLoss"), 2),
    **dict.fromkeys(("GaussianNLLLoss", *ROWS[1:3]), 3),
}
"""The number of first inputs that gradients are compared of; of other losses, one."""
IGNORED = -7


@st.composite
def losses(draw: Any, most: int, kinds: Sequence[str] = EVERY) -> Case:
    """Any loss, or one of some, on a grid of at most so many workers; there may be one more."""
    kind = draw(st.sampled_from(kinds))
    least = 2 if kind in CLASSES else 3 if kind == "CTCLoss" else 1
    ndim = draw(st.integers(least, _MOST.get(kind, 4)))
    shape = tuple(draw(st.integers(1, 5)) for _ in range(ndim))
    options: dict[str, Any] = {}
    reductions = ["mean", "sum", "none", *(["batchmean"] if kind == "KLDivLoss" else [])]
    options["reduction"] = draw(st.sampled_from(reductions))
    for name, values in _OPTIONS.get(kind, {}).items():
        options[name] = draw(st.sampled_from(values))
    probable = options.get("ignore_index") == IGNORED and draw(st.booleans())
    # Drawn from the seed: tensors are no small description.
    weights = {"weight": draw(st.booleans()), "pos_weight": draw(st.booleans())}
    places = {"weights": weights, "probable": probable, "more": draw(st.booleans())}
    places["rows"] = draw(st.booleans())
    seed = draw(st.integers(0, 99))
    P = draw(grids(most, draw(st.integers(1, ndim) | st.just(ndim))))
    own = kind == "TripletMarginWithDistanceLoss" and places["rows"] and ndim > 1
    places["distance"] = own
    if kind == "CTCLoss" or own:  # cut in the batch alone
        P = draw(grids(most, 1))
        P = Partition((1, len(P.workers), 1), P.workers) if kind == "CTCLoss" else P
    return Case(kind, (P,), shape, (), options, places, seed=seed)


_OPTIONS: dict[str, dict[str, list[Any]]] = {
    "SmoothL1Loss": {"beta": [0.0, 0.5]},
    "HuberLoss": {"delta": [0.5]},
    "KLDivLoss": {"log_target": [True, False]},
    "PoissonNLLLoss": {"log_input": [True, False], "full": [True, False]},
    "HingeEmbeddingLoss": {"margin": [1.0, 0.3]},
    "MarginRankingLoss": {"margin": [0.0, 0.3]},
    "GaussianNLLLoss": {"full": [True, False], "eps": [1e-6, 0.5]},
    "NLLLoss": {"ignore_index": [IGNORED, 0]},
    "CrossEntropyLoss": {"ignore_index": [IGNORED, 0], "label_smoothing": [0.0, 0.2]},
    "CosineEmbeddingLoss": {"margin": [0.0, 0.3]},
    "TripletMarginLoss": {"margin": [1.0, 3.0], "p": [2.0, 1.0, 3.0], "swap": [True, False]},
    "TripletMarginWithDistanceLoss": {"margin": [1.0, 3.0], "swap": [True, False]},
    "MultiMarginLoss": {"p": [1, 2], "margin": [1.0, 0.3]},
    "CTCLoss": {"blank": [0], "zero_infinity": [True]},
}


def uniform(shape: tuple[int, ...], seed: int) -> Any:
    """Numbers between 0 and 1."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=WIDE)


def data(case: Case) -> tuple[list[Any], dict[str, Any]]:
    """The input and the other tensors, and the arguments."""
    shape, seed, kind = case.shape, case.seed, case.layer
    options, weights = dict(case.options), case.places["weights"]
    x, t = normal(shape, seed), uniform(shape, seed + 1)
    others = [t]
    if kind == "BCELoss" or options.get("log_input") is False:
        x = uniform(shape, seed)
    if kind in ("BCELoss", "BCEWithLogitsLoss") and weights["weight"]:
        options["weight"] = uniform((1, *shape[1:]), seed + 2)
    if kind == "BCEWithLogitsLoss" and weights["pos_weight"]:
        options["pos_weight"] = uniform(shape[-1:], seed + 3)
    if kind in ("MultiMarginLoss", "MultiLabelSoftMarginLoss") and weights["weight"]:
        options["weight"] = uniform(shape[-1:], seed + 2)
    if kind == "KLDivLoss" and options["log_target"]:
        others = [t.log()]
    if kind == "PoissonNLLLoss":
        others = [(4 * t).floor()]
    if kind in ("SoftMarginLoss", "HingeEmbeddingLoss"):
        others = [2 * t.round() - 1]
    if kind == "MarginRankingLoss":
        others = [normal(shape, seed + 3), 2 * t.round() - 1]
    if kind == "GaussianNLLLoss":
        rows = case.places["rows"]
        others = [normal(shape, seed + 3), uniform(shape[:-1] if rows else shape, seed + 4)]
    if kind == "CosineEmbeddingLoss":
        others = [normal(shape, seed + 3), 2 * uniform(shape[:-1], seed + 1).round() - 1]
    if kind.startswith("Triplet"):
        others = [normal(shape, seed + 3), normal(shape, seed + 4)]
        if case.places["distance"]:
            options["distance_function"] = squared_distance
    if kind == "MultiMarginLoss":
        others = [(uniform(shape[:-1], seed + 1) * shape[-1]).long()]
    if kind == "MultiLabelMarginLoss":
        others = [t.argsort(-1)]
        others[0][uniform(shape, seed + 3) > 0.7] = -1
    if kind in CLASSES:
        if weights["weight"]:
            options["weight"] = uniform(shape[1:2], seed + 2)
        if kind == "NLLLoss" or not case.places["probable"]:
            others = [(t[:, 0] * shape[1]).long()]
            mask = uniform(tuple(others[0].shape), seed + 4) > 0.8
            others[0][mask] = options["ignore_index"]
    if kind == "CTCLoss":
        steps, batch, classes = shape
        x, most = x.log_softmax(2), 1 + seed % 3
        labels = 1 + (uniform((batch, most), seed + 1) * max(classes - 1, 0)).long()
        labels = labels.clamp(max=classes - 1)
        used = [
            (uniform((batch,), seed + 2 + k) * (n + 1)).long() for k, n in ((0, steps), (1, most))
        ]
        others = [labels, *used]
    return [x, *others], options


def squared_distance(x: Any, y: Any) -> Any:
    """A distance between rows of blocks."""
    return (x - y).square().sum(-1)


def within(case: Case, number: int, ndim: int, where: Any) -> Any:
    """Index of a worker's block of one of the tensors, or of the result (number -1).

    Args:
        ndim: dimensions of the tensor.
        where: index of the block of the input.
    """
    if case.layer == "CTCLoss":
        return where if number == 0 else where[1:2]
    if ndim == len(where):
        return where
    return (where[0], *where[2:]) if case.layer in CLASSES else where[:-1]


def is_torch_s(backend: Backend, case: Case) -> None:
    """The loss, and its gradients, are those of torch.nn."""
    (P,), worker = case.partitions, mine(backend)
    wholes, options = data(case)
    smooth = _DIFFERENTIABLE.get(case.layer, 1)
    zs = [x.clone().requires_grad_(k < smooth) for k, x in enumerate(wholes)]
    wanted = getattr(torch.nn, case.layer)(**options)(*zs)
    none = case.options["reduction"] == "none"
    upstream = normal(tuple(wanted.shape), case.seed + 5)
    if not wanted.isfinite().all():
        return  # where nothing counts, the mean is not a number
    wanted.backward(upstream)
    X, blocks = cut(case.shape, P, case.seed), [None] * len(zs)
    if worker in P:
        where = X.slices(worker)
        places = [within(case, k, z.ndim, where) for k, z in enumerate(zs)]
        blocks = [z.detach()[at].clone() for z, at in zip(zs, places, strict=True)]
        blocks = [x.requires_grad_(z.requires_grad) for x, z in zip(blocks, zs, strict=True)]
        if none:
            there = within(case, -1, wanted.ndim, where)
            wanted, upstream = wanted[there], upstream[there]
    loss = getattr(linop.layers, case.layer)(P, **options)
    y = loss(*blocks)
    if worker in P or not none:
        same(y.detach(), wanted.detach())
        y.backward(upstream)
    else:
        assert y.shape[-1] == 0
        y.sum().backward()
    if worker in P:
        for x, z, at in zip(blocks, zs, places, strict=True):
            if z.requires_grad:
                same(x.grad, z.grad[at])
            same(x.detach(), z.detach()[at])


def workers(case: Case) -> int:
    return case.workers + case.places["more"]


WORDS = (
    *(
        "targets from 0 to 3, or ignore_index=-100, expected",
        "input and target between 0 and 1",
        "input and target between 0 and 1",
    )
    * 2,
    "a target of shape (2, 3)",
    "float64; convert one of them",
    "complex64; convert one of them",
    "complex64; convert one of them",
    "int64 expected",
    "weight of shape (3,) for 4 classes",
    "reduction='most'",
    "HuberLoss",
    "label_smoothing=2.0",
)

MORE_WORDS = (
    "variances that are not negative expected; 1 blocks",
    "var of shape (2, 2) in blocks",
    "an input2 of float64",
    "a target of shape (2, 4) in blocks",
    "a negative of shape",
    "targets from 0 to 3 expected",
    "int64 expected",
    "weight of shape (2,) for 4 classes",
    "targets from -1, for the end, to 3",
    "weight of shape (2,) for an input of shape (2, 4)",
    "target_lengths up to the number of labels",
    "target_lengths of float64; int64 expected",
    "targets of shape",
    "splits the batch alone",
    "margin=0.0",
    "splits dimension 0 alone",
    "p=3; 1 or 2 expected",
    "3 tensors given; input, target expected",
    "targets= given",
)

REFUSED = {
    "NLLLoss2d": "an old name of NLLLoss",
    "LinearCrossEntropyLoss": "Linear and CrossEntropyLoss, whose classes may be split",
}
"""Losses of torch that linop.layers has not, and what to use."""
