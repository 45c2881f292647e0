"""Strategies in graphs of torch's compiler: contracts for ranks. Needs torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import linop
from linop import REPLICATED, layers
from linop.backends.engine.base import Backend
from linop.errors import ArgumentError, BackendError, SubsetError
from linop.spaces.partition import Partition
from linop.strategies import (
    AttentionParallel,
    ColwiseParallel,
    ContextParallel,
    CrossEntropyLoss,
    DataParallel,
    ExpertParallel,
    Mesh,
    Pipeline,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    fully_shard,
    parallelize_module,
    spatial,
    split,
    sync_batch_norm,
)
from support.contracts.plans import mine
from support.strategies.expert_nets import Experts, Stacked, net_of
from support.strategies.pipelines.pipelines import squares

Tensor = Any
WIDE = torch.float64


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=WIDE)


class Attention(nn.Module):
    """Causal attention, by a function of queries, keys and values."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.project, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        q = self.project(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return self.function(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return found


class Normed(nn.Module):
    """A norm of somebody's, with two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.full((8,), 1.5)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / x.norm(dim=-1, keepdim=True) + self.bias


def compiled(net: Any, fullgraph: bool = True) -> Any:
    torch.compiler.reset()
    return torch.compile(net, fullgraph=fullgraph, backend="aot_eager")


def results(net: Any, call: Any, x: Tensor) -> list[Tensor]:
    """Of two calls: results, gradients and buffers."""
    found = []
    for _ in range(2):
        net.zero_grad()
        y = call(x)
        y.square().sum().backward()
        found += [y.detach(), *(p.grad.clone() for p in net.parameters())]
        found += [b.clone() for b in net.buffers()]
    return found


def is_eager(
    make: Callable[[], Any], x: Tensor, around: Any = None, fullgraph: bool = True
) -> None:
    """Compiled, a net has the bits of eager calls."""
    eager, other = make(), make()
    with around or nullcontext():
        pairs = zip(
            results(eager, eager, x), results(other, compiled(other, fullgraph), x), strict=True
        )
        assert all(torch.equal(a, b) for a, b in pairs)


def _tensor_parallel(backend: Backend, base: Any, plan: Any, **options: Any) -> Any:
    axis = Mesh(backend, tp=-1)["tp"]
    return lambda: parallelize_module(copy.deepcopy(base), axis, plan, **options)


def tensor_parallel(backend: Backend) -> None:
    torch.manual_seed(0)
    words = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    plan = {"0": RowwiseParallel(), "1": ColwiseParallel(), "3": RowwiseParallel()}
    make = _tensor_parallel(backend, words.to(WIDE), plan)
    given = torch.arange(8).view(2, 4)
    is_eager(make, given)
    raises(SubsetError, "indices from 0 to 12", compiled(make()), torch.tensor([[0, 12], [1, 2]]))
    sequence = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    cut = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=1),
        "3": RowwiseParallel(output_layouts=1),
    }
    part = drawn(3, 4, 8, seed=mine(backend))
    is_eager(_tensor_parallel(backend, sequence.to(WIDE), cut, inputs=1), part)
    kept = nn.Sequential(Normed(), nn.Linear(8, 8), Normed()).to(WIDE)
    whole = PrepareModuleInputOutput(1, REPLICATED, output_layouts=-1, desired_output_layouts=1)
    plan = {
        "0": SequenceParallel(output_layouts=REPLICATED),
        "1": ColwiseParallel(output_layouts=1),
        "2": SequenceParallel(),
    }
    is_eager(_tensor_parallel(backend, kept, plan, inputs=1), part)
    chain, inside = nn.Sequential(nn.Tanh(), *kept[1:2]), {"": whole, "1": ColwiseParallel()}
    is_eager(_tensor_parallel(backend, chain, inside, inputs=1), part)
    heads = {"attention": AttentionParallel()}
    is_eager(_tensor_parallel(backend, SelfAttention().to(WIDE), heads), drawn(3, 4, 8))


def losses(backend: Backend) -> None:
    """Of classes that are cut, and targets that are none."""
    loss = CrossEntropyLoss(Mesh(backend, tp=-1)["tp"])
    x, targets = drawn(3, 4, seed=mine(backend)), torch.tensor([0, 7, 3])
    found = []
    call = compiled(loss)
    for function in loss, call:
        logits = x.clone().requires_grad_()
        y = function(logits, targets)
        y.backward()
        found.append((y.detach(), logits.grad))
    assert all(map(torch.equal, *found))
    raises(ArgumentError, "targets from 0 to 7", call, x, targets + 5)


def raises(kind: Any, words: str, function: Any, *arguments: Any) -> None:
    try:
        function(*arguments)
    except kind as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError(words)


def contexts(backend: Backend) -> None:
    torch.manual_seed(0)
    cp, cut = ContextParallel(Mesh(backend, cp=-1)["cp"]), Partition((1, 1, backend.workers or 1))
    x = cp.shard(drawn(2, 10, 8))

    def of_blocks(*given: Any, **options: Any) -> Tensor:
        return layers.scaled_dot_product_attention(*given, **options, P_x=cut)

    torch_s = nn.functional.scaled_dot_product_attention
    for function in of_blocks, cp.scaled_dot_product_attention:
        base = Attention(function).to(WIDE)
        is_eager(lambda base=base: base, x)  # type: ignore[misc]
    base = Attention(torch_s).to(WIDE)
    is_eager(lambda: base, x, cp)
    is_eager(lambda: cp.parallelize(copy.deepcopy(base)), x)


def data_parallel(backend: Backend) -> None:
    torch.manual_seed(0)
    axis, x = Mesh(backend, dp=-1)["dp"], drawn(4, 8, seed=mine(backend))
    base = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8)).to(WIDE)
    is_eager(lambda: sync_batch_norm(copy.deepcopy(base), axis), x)
    make = lambda: DataParallel(copy.deepcopy(base), axis, reduction="sum")  # noqa: E731
    says(make(), x, "DataParallel sends buffers")
    is_eager(make, x, fullgraph=False)
    inside = DataParallel(compiled(copy.deepcopy(base)), axis, reduction="sum")
    outside = make()
    pairs = zip(results(inside, inside, x), results(outside, outside, x), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def refusals(backend: Backend) -> None:
    """Errors in one graph say why; fully_shard is right with breaks."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)).to(WIDE)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    make, x = _tensor_parallel(backend, base, plan), drawn(3, 8)
    says(make(), x, "Dropout of a tensor-parallel net draws random numbers")
    raises(BackendError, "draws random numbers", compiled(make(), fullgraph=False), x)
    is_eager(lambda: make().eval(), x)
    axis = Mesh(backend, dp=-1)["dp"]
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(WIDE)
    says(fully_shard(copy.deepcopy(plain), axis), x, "fully_shard gathers parameters")
    whole = fully_shard(copy.deepcopy(plain), axis, reduction="sum")
    other = fully_shard(copy.deepcopy(plain), axis, reduction="sum")
    whole(x).square().sum().backward()
    compiled(other, fullgraph=False)(x).square().sum().backward()
    pairs = zip(whole.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs)
    image, blur = drawn(1, 1, 4, 4), nn.Conv2d(1, 1, 3, padding=1).to(WIDE)
    cut = lambda: spatial(copy.deepcopy(blur), Mesh(backend, x=-1)["x"], dims=[2])  # noqa: E731
    says(cut(), image, "spatial cuts tensors, and its workers agree")
    torch.testing.assert_close(compiled(cut(), fullgraph=False)(image).whole(), blur(image))


class Dropped(nn.Module):
    """A net whose forward calls a function that draws, after a graph break or not."""

    def __init__(self, rate: float, breaks: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.rate, self.breaks = rate, breaks

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.two(nn.functional.dropout(y, self.rate, self.training))


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda y: torch.randint_like(y, 3),
    "normal": lambda y: torch.normal(y, 1.0),
    "rand": lambda y: torch.rand(len(y), 1),
    "bernoulli": lambda y: torch.bernoulli(y.sigmoid()),
    "uniform_": lambda y: torch.empty(len(y), 1).uniform_(),
    "gumbel_softmax": nn.functional.gumbel_softmax,
}


class Noisy(Dropped):
    """A net that adds noise."""

    def __init__(self, name: str) -> None:
        super().__init__(0.0)
        self.noise = DRAWS[name]

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        return self.two(y + self.noise(y))


def functions_that_draw(backend: Backend) -> None:
    """They are an error at the first call, of a net that would draw other numbers on each worker;
    one that draws none is compiled."""
    torch.manual_seed(0)
    plan, x = {"one": ColwiseParallel(), "two": RowwiseParallel()}, drawn(3, 8)

    def net(one: Any) -> Any:
        return _tensor_parallel(backend, one.to(WIDE), plan)

    says(net(Dropped(0.5))(), x, "dropout of a tensor-parallel net draws random numbers")
    for name in DRAWS:
        says(net(Noisy(name))(), x, f"{name} of a tensor-parallel net draws random numbers")
    for breaks in False, True:
        call = compiled(net(Dropped(0.5, breaks))(), fullgraph=False)
        for _ in range(2):
            raises(BackendError, "dropout of a tensor-parallel net draws", call, x)
        assert not torch._C._len_torch_function_stack()
        is_eager(net(Dropped(0.0, breaks)), x, fullgraph=not breaks)
        make = net(Dropped(0.5, breaks))
        is_eager(lambda make=make: make().eval(), x, fullgraph=not breaks)


def experts(backend: Backend) -> None:
    """Stacked experts of torch, that are cut, also with draws of their own."""
    axis = Mesh(backend, ep=-1)["ep"]
    x = drawn(5, 2, 3, seed=mine(backend))

    def make(kind: Any) -> Any:
        return ExpertParallel(axis).parallelize(net_of(Experts((1, 1)), kind))

    is_eager(lambda: make(Stacked), x)
    found = []
    for compiles in False, True:
        torch.manual_seed(3)
        net = make(Drawing)
        torch.manual_seed(4 + mine(backend))
        found.append(results(net, compiled(net) if compiles else net, x))
    assert all(map(torch.equal, *found))
    lost = compiled(make(Stacked)[0].experts)
    indices, gates = torch.full((2, 2), 3), drawn(2, 2)
    raises(SubsetError, "indices from 3 to 3; there are 3 experts", lost, x[:2, 0], indices, gates)


class Drawing(Stacked):
    def forward(self, x: Tensor, indices: Tensor, gates: Tensor) -> Tensor:
        y = super().forward(x, indices, gates)
        return nn.functional.dropout(y, 0.5, self.training)


class Branches(nn.Module):
    """A model that torch exports."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x).tanh()
        return self.three(self.two(y).tanh() + y)


def stages(backend: Backend) -> None:
    """Stages of pipelines that are compiled, each in one graph, before `split` (their parts) or
    after, have the bits of those that are not; `split` of a compiled module says what to do."""
    example, graphs = drawn(2, 8), []

    def counting(graph: Any, given: Any) -> Any:
        del given
        graphs.append(graph)
        return graph.forward

    def net(kind: Any) -> Any:
        torch.manual_seed(0)
        return kind().to(WIDE)

    def chain() -> Any:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    options: Any = {"fullgraph": True, "backend": counting}
    for kind, at, more in (chain, "2", ()), (Branches, "two", (example,)):
        cut = split(net(kind), [at], *more)
        wanted = _steps(backend, cut)
        torch.compiler.reset()
        graphs.clear()
        found = _steps(backend, [torch.compile(stage, **options) for stage in cut])
        assert graphs and all(map(torch.equal, wanted, found))
        raises(ArgumentError, "compile its stages", split, torch.compile(net(kind)), [at], *more)
    inner = net(chain)
    inner[0] = torch.compile(inner[0], **options)
    graphs.clear()
    found = _steps(backend, split(inner, ["2"]))
    assert bool(graphs) == (mine(backend) == 0)
    assert all(map(torch.equal, _steps(backend, split(net(chain), ["2"])), found))


def _steps(backend: Backend, cut: Any) -> list[Tensor]:
    """Losses, gradients and outputs of two steps."""
    table = linop.schedules.GENERATORS["1f1b"](2, 2)
    model = Pipeline(cut, table, squares, backend=backend)
    x, found = drawn(4, 8), []
    for turn in range(2):
        for p in model.parameters():
            p.grad = None
        loss, y = model.step(x + turn, x.flip(0)), model(x)
        found += [one.detach() for one in (loss, y) if one is not None]
        found += [p.grad.clone() for p in model.parameters()]
    return found


def shards(backend: Backend) -> None:
    """`fully_shard` of a compiled net, of compiled blocks, and compiled, with graph breaks."""
    axis, x = Mesh(backend, dp=-1)["dp"], drawn(4, 8, seed=mine(backend))

    def net() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(WIDE)

    def shard(one: Any) -> Any:
        return fully_shard(one, axis, reduction="sum")

    whole = shard(net())
    wanted = results(whole, whole, x)
    blocks = net()
    for n in 0, 2:
        blocks[n] = compiled(shard(blocks[n]), fullgraph=False)
    for made in shard(compiled(net(), fullgraph=False)), shard(blocks):
        assert all(map(torch.equal, wanted, results(made, made, x)))
    inside = shard(compiled(net()))
    raises(torch._dynamo.exc.Unsupported, "fully_shard gathers parameters", inside, x)


def says(net: Any, x: Tensor, words: str) -> None:
    """In one graph a net is an error, with these words."""
    raises(torch._dynamo.exc.Unsupported, words, compiled(net), x)
