"""Batches of pipelines that are cut as the user says, beside one process, and those that cannot be
cut: contracts for threads."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from linop.backends.engine.base import Backend
from linop.errors import ArgumentError, BackendError
from linop.schedules import gpipe, one_forward_one_backward
from linop.strategies import Pipeline
from support.strategies.pipelines.pipelines import block, equal, fill, squares, values

Tensor = Any
ROWS, LENGTH, WIDTH = 4, 4, 3
"""As many positions as rows: sizes alone do not tell which dimension is the batch's."""


class Sequences(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A stage of tensors with positions first, and of a mask of pairs of positions."""

    def __init__(self, seed: int, last: bool) -> None:
        super().__init__()
        self.inner, self.last = block(WIDTH, seed), last

    def forward(self, x: Tensor, pairs: Tensor) -> Any:
        y = torch.einsum("ij,jbw->ibw", pairs, self.inner(x))
        return y.transpose(0, 1) if self.last else (y, pairs)


def is_cut_as_said(backend: Backend) -> None:
    """The batch is the second dimension, and a square mask stays whole."""
    stages = [Sequences(s, s == 1) for s in range(2)]
    alone = copy.deepcopy(stages)
    dims = {0: 1, "pairs": None}
    table = one_forward_one_backward(2, 2)
    pipe = Pipeline(stages, table, squares, batch_dims=dims, backend=backend)
    x, pairs = values(LENGTH, ROWS, WIDTH, seed=1), values(LENGTH, LENGTH, seed=2)
    target = values(ROWS, LENGTH, WIDTH, seed=3)
    pipe.step(x, target, pairs=pairs)
    for one, wanted in zip(x.split(2, 1), target.split(2), strict=True):
        squares(alone[1](*alone[0](one, pairs)), wanted).backward()
    for s, stage in pipe.stages.items():
        for p, q in zip(stage.parameters(), alone[s].parameters(), strict=True):
            equal(f"gradient in stage {s}", p.grad, q.grad)


@dataclass
class Result:
    """Of a last stage: rows, a number, what is the same for all rows, and None."""

    rows: Tensor
    number: Tensor
    same: Tensor
    nothing: Any = None


class Several(torch.nn.Module):  # type: ignore[misc]
    """A last stage of several results."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block(WIDTH, 1)
        fill(self, 1)

    def forward(self, x: Tensor) -> Result:
        y = self.inner(x)
        return Result(y, y.sum(), self.inner[0].weight.detach()[:1])


def joins_results(backend: Backend) -> None:
    """Targets in a dict, and results of several kinds."""

    def loss(result: Result, target: Any) -> Tensor:
        return squares(result.rows, target["y"]) * target["factor"] + result.number

    stages = [block(WIDTH, 0), Several()]
    alone = copy.deepcopy(stages)
    pipe = Pipeline(stages, gpipe(2, 3), loss, backend=backend)
    x, y = values(7, WIDTH, seed=1), values(7, WIDTH, seed=2)
    pipe.step(x, {"y": y, "factor": 2})
    for one, wanted in zip(x.split([3, 2, 2]), y.split([3, 2, 2]), strict=True):
        loss(alone[1](alone[0](one)), {"y": wanted, "factor": 2}).backward()
    for s, stage in pipe.stages.items():
        for p, q in zip(stage.parameters(), alone[s].parameters(), strict=True):
            equal(f"gradient in stage {s}", p.grad, q.grad)
    found = pipe(x)
    if found is not None:
        assert list(found) == ["rows", "number", "same", "nothing"]
        wanted = [alone[1](alone[0](one)) for one in x.split([3, 2, 2])]
        equal("rows", found["rows"], torch.cat([one.rows for one in wanted]))
        equal("numbers", found["number"], torch.stack([one.number for one in wanted]))
        equal("the same", found["same"], wanted[0].same)
        assert found["nothing"] is None


class Taking(torch.nn.Module):  # type: ignore[misc]
    """A first stage of two inputs."""

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        return x if mask is None else x * mask


class Local:
    """A class that no form has."""


class Fickle(torch.nn.Module):  # type: ignore[misc]
    """It returns another structure for some values than for zeros."""

    def forward(self, x: Tensor) -> Any:
        return (x, None) if bool((x == 0).all()) else (x, x)


class Pair(torch.nn.Module):  # type: ignore[misc]
    """A stage of an input that may have a second part."""

    def forward(self, x: Tensor, y: Any = None) -> Tensor:
        return x if y is None else x + y


def _batch() -> tuple[Tensor, Tensor]:
    return values(8, WIDTH, seed=1), values(8, WIDTH, seed=2)


def refuses(backend: Backend) -> None:
    """Inputs that cannot be cut, or taken, are named on every worker, with the way to say it."""

    def refused(text: str, *given: Any, dims: Any = None, kind: Any = ArgumentError, **more: Any):  # type: ignore[no-untyped-def]
        stages = [Taking(), block(WIDTH, 0)]
        with pytest.raises(kind, match=text):
            pipe = Pipeline(stages, gpipe(2, 2), squares, batch_dims=dims, backend=backend)
            pipe.step(*given, **more)

    x, target = _batch()
    refused("there is no input 'musk' with a tensor; this call has 0", x, target, dims={"musk": 1})
    refused(
        r"input 'mask' of shape \(6, 3\) cannot be cut .* along dimension 0.*: 8 rows expected, as "
        r"input 0 has; batch_dims=\{'mask': None\}",
        x,
        target,
        mask=x[:6],
        dims={"mask": 0},
    )
    refused(
        r"input 'mask' has the shape \(8, 3\), and no dimension 2",
        x,
        target,
        mask=x,
        dims={"mask": 2},
    )
    refused("no input is cut among the micro-batches", x, target, dims={0: None})
    refused("a dict expected, from places or names", x, target, dims=3)
    refused("on worker 0: input 'mask' is .*Local.*; tensors, numbers", x, target, mask=Local())
    refused("a tensor of 8 rows expected, as the input has .input 0; batch_dims", x, target[:7])
    refused("on worker 1: target is .*Local", x, Local())
    refused(
        r"stage 0, input 0 of shape \(4, 3\) \(cut along dimension 0\), input 'mask' of shape "
        r"\(6, 3\) \(not cut\); batch_dims says",
        x,
        target,
        mask=x[:6],
        kind=BackendError,
    )


def refuses_other_structures(backend: Backend) -> None:
    """A stage returns another structure for numbers than for zeros."""
    pipe = Pipeline([Fickle(), Pair()], gpipe(2, 2), squares, backend=backend)
    with pytest.raises(ArgumentError, match="one structure, with the same constants"):
        pipe.step(*_batch())
