"""Models of which a loss uses a part: gradients of the rest are None, as in one process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from linop.backends.engine.base import Backend
from linop.schedules import GENERATORS
from linop.strategies import Mesh, Pipeline, full_state_dict, fully_shard, unsharded
from support.strategies.pipelines.pipelines import fill, squares, values

Tensor = Any
WIDTH = 3
SCHEDULES = "gpipe", "1f1b", "zb-h1"


class Part(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A module that uses some of its inputs and parameters.

    Args:
        inputs: numbers of those that it uses, and whether always.
        outputs: their number.
        frozen: the first layer has no gradients.
    """

    def __init__(
        self, inputs: Sequence[tuple[int, bool]], outputs: int, frozen: bool, seed: int
    ) -> None:
        super().__init__()
        self.inputs = inputs
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(outputs))
        self.spare = torch.nn.Linear(WIDTH, WIDTH)
        self.layers.double()
        self.spare.double()
        fill(self, seed)
        self.layers[0].requires_grad_(not frozen)

    def forward(self, *xs: Tensor) -> Any:
        used = [xs[k] for k, always in self.inputs if always or bool(xs[0].sum() > 0)]
        x = torch.stack(used).sum(0) if used else torch.ones_like(xs[0])
        results = tuple(layer(x) for layer in self.layers)
        return results if len(results) > 1 else results[0]


def drawn(seed: int) -> list[Part]:
    """Three stages; the loss may depend on the last one alone."""
    choice = random.Random(seed)
    counts = [choice.choice([1, 2]), choice.choice([1, 2]), 1]
    given, stages = 1, []
    for s, outputs in enumerate(counts):
        inputs = [(k, choice.random() < 0.5) for k in range(given) if choice.random() < 0.7]
        stages.append(Part(inputs, outputs, choice.random() < 0.3, s))
        given = outputs
    return stages


def edges_of(stages: Sequence[Part]) -> list[tuple[int, int, int]]:
    """All outputs go to the next stage."""
    pairs = enumerate(stages[:-1])
    return [(s, s + 1, k) for s, stage in pairs for k in range(len(stage.layers))]


def alone(stages: Sequence[Part], x: Tensor) -> Tensor:
    """The output of one process."""
    result: Any = x
    for stage in stages:
        result = stage(*(result if isinstance(result, tuple) else (result,)))
    return result


def adam(parameters: Any) -> Any:
    """It moves parameters that have gradients of zeros."""
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)


def same(name: str, mine: Tensor, wanted: Tensor) -> None:
    assert (mine is None) == (wanted is None), f"{name}: {mine}, {wanted}"
    assert mine is None or torch.allclose(mine, wanted, atol=1e-12), name


def in_pipelines(backend: Backend, schedule: str, seed: int, recompute: bool, tied: bool) -> None:
    """Gradients, and what an optimizer with weight decay makes of them, are one process's."""
    stages, twins = drawn(seed), drawn(seed)
    ties: list[list[str]] = []
    if tied:
        ties = [["0.spare.weight", "2.spare.weight"], ["1.spare.bias", "2.layers.0.bias"]]
        for one in (stages, twins):
            one[2].spare.load_state_dict(one[0].spare.state_dict())
            one[2].layers[0].bias.data.copy_(one[1].spare.bias.data)
            one[2].layers[0].bias.requires_grad_()
        twins[2].spare.weight = twins[0].spare.weight
        twins[2].layers[0].bias = twins[1].spare.bias
    options: dict[str, Any] = {"edges": edges_of(stages), "recompute": recompute, "tied": ties}
    table = GENERATORS[schedule](3, 4)
    optimizer = adam if seed % 2 else None
    pipe = Pipeline(stages, table, squares, optimizer=optimizer, backend=backend, **options)
    twin = adam(torch.nn.ModuleList(twins).parameters())
    for step in range(2):
        x, target = values(8, WIDTH, seed=seed + step), values(8, WIDTH, seed=1)
        trains = any(p.requires_grad for stage in twins for p in stage.parameters())
        for one, wanted in zip(x.chunk(4), target.chunk(4), strict=True):
            loss = squares(alone(twins, one), wanted)
            if trains and loss.requires_grad:
                loss.backward()
        pipe.step(x, target)
        if optimizer is not None:
            twin.step()
            twin.zero_grad()
        for s, stage in pipe.stages.items():
            pairs = zip(stage.named_parameters(), twins[s].parameters(), strict=True)
            for (name, p), q in pairs:
                if optimizer is None:
                    same(f"{s}.{name}", p.grad, q.grad)
                same(f"value of {s}.{name}", p.detach(), q.detach())


def in_shards(backend: Backend, seed: int, options: dict[str, Any], accumulates: bool) -> None:
    """A parameter that no worker used has no gradient; one that some used has the sum of theirs."""
    net, twin = (drawn(seed)[-1].requires_grad_() for _ in range(2))
    axis = Mesh(backend, dp=-1)["dp"]
    fully_shard(net, axis, **options)
    mine, wanted = adam(net.parameters()), adam(twin.parameters())
    batches = [values(2, WIDTH, seed=seed + w) for w in range(axis.size)]
    given = len(net.inputs) or 1
    for _ in range(2):
        if accumulates:
            with net.no_sync():
                squares(net(*[batches[axis.index]] * (given + 1)), 0).backward()
        squares(net(*[batches[axis.index]] * (given + 1)), 0).backward()
        for _ in range(1 + accumulates):
            for x in batches:
                squares(twin(*[x] * (given + 1)), 0).backward()
        for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
        mine.step()
        wanted.step()
        mine.zero_grad()
        wanted.zero_grad()
    state = full_state_dict(net)
    for key, value in twin.state_dict().items():
        same(key, state[key], value)
    with unsharded(net):
        for key, value in net.state_dict().items():
            same(f"unsharded {key}", value, state[key])
