"""Networks that are made tensor-parallel, and Megatron's plan of them. Needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from linop import COPIES, REPLICATED
from linop.strategies import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

Tensor = Any
nn = torch.nn
TOLERANCE = 1e-12
WORDS = 11


class MLP(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Megatron's."""

    def __init__(
        self, width: int, hidden: int, activation: str = "gelu", bias: bool = True
    ) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias)
        self.down = nn.Linear(hidden, width, bias)
        self._activation = getattr(torch.nn.functional, activation)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self._activation(self.up(x)))


class Attention(nn.Module):  # type: ignore[misc]
    """Causal self-attention, with a number of groups of heads that share keys and values. It knows
    the width of a head, and not how many there are."""

    def __init__(self, width: int, heads: int, groups: int, bias: bool = True) -> None:
        super().__init__()
        self.head = 2
        self.q = nn.Linear(width, 2 * heads, bias)
        self.k = nn.Linear(width, 2 * groups, bias)
        self.v = nn.Linear(width, 2 * groups, bias)
        self.o = nn.Linear(2 * heads, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int, groups: int, norm: str, bias: bool) -> None:
        super().__init__()
        make = getattr(nn, norm)
        self.norm1, self.norm2 = make(width), make(width)
        self.attention = Attention(width, heads, groups, bias)
        self.mlp = MLP(width, 3 * width + 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):  # type: ignore[misc]
    """Tied embedding, positions, blocks, norm, projection."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, case.width)
        self.positions = nn.Embedding(16, case.width)
        self.blocks = nn.ModuleList(
            Block(case.width, case.heads, case.groups, case.norm, case.bias)
            for _ in range(case.blocks)
        )
        self.start = nn.Identity()
        self.norm = getattr(nn, case.norm)(case.width)
        self.head = nn.Linear(case.width, WORDS, bias=False)
        if case.tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x) + self.positions(torch.arange(x.shape[1]))
        y = self.start(y)
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y))


@dataclass(frozen=True)
class Case:
    """A language model, and how it is parallel."""

    width: int = 6
    heads: int = 4
    groups: int = 4
    blocks: int = 2
    norm: str = "LayerNorm"
    bias: bool = True
    tied: bool = True
    sequence: bool = False
    length: int = 7
    batch: int = 3
    seed: int = 0


def plan(case: Case, workers: int = 1) -> dict[str, Any]:
    """Megatron's plan of a language model; groups that are fewer than the workers are shared."""
    inside = 1 if case.sequence else None
    outside = {"output_layouts": 1} if case.sequence else {}
    shared = case.groups < workers
    heads = {"heads": case.heads if shared else case.groups}
    groups = {"heads": case.groups, "queries": case.heads} if shared else heads
    found: dict[str, Any] = {
        "words": RowwiseParallel(),
        "blocks.*.attention": PrepareModuleInput(layout_or_whole(inside), COPIES),
        "blocks.*.attention.q": ColwiseParallel(COPIES, **heads),
        "blocks.*.attention.[kv]": ColwiseParallel(COPIES, **groups),
        "blocks.*.attention.o": RowwiseParallel(**heads, **outside),
        "blocks.*.mlp.up": ColwiseParallel(layout_or_whole(inside)),
        "blocks.*.mlp.down": RowwiseParallel(**outside),
        "head": ColwiseParallel(layout_or_whole(inside)),
    }
    if case.sequence:
        found |= {
            "start": SequenceParallel(input_layouts=layout_or_whole(None)),
            "blocks.*.norm[12]": SequenceParallel(),
            "norm": SequenceParallel(),
        }
    return found


def layout_or_whole(given: int | None) -> Any:
    """The layout; None: whole on all workers."""
    return REPLICATED if given is None else given


def filled(net: Any, seed: int, whole: bool = False) -> Any:
    """The net in float64, with values of its own: whole numbers from -2 to 2, if asked for."""
    draw = torch.Generator().manual_seed(seed)
    net = net.double()
    with torch.no_grad():
        for p in net.parameters():
            if whole:
                p.copy_(torch.randint(-2, 3, p.shape, generator=draw))
            else:
                p.copy_(torch.randn(p.shape, generator=draw, dtype=p.dtype) * 0.5)
    return net


def values(*shape: int, seed: int, whole: bool = False) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    if whole:
        return torch.randint(-3, 4, shape, generator=draw).double()
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def equal(what: str, found: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> None:
    """Equal to a tolerance, relative to the largest element; 0: bit for bit."""
    assert found.shape == wanted.shape, (what, found.shape, wanted.shape)
    if not tolerance:
        assert torch.equal(found, wanted), what
    elif found.numel():
        most = max(1.0, wanted.abs().max().item())
        error = (found - wanted).abs().max().item()
        assert error <= tolerance * most, (what, error, most)
