"""The needs of backward of a model that is cut in space: its memory, and what changes it."""

from __future__ import annotations

import copy
import gc
import importlib.util
from collections.abc import Sequence
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import linop
from linop.strategies import Mesh, spatial
from linop.strategies.space.saving import _Saved
from support.strategies.spatial import (
    TOLERANCE,
    compared,
    difference,
    model_equals_one_process,
    strips_from,
    unet,
)
from support.workers import on_threads


def test_saved_memory() -> None:
    """All workers together save what one process does, and halos: blocks with halos and without are
    one memory."""
    net, (x,) = unet(2, 30, width=8, depth=1)
    alone = _saved_bytes(lambda: copy.deepcopy(net)(x), hooked=True)

    def main(backend: Any) -> Any:
        with strips_from(backend, 0):
            mine = spatial(copy.deepcopy(net), Mesh(backend, x=2)["x"], (2,))
            return mine(x)

    kept = []
    together = _saved_bytes(lambda: kept.append(linop.launch(main, 2)), hooked=False)
    halo = 2 / 15  # rows of a block of the first level, whose halos are the narrowest
    assert alone < together <= (1.1 + 2 * halo) * alone


def _saved_bytes(work: Any, hooked: bool) -> int:
    """Bytes of the memory that is saved for backward, each once."""
    found: dict[int, int] = {}
    kept: list[Any] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    gc.collect()
    known = {id(o) for o in gc.get_objects() if isinstance(o, _Saved)}
    if hooked:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            result = work()
    else:
        result = work()
        kept = [o.tensor for o in _alive() if id(o) not in known and not o.is_parameter]
    for t in kept:
        if not isinstance(t, nn.Parameter):
            storage = t.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    del result
    return sum(found.values())


def _alive() -> Sequence[_Saved]:
    return [o for o in gc.get_objects() if isinstance(o, _Saved)]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.GroupNorm(3, 3), nn.ReLU())
        self.last = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False)
        with torch.no_grad():
            mask = self.last(y) > 0
        return self.last(y) * mask  # type: ignore[no-any-return]


@pytest.mark.parametrize("large", [0, 1 << 15])
def test_checkpoints_and_parts_without_gradient(large: int) -> None:
    """A block that is extended in a part without gradient keeps its own."""
    x = torch.randn(2, 1, 9, 8, dtype=torch.float64)
    net = Checkpointed().double()

    def contract(backend: Any) -> None:
        with strips_from(backend, large):
            model_equals_one_process(backend, lambda: (copy.deepcopy(net), [x]), (), (2, 2), (2, 3))

    on_threads(4, contract)


class Skip(nn.Module):
    """A convolution, whose result is used twice, once with halos.

    Args:
        change: called with that result after the second convolution has used it.
    """

    def __init__(self, change: Any = None) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 2, 3, padding=1)
        self.second = nn.Conv2d(2, 2, 3, padding=1)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.second(y)
        if self.change is not None:
            self.change(y)
        return z * z + y  # type: ignore[no-any-return]


def cut_in_two(work: Any, net: nn.Module) -> list[Any]:
    """The results of a function of the backend and of the module, cut in space, with strips."""

    def main(backend: Any) -> Any:
        with strips_from(backend, 0):
            return work(spatial(copy.deepcopy(net).double(), Mesh(backend, x=2)["x"], (2,)))

    return linop.launch(main, 2)


IMAGE = torch.arange(64, dtype=torch.float64).reshape(1, 1, 8, 8).cos()


@pytest.mark.parametrize("way", ["autograd.grad", "retain_grad", "retain_grad afterwards"])
def test_gradients_of_what_has_been_extended(way: str) -> None:
    """The gradient of a tensor that is used with halos and without is of both uses."""
    net = Skip().double()

    def gradient(net: Any) -> Tensor:
        seen: list[Any] = []
        inner = getattr(net, "module", net)
        when = inner.second if way == "retain_grad afterwards" else inner.first
        here = when.register_forward_hook(
            lambda m, xs, y: seen.append(xs[0] if m is inner.second else y)
        )
        if way == "retain_grad":
            inner.first.register_forward_hook(lambda m, xs, y: y.retain_grad())
        loss = net(IMAGE).square().sum()
        here.remove()
        y = seen[0]
        if way == "autograd.grad":
            (g,) = torch.autograd.grad(loss, getattr(y, "block", y))
            return g
        if way == "retain_grad afterwards":
            y.retain_grad()
        loss.backward()
        g = y.grad
        return getattr(g, "block", g)

    expected = gradient(copy.deepcopy(net))
    found = torch.cat(cut_in_two(gradient, net), 2)
    assert difference(found, expected) <= TOLERANCE


def test_forwards_without_backward_keep_nothing() -> None:
    def main(net: Any) -> None:
        for _ in range(3):
            net(IMAGE)

    gc.collect()
    known = {id(o) for o in _alive()}
    cut_in_two(main, nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Sigmoid(), nn.Conv2d(2, 2, 3)))
    gc.collect()
    assert not [o for o in _alive() if id(o) not in known]


CHANGED: list[Any] = [
    nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sigmoid()),  # the result
    Skip(change=lambda y: y.mul_(2)),  # what a convolution has extended
]


@pytest.mark.parametrize("net", CHANGED)
def test_what_was_saved_is_not_changed_in_place(net: nn.Module) -> None:
    def main(net: Any) -> str:
        y = net(IMAGE)
        if isinstance(net.module, nn.Sequential):
            y.mul_(2)
        try:
            y.square().sum().backward()
        except RuntimeError as error:
            return str(error)
        return ""

    for said in cut_in_two(main, net):
        assert "modified by an inplace operation" in said


class Viewed(Skip):
    """A view, which is changed after its tensor was extended, in a part without gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        kept = y[:, :1]
        with torch.no_grad():
            z = self.second(y)
        kept.mul_(2)
        return z + y  # type: ignore[no-any-return]


def test_views_of_what_has_been_extended() -> None:
    """A view that is changed changes its tensor, also after that was extended."""
    torch.manual_seed(0)
    net = Viewed().double()

    def contract(backend: Any) -> None:
        with strips_from(backend, 0):
            error, what = compared(backend, net, [IMAGE], (2,), (2,))
            assert error <= TOLERANCE, what

    on_threads(2, contract)
