"""Context parallelism beside one process: contracts. Needs torch.

Ranks import this module, and no test.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import linop
from linop.backends import Backend
from linop.errors import PartitionError
from linop.strategies import (
    ColwiseParallel,
    ContextParallel,
    DataParallel,
    Mesh,
    Pipeline,
    RowwiseParallel,
    check,
    fully_shard,
    parallelize_module,
)
from support.layers.attentions import Attending, whole
from support.layers.cases import normal, same
from support.strategies.pipelines.pipelines import squares
from support.strategies.tensor.tensor_networks import filled

Tensor = Any
attention = torch.nn.functional.scaled_dot_product_attention


@dataclass(frozen=True)
class Context:
    """Attention of tokens that workers share.

    Args:
        call: of the whole.
        method, zigzag: of `ContextParallel`.
    """

    call: Attending
    workers: int = 1
    method: str = "ring"
    zigzag: bool | None = None


def attends_as_whole(backend: Backend, case: Context) -> None:
    """Under ``with cp:`` torch's function is attention of all workers' tokens, as its gradients."""
    call = case.call
    given, mask = call.given()
    leaves = [x.clone().requires_grad_() for x in given]
    wanted = whole(call, leaves, mask)
    upstream = normal(tuple(wanted.shape), 5)
    wanted.backward(upstream)
    cp = ContextParallel(Mesh(backend, cp=-1)["cp"], case.method, case.zigzag)
    mine = [cp.shard(x, -2).requires_grad_() for x in given]
    if mask is not None and mask.shape[-2] == given[0].shape[-2]:
        mask = cp.shard(mask, -2)
    with cp:
        y = attention(*mine, mask, 0.0, call.causal, scale=call.scale, enable_gqa=True)
    same(y, cp.shard(wanted, -2))
    same(cp.unshard(y.detach(), -2), wanted)
    y.backward(cp.shard(upstream, -2))
    for x, leaf in zip(mine, leaves, strict=True):
        same(x.grad, cp.shard(leaf.grad, -2))


def derives_again(backend: Backend, case: Context) -> None:
    """Gradients of gradients are those of one process."""
    call = case.call
    given, mask = call.given()
    assert mask is None
    leaves = [x.clone().requires_grad_() for x in given]
    upstream = normal((*call.shapes()[0][:-1], call.features[1]), 5)
    others = [normal(tuple(x.shape), 6 + k) for k, x in enumerate(given)]

    def again(y: Tensor, xs: list[Tensor], upstream: Tensor, others: list[Tensor]) -> Any:
        found = torch.autograd.grad(y, xs, upstream, create_graph=True)
        total: Any = sum((a * b).sum() for a, b in zip(found, others, strict=True))
        total.backward()  # through all nodes, also on workers without tokens
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in xs]

    wanted = again(whole(call, leaves, None), leaves, upstream, others)
    cp = ContextParallel(Mesh(backend, cp=-1)["cp"], case.method, case.zigzag)
    mine = [cp.shard(x, -2).requires_grad_() for x in given]
    y = cp.scaled_dot_product_attention(*mine, is_causal=call.causal, enable_gqa=True)
    parts = [cp.shard(x, -2) for x in others]
    for x, z in zip(again(y, mine, cp.shard(upstream, -2), parts), wanted, strict=True):
        same(x, cp.shard(z, -2), 1e-11)


def keeps_its_tokens(backend: Backend, length: int) -> None:
    """Between forward and backward a worker keeps its own tokens and one block of others."""
    cp = ContextParallel(Mesh(backend, cp=-1)["cp"])
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.data_ptr()] = x.numel()
        return x

    q, k, v = (cp.shard(normal((1, 4, length, 8), s), 2).requires_grad_() for s in range(3))
    with saved_tensors_hooks(pack, lambda x: x):
        y = cp.scaled_dot_product_attention(q, k, v, is_causal=True)
    tokens = -(-length // cp.axis.size)
    assert sum(kept.values()) <= 4 * (tokens + 2) * (6 * 8 + 1), (kept, tokens)
    y.sum().backward()


def recomputes(backend: Backend, lonely: int | None) -> None:
    """Under checkpoints, of one worker alone with linop's context or of all without, gradients are
    the same bits."""
    cp = ContextParallel(Mesh(backend, cp=-1)["cp"])
    net = cp.parallelize(filled(Block(4, 2), 0))
    x = cp.shard(normal((2, 7, 4), 1)).requires_grad_()
    net(x).square().sum().backward()
    wanted = [x.grad, *(p.grad for p in net.parameters())]
    x.grad = None
    net.zero_grad()
    if lonely is None:
        y = checkpoint(net, x, use_reentrant=False)
    elif backend.worker == lonely:
        context = linop.autograd.checkpoint_context
        y = checkpoint(net, x, use_reentrant=False, context_fn=context)
    else:
        y = net(x)
    y.square().sum().backward()
    for a, b in zip([x.grad, *(p.grad for p in net.parameters())], wanted, strict=True):
        assert torch.equal(a, b)


# Models


class Block(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Causal attention, as somebody's model has it, and a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = attention(q, k, v, is_causal=True)
        return x + torch.tanh(self.o(y.transpose(1, 2).flatten(2)))


class GPT(nn.Module):  # type: ignore[misc]
    """Tokens and their positions, blocks, logits."""

    def __init__(self, words: int, length: int, width: int, heads: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(Block(width, heads), Block(width, heads))
        self.head = nn.Linear(width, words)
        self.double()

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(tokens) + self.places(positions)))


@dataclass(frozen=True)
class Composed:
    """Context parallelism with other strategies.

    Args:
        dp, cp, pp: extents of the mesh.
        shards: parameters are sharded along dp and cp, ZeRO 3; else they are copies.
    """

    dp: int = 1
    cp: int = 1
    pp: int = 1
    shards: bool = False
    method: str = "ring"
    length: int = 5
    rows: int = 2

    @property
    def workers(self) -> int:
        return self.dp * self.cp * self.pp


def is_its_twin(backend: Backend, case: Composed) -> None:
    """Losses and gradients of a model, by `check`, are those of one process."""
    mesh = Mesh(backend, dp=case.dp, cp=case.cp, pp=case.pp)
    every, cp = mesh["dp", "cp"], ContextParallel(mesh["cp"], case.method)
    rows = case.rows * case.dp
    if case.pp > 1:
        _in_stages(mesh, cp, case, rows)
        return
    twin = filled(GPT(6, case.length, 4, 2), 0)
    model: Any = cp.parallelize(copy.deepcopy(twin))
    if case.shards:
        for block in model.blocks:
            fully_shard(block, every)
        fully_shard(model, every)
    else:
        model = DataParallel(model, every)
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(6, (2, rows, case.length), generator=generator)
    positions = torch.arange(case.length).expand(rows, -1)
    batch = tokens, positions, targets

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        entropy = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        )
        return entropy / (rows * case.length)  # of the whole batch, on each worker

    mine = [cp.shard(x.chunk(case.dp)[mesh["dp"].index]) for x in batch]
    assert check(model, twin, batch, loss, mine=mine, mesh=mesh, data=["dp", "cp"]) <= 1e-12


def _in_stages(mesh: Mesh, cp: ContextParallel, case: Composed, rows: int) -> None:
    twin = filled(nn.Sequential(*(Block(4, 2) for _ in range(case.pp))), 0)
    pp = mesh["pp"]
    stages: list[Any] = [None] * case.pp
    stage = cp.parallelize(copy.deepcopy(twin[pp.index]))
    stages[pp.index] = DataParallel(stage, mesh["dp", "cp"])
    table = linop.schedules.GENERATORS["1f1b"](case.pp, case.rows)
    model = Pipeline(stages, table, squares, backend=pp.backend)
    batch = normal((rows, case.length, 4), 1), normal((rows, case.length, 4), 2)
    mine = [cp.shard(x.chunk(case.dp)[mesh["dp"].index]) for x in batch]
    assert check(model, twin, batch, mine=mine, mesh=mesh, data=["dp", "cp"]) <= 1e-12


def runs_torchs_modules(backend: Backend, method: str, masked: bool, batched: bool = True) -> None:
    """`torch.nn.MultiheadAttention`, whose function calls the other one unseen, is that of the
    whole sequence."""
    cp = ContextParallel(Mesh(backend, cp=-1)["cp"], method)
    length = 11
    net = filled(nn.MultiheadAttention(12, 3, batch_first=batched), 0).double()
    x = normal((2, length, 12) if batched else (length, 12), 1)
    where = -2
    named: Any = {}
    if masked:
        named["attn_mask"] = normal((length, length), 2)
        leaves_out = torch.arange(length) % 4 == 1
        named["key_padding_mask"] = leaves_out.expand(2, -1) if batched else leaves_out
    leaf = x.clone().requires_grad_()
    wanted, _ = net(leaf, leaf, leaf, need_weights=False, **named)
    wanted.sin().sum().backward()
    mine = cp.shard(x, where).requires_grad_()
    if masked:
        named["attn_mask"] = cp.shard(named["attn_mask"], 0)
    y, _ = cp.parallelize(copy.deepcopy(net))(mine, mine, mine, need_weights=False, **named)
    y.sin().sum().backward()
    same(y, cp.shard(wanted, where))
    same(mine.grad, cp.shard(leaf.grad, where))


def runs_torchs_layers(backend: Backend, trains: bool) -> None:
    """Layers of torch's transformers, of which evaluation has a faster way, are those of one
    process."""
    cp = ContextParallel(Mesh(backend, cp=-1)["cp"])
    plain = nn.TransformerEncoderLayer(12, 3, 16, 0.0, batch_first=True)
    net = filled(plain, 0).double().train(trains)
    x = normal((2, 9, 12), 1)
    causal = nn.Transformer.generate_square_subsequent_mask(9).double()
    with torch.set_grad_enabled(trains):
        wanted, all_of_it = net(x), net(x, src_mask=causal, is_causal=True)
        mine = cp.parallelize(copy.deepcopy(net))
        own = cp.shard(x)
        n = own.shape[1]
        same(mine(own), cp.shard(wanted))
        same(mine(own, src_mask=causal[:n, :n], is_causal=True), cp.shard(all_of_it))


def derives_again_of_some(backend: Backend, method: str, wanted: int, length: int = 7) -> None:
    """Gradients of gradients of one of queries, keys and values, with more workers than heads."""
    given = [normal((1, 2, length, 3), 1 + k) for k in range(3)]
    upstream = normal((1, 2, length, 3), 4)
    cp = ContextParallel(Mesh(backend, cp=-1)["cp"], method)

    def again(xs: list[Tensor], upstream: Tensor, function: Any) -> list[Tensor]:
        y = function(*xs, is_causal=True)
        (found,) = torch.autograd.grad((y * upstream).sum(), xs[wanted], create_graph=True)
        found.square().sum().backward()
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in xs]

    def plain(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        del is_causal
        mask = torch.ones(length, length).tril().log()
        return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + mask).softmax(-1) @ v

    one = again([x.clone().requires_grad_() for x in given], upstream, plain)
    mine = [cp.shard(x, -2).requires_grad_() for x in given]
    parts = again(mine, cp.shard(upstream, -2), cp.scaled_dot_product_attention)
    for x, z in zip(parts, one, strict=True):
        same(x, cp.shard(z, -2), 1e-11)


class Projected(nn.Module):
    """Heads that a plan may cut, as of models of others."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(12, 12), nn.Linear(12, 12)
        self.k, self.v = nn.Linear(12, 6), nn.Linear(12, 6)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 3)).transpose(1, 2) for f in (self.q, self.k, self.v))
        named = {"is_causal": True, "enable_gqa": True, "dropout_p": self.drop}
        y = torch.nn.functional.scaled_dot_product_attention(query=q, key=k, value=v, **named)
        return x + self.o(y.transpose(1, 2).flatten(2))


def cuts_heads_and_sequences(backend: Backend, method: str) -> None:
    """Tensor-parallel heads around a ring of parts of the sequence; with dropout they are refused,
    as heads draw for themselves then."""
    twin = nn.Sequential(filled(Projected(), 0), filled(Projected(), 1)).double()
    cut = {f"*.{name}": ColwiseParallel(heads=2) for name in "qkv"}
    plan = {**cut, "*.o": RowwiseParallel(heads=2)}
    mesh = Mesh(backend, cp=2, tp=2)
    cp = ContextParallel(mesh["cp"], method)
    net = cp.parallelize(parallelize_module(copy.deepcopy(twin), mesh["tp"], plan))
    net = DataParallel(net, mesh["cp"], reduction="sum")
    x, target = normal((2, 7, 12), 1), normal((2, 7, 12), 2)
    mine = cp.shard(x), cp.shard(target)
    for _ in range(2):  # the second call is not followed
        assert check(net, twin, (x, target), squares, mine=mine, mesh=mesh, data=["cp"]) < 1e-11
    dropping = parallelize_module(
        nn.Sequential(filled(Projected(0.5), 0)).double(), mesh["tp"], plan
    )
    with pytest.raises(PartitionError, match="attention_of_parts draws as many numbers"):
        cp.parallelize(dropping)(mine[0])
