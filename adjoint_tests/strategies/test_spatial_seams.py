"""Seams between torch and cut tensors: functions that call themselves, autograd's own functions,
hooks, checkpoints, sizes that do not fit, and tensors without elements."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
import torch.overrides
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

import linop
from linop.backends.threads.group import AbortedError
from linop.errors import PartitionError
from linop.strategies import CutTensor, Mesh, spatial
from linop.strategies.space.dispatch import GatheredWarning


class Of(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def cut_in_two(net: nn.Module, x: Tensor, then: Callable[[Any], Any] = lambda y: y) -> Any:
    """The result of worker 0 of two, rows cut."""

    def main(backend: Any) -> Any:
        return then(spatial(copy.deepcopy(net), Mesh(backend, x=2)["x"], dims=(2,))(x))

    return linop.launch(main, 2)[0]


def whole(y: Any) -> Any:
    return y.whole() if isinstance(y, CutTensor) else y


# Functions of torch that ask for overrides of themselves


@pytest.mark.parametrize(
    "function",
    [
        torch.unique,
        lambda x: torch.unique(x, dim=2, return_inverse=True)[1],
        torch.unique_consecutive,
        nn.FractionalMaxPool2d(2, output_size=7, _random_samples=torch.full((2, 4, 2), 0.3)),
    ],
)
def test_functions_that_come_back_to_themselves(function: Any) -> None:
    x = torch.randn(2, 4, 37, 29).round()
    with pytest.warns(GatheredWarning):
        found = cut_in_two(Of(function), x, whole)
    torch.testing.assert_close(found, function(x))


def test_no_overridable_function_recurses() -> None:
    """Whatever their arguments mean: each of torch's, of cut tensors."""
    dummies = torch.overrides.get_testing_overrides()
    python = [f for f in dummies if isinstance(f, FunctionType)]
    assert len(python) > 100

    def main(backend: Any) -> list[str]:
        mine = spatial(nn.Identity(), Mesh(backend, x=1)["x"], dims=(2,))
        x, found = mine.take(torch.randn(2, 4, 6, 5)), []
        assert isinstance(x, CutTensor)
        for f in python:
            parameters = inspect.signature(dummies[f]).parameters.values()
            n = sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
            try:
                f(*[x] * max(n, 1))
            except RecursionError:
                found.append(f.__name__)
            except Exception:  # arguments that it does not take
                continue
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert linop.launch(main, 1) == [[]]


# Autograd's functions


def of_grad(y: Any, p: list[Tensor]) -> Any:
    return torch.autograd.grad(y, p, torch.ones_like(y))


def of_backward(y: Any, p: list[Tensor]) -> Any:
    torch.autograd.backward([y, y.sum()], [torch.ones_like(y), None])
    return [one.grad for one in p]


def of_method(y: Any, p: list[Tensor]) -> Any:
    y.backward(torch.ones(y.shape), inputs=p[0])
    return [p[0].grad]


@pytest.mark.parametrize("through", [of_grad, of_backward, of_method])
def test_gradients_of_cut_outputs(through: Any) -> None:
    net, x = nn.Conv2d(3, 3, 3, padding=1), torch.randn(1, 3, 9, 8)
    alone = copy.deepcopy(net)
    expected = through(alone(x), list(alone.parameters()))

    def main(backend: Any) -> Any:
        mine = spatial(copy.deepcopy(net), Mesh(backend, x=2)["x"], dims=(2,))
        return through(mine(x), list(mine.parameters()))

    for found in linop.launch(main, 2):
        torch.testing.assert_close(list(found), list(expected), atol=1e-4, rtol=1e-4)


def test_gradient_of_a_cut_input() -> None:
    net, x = nn.Conv2d(3, 3, 3, padding=1), torch.randn(1, 3, 9, 8)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(net(leaf).square().sum(), leaf)

    def main(backend: Any) -> Any:
        mesh = Mesh(backend, x=2)
        mine = spatial(copy.deepcopy(net), mesh["x"], dims=(2,))
        z = mine.cut(x.tensor_split(2, 2)[mesh["x"].index].clone().requires_grad_())
        (gradient,) = torch.autograd.grad(mine(z).square().sum(), z)
        assert isinstance(gradient, CutTensor)
        return gradient.whole()

    torch.testing.assert_close(linop.launch(main, 2)[1], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("through", "words"),
    [
        (lambda y: torch.autograd.grad(y, y), "needs a gradient; sum it first"),
        (torch.autograd.backward, "needs a gradient; sum it first"),
        (lambda y: torch.autograd.grad(y, y, torch.ones(2)), r"a gradient of shape \(2,\)"),
    ],
)
def test_gradients_that_are_missing(through: Any, words: str) -> None:
    with pytest.raises(PartitionError, match=words):
        cut_in_two(nn.Conv2d(3, 3, 3), torch.ones(1, 3, 9, 8), through)


# What leaves the graph of blocks


@pytest.mark.parametrize("kind", ["", "_pre"])
@pytest.mark.parametrize("outer", [False, True])
def test_backward_hooks_are_refused_by_name(kind: str, outer: bool) -> None:
    net = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU())

    def main(backend: Any) -> None:
        mine = spatial(copy.deepcopy(net), Mesh(backend, x=2)["x"], dims=(2,))
        hooked = mine if outer else mine.module[1]
        getattr(hooked, f"register_full_backward{kind}_hook")(lambda *_: None)
        mine(torch.ones(1, 3, 9, 8))

    with pytest.raises(PartitionError, match="register_full_backward_hook"):
        linop.launch(main, 2)


def test_a_reentrant_checkpoint_around_is_refused() -> None:
    net, x = nn.Conv2d(3, 3, 3), torch.ones(1, 3, 9, 8, requires_grad=True)

    def main(backend: Any) -> None:
        mine = spatial(copy.deepcopy(net), Mesh(backend, x=2)["x"], dims=(2,))
        y = torch.utils.checkpoint.checkpoint(mine, x, use_reentrant=True)
        y.sum().backward()

    with pytest.raises(PartitionError, match="use_reentrant=False"):
        linop.launch(main, 2)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, y: Any) -> Any:
        return y * 2

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return gradient * 2


def test_a_function_of_a_result_is_refused() -> None:
    with pytest.raises(PartitionError, match=r"torch\.autograd\.Function"):
        cut_in_two(nn.Conv2d(3, 3, 3), torch.ones(1, 3, 9, 8), Twice.apply)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_are_refused(transform: Any) -> None:
    def main(backend: Any) -> None:
        mine = spatial(nn.Identity(), Mesh(backend, x=2)["x"], dims=(2,))
        transform(lambda x: mine(x).sum())(torch.ones(2, 1, 9, 8))

    with pytest.raises(PartitionError, match=r"torch\.func"):
        linop.launch(main, 2)


# Sizes


WRONG: list[Callable[[Tensor], Any]] = [
    lambda x: x.split([3, 4], 2),
    lambda x: x.split([3, -4, 10], 2),
    lambda x: x.split_with_sizes([3, 4], 2),
    lambda x: x.split(-1, 2),
    lambda x: x.split(2, 4),
    lambda x: x.chunk(0, 2),
    lambda x: x.unflatten(2, (2, 4)),
    lambda x: x.narrow(2, 3, 10),
    lambda x: x.narrow(2, -3, 4),
    lambda x: x.narrow(2, 3, -1),
    lambda x: x.select(2, -10),
    lambda x: x.flatten(3, 2),
    lambda x: x.squeeze(5),
    lambda x: x.unsqueeze(6),
    lambda x: x.transpose(2, 5),
    lambda x: x.flip(7),
    lambda x: x.mean(7),
    lambda x: x.sum((2, 2)),
    lambda x: F.avg_pool2d(x, 2, padding=2),
]


@pytest.mark.parametrize("function", WRONG)
def test_sizes_that_torch_refuses(function: Any) -> None:
    x = torch.ones(1, 3, 9, 8)
    with pytest.raises((RuntimeError, IndexError)):
        function(x)
    with pytest.raises((RuntimeError, IndexError)):
        cut_in_two(Of(function), x)


@pytest.mark.parametrize("sizes", [[3, 4, 2], [9, 0], 4, 9])
def test_sizes_that_torch_takes(sizes: Any) -> None:
    x = torch.randn(1, 3, 9, 8)
    found = cut_in_two(Of(lambda x: x.split(sizes, -2)), x, lambda y: [*map(whole, y)])
    torch.testing.assert_close(found, [*x.split(sizes, 2)])


# No elements


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(3),
        nn.GroupNorm(1, 3),
        nn.LayerNorm([8, 8]),
        nn.RMSNorm([8, 8]),
        nn.Upsample(scale_factor=2.0),
    ],
)
def test_norms_of_no_samples(norm: nn.Module) -> None:
    net, x = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), norm), torch.ones(0, 3, 8, 8)
    alone = copy.deepcopy(net)
    alone(x).sum().backward()

    def main(backend: Any) -> Any:
        mine = spatial(copy.deepcopy(net), Mesh(backend, x=2)["x"], dims=(2,))
        mine(x).sum().backward()
        return mine.module

    for found in linop.launch(main, 2):
        torch.testing.assert_close(found.state_dict(), alone.state_dict())
        for p, q in zip(found.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


def test_a_worker_that_ends_says_why() -> None:
    said: list[str] = []

    def main(backend: Any) -> None:
        mine = spatial(nn.Identity(), Mesh(backend, x=2)["x"], dims=(2,))
        if backend.worker == 1:
            raise ValueError("no such image")
        try:
            mine(torch.ones(1, 1, 9, 8))
        except AbortedError as error:
            said.append(str(error))
            raise

    with pytest.raises(ValueError, match="no such image"):
        linop.launch(main, 2)
    assert said == ["worker 0 ends, as worker 1 failed: ValueError: no such image"]
