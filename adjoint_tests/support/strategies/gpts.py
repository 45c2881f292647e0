"""examples/gpt.py beside one process: contracts for threads and ranks. Needs torch."""

from __future__ import annotations

import torch

from linop.backends.engine.base import Backend
from support.examples import example

gpt = example("gpt")
SMALL = gpt.Size(width=16, heads=4, blocks=2, length=8)
STEPS, BATCH, WIDE = 3, 8, torch.float64
TOLERANCE = 1e-12
"""Of losses of a few steps. Rounding grows with training: to 1e-9 in 100 steps of the whole net."""


def losses(backend: Backend, strategy: str) -> list[float]:
    torch.set_num_threads(1)
    return [loss for *_, loss in gpt.train(strategy, backend, SMALL, STEPS, BATCH, WIDE)]


def alone(strategy: str) -> list[float]:
    """Losses of one process, without linop."""
    net = gpt.network(strategy, SMALL, WIDE)
    adam = gpt.language_model.optimizer(net.parameters())
    source, found = gpt.language_model.text(), []
    for x, target in gpt.language_model.batches(source, BATCH, STEPS, length=SMALL.length):
        adam.zero_grad()
        loss = gpt.language_model.loss(net(x), target)
        loss.backward()
        adam.step()
        found.append(loss.item())
    return found


def follows(backend: Backend, strategy: str, twin: list[float]) -> None:
    found = losses(backend, strategy)
    assert max(abs(a - b) for a, b in zip(found, twin, strict=True)) < TOLERANCE, (found, twin)
