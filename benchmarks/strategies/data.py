"""Time of a step of data parallel and sharded training, beside the same by hand in mpi4py, and
beside torch's own over gloo, in one job.

    python benchmarks/strategies/data.py [--turns 60]

starts a job of 2 ranks, and prints a table: median milliseconds, of a few steps in turn with those
of the others, and median ratios of steps next to each other in time: to the same by hand, and to
the floor, which is what a strategy has to do besides (`benchmarks.strategies.floors`). By hand is
one flat gradient, and an Allreduce, a ring of Sendrecv, or a Reduce and a Bcast of the parameters;
or a flat shard a layer, Allgather and Reduce_scatter.
"""

from __future__ import annotations

import copy
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout, whatever is installed

import torch  # noqa: E402
import typer  # noqa: E402

from benchmarks.harness.jobs import show  # noqa: E402
from benchmarks.strategies.floors import hooked, sharded_update  # noqa: E402
from benchmarks.strategies.gloo import gloo  # noqa: E402
from linop.strategies import DataParallel, Mesh, ShardedOptimizer, fully_shard  # noqa: E402

WIDTHS, ROWS, WARM = (128, 512), 64, 4
TIMES = "median ms", "min", "max", "ratio", "to floor"
TITLES = "step", "beside", "floor", *(f"{width}: {time}" for width in WIDTHS for time in TIMES)
TURN = 4
"""Steps of one kind in a row, as in training."""
RATE = 1e-9
Step = Callable[[], None]
F = torch.nn.functional


def perceptron(width: int) -> Any:
    """Three layers, the same on all ranks."""
    torch.manual_seed(0)
    linear = [torch.nn.Linear(width, width) for _ in range(3)]
    return torch.nn.Sequential(linear[0], torch.nn.ReLU(), linear[1], torch.nn.ReLU(), linear[2])


def trained(net: Any, x: Any, optimizer: Any, between: Step = lambda: None) -> Step:
    """A step."""

    def step() -> None:
        optimizer.zero_grad()
        net(x).square().sum().backward()
        between()
        optimizer.step()

    return step


Sum = Callable[[Any, Any], None]
"""Of a communicator and a flat array: replaces it by the sum."""


def all_reduce(comm: Any, flat: Any) -> None:
    from mpi4py import MPI

    comm.Allreduce(MPI.IN_PLACE, flat)


def ring(comm: Any, flat: Any) -> None:
    """Reduce-scatter, then all-gather, in steps around a ring."""
    import numpy as np

    parts = np.array_split(flat, comm.size)
    to, of = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    given = np.empty_like(parts[0])
    for k in range(2 * (comm.size - 1)):
        mine, theirs = parts[(comm.rank - k) % comm.size], parts[(comm.rank - k - 1) % comm.size]
        into = given[: theirs.size]
        comm.Sendrecv(mine, to, 0, into, of, 0)
        if k < comm.size - 1:
            theirs += into
        else:
            theirs[:] = into


def to_server(comm: Any, flat: Any) -> None:
    from mpi4py import MPI

    comm.Reduce(MPI.IN_PLACE if comm.rank == 0 else flat, flat if comm.rank == 0 else None)


def summed_by_hand(comm: Any, parameters: Sequence[Any], total: Sum = all_reduce) -> Step:
    """The sum of the gradients as one flat tensor."""
    flat = torch.zeros(sum(p.numel() for p in parameters))

    def reduce() -> None:
        torch.cat([p.grad.reshape(-1) for p in parameters], out=flat)
        total(comm, flat.numpy())
        at = 0
        for p in parameters:
            p.grad = flat[at : at + p.numel()].view(p.shape)
            at += p.numel()

    return reduce


def served_by_hand(comm: Any, net: Any, x: Any, optimizer: Any) -> Step:
    """A server's step: gradients to rank 0, its update, and its parameters to all."""
    parameters = [*net.parameters()]
    reduce = summed_by_hand(comm, parameters, to_server)
    flat = torch.zeros(sum(p.numel() for p in parameters))

    def step() -> None:
        optimizer.zero_grad()
        net(x).square().sum().backward()
        reduce()
        if comm.rank == 0:
            optimizer.step()
            torch.cat([p.detach().reshape(-1) for p in parameters], out=flat)
        comm.Bcast(flat.numpy())
        if comm.rank:
            with torch.no_grad():
                for p, part in zip(
                    parameters, flat.split([p.numel() for p in parameters]), strict=True
                ):
                    p.copy_(part.view(p.shape))

    return step


def gathered_by_hand(comm: Any) -> Any:
    """An all-gather whose backward is a reduce-scatter."""

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, shard: Any) -> Any:
            full = torch.empty(shard.numel() * comm.size)
            comm.Allgather(shard.detach().numpy(), full.numpy())
            return full

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            own = torch.empty(gradient.numel() // comm.size)
            comm.Reduce_scatter_block(gradient.contiguous().numpy(), own.numpy())
            return own

    return Gather.apply


def gathered_twice_by_hand(comm: Any, width: int) -> Any:
    """A linear layer of a shard, which is gathered again in backward."""

    def whole(shard: Any) -> tuple[Any, Any]:
        full = torch.empty(shard.numel() * comm.size)
        comm.Allgather(shard.detach().numpy(), full.numpy())
        return full[: width**2].view(width, width), full[width**2 :]

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, shard: Any) -> Any:
            ctx.save_for_backward(x, shard)
            return F.linear(x, *whole(shard))

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            x, shard = ctx.saved_tensors
            back = gradient @ whole(shard)[0] if ctx.needs_input_grad[0] else None
            both = torch.empty(shard.numel() * comm.size)
            torch.mm(gradient.t(), x, out=both[: width**2].view(width, width))
            torch.sum(gradient, 0, out=both[width**2 :])
            own = torch.empty_like(shard)
            comm.Reduce_scatter_block(both.numpy(), own.numpy())
            return back, own

    return Linear.apply


def sharded_by_hand(comm: Any, width: int, stage: int) -> Any:
    """The perceptron with a flat shard for each layer, gathered in forward; again in backward, of
    stage 3."""
    gather, linear = gathered_by_hand(comm), gathered_twice_by_hand(comm, width)
    shards = torch.nn.ParameterList()
    for layer in perceptron(width)[::2]:
        flat = torch.cat([layer.weight.detach().reshape(-1), layer.bias.detach()])
        shards.append(torch.nn.Parameter(flat.chunk(comm.size)[comm.rank].clone()))

    class Sharded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shards = shards

        def forward(self, x: Any) -> Any:
            for k, shard in enumerate(self.shards):
                x = x if k == 0 else F.relu(x)
                if stage == 3:
                    x = linear(x, shard)
                    continue
                full = gather(shard)
                x = F.linear(x, full[: width**2].view(width, -1), full[width**2 :])
            return x

    return Sharded()


def torchs_own(net: Any, mesh: Any, reshard: bool | None) -> Any:
    """torch's data parallel (None) or sharded module over gloo."""
    if reshard is None:
        return torch.nn.parallel.DistributedDataParallel(net)
    from torch.distributed.fsdp import fully_shard as fsdp2

    for layer in net[::2]:
        fsdp2(layer, mesh=mesh, reshard_after_forward=reshard)
    fsdp2(net, mesh=mesh, reshard_after_forward=reshard)
    return net


class Case(NamedTuple):
    """A step.

    Attributes:
        beside, floor: names of steps that it is compared with; no floor: that beside.
    """

    name: str
    beside: str
    step: Step
    floor: str = ""


def steps(comm: Any, mesh: Any, width: int) -> list[Case]:
    """All of them; each of a network of its own."""
    x, axis = torch.randn(ROWS, width), Mesh(dp=-1)["dp"]

    def sgd(net: Any) -> Any:
        return torch.optim.SGD(net.parameters(), lr=RATE)

    def made(net: Any, between: Step = lambda: None) -> Step:
        return trained(net, x, sgd(net), between)

    def sharded(reshard: bool, prefetch: int = 0) -> Any:
        net = perceptron(width)
        for layer in net[::2]:
            fully_shard(layer, axis, reshard_after_forward=reshard, prefetch=prefetch)
        return net

    def hand(total: Sum) -> Step:
        net = perceptron(width)
        return made(net, summed_by_hand(comm, [*net.parameters()], total))

    def copies(**options: Any) -> Step:
        return made(DataParallel(perceptron(width), axis, **options))

    def updated(scatters: bool) -> Step:
        one = functools.partial(torch.optim.SGD, lr=RATE)
        return sharded_update(comm, perceptron(width), x, one, scatters)

    def hooks(again: bool) -> Step:
        return made(hooked(comm, perceptron(width), again))

    first = DataParallel(perceptron(width), axis)
    optimizer = ShardedOptimizer(first, axis, lambda p: torch.optim.SGD(p, lr=RATE))
    served = perceptron(width)
    own = copy.deepcopy(served)
    ddp, fsdp2, fsdp3 = (torchs_own(perceptron(width), mesh, r) for r in (None, False, True))
    total, circle, server = "Allreduce", "ring of Sendrecv", "Reduce, Bcast"
    stage2, hooks2 = "by hand, stage 2", "hooks alone, stage 2"
    stage3, hooks3 = "by hand, stage 3", "hooks alone, stage 3"
    return [
        Case("one process", total, made(own)),
        Case(total, total, hand(all_reduce)),
        Case("DataParallel", total, copies()),
        Case("buckets of 1 MiB", total, copies(bucket_cap_mb=1)),
        Case("torch's DDP", total, made(ddp)),
        Case(circle, circle, hand(ring)),
        Case("ring", circle, copies(algorithm="ring")),
        Case(server, server, served_by_hand(comm, served, x, sgd(served))),
        Case("server", server, copies(server=0)),
        Case("Allreduce, Allgather", total, updated(False)),
        Case("Reduce_scatter, Allgather", total, updated(True)),
        Case("ZeRO 1", total, trained(first, x, optimizer), "Allreduce, Allgather"),
        Case(stage2, stage2, made(sharded_by_hand(comm, width, 2))),
        Case(hooks2, stage2, hooks(False)),
        Case("ZeRO 2", stage2, made(sharded(False)), hooks2),
        Case("torch's FSDP2, stage 2", stage2, made(fsdp2), hooks2),
        Case(stage3, stage3, made(sharded_by_hand(comm, width, 3))),
        Case(hooks3, stage3, hooks(True)),
        Case("ZeRO 3", stage3, made(sharded(True)), hooks3),
        Case("ZeRO 3, prefetch=1", stage3, made(sharded(True, 1)), hooks3),
        Case("torch's FSDP2, stage 3", stage3, made(fsdp3), hooks3),
    ]


def main(turns: Annotated[int, typer.Option(min=1, help="of a few steps of each")] = 60) -> None:
    """Measure in an MPI job."""
    show(2, TITLES, measure, turns)


def measure(comm: Any, turns: int) -> Iterator[Sequence[str]]:
    """Program of a rank: rows of the table."""
    torch.set_num_threads(1)
    lines: dict[str, list[str]] = {}
    with gloo(comm) as mesh:
        for width in WIDTHS:
            add(comm, steps(comm, mesh, width), turns, lines)
    for name, row in lines.items():
        yield name, *row


def add(comm: Any, found: Sequence[Case], turns: int, lines: dict[str, list[str]]) -> None:
    """Add this width's columns to the lines of the table."""
    times: dict[str, list[float]] = {case.name: [] for case in found}
    for k in range(WARM + turns):
        for case in found:
            case.step()  # its memory and code are in the caches again
            comm.Barrier()
            begun = time.perf_counter()
            for _ in range(TURN):
                case.step()
            if k >= WARM:
                times[case.name].append(1e3 * (time.perf_counter() - begun) / TURN)
    for case in found:
        each, floor = times[case.name], case.floor or case.beside
        others = [times[name] for name in (case.beside, floor)]
        pairs = [zip(each, other, strict=True) for other in others]
        ratios = [statistics.median(a / b for a, b in pair) for pair in pairs]
        row = [statistics.median(each), min(each), max(each), *ratios]
        line = lines.setdefault(case.name, [case.beside, floor])
        line.extend(f"{number:.2f}" for number in row)


if __name__ == "__main__":
    typer.run(main)
