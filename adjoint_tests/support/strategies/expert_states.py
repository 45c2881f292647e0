"""States and norms of nets whose experts are cut over other workers than the rest: contracts. Needs
torch.

Ranks import this module, and no test.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from linop import layers
from linop.backends import Backend
from linop.layers.state.workers import Workers
from linop.strategies import (
    Axis,
    ColwiseParallel,
    DataParallel,
    ExpertParallel,
    Mesh,
    RowwiseParallel,
    ShardedOptimizer,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
    parallelize_module,
)
from support.layers.cases import normal, same
from support.strategies.expert_nets import Block
from support.strategies.tensor.tensor_networks import filled

Tensor = Any
STRATEGIES = ("dp", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Layout:
    """A net with experts on a mesh.

    Args:
        dp, ep, tp: extents, in the order of `order`.
        strategy: of the parameters, over dp and ep; experts', over dp.
        rest: axes of the parameters that are no experts, of ZeRO 2 and 3.
        experts, seed: of the net.
    """

    dp: int = 1
    ep: int = 2
    tp: int = 1
    strategy: str = "zero3"
    order: tuple[str, ...] = ("dp", "ep", "tp")
    rest: tuple[str, ...] = ("dp", "ep")
    experts: int = 3
    seed: int = 0

    @property
    def workers(self) -> int:
        return self.dp * self.ep * self.tp


class Net(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A perceptron, which may be tensor parallel, and experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 3)
        self.block = Block(experts, 1, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x + self.down(torch.tanh(self.up(x))))


def net_of(case: Layout) -> Any:
    return filled(Net(case.experts), case.seed)


def parallel(backend: Backend, case: Layout) -> tuple[Any, Axis, Any]:
    """The net, the axis of the workers with other rows, and a function of an optimizer."""
    mesh = Mesh(backend, **{name: getattr(case, name) for name in case.order})
    every = mesh[tuple(name for name in case.order if name != "tp")]
    rest = mesh[tuple(name for name in case.order if name in case.rest)]
    net: Any = net_of(case)
    if case.tp > 1:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        net = parallelize_module(net, mesh["tp"], plan)
    shards = case.strategy in ("zero2", "zero3")
    ep = ExpertParallel(mesh["ep"], None if shards else mesh["dp"])
    net = ep.parallelize(net)
    if shards:
        options: Any = {"reshard_after_forward": case.strategy == "zero3", "reduction": "sum"}
        for one in ep.experts(net):
            fully_shard(one, mesh["dp"], **options)
        net = fully_shard(net, rest, **options)
        if rest.size < every.size:  # copies of the shards
            others = tuple(name for name in case.order if name in every.name.split(", "))
            across = mesh[tuple(name for name in others if name not in case.rest)]
            net = DataParallel(net, across, init_sync=False, reduction="sum")
    else:
        net = DataParallel(net, every, reduction="sum")
    if case.strategy == "zero1":
        return net, every, lambda make: ShardedOptimizer(net, mesh["dp"], make)
    return net, every, lambda make: make([*net.parameters()])


def loss_of(y: Tensor) -> Tensor:
    return y.square().sum() / 8


def is_clipped(backend: Backend, case: Layout) -> None:
    """The norm of all gradients is one process's, and so are the gradients that are clipped."""
    twin, x = net_of(case), normal((2 * case.dp * case.ep, 2, 3), 1)
    loss_of(twin(x)).backward()
    wanted = nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
    net, every, optimizer = parallel(backend, case)
    sgd = optimizer(partial(torch.optim.SGD, lr=1.0))
    loss_of(net(x.chunk(every.size)[every.index])).backward()
    for kind in (1.0, torch.inf, 2.0):
        most = 0.01 if kind == 2.0 else torch.inf
        found = layers.clip_grad_norm_(net, most, kind)
    assert abs(found / wanted - 1) < 1e-12
    assert abs(layers.clip_grad_norm_([*net.parameters()], torch.inf) / 0.01 - 1) < 1e-3
    sgd.step()
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    for key, value in state_of(net, case).items():
        same(value, twin.state_dict()[key], 1e-12)


def state_of(net: Any, case: Layout) -> dict[str, Tensor]:
    """The state of one process, by each of the functions that give it."""
    every = full_state_dict(net)
    gathered = layers.gather_state(net)
    assert gathered is not None and list(gathered) == list(every)
    assert all(torch.equal(gathered[key], value) for key, value in every.items())
    return every


def goes_on(backend: Backend, case: Layout, folder: str) -> None:
    """States that are loaded, gathered by one worker, saved and loaded are those of one process."""
    first = parallel(backend, case)[0]
    groups = Workers("a test", first).groups
    root = case.seed % groups.workers
    wanted = net_of(case).state_dict()
    for key, value in state_of(first, case).items():
        assert torch.equal(value, wanted[key]), key
    others = net_of(Layout(experts=case.experts, seed=case.seed + 1)).state_dict()
    for given in (others, wanted if groups.worker == root else None):
        load_full_state_dict(first, given)
        said = layers.gather_state(first, root)
        assert (said is None) == (groups.worker != root)
        expected = others if given is others else wanted
        for key, value in (said or {}).items():
            assert torch.equal(value, expected[key]), key
    net, every, optimizer = parallel(backend, case)
    adam = optimizer(partial(torch.optim.Adam, lr=0.01))
    x = normal((2 * every.size, 2, 3), 1)

    def step(net: Any, adam: Any) -> None:
        adam.zero_grad()
        loss_of(net(x.chunk(every.size)[every.index])).backward()
        adam.step()

    step(net, adam)
    sharded = case.seed % 2 == 0
    layers.save(net, f"{folder}/state", adam, sharded=sharded)
    step(net, adam)
    after = state_of(net, case)
    net, _, optimizer = parallel(backend, case)
    adam = optimizer(partial(torch.optim.Adam, lr=0.01))
    layers.load(net, f"{folder}/state", adam)
    step(net, adam)
    for key, value in state_of(net, case).items():
        assert torch.equal(value, after[key]), key
    twin = net_of(case)
    alone = torch.optim.Adam(twin.parameters(), lr=0.01)
    for _ in range(2):
        alone.zero_grad()
        loss_of(twin(x)).backward()
        alone.step()
    for key, value in twin.state_dict().items():
        same(after[key], value, 1e-9)
