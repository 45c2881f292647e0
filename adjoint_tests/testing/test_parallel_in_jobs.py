"""`check_parallel` in a job that is running: steps that are tried again on the same ranks, state
that is left as it was, and ranks that fail."""

from __future__ import annotations

import copy
import importlib.util
import random
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from linop.errors import LinopError
from linop.testing import check_parallel
from support.running_job import ran

pytestmark = pytest.mark.slow


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 2)

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Bent(torch.autograd.Function):
    """tanh, with a backward that is not its derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * (1 - torch.tanh(x))


class BentNet(Net):
    def act(self, x: torch.Tensor) -> torch.Tensor:
        return Bent.apply(x)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, generator=draw), torch.randn(4, 2, generator=draw)


def mine(batch: Any, rank: int, world: int) -> Any:
    return tuple(one.chunk(world)[rank] for one in batch)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).sum() / 4


def step(net: nn.Module, mine: Any) -> torch.Tensor:
    value = loss(net(mine[0]), mine[1])
    value.backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
    total = value.detach().clone()
    dist.all_reduce(total)
    return total


def copied(twin: nn.Module) -> nn.Module:
    net = Net()
    net.load_state_dict(twin.state_dict())
    return net


def checked(model: Any = copied, **others: Any) -> str:
    """The report, or the error."""
    given: dict[str, Any] = {"mine": mine, "step": step, "seconds": 60.0, **others}
    try:
        return str(check_parallel(model, Net, batch, loss, **given))
    except LinopError as error:
        return f"{type(error).__name__}: {error}"


# On the ranks


def unseen() -> str:
    def shy(net: nn.Module, mine: Any) -> torch.Tensor:
        value = step(net, mine)
        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("somebody looks at me")
        return value

    return checked(step=shy)


def bent() -> str:
    def model(twin: nn.Module) -> nn.Module:
        net = BentNet()
        net.load_state_dict(twin.state_dict())
        return net

    return checked(model)


def kept() -> str:
    """The net and the optimizer are the job's."""
    draw = torch.randn(3)
    random.random()
    net = BentNet()
    for p in net.parameters():
        p.grad = torch.full_like(p, 7.0)
    held = torch.optim.Adam(net.parameters(), lr=0.1)
    held.step()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = {k: one["exp_avg"].clone() for k, one in held.state_dict()["state"].items()}
    numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002

    def model(twin: nn.Module) -> nn.Module:
        twin.load_state_dict(before)
        return net

    def own(net: nn.Module, mine: Any) -> torch.Tensor:
        torch.randn(5)
        random.random()
        np.random.rand()  # noqa: NPY002
        net.zero_grad()
        return step(net, mine)

    def twin() -> nn.Module:
        made = Net()
        made.load_state_dict(before)
        return made

    first = copy.deepcopy(held.state_dict())

    def optimizer(parameters: Any) -> Any:
        if parameters[0] is net.up.weight:
            return held
        of_twin = torch.optim.Adam(parameters, lr=0.1)
        of_twin.load_state_dict(copy.deepcopy(first))
        return of_twin

    found = check_parallel(
        model, twin, batch, loss, mine=mine, step=own, dtype="float32", optimizer=optimizer
    )
    after = net.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(bool((p.grad == 7).all()) for p in net.parameters() if p.grad is not None)
    again = {k: one["exp_avg"] for k, one in held.state_dict()["state"].items()}
    assert all(torch.equal(state[k], again[k]) for k in state), "optimizer"
    assert torch.equal(numbers[0], torch.get_rng_state()) and numbers[1] == random.getstate()
    assert (numbers[2] == np.random.get_state()[1]).all()  # noqa: NPY002
    dist.all_reduce(draw)  # the job goes on
    return str(found)


def used_up() -> str:
    def model(twin: nn.Module) -> nn.Module:
        net = copied(twin)
        with torch.no_grad():
            for p in net.parameters():
                p += 1e-3 * torch.randn(p.shape, generator=DRAW, dtype=torch.float64)
        return net

    def shy(net: nn.Module, mine: Any) -> torch.Tensor:
        value = step(net, mine)
        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("somebody looks at me")
        return value

    return checked(model, step=shy)


DRAW = torch.Generator().manual_seed(3)


def other_batches() -> str:
    draw = torch.Generator().manual_seed(3)
    given: dict[str, Any] = {"mine": mine, "step": step, "seconds": 60.0}
    try:
        return str(check_parallel(
            copied, Net, lambda: (torch.randn(4, 3, generator=draw), torch.randn(4, 2)), loss,
            **given))  # fmt: skip
    except LinopError as error:
        return f"{type(error).__name__}: {error}"


def one_fails() -> str:
    def failing(net: nn.Module, mine: Any) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise ValueError("planted")
        return step(net, mine)

    return checked(step=failing)


def out_of_step() -> str:
    def failing(net: nn.Module, mine: Any) -> torch.Tensor:
        value = step(net, mine)
        if dist.get_rank() == 0:
            dist.isend(torch.ones(1), 1)
        raise ValueError(f"planted {value.numel()}")

    return checked(step=failing)


# The tests


def test_a_program_that_fails_while_it_is_looked_at_is_tried_again() -> None:
    ended = ran(__file__, "unseen")
    assert "equal to its twin" in ended.said[0], ended
    assert "somebody looks at me" in ended.said[0]
    assert ended.said[1] == "None"


def test_functions_are_looked_at_alone_in_a_repetition() -> None:
    ended = ran(__file__, "bent")
    assert "The backward of Bent (test_parallel_in_jobs.py:" in ended.said[0], ended
    assert ended.said[1] == "None"


def test_what_is_the_jobs_is_left_as_it_was() -> None:
    ended = ran(__file__, "kept")
    assert "DIFFERS from its twin in 2 of 4" in ended.said[0], ended
    assert "The backward of Bent" in ended.said[0]


def test_what_is_used_up_is_said() -> None:
    ended = ran(__file__, "used_up")
    for said in ended.said.values():
        assert "gives another" in said and "used up" in said, ended


def test_batches_that_differ_are_no_alarm() -> None:
    ended = ran(__file__, "other_batches")
    for said in ended.said.values():
        assert "ArgumentError" in said and "another batch each time" in said, ended


def test_one_rank_that_fails_is_no_hang() -> None:
    ended = ran(__file__, "one_fails")
    assert ended.seconds < 60
    assert not ended.said[0] and "waits for it at" in ended.errors[0], ended
    assert "planted" in ended.errors[0]
    assert "planted" in ended.said[1] and "cannot be tried again" in ended.said[1]


def test_ranks_that_are_not_in_step_are_not_tried_again() -> None:
    ended = ran(__file__, "out_of_step")
    for said in ended.said.values():
        assert "planted" in said and "no rank has received" in said, ended
