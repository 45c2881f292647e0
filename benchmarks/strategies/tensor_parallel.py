"""Tensor-parallel perceptrons and transformer blocks beside the same by hand, in mpi4py on the same
torch, beside torch's own over gloo (of the perceptron), and beside the sequential module.

    python benchmarks/strategies/tensor_parallel.py [--ranks 2] [--seconds 4.0]

It starts the MPI job itself, and prints a Markdown table: medians of interleaved steps (forward and
backward, float32), of the slower rank.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout is measured, whatever is installed

from benchmarks.harness.jobs import show  # noqa: E402
from benchmarks.strategies.gloo import gloo  # noqa: E402
from linop import COPIES, REPLICATED, layers  # noqa: E402
from linop.strategies import (  # noqa: E402
    ColwiseParallel,
    Mesh,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

Tensor = Any
WIDTHS, BATCH, LENGTH, HEAD = (128, 512, 4096), 32, 64, 32
TIMES = "sequential µs", "by hand µs", "linop µs", "fixed shapes µs", "torch's µs"
TITLES = "module", "width", *TIMES, "ratios"
Reduce = Callable[[Tensor], Tensor]


class MLP(nn.Module):  # type: ignore[misc]  # torch is not typed here
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.o = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


PLANS: dict[str, dict[str, Any]] = {
    "perceptron": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "attention": {
        "": PrepareModuleInput(REPLICATED, COPIES),
        "[qkv]": ColwiseParallel(COPIES, heads=4),
        "o": RowwiseParallel(heads=4),
    },
}


def main(
    ranks: Annotated[int, typer.Option(min=1, help="how many")] = 2,
    seconds: Annotated[float, typer.Option(help="for each comparison")] = 4.0,
) -> None:
    """Measure in an MPI job."""
    show(ranks, TITLES, measure, seconds)


def measure(comm: Any, seconds: float) -> Iterator[Sequence[Any]]:
    """Program of a rank: rows of the table."""
    torch.set_num_threads(1)
    with gloo(comm) as mesh:
        yield from _measured(comm, Mesh(tp=-1)["tp"], mesh, seconds)


def _measured(comm: Any, axis: Any, mesh: Any, seconds: float) -> Iterator[Sequence[Any]]:
    from benchmarks.harness.measure import interleaved

    cases = [("perceptron", width) for width in WIDTHS] + [("attention", 4 * HEAD)]
    for name, width in cases:
        torch.manual_seed(0)
        alone = MLP(width, width) if name == "perceptron" else Attention(width)
        hand = by_hand(comm, alone)
        ours = parallelize_module(copy.deepcopy(alone), axis, PLANS[name])
        shape = (BATCH, width) if name == "perceptron" else (4, LENGTH, width)
        x, target = torch.randn(shape).requires_grad_(), torch.randn(shape)

        def step(net: Callable[[Tensor], Tensor], x: Tensor = x, target: Tensor = target) -> Tensor:
            loss = (net(x) - target).square().mean()
            loss.backward()
            return loss

        def fixed(net: Any, step: Any = step) -> Tensor:
            with layers.fixed_shapes():
                return step(net)

        steps = {
            "alone": lambda net=alone: step(net),
            "hand": lambda net=hand: step(net),
            "linop": lambda net=ours: step(net),
            "fixed": lambda net=ours: fixed(net),
        }
        if name == "perceptron":
            own = torchs_own(alone, mesh)
            steps["torch"] = lambda net=own: step(net)
        losses = [run().item() for run in steps.values()]
        assert max(losses) - min(losses) < 1e-5, losses
        found = [*interleaved(comm, steps, seconds).medians.values()]
        ratios = ", ".join(f"{t / found[1]:.2f}" for t in found[2:])
        each = [f"{t:.0f}" for t in found] + [""] * (5 - len(found))
        yield name, width, *each, ratios


def torchs_own(alone: Any, mesh: Any) -> Any:
    """The perceptron, cut by torch's own plan of the same names."""
    from torch.distributed.tensor import parallel

    plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
    return parallel.parallelize_module(copy.deepcopy(alone), mesh, plan)


def by_hand(comm: Any, alone: Any) -> Callable[[Tensor], Tensor]:
    """The module with blocks of the weights, and two all-reduces in functions of autograd's."""
    from mpi4py import MPI

    def summed(x: Tensor) -> Tensor:
        x = x.detach().contiguous().clone()
        comm.Allreduce(MPI.IN_PLACE, x.numpy())
        return x

    class Into(torch.autograd.Function):  # type: ignore[misc]
        forward = staticmethod(lambda ctx, x: x.view_as(x))
        backward = staticmethod(lambda ctx, gradient: summed(gradient))

    class OutOf(torch.autograd.Function):  # type: ignore[misc]
        forward = staticmethod(lambda ctx, x: summed(x))
        backward = staticmethod(lambda ctx, gradient: gradient)

    net = copy.deepcopy(alone)
    for name, module in net.named_children():
        last = name in ("down", "o")
        part = module.weight.detach().chunk(comm.size, 1 if last else 0)[comm.rank]
        module.weight = nn.Parameter(part.clone(memory_format=torch.contiguous_format))
    out = net.down if hasattr(net, "down") else net.o
    bias, out.bias = out.bias, None
    return lambda x: OutOf.apply(net(Into.apply(x))) + bias


if __name__ == "__main__":
    typer.run(main)
