"""Habits of people with a torch model, beside one process: contracts for threads and ranks. Data
are small whole numbers, whose gradients are exact in bfloat16, too."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from linop.backends.engine.base import Backend
from linop.errors import ArgumentError, BackendError
from linop.strategies import DataParallel, Mesh, full_state_dict, fully_shard, unsharded
from linop.strategies.data.mean_losses import MeanLossWarning

Tensor = Any
HALF = torch.bfloat16


def whole(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).float()


def perceptron() -> Any:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with torch.no_grad():
        for k, p in enumerate(net.parameters()):
            p.copy_(whole(*p.shape, seed=k))
    return net


def sharded(net: Any, backend: Backend, **options: Any) -> Any:
    axis = Mesh(backend, dp=-1)["dp"]
    fully_shard(net[0], axis, **options)
    return fully_shard(net, axis, **options)


def part(backend: Backend, x: Tensor) -> Tensor:
    """This worker's rows, balanced as shards are."""
    return x.tensor_split(backend.workers or 1)[backend.worker or 0]


def are_the_twins(backend: Backend, net: Any, twin: Any) -> None:
    """Gradients are the twin's, or this worker's rows of them, to the bit."""
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None
            continue
        wanted = q.grad if p.shape == q.shape else part(backend, q.grad)
        assert p.grad is not None and p.grad.dtype == p.dtype
        assert torch.equal(p.grad, wanted.to(p.dtype)), (p.grad, wanted)


def warns_of_a_mean(backend: Backend) -> None:
    """A mean loss whose gradients are summed is warned of, once; one that was thought of is not."""
    first = (backend.worker or 0) == 0 and (backend.workers or 1) > 1
    x, mean = whole(4, 4, seed=9), nn.MSELoss()

    def said(make: Any, loss: Any, times: int = 2) -> int:
        net = make()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(times):
                loss(net).backward()
        here = [one for one in caught if one.category is MeanLossWarning]
        assert all("Give reduction='mean'" in str(one.message) for one in here)
        return len(here)

    def plain(net: Any) -> Tensor:
        return mean(net(x), whole(4, 2, seed=8))

    makes = (
        lambda **o: DataParallel(perceptron(), **o),
        lambda **o: sharded(perceptron(), backend, **o),
    )
    for make in makes:
        found = said(make, plain)
        if backend.name != "threads":  # filters of warnings are a process's
            assert found == first
        assert not said(lambda make=make: make(reduction="sum"), plain)
        assert not said(lambda make=make: make(reduction="mean"), plain)
        assert not said(make, lambda net: net(x).square().sum())
        assert not said(make, lambda net: plain(net) * (1 / (backend.workers or 1)))
    for make in makes:
        with pytest.raises(ArgumentError, match="reduction: 'sum' or 'mean' expected"):
            make(reduction="max")


def is_a_mean_of_means(backend: Backend) -> None:
    """reduction="mean" is the twin's mean over equal batches, with micro-batches, too."""
    rows = 4 * (backend.workers or 1)
    x, t = whole(rows, 4, seed=9), whole(rows, 2, seed=8)
    loss = nn.MSELoss()
    twin = perceptron()
    loss(twin(x), t).backward()
    for micro in (1, 2):
        net = DataParallel(perceptron(), reduction="mean")
        cut = sharded(perceptron(), backend, reduction="mean")
        pairs = [part(backend, one).chunk(micro) for one in (x, t)]
        batches = list(zip(*pairs, strict=True))
        with net.no_sync():
            for a, b in batches[:-1]:
                (loss(net(a), b) / micro).backward()
        (loss(net(batches[-1][0]), batches[-1][1]) / micro).backward()
        with cut.no_sync():
            for a, b in batches:
                (loss(cut(a), b) / micro).backward()
        for one in (net, cut):
            for p, q in zip(one.parameters(), twin.parameters(), strict=True):
                wanted = q.grad if p.shape == q.shape else part(backend, q.grad)
                assert torch.allclose(p.grad, wanted, rtol=1e-6, atol=1e-6)


def keeps_precision(backend: Backend) -> None:
    """Shards in float32, parameters in half precision, sums in float32; states are the shards'."""
    x = whole(8, 4, seed=9)
    twin = perceptron()
    twin(x).sum().backward()
    for options in (
        {},
        {"prefetch": 1, "offload": True},
        {"reshard_after_forward": False, "reduce_dtype": HALF},
        {"param_dtype": torch.float16, "reduce_dtype": torch.float64},
    ):
        net = sharded(perceptron(), backend, **{"param_dtype": HALF, **options})
        y = net(part(backend, x))
        assert y.dtype is options.get("param_dtype", HALF)
        y.sum().backward()
        are_the_twins(backend, net, twin)
        net.zero_grad()
        with net.no_sync():
            for rows in part(backend, x).split(1):
                net(rows).sum().backward()
        are_the_twins(backend, net, twin)
        small = perceptron()[0].weight * 1.001  # not a number of half precision
        net = perceptron()
        with torch.no_grad():
            net[0].weight.copy_(small)
        net = sharded(net, backend, **{"param_dtype": HALF, **options})
        assert torch.equal(full_state_dict(net)["0.weight"], small)
    for wrong in ("bfloat16", torch.int32):
        with pytest.raises(ArgumentError, match="param_dtype: a floating dtype"):
            sharded(perceptron(), backend, param_dtype=wrong)


def sums_widely(backend: Backend) -> None:
    """Sums of half precision are taken in float32: many small terms are not lost beside a large
    one."""
    workers, me = backend.workers or 1, backend.worker or 0
    term = 256.0 if me == 0 else 1.0  # 256 + 1 is 256 in bfloat16
    wanted = torch.tensor(256.0 + workers - 1).to(HALF)
    for make in (DataParallel, lambda net: fully_shard(net, Mesh(backend, dp=-1)["dp"])):
        linear = nn.Linear(1, 2 * workers, bias=False).to(HALF)
        nn.init.zeros_(linear.weight)
        net = make(linear)
        net(torch.full((1, 1), term, dtype=HALF)).sum().backward()
        (p,) = net.parameters()
        assert p.grad.dtype is HALF
        assert bool((p.grad == wanted).all())


def agrees_under_autocast(backend: Backend) -> None:
    """Autocast is one process's, to the bit, on numbers that are exact in bfloat16."""
    x = whole(8, 4, seed=9)
    twin = perceptron()
    with torch.autocast("cpu", dtype=HALF):
        wanted = twin(x)
    wanted.float().sum().backward()
    for net in (DataParallel(perceptron()), sharded(perceptron(), backend)):
        with torch.autocast("cpu", dtype=HALF):
            y = net(part(backend, x))
        assert y.dtype is HALF
        assert torch.equal(y, part(backend, wanted))
        y.float().sum().backward()
        are_the_twins(backend, net, twin)


def thaws(backend: Backend) -> None:
    """Parameters whose gradients are turned on later are summed from then on; those of
    micro-batches that have not been summed stay."""
    x = whole(8, 4, seed=9)
    for make in (DataParallel, lambda net: sharded(net, backend)):
        net, twin = perceptron(), perceptron()
        for one in (net, twin):
            one[0].requires_grad_(False)
        net = make(net)
        net(part(backend, x)).sum().backward()
        twin(x).sum().backward()
        inner = net.module if isinstance(net, DataParallel) else net
        with net.no_sync():
            net(part(backend, x)).sum().backward()
        twin(x).sum().backward()
        for one in (inner, twin):
            one[0].requires_grad_(True)
        for _ in range(2):
            net(part(backend, x)).sum().backward()
            twin(x).sum().backward()
        are_the_twins(backend, net, twin)
        for one in (inner, twin):  # frozen, and thawed again
            one[0].requires_grad_(False)
            one.zero_grad()
        net(part(backend, x)).sum().backward()
        for one in (inner, twin):
            one[0].requires_grad_(True)
        twin(x).sum().backward()
        net(part(backend, x)).sum().backward()
        twin(x).sum().backward()
        assert inner[0].weight.grad is not None


def thaws_alone(backend: Backend) -> None:
    """Other parameters on other workers."""
    net = perceptron()
    net[0].requires_grad_(False)
    mine = DataParallel(net)
    net[0].get_parameter("weight" if backend.worker else "bias").requires_grad_(True)
    with pytest.raises(BackendError, match=r"'0\.weight' of torch"):
        mine(whole(2, 4, seed=9))


def takes_other_parameters(backend: Backend) -> None:
    """torch.func.functional_call, and gradients of each sample: this worker's, of its rows."""
    x = part(backend, whole(8, 4, seed=9))
    twin = perceptron()

    def each(net: Any, given: Any) -> Any:
        def loss(parameters: Any, row: Tensor) -> Tensor:
            return torch.func.functional_call(net, parameters, (row[None],)).square().sum()

        return torch.vmap(torch.func.grad(loss), (None, 0))(given, x)

    plain = {name: p.detach().clone() for name, p in twin.named_parameters()}
    wanted = each(twin, plain)
    net = DataParallel(perceptron())
    found = each(net, {f"module.{name}": p for name, p in plain.items()})
    assert all(torch.equal(found[f"module.{name}"], one) for name, one in wanted.items())
    cut = sharded(perceptron(), backend)
    with unsharded(cut):
        found = each(cut, plain)
    assert all(torch.equal(found[name], one) for name, one in wanted.items())
    doubled = {name: 2 * p for name, p in plain.items()}
    y = torch.func.functional_call(twin, doubled, (x,))
    assert torch.equal(torch.func.functional_call(cut, doubled, (x,)), y)
    net(x).sum().backward()  # and it goes on as before
    cut(x).sum().backward()
    if (backend.workers or 1) > 1:
        with pytest.raises(ArgumentError, match="are not the shards that were put there"):
            torch.func.functional_call(cut, {"0.weight": plain["0.weight"]}, (x,))
