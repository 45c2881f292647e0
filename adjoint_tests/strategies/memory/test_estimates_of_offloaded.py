"""Estimates of parameters in host memory, beside what a chain of `offload` has."""

from __future__ import annotations

import importlib.util
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
from torch import nn

from linop.errors import ArgumentError
from linop.strategies import ColwiseParallel, RowwiseParallel, checkpoint, estimate, offload

ADAM = partial(torch.optim.Adam, lr=0.1)


def chain(widths: list[int]) -> Any:
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*(one for layer in layers for one in (layer, nn.Tanh())))


def bytes_of(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=5),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
def test_beside_a_step(widths: list[int], ahead: int, saved: bool, again: bool) -> None:
    net = chain(widths)
    net = checkpoint(net, every=2) if again else net
    net = offload(net, prefetch=ahead, activations=saved, parameters=True)
    x = torch.ones(3, widths[0])
    plain = checkpoint(chain(widths), every=2) if again else chain(widths)
    plain = offload(plain, prefetch=ahead) if saved else plain
    (beside,) = estimate(plain, "dp", 1, ADAM, (x,))
    (found,) = estimate(net, "dp", 1, ADAM, (x,))
    assert (found.parameters, found.gradients, found.optimizer) == (0, 0, 0)
    assert (found.activations, found.total) == (beside.activations, found.whole + found.activations)
    adam, seen = ADAM(net.parameters()), [0]

    def see(*unused: Any) -> None:
        seen.append(net.bytes_here)

    net(x).sum().backward()  # so that units know each other's order
    net.zero_grad()
    for module in net:
        module.register_forward_pre_hook(see)
        module.register_forward_hook(see)
    net(x).sum().backward()
    adam.step()
    assert max(seen) == found.whole
    state = bytes_of(v for one in adam.state.values() for v in one.values())
    parameters = [*net.parameters()]
    away = bytes_of(parameters) + bytes_of(p.grad for p in parameters) + state
    assert found.host - beside.host == away


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_tensor_parallel(workers: int) -> None:
    """Each worker has its blocks in host memory."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    x = torch.ones(3, 4)
    wanted = estimate(chain([4, 7, 5]), "tp", workers, ADAM, (x,), plan=plan)
    net = offload(chain([4, 7, 5]), activations=False, parameters=True)
    found = estimate(net, "tp", workers, ADAM, (x,), plan=plan)
    for one, other in zip(found, wanted, strict=True):
        away = other.parameters + other.gradients + other.optimizer
        assert (one.host, one.activations) == (away, other.activations)
        assert one.whole == other.parameters  # both layers, one of them ahead


def test_stages_and_copies() -> None:
    x = torch.ones(4, 4)
    net = nn.Sequential(offload(chain([4, 7]), parameters=True), nn.Linear(7, 2))
    first, second = estimate(net, "pp", 2, ADAM, (x,))
    assert first.parameters == 0 < first.host
    assert second.parameters == 4 * (7 * 2 + 2) and second.host == 0
    alone = offload(chain([4, 7, 5]), activations=False, parameters=True)
    for one in estimate(alone, "dp", 2, ADAM, (x,)):
        assert one.host and one.messages == 4 * (4 * 7 + 7 + 7 * 5 + 5)


def test_mistakes() -> None:
    net = offload(chain([4, 7, 5]), parameters=True)
    with pytest.raises(ArgumentError, match="strategy 'zero3' of parameters that offload has in"):
        estimate(net, "zero3", 2)
