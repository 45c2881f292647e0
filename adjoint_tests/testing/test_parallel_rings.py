"""The reports of `linop.testing.check_parallel` on programs with masks, whose infinities are no
scale for other numbers, and on functions that gather to one rank."""

from __future__ import annotations

import copy
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
from torch import Tensor, nn
from torch.nn import functional as F

from support.parallel_jobs import reports

pytestmark = pytest.mark.slow
RANKS, TOKENS, WIDTH = 3, 9, 4
MASKS = {"infinite": -torch.inf, "large": -1e9}


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(TOKENS, WIDTH, generator=generator) for _ in range(2))  # type: ignore[return-value]


def rows(batch: Any, rank: int, world: int) -> Any:
    return tuple(one.chunk(world)[rank] for one in batch)


def summed(model: nn.Module, batch: Any) -> Tensor:
    """One step, of which each rank has the terms of some rows."""
    value = F.mse_loss(model(batch[0]), batch[1]) / RANKS
    value.backward()
    for one in model.parameters():
        if one.grad is not None:
            dist.all_reduce(one.grad)
    return value.detach()


# Causal attention around a ring


def around(x: Tensor, by: int) -> Tensor:
    rank, found = dist.get_rank(), torch.empty_like(x)
    ends = (
        (dist.isend, x.contiguous(), (rank + by) % RANKS),
        (dist.irecv, found, (rank - by) % RANKS),
    )
    for one in dist.batch_isend_irecv([dist.P2POp(*each) for each in ends]):
        one.wait()
    return found


class Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, back: int) -> Tensor:
        ctx.back = back
        return around(x, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return around(gradients[0], ctx.back), None


class Attention(nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.fill = fill
        self.q, self.kv, self.o = (nn.Linear(WIDTH, n * WIDTH) for n in (1, 2, 1))

    def scores(self, q: Tensor, k: Tensor, row: int, column: int) -> Tensor:
        later = torch.arange(len(k)) + column > torch.arange(len(q))[:, None] + row
        return (q @ k.T).masked_fill(later, self.fill)

    def mixed(self, q: Tensor, kv: Tensor) -> Tensor:
        k, v = kv.chunk(2, -1)
        return self.scores(q, k, 0, 0).softmax(-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.mixed(self.q(x), self.kv(x)))  # type: ignore[no-any-return]


class Ring(Attention):
    def __init__(self, fill: float, back: int) -> None:
        super().__init__(fill)
        self.back = back

    def mixed(self, q: Tensor, kv: Tensor) -> Tensor:
        rank, n, scores, values = dist.get_rank(), len(q), [], []
        for turn in range(RANKS):
            k, v = kv.chunk(2, -1)
            scores.append(self.scores(q, k, rank * n, (rank - turn) % RANKS * n))
            values.append(v)
            if turn < RANKS - 1:
                kv = Step.apply(kv, self.back)  # type: ignore[no-untyped-call]
        return torch.cat(scores, 1).softmax(-1) @ torch.cat(values)


def ring(fill: float, back: int) -> Callable[[Any], nn.Module]:
    def model(twin: Any) -> nn.Module:
        net = Ring(fill, back)
        net.load_state_dict(twin.state_dict())
        return net

    return model


# Rows that one rank alone goes on with


class ToFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: int) -> Tensor:
        ctx.order = order
        parts = [torch.empty_like(x) for _ in range(RANKS)] if dist.get_rank() == 0 else None
        dist.gather(x.contiguous(), parts, 0)
        return x.new_zeros(0, x.shape[1]) if parts is None else torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        found, parts = torch.empty(TOKENS // RANKS, WIDTH), None
        if dist.get_rank() == 0:
            parts = [one.contiguous() for one in gradients[0].chunk(RANKS)][:: ctx.order]
        dist.scatter(found, parts, 0)
        return found, None


def two() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def at_first(order: int) -> Callable[[Any, Any], Tensor]:
    def step(model: Any, batch: Any) -> Tensor:
        x, y = batch
        h = ToFirst.apply(model[0](x), order)  # type: ignore[no-untyped-call]
        value = F.mse_loss(model[1](h), y) if dist.get_rank() == 0 else h.sum()
        value.backward()
        for name, one in model.named_parameters():
            if name.startswith("0."):
                dist.all_reduce(one.grad)
            else:
                one.grad = torch.zeros_like(one) if one.grad is None else one.grad
                dist.broadcast(one.grad, 0)
        dist.broadcast(value := value.detach().clone(), 0)
        return value

    return step


def rows_and_all_targets(batch: Any, rank: int, world: int) -> Any:
    return batch[0].chunk(world)[rank], batch[1]


PROGRAMS: dict[str, Any] = {
    f"{mask}, {back}": {
        "model": ring(fill, back),
        "twin": lambda fill=fill: Attention(fill),
        "step": summed,
        "mine": rows,
    }
    for mask, fill in MASKS.items()
    for back in (1, -1)
} | {
    f"to one, {order}": {
        "model": copy.deepcopy,
        "twin": two,
        "step": at_first(order),
        "mine": rows_and_all_targets,
    }
    for order in (1, -1)
}
PROGRAMS = {
    name: {"batch": data, "loss": F.mse_loss, **arguments} for name, arguments in PROGRAMS.items()
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return reports(__file__, "PROGRAMS", RANKS)


@pytest.mark.parametrize("name", ["infinite, -1", "large, -1", "to one, 1"])
def test_right_ones_with_masks_and_roots(name: str, found: dict[str, Any]) -> None:
    report = found[name]
    assert report and not isinstance(report, Exception), report
    assert [one.proven for one in report.pairs] == [True] * len(report.pairs) != []


@pytest.mark.parametrize("name", ["infinite, 1", "large, 1"])
def test_a_ring_that_turns_the_same_way_in_backward(name: str, found: dict[str, Any]) -> None:
    report = found[name]
    assert not isinstance(report, Exception) and len(report.findings) == 1, report
    one = report.findings[0]
    assert one.operator == "the adjoint of Step" and "Step.apply" in one.place.text
    assert "kv.weight" in one.parameters
    assert all(pair.proven is False for pair in report.pairs)


def test_a_scatter_in_another_order_than_its_gather(found: dict[str, Any]) -> None:
    report = found["to one, -1"]
    assert not isinstance(report, Exception) and len(report.findings) == 1, report
    assert report.findings[0].operator == "the adjoint of ToFirst"
    assert set(report.findings[0].parameters) <= {"0.weight", "0.bias"}
