"""`linop.strategies.estimate` says, before anything runs, the bytes that workers hold."""

from __future__ import annotations

import importlib.util
from functools import partial

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
from torch import nn

from linop.errors import ArgumentError
from linop.strategies import (
    ColwiseParallel,
    RowwiseParallel,
    checkpoint,
    estimate,
    offload,
)
from support.strategies.memory.estimates import (
    is_estimated,
    net_of,
    saved_by,
    tensor_parallel_is_estimated,
)
from support.workers import on_threads


@pytest.mark.parametrize("strategy", ["dp", "zero1", "zero2", "zero3"])
def test_on_threads(strategy: str) -> None:
    for workers in (1, 2, 3):
        on_threads(workers, is_estimated, strategy)


def test_half_precision_on_threads() -> None:
    on_threads(2, is_estimated, "zero3", True)


def test_tensor_parallel_on_threads() -> None:
    for workers in (1, 2, 3):
        on_threads(workers, tensor_parallel_is_estimated)


@pytest.mark.parametrize("every", [1, 2, 4])
def test_checkpoints(every: int) -> None:
    net, x = checkpoint(net_of(False), every=every), torch.ones(11, 6)
    (said,) = estimate(net, "dp", 1, None, (x,))
    assert said.activations == saved_by(net, lambda: net(x))


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_offloading(prefetch: int) -> None:
    net, x = offload(net_of(False), prefetch=prefetch), torch.ones(11, 6)
    (said,) = estimate(net, "dp", 1, None, (x,))
    y = net(x)
    assert said.host == net.window.bytes_away > 0
    assert said.activations == net.window.bytes_here
    del y
    plain = estimate(net_of(False), "dp", 1, None, (x,))[0].activations
    assert plain is not None and said.activations is not None
    assert said.activations + said.host >= plain > said.activations
    again = estimate(checkpoint(net, every=2), "dp", 1, None, (x,))[0]
    assert again.activations is not None
    assert again.activations + again.host < said.activations + said.host


def test_tensor_parallel_nets_that_draw_and_offload() -> None:
    """One worker's memory by "tp" is that by "dp"; two have half of what is between the layers."""
    plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
    x = torch.ones(4, 4)
    layers = nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4)
    before = torch.get_rng_state()
    for net in (nn.Sequential(*layers), offload(nn.Sequential(*layers))):
        plain = estimate(net, "dp", 1, None, (x,))[0]
        assert estimate(net, "tp", 1, None, (x,), plan=plan)[0] == plain
        assert plain.activations is not None
        for half in estimate(net, "tp", 2, None, (x,), plan=plan):
            assert half.activations is not None
            both = half.activations + half.host
            assert 0 < both < plain.activations + plain.host and (half.host > 0) == (plain.host > 0)
    assert torch.equal(before, torch.get_rng_state())


def test_windows_of_other_modules() -> None:
    """An attribute of that name is not always that of `offload`."""

    class Smoothed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("window", torch.ones(4))

    x = torch.ones(3, 4)
    plain = estimate(nn.Linear(4, 4), "dp", 1, None, (x,))[0].activations
    assert estimate(Smoothed(), "dp", 1, None, (x,))[0].activations == plain


def test_stages() -> None:
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2)]
    found = estimate(nn.Sequential(*stages), "pp", 2, torch.optim.SGD, (torch.ones(3, 4),))
    assert [one.parameters for one in found] == [80, 40]
    assert [one.activations for one in found] == [48 + 48, 48]
    assert [one.messages for one in found] == [48, 24]


def test_a_model_too_large_to_be_made() -> None:
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(2**16, 2**16) for _ in range(4)))
    make = partial(torch.optim.AdamW, lr=1e-3)
    rows = torch.empty(64, 2**16, device="meta")
    for k, one in enumerate(estimate(net, "zero3", 64, make, (rows,))):
        assert one.parameters == one.gradients == 4 * 4 * (2**32 + 2**16) // 64
        assert one.optimizer == 2 * one.parameters + 4 * 8, k
        assert one.whole == 4 * (2**32 + 2**16)
    with pytest.raises(ArgumentError, match="one of dp, zero1"):
        estimate(net, "tensor", 2)
    with pytest.raises(ArgumentError, match="a plan of parallelize_module expected"):
        estimate(net, "tp", 2)
    with pytest.raises(ArgumentError, match=r"units \['9'\]"):
        estimate(net, "zero3", 2, units=["9"])
    with pytest.raises(ArgumentError, match="2 workers, and 4 stages"):
        estimate(net, "pp", 2)
    with pytest.raises(ArgumentError, match="at least 1"):
        estimate(net, "dp", 0)
