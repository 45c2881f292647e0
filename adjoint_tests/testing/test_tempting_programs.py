"""`linop.testing.check_parallel` raises no alarm on right programs whose habits tempt it: inputs
that are dicts, or changed in place, optimizers that amplify rounding, gradients that hooks change,
functions of torch that few use. Each is a data-parallel program by hand, or by torch."""

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
from torch.utils.checkpoint import checkpoint

from support.parallel_jobs import reports

pytestmark = pytest.mark.slow


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Any) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class OfDict(Net):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x["values"] * x["mask"])


class OfTuple(Net):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x[0] + 2 * x[1])


class InPlace(Net):
    def forward(self, x: Any) -> Tensor:
        x -= x.mean(-1, keepdim=True)
        return self.b(torch.relu_(self.a(x)))


class Unused(Net):
    """Of its parameters one is frozen, one unused, and one has no gradient but by rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(3, 3)
        self.shift = nn.Parameter(torch.zeros(3))
        self.a.bias.requires_grad_(False)

    def forward(self, x: Any) -> Tensor:
        return torch.softmax(super().forward(x) + self.shift.mean(), -1)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.b = nn.Embedding(7, 5), nn.Linear(5, 3)

    def forward(self, x: Any) -> Tensor:
        return self.b(self.table(x.abs().mul(2).long() % 7).sum(-2))


class Mapped(Net):
    def forward(self, x: Any) -> Tensor:
        one = torch.func.vmap(lambda row: self.a.weight @ row + self.a.bias)
        return self.b(torch.tanh(one(x)))


class Recomputed(Net):
    reentrant = False

    def forward(self, x: Any) -> Tensor:
        h = checkpoint(lambda x: torch.tanh(self.a(x)), x.clone().requires_grad_(),
                       use_reentrant=self.reentrant)  # fmt: skip
        return self.b(h)


class Reentrant(Recomputed):
    reentrant = True


class Masked(torch.autograd.Function):
    """Positive elements, by a mask that is cast; the gradient is expanded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(mask := x > 0)
        return (x * mask.to(x.dtype)).sum(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (mask,) = ctx.saved_tensors
        return gradients[0].unsqueeze(-1).expand(mask.shape) * mask.to(gradients[0].dtype)


class WithFunction(Net):
    def forward(self, x: Any) -> Tensor:
        return self.b(torch.tanh(self.a(x))) + Masked.apply(self.a(x)).unsqueeze(-1)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 4, dtype=torch.complex128))
        self.b = nn.Linear(4, 3)

    def forward(self, x: Any) -> Tensor:
        return self.b((x.to(self.w.dtype) @ self.w).abs())


class Centred(Net):
    """Rows minus their mean over the whole batch: collectives inside of the model."""

    def forward(self, x: Any) -> Tensor:
        h = self.a(x)
        return self.b(torch.tanh(h - h.mean(0)))


class CentredParts(Net):
    def forward(self, x: Any) -> Tensor:
        import torch.distributed.nn.functional as collectives

        h = self.a(x)
        total = collectives.all_reduce(h.sum(0))
        return self.b(torch.tanh(h - total / (len(h) * dist.get_world_size())))


# Steps


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def of_all(value: Tensor) -> Tensor:
    dist.all_reduce(value := value.detach().clone())
    return value / dist.get_world_size()


def averaged(model: nn.Module, batch: Any) -> Tensor:
    value = loss(model(batch[0]), batch[1])
    value.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            parameter.grad = of_all(gradient)
    return of_all(value)


def in_one_bucket(model: nn.Module, batch: Any) -> Tensor:
    value = loss(model(batch[0]), batch[1])
    value.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    bucket = torch.cat([one.reshape(-1) for one in gradients])
    work = dist.all_reduce(bucket, async_op=True)
    work.wait()
    bucket /= dist.get_world_size()
    for one, part in zip(gradients, bucket.split([g.numel() for g in gradients]), strict=True):
        one.copy_(part.view_as(one))
    return of_all(value)


def plain(model: nn.Module, batch: Any) -> Tensor:
    value = loss(model(batch[0]), batch[1])
    value.backward()
    return of_all(value)


def accumulated(model: Any, batch: Any) -> Tensor:
    parts = list(zip(batch[0].chunk(2), batch[1].chunk(2), strict=True))
    with model.no_sync():
        first = loss(model(parts[0][0]), parts[0][1]) / 2
        first.backward()
    second = loss(model(parts[1][0]), parts[1][1]) / 2
    second.backward()
    return of_all(first + second)


# Models and batches


def replica(twin: Any) -> nn.Module:
    return copy.deepcopy(twin)


def of(kind: type[nn.Module]) -> Callable[[Any], nn.Module]:
    def model(twin: Any) -> nn.Module:
        net = kind()
        net.load_state_dict(twin.state_dict())
        return net

    return model


def ddp(twin: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(copy.deepcopy(twin), find_unused_parameters=True)


def hooked(twin: Any) -> nn.Module:
    """Gradients are averaged as soon as they are there."""

    def average(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = of_all(parameter.grad)

    net = copy.deepcopy(twin)
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    return net


def compiled(twin: Any) -> nn.Module:
    net = copy.deepcopy(twin)
    net.a = torch.compile(net.a, backend="eager")
    return net


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def in_dict() -> tuple[dict[str, Tensor], Tensor]:
    x, y = data()
    return {"values": x, "mask": (x > -0.5).to(x.dtype)}, y


def in_tuple() -> tuple[tuple[Tensor, Tensor], Tensor]:
    x, y = data()
    return (x, x.flip(0)), y


def mine(batch: Any, rank: int, world: int) -> Any:
    if isinstance(batch, dict):
        return {name: mine(one, rank, world) for name, one in batch.items()}
    if isinstance(batch, tuple):
        return tuple(mine(one, rank, world) for one in batch)
    return batch.chunk(world)[rank]


def adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=0.1)


def given(twin: type[nn.Module], **others: Any) -> dict[str, Any]:
    usual = {"model": replica, "batch": data, "step": averaged}
    return {"twin": twin, "loss": loss, "mine": mine, **usual, **others}


PROGRAMS = {
    "a dict": given(twin=OfDict, batch=in_dict),
    "a tuple": given(twin=OfTuple, batch=in_tuple, model=ddp, step=plain),
    "in place": given(twin=InPlace),
    "unused and Adam": given(twin=Unused, model=ddp, step=plain, optimizer=adam),
    "sparse": given(twin=Sparse),
    "vmap": given(twin=Mapped),
    "recomputed": given(twin=Recomputed, model=ddp, step=plain),
    "reentrant": given(twin=Reentrant),
    "a function": given(twin=WithFunction),
    "complex": given(twin=Complex),
    "collectives inside": given(twin=Centred, model=of(CentredParts)),
    "one bucket": given(twin=Net, step=in_one_bucket),
    "hooks": given(twin=Net, model=hooked, step=plain),
    "accumulated": given(twin=Net, model=ddp, step=accumulated),
    "compiled": given(twin=Net, model=compiled),
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return reports(__file__, "PROGRAMS", 2)


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_alarm(name: str, found: dict[str, Any]) -> None:
    assert found[name] and not isinstance(found[name], Exception), found[name]
