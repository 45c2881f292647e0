"""Networks of operations that `spatial` cuts, drawn as data: a list of names and settings, from
which every worker builds the same module."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from support.strategies import spatial_operations
from support.strategies.spatial_operations import Chooser, Settings, Shape
from support.strategies.spatial_windows import WINDOWS

OPERATIONS = spatial_operations.OPERATIONS | WINDOWS

MOST = 2500
"""Elements of a tensor, at most."""


class Randomly:
    """Settings by a generator of random numbers."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def int(self, least: int, most: int) -> int:
        return self._random.randint(least, most)

    def of(self, values: Sequence[Any]) -> Any:
        return self._random.choice(list(values))


_NAMES = [name for name, (_, _, often) in OPERATIONS.items() for _ in range(often)]

Description = tuple[Shape, int, tuple[tuple[str, Settings], ...]]
"""Shape of the input, a seed, and operations with their settings."""


def draw(c: Chooser, most: int = 4) -> Description:
    """A network, and the shape of its input."""
    ndim = c.of([1, 2, 2, 2, 3])
    longest = {1: 20, 2: 11, 3: 6}[ndim]
    shape: Shape = (c.int(1, 2), c.int(1, 4), *(c.int(1, longest) for _ in range(ndim)))
    seed = c.int(0, 10**6)
    torch.manual_seed(seed)
    found: list[tuple[str, Settings]] = []
    now = torch.zeros(shape)
    for _ in range(c.int(1, most)):
        name = c.of(_NAMES)
        settings = OPERATIONS[name][0](c, tuple(now.shape))
        module = None if settings is None else OPERATIONS[name][1](tuple(now.shape), settings)
        if module is None:
            continue
        with torch.no_grad():
            after = module(now)
        if after.numel() > MOST or after.ndim not in (
            0,
            2,
            *((after.ndim,) if name != "head" else ()),
        ):
            continue
        found.append((name, settings))
        now = after
        if name == "head":
            break
    return shape, seed, tuple(found)


def build(description: Description) -> tuple[nn.Module, list[Tensor]]:
    """The module, in float64, and its input."""
    shape, seed, operations = description
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    now: Any = torch.zeros(shape)
    modules = []
    for name, settings in operations:
        module = OPERATIONS[name][1](tuple(now.shape), settings)
        with torch.no_grad():
            now = module(now)
        modules.append(module)
    net = nn.Sequential(*modules).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, dtype=torch.float64, generator=generator) * 0.5 + 0.1)
        for name, b in net.named_buffers():
            if "running" in name:
                start = 0.1 if "mean" in name else 1.0
                b.fill_(start)
            elif "num_batches" in name:
                b.zero_()
    return net, [x]
