"""`linop.testing.check_parallel` on pipelines of plain messages, and on cascades of faults: the
rank and the line are named, causes before what follows from them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from linop.testing import check_parallel
from linop.testing.parallel.twins.relations import Kind
from support.parallel_jobs import reports

pytestmark = pytest.mark.slow
STAGES = 3


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(STAGES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Stage(nn.Module):
    def __init__(self, twin: Any) -> None:
        super().__init__()
        number = dist.get_rank()
        self.layers = nn.ModuleDict({str(number): nn.Linear(5, 5)})
        self.layers[str(number)].load_state_dict(twin.layers[number].state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layers[str(dist.get_rank())](x))


def step(fault: str, parts: int) -> Callable[[nn.Module, Any], torch.Tensor]:
    """A step of a pipeline in `parts` microbatches."""

    def run(model: nn.Module, batch: Any) -> torch.Tensor:
        rank, last = dist.get_rank(), STAGES - 1
        total, kept = torch.zeros(()), []
        for x, y in zip(*(one.chunk(parts) for one in batch), strict=True):
            if rank:
                dist.recv(x := torch.empty_like(x), rank - 1)
                x.requires_grad_(fault != "not differentiated" or rank != 1)
            out = model(x)
            if rank < last:
                dist.send(out.detach(), rank + 1)
            kept.append((x, out, y))
        for x, out, y in kept:
            if rank == last:
                loss = F.mse_loss(out, y) / parts
                loss.backward()
                total = total + loss.detach()
            elif fault != "not differentiated" or rank:
                dist.recv(gradient := torch.empty_like(out), rank + 1)
                if fault == "changed behind" and rank == 1:
                    gradient = 3 * gradient
                if fault == "cleared behind" and rank == 1:
                    gradient = gradient.clamp(min=0)
                out.backward(gradient)
            if rank and (fault != "not differentiated" or rank != 1):
                back = x.grad
                if fault == "changed before" and rank == 1:
                    back = back / 4
                dist.send(back, rank - 1)
        dist.broadcast(total, last)
        return total

    return run


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(4, 5, generator=generator), torch.randn(4, 5, generator=generator)


FAULTS = {
    "changed behind": ({0, 1}, Kind.FACTOR, "gradient = 3 * gradient", "rank 1 changes it"),
    "cleared behind": ({0, 1}, Kind.OTHER, "gradient.clamp(min=0)", "rank 1 changes it"),
    "changed before": ({0}, Kind.FACTOR, "dist.send(back, rank - 1)", "sends 1/4 times it back"),
    "not differentiated": ({0}, Kind.NONE, "dist.send(out.detach()", "no gradient of it"),
}


PIPELINES = {
    f"{fault}, {parts}": {
        "model": Stage, "twin": Deep, "batch": data, "loss": F.mse_loss, "step": step(fault, parts)
    }
    for fault in ("", *FAULTS) for parts in (1, 2)
}  # fmt: skip


@pytest.fixture(scope="module")
def pipelines() -> dict[str, Any]:
    return reports(__file__, "PIPELINES", STAGES)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_pipelines_of_messages(fault: str, parts: int, pipelines: dict[str, Any]) -> None:
    found = pipelines[f"{fault}, {parts}"]
    if not fault:
        assert found.passed, found
        return
    wrong, kind, line, words = FAULTS[fault]
    (finding,) = found.findings
    names = {f"layers.{k}.{name}" for k in wrong for name in ("weight", "bias")}
    assert set(finding.parameters) == names and finding.kind is kind, found
    assert line in finding.place.text and words in finding.explanation, found


# Two layers, the second without its sum


class Identity(torch.autograd.Function):
    """Its adjoint is an all-reduce, or a part of the program forgets it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, summed: bool) -> torch.Tensor:
        ctx.summed = summed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = gradients[0].clone()
        if ctx.summed:
            dist.all_reduce(gradient)
        return gradient, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class Blocks(nn.Module):
    """Blocks with a skip: ``x + out(tanh(into(norm(x))))``."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.ModuleList(nn.LayerNorm(4) for _ in range(2))
        self.into = nn.ModuleList(nn.Linear(4, hidden) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(hidden, 4, bias=False) for _ in range(2))

    def enter(self, x: torch.Tensor, k: int) -> torch.Tensor:
        return x

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for k in range(2):
            inner = self.enter(self.norm[k](x), k)
            x = x + self.leave(self.out[k](torch.tanh(self.into[k](inner))))
        return x


class CutBlocks(Blocks):
    def enter(self, x: torch.Tensor, k: int) -> torch.Tensor:
        return Identity.apply(x, k == 0)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return Sum.apply(x)


def shard(name: str, value: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    dim = {"into": 0, "out": 1}.get(name.partition(".")[0])
    return value if dim is None else value.chunk(world, dim)[rank]


def blocks(twin: Any) -> nn.Module:
    net = CutBlocks(3)
    rank = dist.get_rank()
    net.load_state_dict({n: shard(n, v, rank, 2) for n, v in twin.state_dict().items()})
    return net


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator)


def test_causes_come_before_what_follows_from_them() -> None:
    found = check_parallel(blocks, Blocks, inputs, F.mse_loss, shard=shard, workers=2)
    assert found is not None
    cause, following = found.findings
    assert set(cause.parameters) == {"norm.1.weight", "norm.1.bias"}
    assert cause.kind is Kind.UNSUMMED and "all-reduce" in cause.operator
    assert cause.place.module == "into.1"
    assert "fault 1" in following.explanation and "first.weight" in following.parameters
