"""The movements that `linop.testing.check_parallel` reports: their operators, their adjoints in
words; proofs of large ones, of factors that are no fractions, of gradients in expanded memory."""

from __future__ import annotations

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

import linop
from linop.testing.parallel.pairs.proofs import Pair
from support.parallel_jobs import reports

pytestmark = pytest.mark.slow
RANKS, IN = 2, 6


class Twin(nn.Module):
    def __init__(self, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, IN))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.T)


class Sum(torch.autograd.Function):
    """Terms summed; the backward is right for a replicated result, or times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, wrong: bool) -> Tensor:
        ctx.about = scale, wrong
        y = x * scale
        dist.all_reduce(y)
        return y / scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        scale, wrong = ctx.about
        x = gradients[0] / scale
        if wrong:
            x = x.contiguous()
            dist.all_reduce(x)
        return x * scale, None, None


class Cut(nn.Module):
    """Columns of the weight on each rank."""

    def __init__(self, twin: Any, about: tuple[float, bool] | None, last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(twin.weight.detach().chunk(RANKS, 1)[dist.get_rank()].clone())
        self.about, self.last = about, last

    def forward(self, x: Tensor) -> Tensor:
        y = x.chunk(RANKS, 1)[dist.get_rank()] @ self.weight.T
        if self.about is None:
            dist.all_reduce(y)
        else:
            y = Sum.apply(y, *self.about)  # type: ignore[no-untyped-call]
        return y if self.last else torch.tanh(y)


class Linear(Twin):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def program(
    about: tuple[float, bool] | None, out: int = 4, rows: int = 3, last: bool = False
) -> dict[str, Any]:
    def batch() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(rows, IN, generator=generator), torch.zeros(1)

    def twin() -> nn.Module:
        torch.manual_seed(0)
        return (Linear if last else Twin)(out)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        # Of a sum the gradient is one number, in memory that is expanded.
        return output.sum() if last else (output**2).sum()

    def shard(name: str, value: Any, rank: int, world: int) -> Any:
        return value.chunk(world, 1)[rank]

    def model(net: Any) -> nn.Module:
        return Cut(net, about, last)

    return {"model": model, "twin": twin, "batch": batch, "loss": loss, "shard": shard}


PROGRAMS = {
    "right": program((1.0, False)),
    "wrong": program((1.0, True)),
    "expanded": program((1.0, False), last=True),
    "expanded, wrong": program((1.0, True), last=True),
    "roots": program((3**-0.5, False)),
    "roots, wrong": program((3**-0.5, True)),
    "large": program((0.5, False), out=400, rows=250),
    "large, wrong": program((0.5, True), out=400, rows=250),
    "in place": program(None),
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return reports(__file__, "PROGRAMS", RANKS)


@pytest.fixture
def pair(found: dict[str, Any]) -> Callable[[str], Pair]:
    def of(name: str) -> Pair:
        (one,) = found[name].pairs
        return one  # type: ignore[no-any-return]

    return of


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "wrong" not in name])
def test_right_pairs_are_proven(
    name: str, found: dict[str, Any], pair: Callable[[str], Pair]
) -> None:
    assert found[name], found[name]
    one = pair(name)
    assert one.proven and one.exact is (name != "roots"), one
    rounding = " up to the rounding of its factors" if name == "roots" else ""
    assert str(one).endswith(
        "all-reduce over ranks 0, 1 (terms of a sum to replicated); its adjoint is the identity, "
        f"which ran: adjoint, proven{rounding}"
    )
    assert ("in place" in one.name) is (name == "in place")


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "wrong" in name])
def test_wrong_pairs_are_refused(
    name: str, found: dict[str, Any], pair: Callable[[str], Pair]
) -> None:
    assert not found[name]
    one = pair(name)
    assert one.proven is False, one
    words = str(one)
    assert "its adjoint is the identity, what ran was the all-reduce over ranks 0, 1" in words
    entry = "element 0 of the argument's gradient on rank 0 is {} times element 0 of the result's"
    assert entry.format(2) in words, words
    assert one.beside in found[name].findings[0].explanation


def test_their_operators(pair: Callable[[str], Pair]) -> None:
    one = pair("right")
    assert one.operator is not None and one.adjoint is not None
    y = one.operator.codomain
    assert [(r.name, r.shape, r.workers) for r in y.regions] == [
        ("y0.0", (12,), (0,)), ("y0.1", (12,), (1,))
    ]  # fmt: skip
    assert "B_{1→2} R_{2→1}" in str(one.operator)  # linop's all-reduce
    copies = linop.TensorSpace((12,), linop.Partition((2,)), axes=[linop.COPIES])
    assert (one.operator.to_matrix() != linop.all_reduce(copies).to_matrix()).nnz == 0
    assert not one.operator.H.equals(one.adjoint)  # which it is between other spaces than these
    assert pair("large").operator.shape == (200_000, 200_000)  # type: ignore[union-attr]
    data = one.as_dict()
    assert data["wanted"] == "identity" and data["operator"] == str(one.operator)
