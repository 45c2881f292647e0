"""Models that call one module several times, in stages of a pipeline: contracts. Needs torch.

Ranks import this module, and no test.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from linop.backends import Backend
from linop.schedules import GENERATORS
from linop.strategies import Pipeline, split
from support.layers.cases import normal, same
from support.strategies.pipelines.pipelines import squares

Tensor = Any


@dataclass(frozen=True)
class Repeated:
    """A model that calls one layer so often, and the calls that stages begin with.

    Args:
        cuts: numbers of calls, ascending; that of the calls stands for what comes after them.
        schedule: one of `linop.schedules.GENERATORS`.
        max_norm: of gradients.
    """

    calls: int = 2
    cuts: tuple[int, ...] = (1,)
    schedule: str = "1f1b"
    max_norm: float | None = None

    @property
    def workers(self) -> int:
        return len(self.cuts) + 1

    @property
    def names(self) -> list[str]:
        return ["last" if k == self.calls else f"layer@{k}" for k in self.cuts]


class Layer(nn.Module):  # type: ignore[misc]  # torch is not typed here
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.full((3,), 0.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.norm(self.inner(x).tanh() * self.scale + y) + self.shift


class Net(nn.Module):  # type: ignore[misc]
    """As ALBERT: the same layer again and again; its result, and the first one, go in."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls
        self.first, self.layer, self.last = nn.Linear(3, 3), Layer(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        first = y = self.first(x)
        for _ in range(self.calls):
            y = self.layer(y, first)
        return self.last(y)


@lru_cache
def cut(calls: int, names: tuple[str, ...]) -> tuple[Any, Any]:
    """A model, and its stages."""
    with torch.random.fork_rng():
        torch.manual_seed(calls)
        model = Net(calls).double()
    return model, split(model, names, torch.ones(2, 3).double())


def is_one_process(backend: Backend, case: Repeated, folder: str) -> None:
    """After some steps, a file and a step more the state is one process's."""
    model, stages = cut(case.calls, tuple(case.names))
    trained(backend, copy.deepcopy(model), copy.deepcopy(stages), case, folder, squares)


def trained(
    backend: Backend,
    twin: Any,
    stages: Any,
    case: Repeated,
    folder: str,
    loss: Any,
    batches: Sequence[Tensor] | None = None,
    tied: Sequence[Sequence[str]] = (),
) -> None:
    made = partial(torch.optim.SGD, lr=0.01, momentum=0.9)  # Adam enlarges roundings
    x, target = batches or (normal((8, 3), 1), normal((8, 2), 2))
    alone = made(twin.parameters())
    for _ in range(3):
        alone.zero_grad()
        for rows, wanted in zip(x.chunk(4), target.chunk(4), strict=True):
            loss(twin(rows), wanted).backward()
        if case.max_norm is not None:
            nn.utils.clip_grad_norm_(twin.parameters(), case.max_norm)
        alone.step()

    def pipeline() -> Pipeline:
        return Pipeline(
            copy.deepcopy(stages),
            GENERATORS[case.schedule](case.workers, 4),
            loss,
            edges=stages.edges,
            optimizer=made,
            max_norm=case.max_norm,
            tied=tied,
            backend=backend,
        )

    pipe = pipeline()
    pipe.step(x, target)
    pipe.step(x, target)
    pipe.save(f"{folder}/state")
    other = pipeline()
    other.load(f"{folder}/state")
    for one in (pipe, other):
        one.step(x, target)
        state = one.state_dict()
        assert list(state) == list(twin.state_dict())
        for key, value in twin.state_dict().items():
            same(state[key], value, 1e-10)


def albert() -> tuple[Any, Any, Any, Any]:
    """ALBERT of transformers, its stages, words, and the names of embeddings that are tied."""
    from support.models.packages import torchvision

    torchvision()
    import transformers

    config = transformers.AlbertConfig(
        vocab_size=20,
        embedding_size=6,
        hidden_size=8,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AlbertForMaskedLM(config).double().eval()
    words = torch.randint(20, (8, 5), generator=torch.Generator().manual_seed(1))
    names: dict[int, list[str]] = {}
    for key, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(key)
    layer = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    stages = split(model, [f"{layer}@1", f"{layer}@3"], words[:2])
    return model, stages, words, [keys for keys in names.values() if len(keys) > 1]


def is_albert(backend: Backend, one: Any, folder: str) -> None:
    """Three stages, of which each has the layer, and two the embeddings."""
    model, stages, words, tied = one

    def loss(output: Any, target: Tensor) -> Tensor:
        logits = getattr(output, "logits", output)
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")

    case = Repeated(4, (1, 3))
    twin = copy.deepcopy(model)
    trained(backend, twin, stages, case, folder, loss, (words, words.flip(0)), tied)
