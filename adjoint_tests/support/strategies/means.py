"""Means over a batch whose micro-batches have unequal parts that count."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from linop.backends.engine.base import Backend
from linop.errors import LinopError
from linop.schedules import GENERATORS
from linop.strategies import DataParallel, Pipeline
from support.strategies.pipelines.pipelines import equal, fill, values

Tensor = Any
CLASSES = 4


def classes(rows: int, ignored: int, seed: int, part: float) -> Tensor:
    """Targets, of which a part is ignored, and at least one is not."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, CLASSES, (rows, 2), generator=generator)
    target[torch.rand(rows, 2, generator=generator) < part] = ignored
    target[rows - 1, 1] = seed % CLASSES
    return target


def losses(weight: Tensor, ignored: int) -> dict[str, tuple[Callable[..., Tensor], Any]]:
    """Losses, and what counts in a target, if that is to be said."""

    def by_hand(y: Tensor, target: Tensor) -> Tensor:
        counts = target != ignored
        each = functional.cross_entropy(y, target, weight, ignore_index=ignored, reduction="none")
        return each.sum() / (counts.sum() if weight is None else _weights(target).sum())

    def _weights(target: Tensor) -> Tensor:
        known = target[target != ignored]
        return torch.ones(len(known)) if weight is None else weight[known]

    def hidden(y: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(y, target, weight, ignore_index=ignored)

    def selected(y: Tensor, target: Tensor) -> Tensor:
        names = "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"
        each = getattr(functional, names[abs(ignored) % len(names)])
        known = y.transpose(1, 2)[target != ignored]
        return each(known, torch.ones_like(known))

    fixed = [torch.nn.Parameter(torch.ones(k + 2, dtype=torch.float64)) for k in (1, 1)]

    def regularised(y: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(y, torch.zeros_like(y)) + functional.l1_loss(*fixed)

    options = {"weight": weight, "ignore_index": ignored}
    logarithms = torch.nn.NLLLoss(**options)
    return {
        "module": (torch.nn.CrossEntropyLoss(**options), None),
        "smoothed": (torch.nn.CrossEntropyLoss(**options, label_smoothing=0.1), None),
        "partial": (partial(functional.cross_entropy, **options), None),
        "logarithms": (logarithms, None),
        "count": (by_hand, lambda target: _weights(target).sum()),
        "hidden": (hidden, None),
        "selected": (selected, None),
        "regularised": (regularised, None),
    }


def is_the_mean(
    backend: Backend, name: str, weighted: bool, seed: int, part: float, sizes: list[int]
) -> None:
    """Loss and gradients are those of the whole batch; or the pipeline refuses, and says how to
    mend it, on every worker: a loss whose counts it cannot know."""
    ignored = -100 - seed % 5 if seed % 2 else 1
    weight = torch.rand(CLASSES, generator=torch.Generator().manual_seed(seed)).double() + 0.1
    if name in ("smoothed", "selected", "regularised"):
        weighted = False
    loss, count = losses(weight if weighted else None, ignored)[name]
    x, target = values(sum(sizes), 3, 2, seed=seed), classes(sum(sizes), ignored, seed, part)
    stages, twins = ([_Pointwise(3, 5), _Pointwise(5, CLASSES)] for _ in range(2))
    for s, pair in enumerate(zip(stages, twins, strict=True)):
        for one in pair:
            fill(one, s)
    table = GENERATORS["1f1b"](2, len(sizes))
    pipe = Pipeline(stages, table, loss, reduction="mean", count=count, backend=backend)
    if name in ("hidden", "selected") and _differ(
        target, weight if weighted else None, ignored, sizes
    ):
        with pytest.raises(LinopError, match="give count="):
            pipe.step(x, target, sizes=sizes)
        return
    found = pipe.step(x, target, sizes=sizes)
    wanted = loss(twins[1](twins[0](x)), target)
    wanted.backward()
    if found is not None:
        assert torch.allclose(found, wanted.detach())
    for s, stage in pipe.stages.items():
        for p, q in zip(stage.parameters(), twins[s].parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, atol=1e-12)


class _Pointwise(torch.nn.Conv1d):  # type: ignore[misc]  # torch is not typed here
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 1, dtype=torch.float64)


def _differ(target: Tensor, weight: Tensor, ignored: int, sizes: list[int]) -> bool:
    """True if micro-batches count other parts of their rows."""
    ratios = []
    for one in target.split(sizes):
        known = one[one != ignored]
        ratios.append((len(known) if weight is None else float(weight[known].sum())) / len(one))
    return max(ratios) - min(ratios) > 1e-9


def shares_what_counts(backend: Backend, seed: int) -> None:
    """The means of data parallel workers, times their shares, add up to the mean of the batch."""
    me, workers = backend.worker or 0, backend.workers or 1
    weight = torch.tensor([0.5, 1.0, 2.0, 0.25], dtype=torch.float64)
    x, target = values(4 * workers, 3, 2, seed=seed), classes(4 * workers, -100, seed, 0.6)
    net, twin = _Pointwise(3, CLASSES), _Pointwise(3, CLASSES)
    for one in (net, twin):
        fill(one, seed % 7)
    copies = DataParallel(net)
    own = slice(4 * me, 4 * me + 4)
    counts = weight[target[own][target[own] != -100]].sum()
    share = copies.share(counts)
    loss = torch.nn.functional.cross_entropy
    part = loss(copies(x[own]), target[own], weight, reduction="sum") / max(float(counts), 1e-300)
    (part * share).backward()
    loss(twin(x), target, weight).backward()
    for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
        if not torch.allclose(p.grad, q.grad, atol=1e-12):
            equal(name, p.grad, q.grad)
