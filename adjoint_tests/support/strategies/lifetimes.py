"""Lifetimes: when a program lets go of a parallel model nothing else holds it, or its parameters;
and when the program has ended nothing holds its backend."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from linop.backends.engine.base import Backend
from linop.schedules import GENERATORS
from linop.strategies import Mesh, Pipeline, split
from support.strategies.pipelines.pipelines import squares, values
from support.strategies.states import WIDTH, model, wrapped

_TIMES = 50
"""Tries until what is still there is held."""


def models_are_let_go(
    backend: Backend, names: Sequence[str], seed: int, extents: dict[str, int]
) -> None:
    """Of a model in strategies, after a step."""

    def used() -> Iterator[Any]:
        net = wrapped(model(seed, 2), names, Mesh(backend, **extents))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        squares(net(values(3, WIDTH, seed=seed)), 0).backward()
        optimizer.step()
        yield net
        yield from net.modules()
        yield from net.parameters()

    _are_let_go(used)


def pipelines_are_let_go(backend: Backend, seed: int, generator: str) -> None:
    """Of a pipeline, after a step and an evaluation."""

    def used() -> Iterator[Any]:
        optimizer = partial(torch.optim.SGD, lr=0.1)
        table = GENERATORS[generator](backend.workers or 1, 2)
        parts = split(model(seed, table.stages), [str(k) for k in range(1, table.stages)])
        pipe = Pipeline(parts, table, squares, backend=backend, optimizer=optimizer)
        pipe.step(values(4, WIDTH, seed=1), torch.zeros(4, WIDTH))
        pipe(values(4, WIDTH, seed=2))
        yield pipe
        for part in parts:
            yield from part.parameters() if part is not None else ()

    _are_let_go(used)


def _are_let_go(used: Callable[[], Iterator[Any]]) -> None:
    known = [weakref.ref(one) for one in used()]
    for _ in range(_TIMES):
        gc.collect()
        left = [type(one).__name__ for ref in known if (one := ref()) is not None]
        if not left:
            return
        time.sleep(0.1)  # while another thread collects, `collect` does nothing
    raise AssertionError(f"{left} of {len(known)} are still there")
