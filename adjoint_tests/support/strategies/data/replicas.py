"""Data parallel training beside one process: contracts for threads and ranks."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from linop.backends.engine.base import Backend
from linop.errors import ArgumentError, BackendError, LinopError
from linop.schedules import GENERATORS
from linop.spaces.partition import balanced
from linop.strategies import DataParallel, Mesh, Pipeline, fully_shard
from support.strategies.pipelines.pipelines import block, squares, values

Tensor = Any


@dataclass(frozen=True)
class Case:
    """A batch, and arguments of `DataParallel`.

    Args:
        whole: parameters and data are whole numbers, and gradients exact.
        micro: of how many micro-batches each worker's is; all but the last under ``no_sync``.
        steps: updates.
        cap: bytes of a bucket.
    """

    options: tuple[tuple[str, Any], ...] = ()
    whole: bool = True
    micro: int = 1
    steps: int = 1
    rows: int = 13
    cap: int = 400
    dtype: str = "float64"

    def numbers(self, *shape: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.whole:
            found = torch.randint(-3, 4, shape, generator=generator)
            return found.to(getattr(torch, self.dtype))
        return torch.randn(shape, generator=generator, dtype=getattr(torch, self.dtype)) / 2

    def model(self, seed: int = 0) -> Any:
        """A perceptron with a shared weight and a parameter of no elements or dimensions."""
        net: Any = torch.nn.Sequential(
            torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.ReLU()
        ).to(getattr(torch, self.dtype))
        net.append(net[2])
        net.append(Scaled(self.dtype))
        with torch.no_grad():
            for k, p in enumerate(net.parameters()):
                p.copy_(self.numbers(*p.shape, seed=100 * seed + k))
        return net


class Scaled(torch.nn.Module):
    """A factor without dimensions, an empty parameter, and a frozen one."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        kind = getattr(torch, dtype)
        self.factor = torch.nn.Parameter(torch.ones((), dtype=kind))
        self.nothing = torch.nn.Parameter(torch.ones(0, 3, dtype=kind))
        self.fixed = torch.nn.Parameter(torch.ones((), dtype=kind), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.nothing.sum() + self.fixed


def blocks(case: Case, x: Tensor, workers: int) -> list[Tensor]:
    """Rows of each worker: unequal numbers."""
    return list(x.split(balanced(case.rows, workers)))


def same(case: Case, a: Tensor, b: Tensor, what: str) -> None:
    if a is None or b is None:
        assert a is b, (what, a, b)
    elif case.whole:
        assert torch.equal(a, b), (what, a, b)
    else:
        scale = max(1.0, *b.abs().reshape(-1).tolist(), 0.0)
        assert bool(((a - b).abs() <= 1e-12 * scale).all()), (what, a, b)


def is_sequential(backend: Backend, case: Case) -> None:
    """Gradients of the sum of losses, and the parameters after updates, are one process's."""
    workers, me = backend.workers or 1, backend.worker or 0
    twin = case.model()
    net = DataParallel(case.model(me), bucket_cap_mb=case.cap / 2**20, **dict(case.options))
    server = dict(case.options).get("server")
    own, whole = (torch.optim.SGD(one.parameters(), lr=2.0**-6) for one in (net, twin))
    names = [name for name, _ in twin.named_parameters()]
    for step in range(case.steps):
        x, t = (case.numbers(case.rows, n, seed=10 + 2 * step + n) for n in (5, 8))
        mine = [blocks(case, one, workers)[me].chunk(case.micro) for one in (x, t)]
        pairs = list(zip(*mine, strict=True))
        own.zero_grad()
        whole.zero_grad()
        with net.no_sync():
            for a, b in pairs[:-1]:
                squares(net(a), b).backward()
        loss = squares(net(pairs[-1][0]), pairs[-1][1])
        loss.backward()
        wanted = squares(twin(x), t)
        wanted.backward()
        if case.micro == 1:
            same(case, net.total(loss), wanted.detach(), "loss")
        for name, p, q in zip(names, net.module.parameters(), twin.parameters(), strict=True):
            if server in (None, me):
                same(case, p.grad, q.grad, name)
            else:
                assert p.grad is None, name
        own.step()
        whole.step()
    net.check() if server is None else net(x[:0])  # brings the server's last update
    for name, p, q in zip(names, net.module.parameters(), twin.parameters(), strict=True):
        same(case, p, q, f"{name} after updates")


def adds_to_gradients(backend: Backend) -> None:
    """Gradients of several backwards add up, as torch's do; discarded ones do not count."""
    case = Case()
    workers, me = backend.workers or 1, backend.worker or 0
    twin, net = case.model(), DataParallel(case.model())
    x, t = case.numbers(case.rows, 5, seed=3), case.numbers(case.rows, 8, seed=4)
    a, b = (blocks(case, one, workers)[me] for one in (x, t))
    for _ in range(2):
        squares(net(a), b).backward()
        squares(twin(x), t).backward()
    with net.no_sync():
        squares(net(a), b).backward()
    squares(twin(x), t).backward()
    net.reduce_gradients()
    net.reduce_gradients()  # nothing is left: they stay
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        same(case, p.grad, q.grad, "added")
    with net.no_sync():
        squares(net(a), b).backward()
    net.zero_grad()
    twin.zero_grad()
    squares(net(a), b).backward()
    squares(twin(x), t).backward()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        same(case, p.grad, q.grad, "discarded")


class Branches(torch.nn.Module):
    """Branches, of which a call uses one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.branches = torch.nn.ModuleList(
            torch.nn.Linear(3, 3, dtype=torch.float64) for _ in range(count)
        )

    def forward(self, x: Tensor, k: int) -> Tensor:
        return self.branches[k](x)


def has_unused(backend: Backend) -> None:
    """Parameters that some workers use have the sum of theirs; those that none uses, None."""
    me = backend.worker or 0
    net = DataParallel(Branches(5), bucket_cap_mb=1e-5)
    x = torch.full((2, 3), me + 1.0, dtype=torch.float64)
    net(x, me % 2).sum().backward()
    rows = [[2 * (w + 1.0) for w in range(backend.workers or 1) if w % 2 == k] for k in range(2)]
    for k, branch in enumerate(net.module.branches):
        given = sum(rows[k]) if k < 2 and rows[k] else None
        grad = branch.weight.grad
        assert grad is None if given is None else bool((grad == given).all()), (k, given, grad)


def has_the_global_mean(backend: Backend) -> None:
    """Means over unequal batches, weighted; and torch's mean of means when asked for."""
    case = Case(whole=False)
    workers, me = backend.workers or 1, backend.worker or 0
    x, t = case.numbers(case.rows, 5, seed=3), case.numbers(case.rows, 8, seed=4)
    a, b = (blocks(case, one, workers) for one in (x, t))
    mean = torch.nn.functional.mse_loss
    for options in ({}, {"reduction": "mean"}):
        twin, net = case.model(), DataParallel(case.model(), **options)
        loss = mean(net(a[me]), b[me])
        (loss * (1 if options else net.share(len(a[me])))).backward()
        pairs = zip(a, b, strict=True)
        means = [mean(twin(rows), wanted) for rows, wanted in pairs]
        (sum(means) / workers if options else mean(twin(x), t)).backward()
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            same(case, p.grad, q.grad, str(options))


def has_buffers(backend: Backend) -> None:
    """Buffers are worker 0's at each forward of training."""
    me = backend.worker or 0
    norm = torch.nn.BatchNorm1d(3, dtype=torch.float64)
    norm.register_buffer("mask", torch.tensor([me == 0, True]))
    net = DataParallel(norm)
    assert norm.mask.tolist() == [True, True]
    twin = torch.nn.BatchNorm1d(3, dtype=torch.float64)
    for seed in range(3):
        net(values(4, 3, seed=10 * seed + me))
        twin(values(4, 3, seed=10 * seed))
    net(values(4, 3, seed=99))
    twin(values(4, 3, seed=99))
    assert torch.equal(norm.running_mean, twin.running_mean)
    assert torch.equal(norm.num_batches_tracked, twin.num_batches_tracked)


class Placed(torch.nn.Module):
    """An embedding of positions, and a norm: autograd saves their buffers for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(4))
        self.words, self.places = torch.nn.Embedding(6, 3), torch.nn.Embedding(4, 3)
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, text: Tensor) -> Tensor:
        return self.norm(self.words(text) + self.places(self.positions))


def keeps_saved_buffers(backend: Backend) -> None:
    """A forward does not spoil what the forward before it has saved for a backward that is yet to
    come, as in losses of two calls and in pipelines."""
    model = Placed().double()
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(values(*p.shape, seed=k))
    net, twin = DataParallel(copy.deepcopy(model), Mesh(backend, dp=-1)["dp"]), model
    text = torch.arange(4) + (backend.worker or 0) % 2
    (net(text) * net(text)).sum().backward()
    for worker in range(backend.workers or 1):
        text = torch.arange(4) + worker % 2
        (twin(text) * twin(text)).sum().backward()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-12, atol=1e-12)


def says_what_is_wrong(backend: Backend) -> None:
    """Errors on every worker, which go on."""
    me = backend.worker or 0

    def refused(match: str, make: Any, kind: type[LinopError] = ArgumentError) -> None:
        with pytest.raises(kind, match=match):
            make()

    def linear(n: int = 3) -> Any:
        return torch.nn.Linear(2, n, dtype=torch.float64)

    refused(
        r"on worker 1: a torch\.nn\.Module exp", lambda: DataParallel(linear() if me != 1 else 7)
    )
    refused("'mean' expected, given 'avg'", lambda: DataParallel(linear(), reduction="avg"))
    refused("axis: expected", lambda: DataParallel(linear(), "dp"))  # type: ignore[arg-type]
    refused("given 'star'", lambda: DataParallel(linear(), algorithm="star"))
    refused("server: a worker of", lambda: DataParallel(linear(), server=9))
    refused("meta device", lambda: DataParallel(torch.nn.Linear(2, 3, device="meta")))
    what = r"worker 1 has 'weight' of torch.float64 and shape \(4, 2\), worker 0 'weight' of"
    refused(what, lambda: DataParallel(linear(3 + (me == 1))), BackendError)
    ring = {"algorithm": "ring"} if me == 1 else {}
    refused(
        "worker 1 has ring, worker 0 all-reduce",
        lambda: DataParallel(linear(), **ring),
        BackendError,
    )
    given = linear()
    with torch.no_grad():
        given.weight.fill_(me)
        given.bias.fill_(0)
    what = r"DataParallel: 'weight' differ between workers \('weight' on workers \[1"
    refused(what, lambda: DataParallel(given, init_sync=False), BackendError)
    net = DataParallel(given)
    refused("is in a module that is already data parallel", lambda: DataParallel(given))
    net.check()
    every = ", ".join(map(str, [2, -1.5, *[2] * (net.workers - 2)]))
    refused(f"(?m)expected; given {every}$", lambda: net.share(-1.5 if me == 1 else 2))
    assert net.share(torch.tensor(0.5) if me else 2.5) == (0.5 if me else 2.5) / (
        2.5 + 0.5 * (net.workers - 1)
    )
    refused("numbers of rows, of which some are above 0", lambda: net.share(0))
    refused("value: expected a Tensor", lambda: net.total(5.0))
    refused("on worker 1: an iterable", lambda: [*net.joined(5 if me == 1 else [])])  # type: ignore[arg-type]
    assert [*net.joined([1, None, 2][: 3 - me])] == [1, None, None if me else 2]
    x = torch.ones(1, 2, dtype=torch.float64)
    (y,) = torch.autograd.grad(net(x).sum(), given.bias)  # moves nothing
    assert y.tolist() == [1, 1, 1]
    assert given.bias.grad is None
    net(x).sum().backward()
    with torch.no_grad():
        given.weight[0, 0] += me == 1
    refused("'weight' differ between workers", net.check, BackendError)
    given.weight.requires_grad_(False)
    frozen = DataParallel(
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        .requires_grad_(False)
        .append(linear(2))
    )
    frozen.module[0 if me == 1 else 1].weight.requires_grad_(True)
    refused("'1.weight' of torch.float32", lambda: frozen(x.float()), BackendError)


def fails_in_backward(backend: Backend) -> None:
    """A gradient that cannot be summed on one worker is an error on all."""
    me = backend.worker or 0
    net = DataParallel(torch.nn.Embedding(4, 3, sparse=me == 1))
    with pytest.raises(LinopError, match=r"gradient of 'weight': layout torch\.sparse"):
        net(torch.tensor([1, 2])).sum().backward()


def misses_a_batch(backend: Backend) -> None:
    """Worker 0 has one batch more than the others."""
    net = DataParallel(torch.nn.Linear(2, 2))
    for _ in range(2 + (backend.worker == 0)):
        net(torch.ones(1, 2)).sum().backward()


def joins(backend: Backend) -> None:
    """Workers with different numbers of batches, the last of which has most, are one process that
    sums the terms of those that have one; with a server and with buffers, too."""
    workers, me = backend.workers or 1, backend.worker or 0
    made: list[dict[str, Any]] = [{}, {"algorithm": "ring"}, {"server": 0}]
    for options in made:
        net = DataParallel(buffered(), **options)
        twin = buffered()
        own, whole = (torch.optim.SGD(one.parameters(), lr=2.0**-6) for one in (net, twin))
        seen = 0
        for k, batch in enumerate(net.joined([values(3, 3, seed=k) for k in range(1 + me)])):
            own.zero_grad()
            if batch is None:
                net.without_batch()
            else:
                seen += 1
                squares(net(batch), 0).backward()
            own.step()
            whole.zero_grad()
            terms = [squares(twin(values(3, 3, seed=k)), 0) for w in range(workers) if w >= k]
            sum(terms).backward()
            whole.step()
        assert (seen, k) == (1 + me, workers - 1)
        net.without_batch()
        for p, q in zip(net.module.parameters(), twin.parameters(), strict=True):
            same(Case(whole=False), p, q, str(options))


def buffered() -> Any:
    """A layer, and a buffer."""
    net = torch.nn.Linear(3, 3).double()
    net.register_buffer("mask", torch.ones(3))
    with torch.no_grad():
        for k, p in enumerate(net.parameters()):
            p.copy_(values(*p.shape, seed=k))
    return net


def checks_itself(backend: Backend) -> None:
    """Copies that one worker has changed are found by the next check."""
    net = DataParallel(torch.nn.Linear(2, 2), check_every=2)
    x = torch.ones(1, 2)
    for _ in range(2):
        net(x).sum().backward()
        with torch.no_grad():
            net.module.bias[0] += backend.worker == 1
    with pytest.raises(BackendError, match="'bias' differ between workers"):
        net(x)
    with pytest.raises(ArgumentError, match="check_every=-1"):
        DataParallel(torch.nn.Linear(2, 2), check_every=-1)


def spreads_nan(backend: Backend) -> None:
    """A NaN of one worker is in all gradients that it is in."""
    net = DataParallel(torch.nn.Linear(2, 2, bias=False))
    x = torch.ones(1, 2)
    x[0, 1] = float("nan") if backend.worker == 1 else 1
    net(x).sum().backward()
    grad = net.module.weight.grad
    assert grad[:, 0].tolist() == [backend.workers] * 2
    assert grad[:, 1].isnan().all()


def composes_with_pipelines(backend: Backend) -> None:
    """Replicas along one axis of a pipeline along the other are one process."""
    mesh = Mesh(dp=2, pp=2)
    dp, pp = mesh["dp"], mesh["pp"]
    stages = [block(3, seed) for seed in range(2)]
    mine = DataParallel(stages[pp.index], dp)
    stages[pp.index] = mine
    with mine.no_sync():
        pipe = Pipeline(stages, GENERATORS["1f1b"](2, 3), squares, backend=pp.backend)
        x, t = values(12, 3, seed=1), values(12, 3, seed=2)
        pipe.step(x.chunk(2)[dp.index], t.chunk(2)[dp.index])
    mine.reduce_gradients()
    twin = torch.nn.Sequential(*(block(3, seed) for seed in range(2)))
    squares(twin(x), t).backward()
    case = Case(whole=False)
    for p, q in zip(mine.parameters(), twin[pp.index].parameters(), strict=True):
        same(case, p.grad, q.grad, "composed")


def delays_updates(backend: Backend, name: str) -> None:
    """Replicas of a pipeline that reads older weights are that pipeline of all their rows."""
    mesh = Mesh(dp=2, pp=2)
    dp, pp = mesh["dp"], mesh["pp"]
    sgd, table = partial(torch.optim.SGD, lr=2.0**-6), GENERATORS[name](2, 4)
    x, t = values(16, 3, seed=1), values(16, 3, seed=2)
    found = []
    for copied in (True, False):
        stages = [block(3, seed) for seed in range(2)]
        if copied:
            stages[pp.index] = DataParallel(stages[pp.index], dp)
        pipe = Pipeline(stages, table, squares, optimizer=sgd, backend=pp.backend)
        rows = torch.arange(16).reshape(-1, 2, 2)[:, dp.index].flatten() if copied else slice(16)
        for _ in range(2):
            pipe.step(x[rows], t[rows])
        found.append([p.detach() for p in pipe.parameters()])
    for p, q in zip(*found, strict=True):
        assert torch.allclose(p, q, rtol=1e-12, atol=0)


def changes_dtype(backend: Backend) -> None:
    """A module that is converted afterwards, with its buffers, trains as its converted twin."""
    workers, me = backend.workers or 1, backend.worker or 0
    for options in ({}, {"server": 0}, {"bucket_cap_mb": 1e-5}):
        net, twin = DataParallel(buffered(), **options), buffered()
        for kind in (torch.float64, torch.float32, torch.float64):
            net.to(kind)
            twin.to(kind)
            x = torch.arange(6 * workers).to(kind).reshape(2 * workers, 3)
            squares(net(x[2 * me : 2 * me + 2]), 0).backward()
            squares(twin(x), 0).backward()
            assert net.module.mask.dtype is kind
            for p, q in zip(net.module.parameters(), twin.parameters(), strict=True):
                if not (me and options.get("server") == 0):
                    assert p.grad.dtype is kind
                    assert torch.allclose(p.grad, q.grad, rtol=1e-4)


def is_converted_by_one(backend: Backend) -> None:
    """Worker 0 alone converts its module."""
    net = DataParallel(buffered())
    net.to(torch.float64 if backend.worker else torch.float32)
    net(torch.ones(1, 3).to(net.module.weight.dtype)).sum().backward()


def has_no_parameters(backend: Backend) -> None:
    """Modules without parameters, or with frozen ones alone, are called as they are."""
    me = backend.worker or 0
    x = torch.tensor([me - 0.5, 1.0], requires_grad=True)
    for make in (torch.nn.ReLU, lambda: torch.nn.Linear(2, 2).requires_grad_(False)):
        net = DataParallel(make())
        y = net(x)
        assert torch.equal(y, net.module(x))
        y.sum().backward()
        net.reduce_gradients()
        net.check()
    axis = Mesh(dp=-1)["dp"]
    relu = fully_shard(torch.nn.ReLU(), axis)
    assert torch.equal(relu(x), x.relu())
    both = torch.nn.Sequential(fully_shard(buffered(), axis), relu)
    assert fully_shard(both, axis)(values(3, seed=1)).shape == (3,)  # nothing is left


def clips_and_copies(backend: Backend) -> None:
    """torch's own functions on the gradients: they are plain tensors, the same on all workers."""
    case = Case(whole=False)
    workers, me = backend.workers or 1, backend.worker or 0
    twin, net = case.model(), DataParallel(case.model())
    x, t = case.numbers(case.rows, 5, seed=3), case.numbers(case.rows, 8, seed=4)
    a, b = (blocks(case, one, workers)[me] for one in (x, t))
    adam = partial(torch.optim.AdamW, lr=1e-2)
    own, whole = adam(net.parameters()), adam(twin.parameters())
    for _ in range(3):
        for one, rows, wanted in ((net, a, b), (twin, x, t)):
            one.zero_grad()
            squares(one(rows), wanted).backward()
            torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)
        own.step()
        whole.step()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        same(Case(whole=False), p, q, "clipped")
    twin.load_state_dict(copy.deepcopy(net.module.state_dict()))
