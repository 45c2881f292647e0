"""The reports of `linop.testing.check_parallel` name the cause, not what follows from it: a sum
that one of two branches forgets, factors of backward functions and of accumulated losses, a sum
over the wrong axis of a mesh; one cause once, however different its parameters are."""

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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from linop.testing import ParallelReport
from linop.testing.parallel.twins.relations import Kind
from support.parallel_jobs import reports

pytestmark = pytest.mark.slow


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return tuple(torch.randn(4, 4, generator=generator) for _ in range(2))  # type: ignore[return-value]


# Two branches of one replicated tensor, one of them cut


class Identity(torch.autograd.Function):
    """Its adjoint is an all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        dist.all_reduce(gradient := gradients[0].clone())
        return gradient


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Branches(nn.Module):
    """``beside(h) + out(tanh(into(h)))`` with ``h = norm(x)``."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.norm, self.beside = nn.LayerNorm(4), nn.Linear(4, 4)
        self.into, self.out = nn.Linear(4, hidden), nn.Linear(hidden, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.beside(h) + self.leave(self.out(torch.tanh(self.into(self.enter(h)))))

    def enter(self, x: Tensor) -> Tensor:
        return x

    leave = enter


class CutBranches(Branches):
    forgotten = True

    def enter(self, x: Tensor) -> Tensor:
        return x if self.forgotten else Identity.apply(x)

    def leave(self, x: Tensor) -> Tensor:
        return Sum.apply(x)


def cut_branch(name: str, value: Tensor, rank: int, world: int) -> Tensor:
    dim = {"into": 0, "out": 1}.get(name.partition(".")[0])
    return value if dim is None else value.chunk(world, dim)[rank]


def branches(forgotten: bool) -> Callable[[Any], nn.Module]:
    def model(twin: Any) -> nn.Module:
        net, rank = CutBranches(3), dist.get_rank()
        net.forgotten = forgotten
        net.load_state_dict({n: cut_branch(n, v, rank, 2) for n, v in twin.state_dict().items()})
        return net

    return model


# An all-to-all of two tensors, of rows into columns


class Turn(torch.autograd.Function):
    fault = ""

    @staticmethod
    def forward(ctx: Any, fault: str, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.fault = fault
        return tuple(to_columns(one) for one in given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        back = [to_rows(one) for one in gradients]
        if ctx.fault == "order":
            back.reverse()
        return None, *(3 * one if ctx.fault == "factor" else one for one in back)


def moved(blocks: list[Tensor]) -> list[Tensor]:
    given = torch.stack(blocks)
    dist.all_to_all_single(made := torch.empty_like(given), given)
    return list(made)


def to_columns(x: Tensor) -> Tensor:
    return torch.cat(moved([one.contiguous() for one in x.chunk(2, 1)]), 0)


def to_rows(x: Tensor) -> Tensor:
    return torch.cat(moved([one.contiguous() for one in x.chunk(2, 0)]), 1)


class Columns(nn.Module):
    """A product of two tensors that mixes the rows of each column."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(self.a(x), self.b(x))

    def mixed(self, a: Tensor, b: Tensor) -> Tensor:
        return a.cumsum(0) * torch.tanh(b - b.mean(0))


class Turned(Columns):
    fault = ""

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(*Turn.apply(self.fault, self.a(x), self.b(x)))


def turned(fault: str) -> Callable[[Any], nn.Module]:
    def model(twin: Any) -> nn.Module:
        net = Turned()
        net.fault = fault
        net.load_state_dict(twin.state_dict())
        return net

    return model


def rows_in_columns_out(batch: Any, rank: int, world: int) -> Any:
    return batch[0].chunk(world)[rank], batch[1].chunk(world, 1)[rank]


def squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum()


def of_all(value: Tensor) -> Tensor:
    dist.all_reduce(value := value.detach().clone())
    return value


def summed(model: nn.Module, batch: Any) -> Tensor:
    value = squares(model(batch[0]), batch[1])
    value.backward()
    for one in model.parameters():
        assert one.grad is not None
        dist.all_reduce(one.grad)
    return of_all(value)


# Losses of parts of a batch


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))


def sharded(twin: Any) -> nn.Module:
    return fully_shard(copy.deepcopy(twin), mesh=init_device_mesh("cpu", (2,)))


def accumulated(parts: int) -> Callable[[Any, Any], Tensor]:
    """Two losses, each divided by `parts`."""

    def step(model: Any, batch: Any) -> Tensor:
        total = torch.zeros(())
        for x, y in zip(*(one.chunk(2) for one in batch), strict=True):
            value = F.mse_loss(model(x), y) / parts
            value.backward()
            total += value.detach()
        return of_all(total) / 4 * parts

    return step


def other_of_the_second(model: Any, batch: Any) -> Tensor:
    """The second part has another loss; its gradient is no multiple of the twin's."""
    total = torch.zeros(())
    for k, (x, y) in enumerate(zip(*(one.chunk(2) for one in batch), strict=True)):
        value = (F.l1_loss if k else F.mse_loss)(model(x), y) / 2
        value.backward()
        total += value.detach()
    return of_all(total) / 2


def rows(batch: Any, rank: int, world: int) -> Any:
    return tuple(one.chunk(world)[rank] for one in batch)


def given(**arguments: Any) -> dict[str, Any]:
    return {"batch": data, "loss": F.mse_loss, **arguments}


PROGRAMS = {
    f"branches, {forgotten}": given(model=branches(forgotten), twin=Branches, shard=cut_branch)
    for forgotten in (False, True)
} | {
    f"turned, {fault}": given(
        model=turned(fault), twin=Columns, mine=rows_in_columns_out, loss=squares, step=summed
    )
    for fault in ("", "order", "factor")
} | {
    f"accumulated, {n}": given(model=sharded, twin=deep, mine=rows, step=accumulated(n))
    for n in (1, 2)
} | {
    "other of the second": given(model=sharded, twin=deep, mine=rows, step=other_of_the_second)
}  # fmt: skip


# A mesh of two axes


def on_a_mesh(twin: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = copy.deepcopy(twin)
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    net.mesh = mesh
    return net


def deep_of_six() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def averaged_over(axis: str) -> Callable[[Any, Any], Tensor]:
    """The gradient of the first weight is summed over an axis of the mesh, others over ``dp``."""

    def step(model: Any, batch: Any) -> Tensor:
        value = F.mse_loss(model(batch[0]), batch[1])
        value.backward()
        for name, one in model.named_parameters():
            gradient = one.grad.to_local() if isinstance(one.grad, DTensor) else one.grad
            over = axis if name == "0.weight" else "dp"
            dist.all_reduce(gradient, group=model.mesh[over].get_group())
            gradient /= 2
        return of_all(value) / 4

    return step


def part_of_dp(batch: Any, rank: int, world: int) -> Any:
    return rows(batch, rank // 2, 2)


MESHES = {
    axis: given(model=on_a_mesh, twin=deep_of_six, mine=part_of_dp, step=averaged_over(axis))
    for axis in ("dp", "tp")
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return {**reports(__file__, "PROGRAMS", 2), **reports(__file__, "MESHES", 4)}


@pytest.mark.parametrize("name", ["branches, False", "turned, ", "accumulated, 2", "dp"])
def test_right_ones(name: str, found: dict[str, Any]) -> None:
    assert found[name] and not isinstance(found[name], Exception), found[name]


def only(report: ParallelReport) -> Any:
    assert not isinstance(report, Exception) and len(report.findings) == 1, report
    return report.findings[0]


def test_a_sum_that_one_of_two_branches_forgets(found: dict[str, Any]) -> None:
    one = only(found["branches, True"])
    assert set(one.parameters) == {"norm.weight", "norm.bias"}
    assert one.place.module == "into" and "all-reduce over ranks 0, 1" in one.operator
    assert any("cannot be judged" in note for note in found["branches, True"].notes)


def test_a_factor_of_a_backward_all_to_all(found: dict[str, Any]) -> None:
    one = only(found["turned, factor"])
    assert one.kind is Kind.FACTOR and "too many" not in one.operator
    assert "its backward is 3 times that" in one.operator


def test_one_cause_of_several_kinds(found: dict[str, Any]) -> None:
    """The bias of ``b`` has a gradient of zero, since its mean is taken away, so that of ``a``'s is
    none."""
    report = found["turned, order"]
    one = only(report)
    assert one.operator == "the adjoint of Turn" and one.unlike["a.bias"].kind is Kind.NONE
    assert report.parameters["a.bias"].kind is Kind.NONE
    assert report.parameters["a.weight"].kind is one.kind is not Kind.NONE
    assert "a.bias: no gradient" in str(report)
    assert report.as_dict()["findings"][0]["unlike"]["a.bias"]["kind"] == "no gradient"


def test_losses_that_are_not_divided(found: dict[str, Any]) -> None:
    one = only(found["accumulated, 1"])
    assert one.kind is Kind.FACTOR and one.detail == "2 = the number of losses"
    assert one.origin == "the loss" and not one.place.module and "mse_loss" in one.place.text


def test_a_part_with_another_loss(found: dict[str, Any]) -> None:
    """A factor of the other part does not explain it."""
    one = only(found["other of the second"])
    assert one.kind is Kind.OTHER and one.origin == "the loss"


def test_a_sum_over_the_wrong_axis_of_a_dtensors_gradient(found: dict[str, Any]) -> None:
    one = only(found["tp"])
    assert one.parameters == ("0.weight",) and one.kind is Kind.WRONG_RANKS
    assert "'tp'" in one.detail and "instead of" in one.detail and "'dp'" in one.operator
