"""Time of a step of data parallel and sharded training, beside the same by hand in mpi4py.

    mpiexec -n 2 python benchmarks/strategies/data.py

prints a table: median milliseconds, interleaved, and the ratio to the first row of its kind. By
hand is one flat gradient and one Allreduce; a flat shard a layer, Allgather and Reduce_scatter.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout, whatever is installed

import torch  # noqa: E402

import linop  # noqa: E402
from benchmarks.strategies.tables import markdown  # noqa: E402
from linop.strategies import DataParallel, Mesh, ShardedOptimizer, fully_shard  # noqa: E402

WIDTHS, ROWS, STEPS, WARM = (128, 512), 64, 150, 20
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


def summed_by_hand(comm: Any, parameters: Sequence[Any]) -> Step:
    """An Allreduce of the gradients as one flat tensor."""
    from mpi4py import MPI

    flat = torch.zeros(sum(p.numel() for p in parameters))

    def reduce() -> None:
        torch.cat([p.grad.reshape(-1) for p in parameters], out=flat)
        comm.Allreduce(MPI.IN_PLACE, flat.numpy())
        at = 0
        for p in parameters:
            p.grad = flat[at : at + p.numel()].view(p.shape)
            at += p.numel()

    return reduce


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


def sharded_by_hand(comm: Any, width: int) -> Any:
    """The perceptron with a flat shard for each layer, gathered in forward (stage 2)."""
    gather = gathered_by_hand(comm)
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
                full = gather(shard)
                x = F.linear(
                    x if k == 0 else F.relu(x), full[: width**2].view(width, -1), full[width**2 :]
                )
            return x

    return Sharded()


def steps(comm: Any, width: int) -> dict[str, Step]:
    """By name; each of a network of its own."""
    x, axis = torch.randn(ROWS, width), Mesh(dp=-1)["dp"]

    def sgd(net: Any) -> Any:
        return torch.optim.SGD(net.parameters(), lr=RATE)

    def made(net: Any, between: Step = lambda: None) -> Step:
        return trained(net, x, sgd(net), between)

    def sharded(reshard: bool) -> Any:
        net = perceptron(width)
        for layer in net[::2]:
            fully_shard(layer, axis, reshard_after_forward=reshard)
        return net

    hand, first = perceptron(width), DataParallel(perceptron(width), axis)
    optimizer = ShardedOptimizer(first, axis, lambda p: torch.optim.SGD(p, lr=RATE))
    return {
        "one process": made(perceptron(width)),
        "copies by hand": made(hand, summed_by_hand(comm, [*hand.parameters()])),
        "DataParallel": made(DataParallel(perceptron(width), axis)),
        "buckets of 1 MiB": made(DataParallel(perceptron(width), axis, bucket_cap_mb=1)),
        "ring": made(DataParallel(perceptron(width), axis, algorithm="ring")),
        "server": made(DataParallel(perceptron(width), axis, server=0)),
        "ZeRO 1": trained(first, x, optimizer),
        "shards by hand, stage 2": made(sharded_by_hand(comm, width)),
        "ZeRO 2": made(sharded(False)),
        "ZeRO 3": made(sharded(True)),
    }


def main(backend: Any) -> None:
    """Measure, and print the table on rank 0."""
    torch.set_num_threads(1)
    comm = backend.transport.comm.Dup()
    lines: dict[str, list[str]] = {}
    for width in WIDTHS:
        found = steps(comm, width)
        times: dict[str, list[float]] = {name: [] for name in found}
        for k in range(WARM + STEPS):
            for name, step in found.items():
                comm.Barrier()
                begun = time.perf_counter()
                step()
                if k >= WARM:
                    times[name].append(1e3 * (time.perf_counter() - begun))
        base = 1.0
        for name, each in times.items():
            median = statistics.median(each)
            base = median if "hand" in name or name == "one process" else base
            row = [f"{median:.2f}", f"{min(each):.2f}", f"{max(each):.2f}", f"{median / base:.2f}"]
            lines.setdefault(name, []).extend(row)
    comm.Free()
    if backend.worker == 0:
        titles = ("median", "min", "max", "ratio")
        header = ["step", *(f"{width}: {what}" for width in WIDTHS for what in titles)]
        print(markdown(header, [[name, *row] for name, row in lines.items()]))


if __name__ == "__main__":
    linop.launch(main)
