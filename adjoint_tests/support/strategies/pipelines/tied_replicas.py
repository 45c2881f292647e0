"""Tied weights in pipelines whose stages are replicas, with steps of which some are in
``no_sync()``: contracts for threads and ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from linop import schedules
from linop.backends.engine.base import Backend
from linop.strategies import DataParallel, Mesh, Pipeline
from support.strategies.data.habits import whole

TIED = "0.0.weight", "1.1.weight"


def stages() -> list[Any]:
    made = [nn.Sequential(nn.Linear(3, 3, bias=False))]
    made.append(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False)))
    for k, p in enumerate(p for stage in made for p in stage.parameters()):
        p.data.copy_(whole(*p.shape, seed=k))
    made[1][1].weight.data.copy_(made[0][0].weight.data)
    return [stage.double() for stage in made]


def adds_replicas_of_ties(backend: Backend, steps: str) -> None:
    """Gradients are those of one process, to the bit, on whole numbers.

    Args:
        steps: for each a letter: "n" for one in ``no_sync()``, "s" for others. Steps that end in
            "n" are summed by ``reduce_gradients``.
    """
    mesh = Mesh(backend, dp=2, pp=2)
    k, loss = mesh["pp"].index, nn.MSELoss(reduction="sum")
    x, t = (whole(8, 3, seed=seed).double() for seed in (9, 8))
    twin = nn.Sequential(*stages())
    twin[1][1].weight = twin[0][0].weight
    mine = DataParallel(stages()[k], mesh["dp"], reduction="sum")
    placed: list[Any] = [None, None]
    placed[k] = mine
    pipe = Pipeline(placed, schedules.gpipe(2, 2), loss, backend=mesh["pp"].backend, tied=[TIED])
    rows = [one.tensor_split(2)[mesh["dp"].index] for one in (x, t)]
    for step in steps:
        loss(twin(x), t).backward()
        if step == "n":
            with mine.no_sync():
                pipe.step(*rows)
        else:
            pipe.step(*rows)
    if steps.endswith("n"):
        mine.reduce_gradients()
    wanted = dict(twin.named_parameters(remove_duplicate=False))
    for name, p in mine.module.named_parameters():
        assert torch.equal(p.grad, wanted[f"{k}.{name}"].grad), (steps, name)
