"""Nets with stacked experts that workers share beside one process: contracts. Needs torch.

Ranks import this module, and no test.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import linop
from linop import Routing
from linop.backends import Backend
from linop.strategies import DataParallel, ExpertParallel, Mesh, Pipeline, check, fully_shard
from support.layers.cases import normal, same
from support.strategies.pipelines.pipelines import squares
from support.strategies.tensor.tensor_networks import filled

Tensor = Any


class Stacked(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Experts of somebody's model, with a bias."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.zeros(experts, hidden, width))
        self.down = nn.Parameter(torch.zeros(experts, width, hidden))
        self.bias = nn.Parameter(torch.zeros(experts, width))

    def forward(self, x: Tensor, indices: Tensor, gates: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            token, choice = torch.where(indices == e)
            hidden = torch.tanh(x[token] @ self.up[e].T)
            each = (hidden @ self.down[e].T + self.bias[e]) * gates[token, choice, None]
            y = y.index_add(0, token, each)
        return y


class Dropping(Stacked):
    """The same, of which each takes some tokens only: what one process computes."""

    factor = 1.0

    def forward(self, x: Tensor, indices: Tensor, gates: Tensor) -> Tensor:
        capacity = math.ceil(self.factor * indices.numel() / self.num_experts)
        slots = Routing(indices.numpy(), self.num_experts, capacity).slots
        kept = torch.zeros(indices.numel())
        kept[torch.from_numpy(slots)] = 1
        return super().forward(x, indices, gates * kept.view(gates.shape))


class Block(nn.Module):  # type: ignore[misc]
    """A router, and experts."""

    def __init__(self, experts: int, k: int, width: int, kind: type[Stacked] = Stacked) -> None:
        super().__init__()
        self.k, self.router = k, nn.Linear(width, experts)
        self.experts = kind(experts, width, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        gates, indices = self.router(rows).softmax(-1).topk(self.k, -1)
        y = self.experts(rows, indices, gates / gates.sum(-1, keepdim=True))
        return x + y.view(x.shape)


@dataclass(frozen=True)
class Experts:
    """A net whose experts are cut.

    Args:
        dp, ep: extents of the mesh.
        rows: of the batch, by worker: dp first.
        experts, k: how many, and how many for each token.
        factor: `capacity_factor`, with dp of 1.
        shards: parameters are sharded, ZeRO 3; else they are copies.
    """

    rows: tuple[int, ...] = (1,)
    dp: int = 1
    experts: int = 3
    k: int = 2
    factor: float | None = None
    shards: bool = False
    seed: int = 0

    @property
    def workers(self) -> int:
        return len(self.rows)


def net_of(case: Experts, kind: type[Stacked] = Stacked) -> Any:
    return filled(
        nn.Sequential(*(Block(case.experts, case.k, 3, kind) for _ in range(2))), case.seed
    )


def is_its_twin(backend: Backend, case: Experts) -> None:
    """Losses and gradients, by `check`, are those of one process."""
    mesh = Mesh(backend, dp=case.dp, ep=-1)
    twin = net_of(case, Stacked if case.factor is None else Dropping)
    for block in twin:
        block.experts.factor = case.factor
    data = None if case.shards else mesh["dp"]
    ep = ExpertParallel(mesh["ep"], data, case.factor)
    model: Any = ep.parallelize(net_of(case))
    every = mesh["dp", "ep"]
    if case.shards:
        for one in ep.experts(model):
            fully_shard(one, mesh["dp"])
        model = fully_shard(model, every)
    else:
        model = DataParallel(model, every)
    batch = normal((sum(case.rows), 2, 3), 1), normal((sum(case.rows), 2, 3), 2)
    mine = [x.split(case.rows)[every.index] for x in batch]

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().sum()

    assert check(model, twin, batch, loss, mine=mine, mesh=mesh, data=["dp", "ep"]) <= 1e-12


def is_its_twin_in_stages(backend: Backend, dp: int) -> None:
    """In stages of a pipeline, too."""
    mesh = Mesh(backend, dp=dp, ep=2, pp=2)
    case = Experts(dp=dp, experts=3)
    twin, pp, every = net_of(case), mesh["pp"], mesh["dp", "ep"]
    ep = ExpertParallel(mesh["ep"], mesh["dp"])
    stages: list[Any] = [None, None]
    stages[pp.index] = DataParallel(ep.parallelize(copy.deepcopy(twin))[pp.index], every)
    table = linop.schedules.GENERATORS["1f1b"](2, 2)
    model = Pipeline(stages, table, squares, backend=pp.backend)
    batch = normal((2 * every.size, 2, 3), 1), normal((2 * every.size, 2, 3), 2)
    mine = [x.chunk(every.size)[every.index] for x in batch]
    assert check(model, twin, batch, mine=mine, mesh=mesh, data=["dp", "ep"]) <= 1e-12


def accumulates(backend: Backend, case: Experts) -> None:
    """Under `no_sync`, gradients of experts and of the others are those of all micro-batches."""
    mesh = Mesh(backend, dp=case.dp, ep=-1)
    twin, every = net_of(case), mesh["dp", "ep"]
    model: Any = ExpertParallel(mesh["ep"], mesh["dp"]).parallelize(net_of(case))
    model = DataParallel(model, every)
    batches = [normal((sum(case.rows), 2, 3), s) for s in (1, 2)]
    for x in batches:
        twin(x).square().sum().backward()
    mine = [x.split(case.rows)[every.index] for x in batches]
    with model.no_sync():
        model(mine[0]).square().sum().backward()
    model(mine[1]).square().sum().backward()
    for block, wanted in zip(model.module, twin, strict=True):
        same(block.router.weight.grad, wanted.router.weight.grad, 1e-11)
        experts = getattr(block.experts, "module", block.experts)
        for name, space in experts.spaces.items():
            part = space.slices(experts.worker)
            same(getattr(experts, name).grad, getattr(wanted.experts, name).grad[part], 1e-11)


def recomputes(backend: Backend, context: bool) -> None:
    """Under checkpoints, with linop's context or without, gradients are the same bits, though calls
    of other routings come between."""
    case = Experts((3, 2, 1))
    ep = ExpertParallel(Mesh(backend, ep=-1)["ep"])
    net = ep.parallelize(net_of(case))
    x = normal((9, 2, 3), 1)[backend.worker or 0 :].requires_grad_()
    net(x).square().sum().backward()
    wanted = [x.grad, *(p.grad for p in net.parameters())]
    x.grad = None
    net.zero_grad()
    more = {"context_fn": linop.autograd.checkpoint_context} if context else {}
    y = checkpoint(net, x, use_reentrant=False, **more)
    net(x.detach()[:2] * 3)
    y.square().sum().backward()
    for a, b in zip([x.grad, *(p.grad for p in net.parameters())], wanted, strict=True):
        assert torch.equal(a, b)


def losses_of_routers(backend: Backend, seed: int) -> None:
    """Terms of all workers make up Mixtral's loss of all tokens, and its gradient."""
    ep = ExpertParallel(Mesh(backend, ep=-1)["ep"])
    lengths = [2 + w % 3 for w in range(ep.axis.size)]
    whole = normal((sum(lengths), 5), seed).requires_grad_()
    probabilities = whole.softmax(-1)
    chosen = torch.nn.functional.one_hot(probabilities.topk(2).indices, 5).double().mean(0).sum(0)
    balance = 5 * (chosen * probabilities.mean(0)).sum()
    z = whole.logsumexp(-1).square().mean()
    (wanted,) = torch.autograd.grad(balance + z, whole)
    mine = whole.detach().split(lengths)[ep.axis.index].clone().requires_grad_()
    terms = ep.router_losses(mine, 2)
    (terms.balance + terms.z).backward()
    same(mine.grad, wanted.split(lengths)[ep.axis.index])
    every = linop.layers.AllReduce(ep.axis.partition)
    same(every(torch.stack([*terms]).detach()), torch.stack([balance, z]))


def is_mixtral(backend: Backend, name: str, dp: int) -> None:
    """Models of transformers as they are: a step's gradients, and the state."""
    from support.models.exact import in_double, model

    mesh = Mesh(backend, dp=dp, ep=-1)
    twin = Logits(copy.deepcopy(model(name)))
    ep = ExpertParallel(mesh["ep"], mesh["dp"])
    net = DataParallel(ep.parallelize(copy.deepcopy(twin)), mesh["dp", "ep"])
    words = torch.randint(3, 14, (4, 6), generator=torch.Generator().manual_seed(1))

    def loss(logits: Tensor, words: Tensor) -> Tensor:
        entropy = nn.functional.cross_entropy
        return entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten(), reduction="sum") / 20

    with in_double(twin):
        found = check(net, twin, (words, words), loss, mesh=mesh, data=["dp", "ep"])
    assert found <= 1e-12
    state = linop.layers.gather_state(net)
    if state is not None:
        for key, x in twin.state_dict().items():
            assert torch.equal(state[key], x), key


class Logits(nn.Module):  # type: ignore[misc]
    """A model of transformers that gives its logits."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, words: Tensor) -> Tensor:
        return self.net(input_ids=words).logits
