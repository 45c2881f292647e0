"""`autograd.Function`s that are looked at alone: right ones, also with kinks and random numbers,
and wrong ones, with a counterexample."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from linop.testing.parallel.recording.probes import Kept, probed


def function(forward: Any, backward: Any) -> Any:
    """A function of tensors, whose backward is called with the tensors and the gradients."""

    class Made(Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            ctx.save_for_backward(*(one for one in args if isinstance(one, Tensor)))
            ctx.others = [one for one in args if not isinstance(one, Tensor)]
            return forward(*args)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            found = backward(*gradients, *ctx.saved_tensors, *ctx.others)
            found = found if isinstance(found, tuple) else (found,)
            return (*found, *[None] * (len(ctx.needs_input_grad) - len(found)))

    return Made


def given(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()


def judged(kind: Any, *args: Any) -> Any:
    return probed(Kept.of(kind, args, ("Made", "", "", 1)))


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


def of_swiglu(g: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(x)
    return g * y * s * (1 + x * (1 - s)), g * F.silu(x)


def normed(x: Tensor) -> Tensor:
    return x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()


def of_normed(g: Tensor, x: Tensor) -> Tensor:
    r = x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
    return r * g - x * r**3 * (g * x).mean(-1, keepdim=True)


def with_zeros() -> Tensor:
    """Arguments of which many are at a kink."""
    return F.relu(given(6, 5)).detach().requires_grad_()


RIGHT = {
    "swiglu": (swiglu, of_swiglu, given(4, 3), given(4, 3, seed=1)),
    "norm": (normed, of_normed, given(3, 5)),
    "relu": (torch.relu, lambda g, x: g * (x > 0), with_zeros()),
    "abs": (torch.abs, lambda g, x: g * x.sign(), with_zeros()),
    "clamped": (lambda x: x.clamp(-0.5, 0.5), lambda g, x: g * (x.abs() <= 0.5), given(40)),
    "transposed": (lambda x: x.T.clone(), lambda g, x: g.T, given(3, 4)),
    "scaled": (lambda x, k: x * k, lambda g, x, k: g * k, given(5), 0.3),
    "matmul": (torch.matmul, lambda g, a, b: (g @ b.T, a.T @ g), given(2, 3), given(3, 4)),
    "rows": (lambda x, i: x[i], lambda g, x, i: torch.zeros_like(x).index_add(0, i, g),
             given(4, 2), torch.tensor([0, 2, 2])),
    "two results": (lambda x: (x * 2, x.exp()), lambda g, h, x: 2 * g + h * x.exp(), given(3)),
    "of many elements": (torch.tanh, lambda g, x: g * (1 - torch.tanh(x) ** 2), given(300, 100)),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right_ones(name: str) -> None:
    forward, backward, *args = RIGHT[name]
    found = judged(function(forward, backward), *args)
    assert found.right, found


WRONG = {
    "swiglu without a term": (
        swiglu, lambda g, x, y: (g * y * torch.sigmoid(x), g * F.silu(x)), "argument 0",
        given(4, 3), given(4, 3, seed=1)),
    "norm as if its root were constant": (
        normed, lambda g, x: g * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt(), "argument 0",
        given(3, 5)),
    "a factor": (lambda x, k: x * k, lambda g, x, k: g, "gets 1 times", given(5), 0.5),
    "not transposed": (
        lambda x: x.T.clone(), lambda g, x: g, "gets 1 times the gradient of element 1",
        given(3, 3)),
    "no gradient": (
        torch.matmul, lambda g, a, b: (g @ b.T, torch.zeros_like(b)), "argument 1",
        given(2, 3), given(3, 4)),
    "one element of many": (
        torch.tanh, lambda g, x: (g * (1 - torch.tanh(x) ** 2)).index_fill(
            0, torch.tensor([123]), 0.0), "element 123 of", given(20_000)),
    "a kink, and wrong": (torch.relu, lambda g, x: g * (x > 0) * 1.5, "argument 0", with_zeros()),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_ones(name: str) -> None:
    forward, backward, said, *args = WRONG[name]
    found = judged(function(forward, backward), *args)
    assert found.right is False, found
    assert said in found.text
    assert found.where.startswith("test_function_probes.py:")


def test_a_linear_function_is_decided_exactly() -> None:
    right = judged(function(lambda x: x.flip(0), lambda g, x: g.flip(0)), given(6))
    wrong = judged(function(lambda x: x.flip(0), lambda g, x: g.roll(1)), given(6))
    assert right.exact and right.right
    assert wrong.exact and wrong.right is False
    assert "the function is linear, and that is exact" in wrong.text


def test_a_surrogate_is_no_adjoint() -> None:
    found = judged(function(torch.round, lambda g, x: g), given(8))
    assert found.right is False


def test_dropout_inside_is_switched_off() -> None:
    class Dropped(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mask = F.dropout(torch.ones_like(x), 0.5)
            return x * ctx.mask

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * ctx.mask

    assert judged(Dropped, given(9)).right


def test_what_cannot_be_decided_says_why() -> None:
    count = iter(range(1000))
    found = judged(function(lambda x: x * next(count), lambda g, x: g), given(3))
    assert found.right is None and "other results each time" in found.text
    found = judged(function(lambda x: x + 1, lambda g, x: g), given(3).detach())
    assert found.right is None and "requires a gradient" in found.text

    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("not alone")

    found = judged(function(fails, lambda g, x: g), given(3))
    assert found.right is None and "not alone" in found.text


def test_arguments_that_are_changed_in_place() -> None:
    class Doubled(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * 2

    x = given(4)
    before = x.detach().clone()
    assert judged(Doubled, x).right
    assert torch.equal(x, before)
