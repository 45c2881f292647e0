"""Pipelines with a stage that is cut in space over several workers, beside one process."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch

from linop import Partition, layers
from linop.backends.engine.base import Backend
from linop.schedules import GENERATORS
from linop.strategies import Pipeline
from support.strategies.pipelines.pipelines import RATE, fill, squares, values

Tensor = Any


def cut_convolution(P: Partition) -> Any:
    """A stage on the workers of a partition."""
    cut = layers.Conv2d(P, 2, 2, 3, padding=1, dtype=torch.float64)
    return torch.nn.Sequential(cut, torch.nn.Tanh())


def cut_stage_is_whole(backend: Backend, schedule: str) -> None:
    """Convolutions on workers 0, 1 and 2 together, and 3, are those of one process, after an
    update: the edges are repartitions between one worker and two."""
    convolution = partial(torch.nn.Conv2d, 2, 2, 3, padding=1)
    whole = [torch.nn.Sequential(convolution(), torch.nn.Tanh()).double() for _ in range(3)]
    for seed, stage in enumerate(whole):
        fill(stage, seed)
    net = torch.nn.Sequential(*copy.deepcopy(whole))
    pipe = Pipeline(
        [whole[0], cut_convolution, whole[2]],
        GENERATORS[schedule](3, 4),
        squares,
        optimizer=partial(torch.optim.SGD, lr=RATE / 100),
        workers=[0, Partition((1, 1, 2, 1), (1, 2)), 3],
        backend=backend,
    )
    pipe.load_state_dict(net.state_dict())
    x, target = values(10, 2, 7, 5, seed=1), values(10, 2, 7, 5, seed=2)
    loss, y = pipe.step(x, target), pipe(x)
    wanted = squares(net(x), target)
    wanted.backward()
    torch.optim.SGD(net.parameters(), lr=RATE / 100).step()
    if backend.worker == 3:
        assert torch.allclose(loss, wanted, rtol=1e-12, atol=0), (loss, wanted)
        # Sums of convolutions are taken in another order on blocks.
        assert torch.allclose(y, net(x), rtol=1e-10, atol=1e-12), (y - net(x)).abs().max()
