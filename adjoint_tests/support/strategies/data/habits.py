"""Habits of people with a torch model, beside one process: contracts for threads and ranks. Data
are small whole numbers, whose gradients are exact in bfloat16, too."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from linop import Partition, layers
from linop.backends.engine.base import Backend
from linop.errors import ArgumentError, BackendError, LinopError
from linop.layers.agreement.input_agreement import agreement_of
from linop.strategies import (
    Axis,
    ColwiseParallel,
    ContextParallel,
    DataParallel,
    Mesh,
    Parts,
    RowwiseParallel,
    ShardedOptimizer,
    full_module,
    full_state_dict,
    fully_shard,
    loader,
    parallelize_module,
    sync_batch_norm,
    unsharded,
)
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


def perceptron_with_norm(norm: Any = nn.BatchNorm1d) -> Any:
    net = nn.Sequential(nn.Linear(4, 6), norm(6), nn.ReLU(), nn.Linear(6, 2)).double()
    with torch.no_grad():
        for k, p in enumerate(net.parameters()):
            p.copy_(whole(*p.shape, seed=k))
    return net


def normalises_over_all_rows(backend: Backend) -> None:
    """torch's SyncBatchNorm under DataParallel, and sync_batch_norm of a sharded net, train as one
    process with its BatchNorm, for batches that the loader cuts: 13 rows, of which the last batch
    has 3."""
    data = torch.utils.data.TensorDataset(
        whole(13, 4, seed=9).double(), whole(13, 2, seed=8).double()
    )
    axis = Mesh(backend, dp=-1)["dp"]
    copied = DataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(perceptron_with_norm()), axis)
    cut = fully_shard(sync_batch_norm(perceptron_with_norm(), axis), axis)
    for net in (copied, copy.deepcopy(cut)):
        twin = perceptron_with_norm()
        own, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (net, twin))
        ours = loader(data, axis, batch_size=5, shuffle=True, seed=3)
        batches = Parts(data, Axis("all", (0,), 0, backend), batch_size=5, shuffle=True, seed=3)
        for _ in range(2):
            for (a, b), rows in zip(ours, batches, strict=True):
                x, t = data[rows]
                own.zero_grad()
                other.zero_grad()
                (net(a) - b).square().sum().div(len(rows)).backward()
                (twin(x) - t).square().sum().div(len(rows)).backward()
                own.step()
                other.step()
        state = net.state_dict() if net is copied else full_state_dict(net)
        for key, value in twin.state_dict().items():
            assert torch.allclose(state[key], value, rtol=1e-10, atol=1e-10), key
        net.eval()
        twin.eval()
        assert torch.allclose(net(x), twin(x), rtol=1e-10, atol=1e-10)
    kept = io.BytesIO()
    torch.save(copied.module, kept)
    kept.seek(0)
    assert type(torch.load(kept, weights_only=False)[1]) is nn.SyncBatchNorm


def gives_each_row_once(backend: Backend) -> None:
    """Parts of batches are all rows of an epoch, in its order, once."""
    axis = Mesh(backend, dp=-1)["dp"]
    agreement = agreement_of(backend)
    for rows, size, drop in ((13, 5, False), (13, 5, True), (4, 2, False), (1, 3, False)):
        parts = Parts(range(rows), axis, batch_size=size, shuffle=True, seed=1, drop_last=drop)
        epochs = []
        for _ in (0, 1):
            mine = [*parts]
            assert len(mine) == len(parts)
            said = agreement.gather_objects(mine, "compare parts")
            found = [k for batch in zip(*said, strict=True) for part in batch for k in part]
            wanted = rows // size * size if drop else rows
            assert len({*found}) == len(found) == wanted
            epochs.append(found)
        assert rows < 4 or epochs[0] != epochs[1]
        parts.set_epoch(0)
        assert [*parts] == parts_of(epochs[0], size, axis)
    empty = next(iter(loader(torch.ones(1, 3), axis, batch_size=4)))
    assert empty.shape == (int(axis.index == 0), 3)
    with pytest.raises(ArgumentError, match="data with a length expected"):
        Parts(iter([1]), axis, batch_size=2)
    with pytest.raises(ArgumentError, match="at least 1 expected"):
        Parts([1], axis, batch_size=0)
    with pytest.raises(ArgumentError, match="give that its data"):
        loader([1], axis, batch_size=2, sampler=[0])


def takes_empty_parts(backend: Backend) -> None:
    """The mean over fewer rows than there are workers, some of which have none."""
    x, t = whole(2, 4, seed=9), whole(2, 2, seed=8)
    twin = perceptron()
    nn.functional.mse_loss(twin(x), t).backward()
    net = DataParallel(perceptron())
    mine = part(backend, x)
    loss = nn.functional.mse_loss(net(mine), part(backend, t))
    (loss * net.share(len(mine))).backward()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-6)


def parts_of(rows: list[int], size: int, axis: Any) -> list[list[int]]:
    batches = [torch.tensor(rows[k : k + size]) for k in range(0, len(rows), size)]
    return [batch.tensor_split(axis.size)[axis.index].tolist() for batch in batches]


def is_pickled(backend: Backend) -> None:
    """Modules are pickled, copied and saved as torch's are, or as the model of one process."""
    x = part(backend, whole(8, 4, seed=9))
    twin = perceptron()
    twin(whole(8, 4, seed=9)).sum().backward()

    def again(module: Any) -> Any:
        kept = io.BytesIO()
        torch.save(module, kept)
        kept.seek(0)
        assert b"linop" not in kept.getvalue() or isinstance(module, DataParallel)
        return torch.load(kept, weights_only=False)

    net = DataParallel(perceptron(), reduction="sum")
    net(x).sum().backward()
    cut = sharded(perceptron(), backend)
    cut(x).sum().backward()
    for plain in (net.module, full_module(net), full_module(cut)):
        loaded = again(plain)
        assert type(loaded) is nn.Sequential
        assert torch.equal(loaded(x), twin(x))
        DataParallel(loaded, reduction="sum")(x).sum().backward()  # nothing is left of the first
        are_the_twins(backend, loaded, twin)
    for other in (again(net), copy.deepcopy(net), copy.deepcopy(cut)):
        other.zero_grad()
        other(x).sum().backward()
        are_the_twins(backend, other, twin)
    average = torch.optim.swa_utils.AveragedModel(cut)
    with torch.no_grad():
        for p in cut.parameters():
            p.add_(1)
    average.update_parameters(cut)
    average.update_parameters(cut)
    means = full_state_dict(average.module)
    for key, value in perceptron().state_dict().items():
        assert (
            torch.equal(means[key], value + 1.5)
            or torch.equal(means[key], value + 0.5)
            or (torch.equal(means[key], value + 1))
        ), key
    context = ContextParallel(Mesh(backend, cp=-1)["cp"])
    loaded = again(full_module(context.parallelize(sharded(perceptron(), backend))))
    assert torch.equal(loaded(x), twin(x)) and "_call_impl" not in vars(loaded)
    if (backend.workers or 1) > 1:
        adam = torch.optim.Adam(cut.parameters())
        for some in (cut, adam, dict(cut.named_parameters()), next(iter(cut.parameters()))):
            with pytest.raises(ArgumentError, match=r"cannot be pickled: .*full_module\(net\)"):
                pickle.dumps(some)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    tensors = parallelize_module(perceptron(), Mesh(backend, tp=-1)["tp"], plan)
    with pytest.raises(ArgumentError, match=r"cannot be pickled, .*full_module\(net\)"):
        pickle.dumps(tensors)
    assert torch.equal(again(full_module(tensors))(x), perceptron()(x))
    layer = layers.Linear(Partition((1, backend.workers or 1)), 2, 2)
    with pytest.raises(ArgumentError, match="of all workers together"):
        full_module(nn.Sequential(layer))


def is_an_optimizer(backend: Backend) -> None:
    """ShardedOptimizer under torch's schedulers and hooks, with parameters that are thawed."""
    axis = Mesh(backend, dp=-1)["dp"]
    x = whole(8, 4, seed=9)
    inner, twin = perceptron(), perceptron()
    for one in (inner, twin):
        one[0].requires_grad_(False)
    net = DataParallel(inner, axis, reduction="sum")
    make = partial(torch.optim.SGD, lr=0.5, momentum=0.5)
    own, other = ShardedOptimizer(net, axis, make), make(twin[2].parameters())
    assert isinstance(own, torch.optim.Optimizer)
    seen: list[Any] = []
    own.register_step_post_hook(lambda *_: seen.append(1))
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (own, other)]
    for turn in range(4):
        if turn == 2:
            for one in (inner, twin):
                one[0].requires_grad_(True)
            for optimizer, one in ((own, inner), (other, twin)):
                optimizer.add_param_group({"params": [*one[0].parameters()], "lr": 0.25})
            schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (own, other)]
        for optimizer in (own, other):
            optimizer.zero_grad()
        net(part(backend, x)).sum().backward()
        twin(x).sum().backward()
        for optimizer, schedule in zip((own, other), schedules, strict=True):
            optimizer.step()
            schedule.step()
    assert len(seen) == 4
    for p, q in zip(inner.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    for wrong in ([*inner.parameters()], [torch.ones(2, requires_grad=True)]):
        with pytest.raises(ArgumentError, match="not in a group yet"):
            own.add_param_group({"params": wrong})
    own.load_state_dict(own.state_dict())


def saves_beside_training(backend: Backend, folder: str) -> None:
    """A save that goes on has the values of its begin; it counts when all workers have waited."""
    x = part(backend, whole(8, 4, seed=9))
    for whole_files in (True, False):
        net = DataParallel(perceptron(), reduction="sum") if whole_files else None
        net = net or sharded(perceptron(), backend)
        adam = torch.optim.Adam(net.parameters())
        net(x).sum().backward()
        adam.step()
        wanted = net.state_dict() if whole_files else full_state_dict(net)
        wanted = {key: value.clone() for key, value in wanted.items()}
        path = f"{folder}/{'file' if whole_files else 'folder'}"
        saving = layers.save_async(net, path, adam, sharded=not whole_files)
        net(x).sum().backward()
        adam.step()
        saving.wait()
        saving.wait()
        assert saving.done
        layers.load(net, path, adam)
        found = net.state_dict() if whole_files else full_state_dict(net)
        assert all(torch.equal(found[key], value) for key, value in wanted.items())
        gone = layers.save_async(net, f"{path}/none/there", sharded=False)
        with pytest.raises(LinopError):
            gone.wait()
