"""Messages of stages that no `autograd.Function` sends: each is a pair with the one that brings its
gradient back."""

from __future__ import annotations

import copy
import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.parallel_jobs import reports

pytestmark = pytest.mark.slow
WIDTHS = 3, 4, 2
"""Of what stages get and give; the last is that of the result."""


class Twin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        pairs = itertools.pairwise(WIDTHS)
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in pairs])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Stage(nn.Module):
    """One layer, by its name in the twin."""

    def __init__(self, twin: Twin, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(rank): copy.deepcopy(twin.layers[rank])})


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def step(model: Stage, batch: Any) -> Tensor:
    rank, (x, target) = dist.get_rank(), batch
    value = torch.zeros((), dtype=x.dtype)
    for rows, wanted in zip(x.chunk(2), target.chunk(2), strict=True):  # two micro-batches
        if rank == 0:
            y = torch.tanh(model.layers["0"](rows))
            dist.send(y.detach().contiguous(), 1)
            gradient = torch.empty_like(y)
            dist.recv(gradient, 1)
            y.backward(gradient)
        else:
            given = torch.empty(len(rows), WIDTHS[1], dtype=x.dtype)
            dist.recv(given, 0)
            given.requires_grad_()
            part = loss(torch.tanh(model.layers["1"](given)), wanted)
            part.backward()
            assert given.grad is not None
            dist.send(given.grad, 0)
            value = value + part.detach()
    dist.broadcast(value, 1)
    return value


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(6, 3, generator=generator), torch.randn(6, 2, generator=generator)


PROGRAMS = {
    "pipeline": {
        "model": lambda twin: Stage(twin, dist.get_rank()),
        "twin": Twin,
        "batch": data,
        "loss": loss,
        "step": step,
    }
}


def test_a_message_and_its_gradient_are_a_pair() -> None:
    report = reports(__file__, "PROGRAMS", 2)["pipeline"]
    assert report and not isinstance(report, Exception), str(report)
    pairs = [pair for pair in report.pairs if pair.name == "send"]
    assert [pair.proven for pair in pairs] == [True, True]
    assert all(pair.line.startswith(Path(__file__).name) for pair in pairs)
    assert pairs[0].forward == "message from rank 0 to rank 1"
    assert pairs[0].backward == "message from rank 1 to rank 0"
    assert pairs[0].operator.H.equals(pairs[0].adjoint)
