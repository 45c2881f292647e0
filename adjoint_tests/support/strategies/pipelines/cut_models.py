"""Models of several tensors between their parts, cut into stages, beside one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from linop.backends.engine.base import Backend
from linop.errors import ArgumentError
from linop.schedules import GENERATORS
from linop.strategies import Pipeline
from support.strategies.pipelines.pipelines import block, equal, fill, squares, values

Tensor = Any
SGD = partial(torch.optim.SGD, lr=2**-6)


class Halves(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Its output is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Linear(5, 5), torch.nn.Linear(5, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"left": self.left(x), "right": torch.tanh(self.right(x))}


class Mixed(torch.nn.Module):  # type: ignore[misc]
    """Its input is a dict, its output a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 5)

    def forward(self, halves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.inner(halves["right"]) * halves["left"], halves["right"]


class Branching(torch.nn.Module):  # type: ignore[misc]
    """Parts that take tensors of several before them, the input included."""

    def __init__(self, several: bool) -> None:
        super().__init__()
        self.halves, self.mixed = Halves(), Mixed()
        self.third, self.last = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
        self.several = several
        fill(self, 4)

    def forward(self, x: Tensor) -> Any:
        halves = self.halves(x)
        y, right = self.mixed(halves)
        z = self.third(y) + halves["left"]
        z = self.last(z) * y + x
        return {"z": z, "right": right, "x": x} if self.several else z


def loss_of(output: Any, target: Tensor) -> Tensor:
    """Of a tensor, or of several."""
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, tuple):
        return squares(output[0] * output[1].sum() + output[2], target)
    return squares(output, target)


def cut_model_is_whole(
    backend: Backend, model: Any, stages: Sequence[Any], schedule: str, several: bool
) -> None:
    """Loss, parameters after a step, and output are those of one process."""
    x, target = values(8, 5, seed=1, dtype=torch.float32), values(8, 5, seed=2, dtype=torch.float32)
    # Apart: the stages have the model's own parameters.
    alone, stages = copy.deepcopy(model), copy.deepcopy(stages)
    pipe = Pipeline(stages, GENERATORS[schedule](4, 4), loss_of, optimizer=SGD, backend=backend)
    value = pipe.step(x, target)
    losses = [loss_of(alone(a), b) for a, b in zip(x.split(2), target.split(2), strict=True)]
    for loss in losses:
        loss.backward()
    SGD(alone.parameters()).step()
    for key, p in pipe.state_dict().items():
        equal(key, p, alone.state_dict()[key])
    found = pipe(x)
    if value is not None:
        equal("loss", value, sum(losses))
        wanted = [alone(a) for a in x.split(2)]
        each = found if several else (found,)
        for k, y in enumerate(each):
            whole = [tuple(one.values())[k] if several else one for one in wanted]
            equal(f"output {k}", y, torch.cat(whole))


class Named(torch.nn.Module):  # type: ignore[misc]
    """A stage whose outputs are a dict, or a list."""

    def __init__(self, seed: int, kind: type) -> None:
        super().__init__()
        self.inner, self.kind = block(5, seed), kind

    def forward(self, *inputs: Tensor) -> Any:
        y = self.inner(sum(inputs))
        return {"y": y, "z": y * 2} if self.kind is dict else [y, y * 2]


def returns_dicts(backend: Backend) -> None:
    """Stages, the last one too, return several tensors in a dict or a list."""
    stages = [Named(0, dict), Named(1, list), Named(2, dict)]
    alone = copy.deepcopy(stages)

    def loss(output: Any, target: Tensor) -> Tensor:
        return squares(output["y"] + output["z"] ** 2, target)

    edges = [(0, 1, 1), (0, 2), (1, 2, 1)]
    table = GENERATORS["1f1b"](3, 4)
    pipe = Pipeline(stages, table, loss, edges=edges, backend=backend)
    x, target = values(8, 5, seed=1), values(8, 5, seed=2)
    pipe.step(x, target)
    y = pipe(x)
    for one, wanted in zip(x.split(2), target.split(2), strict=True):
        first = alone[0](one)
        output = alone[2](first["y"], alone[1](first["z"])[1])
        loss(output, wanted).backward()
    for s, stage in pipe.stages.items():
        for p, q in zip(stage.parameters(), alone[s].parameters(), strict=True):
            equal(f"gradient in stage {s}", p.grad, q.grad)
    if 2 in pipe.stages:
        assert list(y) == ["y", "z"]
        equal("output", y["z"], y["y"] * 2)


class Tied(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A model whose last layer has the weight of the first, and that defines its modules in another
    order than it runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.full((5,), 0.5, dtype=torch.float64))
        self.last, self.middle, self.first = (
            torch.nn.Linear(5, 5, bias=False).double() for _ in range(3)
        )
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.middle(y)) + self.shift)


TIED = [("first.weight", "last.weight")]


def tied_model_is_whole(backend: Backend, model: Any, stages: Sequence[Any], path: str) -> None:
    """An exported model with tied weights trains as in one process, which can load its
    optimizer's state."""
    table, adam = GENERATORS["1f1b"](3, 4), partial(torch.optim.Adam, lr=0.01)
    with pytest.raises(ArgumentError, match=r"\['first.weight', 'last.weight'\] are one"):
        Pipeline(stages, table, squares, backend=backend)
    pipe = Pipeline(stages, table, squares, tied=TIED, optimizer=adam, backend=backend)
    x, target = values(8, 5, seed=1), values(8, 5, seed=2)
    pipe.step(x, target)
    pipe.save(path)
    saved = torch.load(path)
    pipe.step(x, target)
    alone = copy.deepcopy(model)
    optimizer = adam(alone.parameters())
    alone.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for one, wanted in zip(x.split(2), target.split(2), strict=True):
        squares(alone(one), wanted).backward()
    optimizer.step()
    state = pipe.state_dict()
    assert list(state) == list(alone.state_dict())
    for key, value in alone.state_dict().items():
        assert torch.allclose(state[key], value, rtol=1e-12, atol=1e-12), key


class Modal(torch.nn.Module):  # type: ignore[misc]
    """It computes otherwise in training: by a norm, by dropout and by itself.

    Args:
        apart: in evaluation it uses a layer of its own.
    """

    def __init__(self, apart: bool = False) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
        self.norm, self.drop = torch.nn.BatchNorm1d(5), torch.nn.Dropout(0.5)
        self.shift = torch.nn.Parameter(torch.ones(5))
        self.other = torch.nn.Linear(5, 5) if apart else None
        fill(self, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x) * self.shift)
        if not self.training:
            y = (self.other or torch.tanh)(y) + torch.tensor([1.0, 2, 3, 4, 5])
        return self.last(self.drop(y) * 2) + x


def modes_are_kept(backend: Backend, model: Any, stages: Sequence[Any]) -> None:
    """Stages of an exported model evaluate as the model does, before steps and after them, and
    train as if they had not."""
    alone, pipes = copy.deepcopy(model), []
    x, target = values(8, 5, seed=1, dtype=torch.float32), values(8, 5, seed=2, dtype=torch.float32)
    for evaluates in (False, True):
        table = GENERATORS["1f1b"](2, 4)
        mine = copy.deepcopy(stages)
        pipe = Pipeline(mine, table, squares, optimizer=SGD, recompute=evaluates, backend=backend)
        pipe.train()
        for _ in range(2):
            pipe.step(x, target)
            if evaluates:
                pipe.eval()
                state = pipe.state_dict()
                alone.load_state_dict(state)
                found = pipe(x)
                if found is not None:
                    wanted = torch.cat([alone.eval()(one) for one in x.split(2)])
                    equal("output", found, wanted.detach())
                for key, value in pipe.state_dict().items():
                    equal(f"{key} after evaluation", value, state[key])
                pipe.train()
        pipes.append(pipe.state_dict())
    for key, value in pipes[0].items():
        equal(key, pipes[1][key], value)
    assert pipes[0]["norm.num_batches_tracked"] == 8


def refuses_other_modes(backend: Backend, stages: Sequence[Any]) -> None:
    """Stages that exist for training alone are refused for evaluation on all workers."""
    pipe = Pipeline(stages, GENERATORS["1f1b"](2, 4), squares, backend=backend)
    x = values(8, 5, seed=1, dtype=torch.float32)
    pipe.step(x, x)
    with pytest.raises(ArgumentError, match="for training, and cannot be for evaluation: only"):
        pipe.eval()(x)
    pipe.train().step(x, x)
