"""Pipelines between whose stages whole numbers and booleans go, beside one process: contracts for
threads and ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from linop.backends.engine.base import Backend
from linop.schedules import GENERATORS
from linop.strategies import Pipeline
from support.strategies.pipelines.pipelines import RATE, equal, fill, squares, values

Tensor = Any
WIDTH = 4
KINDS = ("int64", "int32", "int16", "int8", "uint8", "bool")


class Mixed(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A stage of any inputs and four outputs: numbers with gradients, numbers that choose rows of a
    table, a mask, and the first of its inputs that has no gradient.

    Args:
        kind: dtype of output 1.
        writes: it changes inputs without gradients in place, after their use.
    """

    def __init__(self, seed: int, kind: str, writes: bool) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(3, WIDTH, dtype=torch.float64)
        self.inner = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.kind, self.writes = getattr(torch, kind), writes
        fill(self, seed)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        total, same = 0.0, None
        for x in inputs:
            whole = not x.is_floating_point()
            total = total + (self.table(x.long() % 3) if whole else torch.tanh(self.inner(x)))
            same = x if whole and same is None else same
        if self.writes:
            for x in inputs:
                if not x.is_floating_point():
                    x.logical_not_() if x.dtype is torch.bool else x.add_(1)
        sums = total.detach().sum(-1)
        chosen, mask = (sums * 2).round().long() % 3, sums > 0
        return total, chosen.to(self.kind), mask, mask if same is None else same.clone()


class Final(torch.nn.Module):  # type: ignore[misc]
    """The first output of a stage."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.inner(*inputs)[0]


@dataclass(frozen=True)
class Graph:
    """Stages, and edges (a, b, k): stage b takes output k of stage a."""

    schedule: str
    edges: tuple[tuple[int, int, int], ...]
    kinds: tuple[str, ...]
    chunks: int = 1
    recompute: bool = False
    writes: bool = False
    slots: int | None = None

    @property
    def stages(self) -> int:
        return len(self.kinds)

    @property
    def workers(self) -> int:
        return self.stages // self.chunks

    def model(self) -> list[Any]:
        each = enumerate(self.kinds)
        *first, last = [Mixed(s, kind, self.writes and s > 0) for s, kind in each]
        return [*first, Final(last)]

    def output(self, stages: Sequence[Any], x: Tensor) -> Tensor:
        outputs: list[Any] = []
        for s, stage in enumerate(stages):
            own = [outputs[a][k] for a, b, k in sorted(self.edges) if b == s]
            given = own or [x]
            outputs.append(stage(*(t.clone() for t in given)))
        return outputs[-1]


def is_one_process(backend: Backend, graph: Graph) -> None:
    """Gradients of two steps, and outputs, bit for bit; input and target of whole numbers."""
    stages, alone = graph.model(), graph.model()
    options: Any = {"chunks": graph.chunks} if graph.chunks > 1 else {}
    table = GENERATORS[graph.schedule](graph.stages, 4, **options)
    pipe = Pipeline(
        stages,
        table,
        squares,
        edges=list(graph.edges),
        recompute=graph.recompute,
        slots=graph.slots,
        backend=backend,
    )
    x = (values(9, seed=1) * 3).round().to(getattr(torch, graph.kinds[0]))
    target = values(9, WIDTH, seed=2)
    sizes = [3, 2, 2, 2]
    for _ in range(2):
        pipe.step(x.clone(), target)
        for one, wanted in zip(x.split(sizes), target.split(sizes), strict=True):
            squares(graph.output(alone, one), wanted).backward()
        for s, stage in pipe.stages.items():
            for p, q in zip(stage.parameters(), alone[s].parameters(), strict=True):
                # A stage on which the loss does not depend gets zeros, where one process has None.
                equal(f"gradient in stage {s}", *(zero(p, g) for g in (p.grad, q.grad)))
    y = pipe(x.clone())
    if y is not None:
        with torch.no_grad():
            each = [graph.output(alone, one) for one in x.split(sizes)]
        equal("output", y, torch.cat(each))


def zero(p: Tensor, grad: Tensor) -> Tensor:
    return torch.zeros_like(p) if grad is None else grad


class Language(torch.nn.Module):  # type: ignore[misc]
    """A model of token numbers, which its last stage takes again, with a mask made in the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, WIDTH)
        self.body = torch.nn.Linear(WIDTH, WIDTH)
        self.again = torch.nn.Embedding(7, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        kept = tokens > 2
        x = self.embedding(tokens)
        y = self.body(x).masked_fill(kept.unsqueeze(-1), 0.0)
        return y * self.again(tokens) + kept.unsqueeze(-1)


def exported_tokens(backend: Backend, model: Any, stages: Any) -> None:
    """A module that torch cut sends token numbers and a mask past stages."""
    sgd = partial(torch.optim.SGD, lr=RATE)
    table = GENERATORS["1f1b"](3, 4)
    pipe = Pipeline(copy.deepcopy(stages), table, squares, optimizer=sgd, backend=backend)
    tokens = torch.arange(40).reshape(8, 5) % 7
    target = values(8, 5, WIDTH, seed=3, dtype=torch.float32)
    pipe.step(tokens, target)
    alone = copy.deepcopy(model)
    for one, wanted in zip(tokens.split(2), target.split(2), strict=True):
        squares(alone(one), wanted).backward()
    sgd(alone.parameters()).step()
    for key, value in pipe.state_dict().items():
        equal(key, value, alone.state_dict()[key])
