"""Sums of parameters' gradients of a model that is cut in space: together, and each by itself."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
from torch import Tensor, nn

import linop
from linop.strategies import Mesh, spatial
from linop.strategies.space import sums
from support.strategies.spatial import TOLERANCE, difference
from support.workers import on_threads

IMAGE = torch.arange(2 * 7 * 6, dtype=torch.float64).reshape(2, 1, 7, 6).cos()


class Several(nn.Module):
    """Parameters that are used once, twice, also by whole tensors, not, and in one of the
    results."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.GroupNorm(3, 3)
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0, 3.0]))
        self.unused = nn.Linear(2, 2)
        self.side = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.second(self.first(x)))
        y = self.second(y * self.scale[:, None, None])
        pooled = y.mean((2, 3)) * self.scale
        return y.square().mean() + pooled.sum(), self.side(pooled).square().sum()


def gradients(net: Any) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def by_backward(net: Any) -> Any:
    net(IMAGE)[0].backward()
    return gradients(net)


def by_two_backwards(net: Any) -> Any:
    """Of one graph, and of another one, which are added."""
    first, second = net(IMAGE)
    first.backward(retain_graph=True)
    second.backward()
    sum(net(IMAGE)).backward()
    return gradients(net)


def by_grad(net: Any) -> Any:
    found = torch.autograd.grad(sum(net(IMAGE)), list(net.parameters()), allow_unused=True)
    assert gradients(net) == [None] * len(found)
    return found


def by_inputs(net: Any) -> Any:
    p = next(net.parameters())
    sum(net(IMAGE)).backward(inputs=[p])
    return gradients(net)


def by_hooks(net: Any) -> Any:
    """Hooks see whole gradients."""
    seen: list[Any] = []
    some, other, *_ = net.parameters()
    some.register_hook(lambda g: seen.append(g.clone()))
    other.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    sum(net(IMAGE)).backward()
    return [*sorted(seen, key=lambda t: t.ndim), *gradients(net)]


def by_graph(net: Any) -> Any:
    """Gradients of gradients."""
    given = [p for name, p in net.named_parameters() if "first" in name or "scale" in name]
    found: Any = torch.autograd.grad(sum(net(IMAGE)), given, create_graph=True)
    sum(g.square().sum() for g in found).backward()
    return gradients(net)


WAYS = [by_backward, by_two_backwards, by_grad, by_inputs, by_hooks, by_graph]


@pytest.mark.parametrize("cap", [0, 100, sums.CAP])
@pytest.mark.parametrize("way", WAYS)
def test_gradients(way: Any, cap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "CAP", cap)
    torch.manual_seed(0)
    net = Several().double()
    expected = way(copy.deepcopy(net))

    def contract(backend: Any) -> None:
        mesh = Mesh(backend, x=2, y=2)
        found = way(spatial(copy.deepcopy(net), mesh["x", "y"], (2, 3)))
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert difference(a, b, 1e-2) <= TOLERANCE

    on_threads(4, contract)


def test_the_number_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of all parameters are one message."""
    calls: list[int] = []
    apart = sums.Sums._sum

    def counted(self: Any, axes: Any, waiting: Any) -> None:
        calls.append(len(waiting.gradients))
        apart(self, axes, waiting)

    monkeypatch.setattr(sums.Sums, "_sum", counted)

    def main(backend: Any) -> None:
        with linop.layers.seeded(0):
            net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3)).double()
        spatial(net, Mesh(backend, x=2)["x"], (2,))(IMAGE).square().mean().backward()

    linop.launch(main, 2)
    assert calls == [4, 4]


def test_a_backward_that_fails_is_no_part_of_the_next() -> None:
    def main(backend: Any) -> list[Tensor | None]:
        with linop.layers.seeded(0):
            net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3)).double()
        mine = spatial(net, Mesh(backend, x=2)["x"], (2,))
        x = IMAGE.clone().requires_grad_()
        x.register_hook(lambda g: (_ for _ in ()).throw(ValueError("of the user")))
        with pytest.raises(ValueError, match="of the user"):
            mine(x).square().mean().backward()
        net.zero_grad()
        mine(IMAGE).square().mean().backward()
        return gradients(net)

    with linop.layers.seeded(0):
        net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3)).double()
    net(IMAGE).square().mean().backward()
    for found in linop.launch(main, 2):
        for a, p in zip(found, net.parameters(), strict=True):
            assert a is not None and p.grad is not None
            assert difference(a, p.grad) <= TOLERANCE
