"""torch's attention cut by heads, modules with inputs by name, projections of several parts, and
linear layers with terms of low rank, beside one process."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from linop import COPIES, REPLICATED, LinopError, layers
from linop.backends.engine.base import Backend
from linop.strategies import (
    AttentionParallel,
    ColwiseParallel,
    Mesh,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    check,
    parallelize_module,
)

ATTENTIONS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "of itself": (4, {}, {"itself": True}),
    "without weights": (4, {"batch_first": True}, {"itself": True, "need_weights": False}),
    "all weights": (3, {"batch_first": True}, {"average_attn_weights": False}),
    "masks": (4, {"bias": False}, {"attn_mask": "places", "key_padding_mask": True}),
    "a mask of each head": (4, {"kdim": 7, "vdim": 9}, {"attn_mask": "heads"}),
    "a trained mask": (
        4,
        {"add_bias_kv": True, "add_zero_attn": True},
        {"attn_mask": "trained", "need_weights": False},
    ),
    "one sequence": (5, {}, {"itself": True, "one": True}),
}
"""Heads of 3 features, options of `torch.nn.MultiheadAttention`, and of its call."""


def drawn(make: Any) -> Any:
    """A module of float64, the same on all workers."""
    with layers.seeded(1):
        made = make().double()
        draw = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p in made.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=draw).double())
    return made


def attends(backend: Backend, name: str) -> None:
    """Results, gradients of inputs, masks and parameters, and the state."""
    heads, options, given = ATTENTIONS[name]
    twin = drawn(lambda: nn.MultiheadAttention(3 * heads, heads, **options))
    net = parallelize_module(copy.deepcopy(twin), Mesh(backend, tp=-1)["tp"], AttentionParallel())
    for _ in range(2):  # the second call is not followed
        found = []
        for one in twin, net:
            one.zero_grad()
            inputs, call = _inputs(heads, options, dict(given))
            y, weights = one(*inputs, **call)
            value = y.square().sum()
            if weights is not None:
                value = value + (weights * weights.cos()).sum()
            value.backward()
            mask = call.get("attn_mask")
            trained = mask is not None and mask.requires_grad
            found.append([y, weights, inputs[0].grad, mask.grad if trained else None])
        for a, b in zip(*found, strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a - b).abs().max() < 1e-12
    for one in twin, net:
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    _same_state(net, twin)


def _inputs(heads: int, options: Any, call: Any) -> tuple[list[Any], dict[str, Any]]:
    draw, first = torch.Generator().manual_seed(3), options.get("batch_first", False)
    one = call.pop("one", False)
    sizes = [(5, 3 * heads)] * 3
    if not call.pop("itself", False):
        sizes[1:] = [(6, options.get(k, 3 * heads)) for k in ("kdim", "vdim")]
    shapes = [(n, w) if one else ((2, n, w) if first else (n, 2, w)) for n, w in sizes]
    inputs = [torch.randn(s, generator=draw).double().requires_grad_() for s in shapes]
    if sizes[1][0] == 5:
        inputs = inputs[:1] * 3
    kind = call.get("attn_mask")
    if kind == "places":
        call["attn_mask"] = torch.rand(5, 6, generator=draw) > 0.7
    elif kind is not None:
        n = [2 * heads] if kind == "heads" else []
        mask = torch.randn(*n, 5, 6, generator=draw).double()
        call["attn_mask"] = mask.requires_grad_(kind == "trained")
    if call.get("key_padding_mask"):
        call["key_padding_mask"] = torch.arange(6) >= torch.tensor([[4], [6]])
    return inputs, call


def _same_state(net: Any, twin: Any) -> None:
    state = layers.gather_state(net)
    assert state is not None and [*state] == [*twin.state_dict()]
    for key, p in twin.state_dict().items():
        assert (state[key] - p).abs().max() < 1e-12, key
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    layers.scatter_state(net, state)
    again = layers.gather_state(net)
    assert again is not None and all(torch.equal(again[key], state[key]) for key in state)


ENCODER: dict[str, Any] = {
    "layers.*.self_attn": AttentionParallel(),
    "layers.*.linear1": ColwiseParallel(),
    "layers.*.linear2": RowwiseParallel(),
}
SEQUENCE: dict[str, Any] = {
    "layers.0": PrepareModuleInput(REPLICATED, 1),
    "layers.*.self_attn": AttentionParallel(1, 1),
    "layers.*.linear1": ColwiseParallel(1),
    "layers.*.linear2": RowwiseParallel(output_layouts=1),
    "layers.*.norm?": SequenceParallel(),
    "layers.1": PrepareModuleOutput(1, REPLICATED),
}


def encodes(backend: Backend, sequence: bool, first: bool) -> None:
    """torch's transformer, in training, in evaluation, and compiled."""

    def make() -> Any:
        layer = nn.TransformerEncoderLayer(12, 4, 20, 0.0, batch_first=True, norm_first=first)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    twin, draw = drawn(make), torch.Generator().manual_seed(3)
    x, target = (torch.randn(2, 5, 12, generator=draw).double() for _ in range(2))
    plan = SEQUENCE if sequence else ENCODER
    net = parallelize_module(copy.deepcopy(twin), Mesh(backend, tp=-1)["tp"], plan)
    assert check(net, twin, (x, target), nn.MSELoss(reduction="sum")) < 1e-12
    with torch.no_grad():
        assert (net.eval()(x) - twin.eval()(x)).abs().max() < 1e-12


class Fused(nn.Module):
    """Attention whose projections are one, taken apart in several ways."""

    def __init__(self, way: str, groups: int = 4) -> None:
        super().__init__()
        self.way, self.groups = way, groups
        self.qkv, self.o = nn.Linear(12, 12 + 6 * groups), nn.Linear(12, 12)

    def forward(self, x: Any) -> Any:
        y = self.qkv(x)
        n = 3 * self.groups
        if self.way == "split":
            q, k, v = y.split((12, n, n), dim=-1)
        elif self.way == "equal split":
            q, k, v = y.split(12, -1)
        elif self.way == "chunk":
            q, k, v = torch.chunk(y, 3, dim=2)
        elif self.way == "slices":
            q, k, v = y[..., :12], y[:, :, 12 : 12 + n], y[..., 12 + n :]
        elif self.way == "pairs":  # the last two together, first
            q, kv = y[..., :12].tanh(), y.narrow(-1, 12, 2 * n).tanh()
            k, v = kv.chunk(2, -1)
        elif self.way == "view":
            q, k, v = y.view(*y.shape[:-1], 3, 4, 3).unbind(-3)
        else:
            q, k, v = y.unflatten(-1, (3, -1, 3)).permute(2, 0, 1, 3, 4)
        if q.ndim == 3:
            q, k, v = (one.unflatten(-1, (-1, 3)) for one in (q, k, v))
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


WAYS = [
    *(("split", g) for g in (4, 2)),
    *(("slices", g) for g in (4, 2)),
    *(("pairs", g) for g in (4, 2)),
    *((way, 4) for way in ("equal split", "chunk", "view", "unflatten")),
]


def takes_parts(backend: Backend, way: str, groups: int) -> None:
    twin, draw = drawn(lambda: Fused(way, groups)), torch.Generator().manual_seed(3)
    x, target = (torch.randn(2, 5, 12, generator=draw).double() for _ in range(2))
    plan: dict[str, Any] = {
        "qkv": ColwiseParallel(heads=groups, packed=(4, groups, groups)),
        "o": RowwiseParallel(heads=groups),
    }
    net = parallelize_module(copy.deepcopy(twin), Mesh(backend, tp=-1)["tp"], plan)
    for _ in range(2):
        assert check(net, twin, (x, target), nn.MSELoss(reduction="sum")) < 1e-12
        net.zero_grad()
        twin.zero_grad()
    _same_state(net, twin)


class Wrong(nn.Module):
    """Functions of a projection of two parts, before they are taken."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.up, self.down = way, nn.Linear(4, 8), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        y = self.up(x)
        if self.way == "softmax":
            y = y.softmax(-1)
        elif self.way == "slice":
            return self.down(y[..., 2:6])
        elif self.way == "view":
            return self.down(y.view(*y.shape[:-1], 4, 2).flatten(-2)[..., :4])
        elif self.way == "rows":
            return self.down(y.chunk(2, 0)[0][..., :4])
        a, b = y.chunk(2, -1)
        return self.down(a * b)


REFUSALS = {
    "softmax": "softmax of the output of a projection of 2 parts",
    "slice": "features 2 to 6 of the output of a projection whose parts",
    "view": "a view as",
    "rows": "chunk along dimension 0 of the output of a projection of 2 parts",
}


def refuses_other_parts(backend: Backend, way: str) -> None:
    """When the call is followed, and later."""
    net = drawn(lambda: Wrong(way))
    plan: dict[str, Any] = {"up": ColwiseParallel(packed=2), "down": RowwiseParallel()}
    parallelize_module(net, Mesh(backend, tp=-1)["tp"], plan)
    for _ in range(2):
        with pytest.raises(LinopError, match=REFUSALS[way]):
            net(torch.ones(2, 3, 4).double())


class Named(nn.Module):
    """A module that calls another with inputs by name, of which one is None."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = Rms(8), Gated()

    def forward(self, x: Any) -> Any:
        return x + self.inner(hidden=self.norm(x), scale=None)


class Rms(nn.Module):
    """As those of models of other people."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x: Any) -> Any:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), Rms(3)

    def forward(self, hidden: Any, scale: Any) -> Any:
        h = self.norm(self.up(hidden).unflatten(-1, (-1, 3))).flatten(-2)
        return self.down(h if scale is None else h * scale)


def converts_by_name(backend: Backend) -> None:
    twin, draw = drawn(Named), torch.Generator().manual_seed(3)
    x, target = (torch.randn(2, 5, 8, generator=draw).double() for _ in range(2))
    named: Any = {"hidden": 1, "scale": 1}, {"hidden": COPIES, "scale": COPIES}
    plan: dict[str, Any] = {
        "": PrepareModuleOutput(1, REPLICATED),
        "norm": SequenceParallel(),
        "inner": PrepareModuleInput((), (), *named),
        "inner.up": ColwiseParallel(COPIES, heads=4),
        "inner.norm": SequenceParallel(None),
        "inner.down": RowwiseParallel(output_layouts=1, heads=4),
    }
    axis, root = Mesh(backend, tp=-1)["tp"], nn.Sequential(copy.deepcopy(twin))
    cut = {"0" if not k else f"0.{k}": style for k, style in plan.items()}
    first = nn.Sequential(nn.Identity(), root[0])
    cut = {f"1{k[1:]}": style for k, style in cut.items()} | {"0": SequenceParallel(1, REPLICATED)}
    net: Any = parallelize_module(first, axis, cut)
    whole = nn.Sequential(nn.Identity(), twin)
    assert check(net, whole, (x, target), nn.MSELoss(reduction="sum")) < 1e-12
    with pytest.raises(LinopError, match="called without an input 'hidden' by name"):
        net[1].inner(x, scale=None)


class LowRank(nn.Module):
    """A linear layer with a term of low rank, in the form of peft's."""

    def __init__(self, base: Any, rank: int = 3, dora: bool = False) -> None:
        super().__init__()
        n, m = base.in_features, base.out_features
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(n, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, m, bias=False)})
        self.lora_magnitude_vector = nn.ModuleDict({"default": Rms(m)} if dora else {})

    def forward(self, x: Any) -> Any:
        y = self.base_layer(x)
        for name in self.lora_A:
            y = y + 2.0 * self.lora_B[name](self.lora_A[name](x))
        return y


def adapts(backend: Backend, sequence: bool) -> None:
    def make() -> Any:
        up, down = LowRank(nn.Linear(8, 10)), LowRank(nn.Linear(10, 8))
        return nn.Sequential(nn.Identity(), up, nn.Tanh(), down, nn.Identity())

    twin, draw = drawn(make), torch.Generator().manual_seed(3)
    x, target = (torch.randn(2, 5, 8, generator=draw).double() for _ in range(2))
    plan: dict[str, Any] = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    if sequence:
        plan = {"1": ColwiseParallel(1), "3": RowwiseParallel(output_layouts=1)}
        plan |= {"0": SequenceParallel(1, REPLICATED), "4": SequenceParallel(1, 1, REPLICATED)}
    net = parallelize_module(copy.deepcopy(twin), Mesh(backend, tp=-1)["tp"], plan)
    assert check(net, twin, (x, target), nn.MSELoss(reduction="sum")) < 1e-12
    _same_state(net, twin)


def refuses_magnitudes(backend: Backend) -> None:
    net = nn.Sequential(LowRank(nn.Linear(4, 4), dora=True))
    with pytest.raises(LinopError, match="'0' has parameters beside base_layer, lora_A"):
        parallelize_module(net, Mesh(backend, tp=-1)["tp"], {"0": ColwiseParallel()})


class Opened(nn.Module):
    """A fused projection of two parts, of which one opens the other."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.up, self.down, self.way = nn.Linear(6, 14), nn.Linear(7, 6), way

    def forward(self, x: Any) -> Any:
        h = self.up(x)
        if self.way == "glu":
            return self.down(nn.functional.glu(h))
        if self.way == "own":  # of this worker's tensor
            where: Any = (h.shape[-1] // 2,)
        else:
            where = {"indices": (7,), "from the end": (-7,), "number": torch.tensor(2)}.get(
                self.way, 2
            )
        a, b = h.tensor_split(where, dim=-1)
        return self.down(a * b.sigmoid())


def opens(backend: Backend) -> None:
    """torch's function of both parts, and other ways to take them."""
    for way in "glu", "indices", "sections", "from the end", "number", "own":
        twin = drawn(partial(Opened, way))
        plan = {"up": ColwiseParallel(packed=2), "down": RowwiseParallel()}
        net = parallelize_module(copy.deepcopy(twin), Mesh(backend, tp=-1)["tp"], plan)
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(5)).double()
        assert check(net, twin, (x, x), lambda y, _: y.square().sum()) < 1e-12


class Cache:
    """Keys and values of tokens before, as those of transformers."""

    def __init__(self) -> None:
        self.pairs: list[Any] = []

    def update(self, k: Any, v: Any) -> Any:
        if self.pairs:
            k, v = (torch.cat(pair, 2) for pair in zip(self.pairs, (k, v), strict=True))
        self.pairs = [k, v]
        return k, v


class Generating(nn.Module):
    """Heads with rotary embeddings as complex numbers, that may have a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Any, places: Any, cache: Any = None) -> Any:
        q, k, v = (f(x).unflatten(-1, (-1, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        turns = torch.polar(torch.ones_like(places), places).unsqueeze(-1)
        q, k = (
            torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * turns).flatten(-2)
            for y in (q, k)
        )
        if cache is not None:
            k, v = cache.update(k, v)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).flatten(2))


def generates(backend: Backend) -> None:
    """Token by token with a cache, of which the calls of a second text are known up to some length
    and new behind it; and trained without, and through a cache."""
    twin = drawn(Generating)
    heads = {"[qkv]": ColwiseParallel(heads=6), "o": RowwiseParallel(heads=6)}
    net = parallelize_module(copy.deepcopy(twin), Mesh(backend, tp=-1)["tp"], heads)
    x = torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(5)).double()
    for length in (5, 9):
        caches = Cache(), Cache()
        with torch.no_grad():
            for a, b in [(0, 3), *((k, k + 1) for k in range(3, length))]:
                places = torch.arange(a, b).double()
                y, wanted = (
                    one(x[:, a:b], places, c) for one, c in zip((net, twin), caches, strict=True)
                )
                assert (y - wanted).abs().max() < 1e-12, (length, a)
    every = torch.arange(9).double()
    for one in (net, twin):
        one(x, every).square().sum().backward()
    assert net.o.bias is None or (net.o.bias.grad - twin.o.bias.grad).abs().max() < 1e-10
    given = [x.clone().requires_grad_() for _ in range(2)]
    for one, mine in zip((net, twin), given, strict=True):
        cache, total = Cache(), x.new_zeros(())
        for a, b in (0, 4), (4, 9):
            total = total + one(mine[:, a:b], every[a:b], cache).square().sum()
        total.backward()
    ours, theirs = (one.grad for one in given)
    assert ours is not None and theirs is not None and (ours - theirs).abs().max() < 1e-10
