"""A mixture of experts over ranks beside the same by hand, in mpi4py on the same torch, and beside
one process with all tokens.

    python benchmarks/strategies/experts.py [--ranks 2] [--seconds 4.0]

It starts the MPI job itself, and prints a Markdown table: medians of interleaved steps (forward and
backward, float32, 8 experts, 2 for each token), of the slower rank. Tokens are others at each step,
and so is the routing. By hand, counts go by `Alltoall` and rows by `Alltoallv`, of exactly as many
as there are, and backward is written out. Both sides route and compute with the same functions. It
also prints what a plan for each routing would cost: the time of `linop.dispatch` and its compiling.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout is measured, whatever is installed

import linop  # noqa: E402
from benchmarks.harness.jobs import show  # noqa: E402
from linop import Partition, layers  # noqa: E402
from linop.layers.experts.losses import routed  # noqa: E402

Tensor = Any
SIZES = ((64, 64), (256, 128), (1024, 128), (1024, 512))
"""Tokens of a rank, and features; experts have twice as many."""
EXPERTS, K, ROUTINGS = 8, 2, 16
TIMES = "whole µs", "by hand µs", "linop µs", "fixed shapes µs"
TITLES = "tokens a rank", "features", *TIMES, "linop, fixed / by hand", "plan a routing µs"


def main(
    ranks: Annotated[int, typer.Option(min=1, help="how many")] = 2,
    seconds: Annotated[float, typer.Option(help="for each comparison")] = 4.0,
) -> None:
    """Measure in an MPI job."""
    show(ranks, TITLES, measure, seconds)


def measure(comm: Any, seconds: float) -> Iterator[Sequence[Any]]:
    """Program of a rank: rows of the table."""
    from benchmarks.harness.measure import interleaved

    torch.set_num_threads(1)
    for tokens, features in SIZES:
        torch.manual_seed(0)
        P = Partition((comm.size,))
        net = layers.MixtureOfExperts(P, features, 2 * features, EXPERTS, K)
        state = comm.bcast(layers.gather_state(net))
        with linop.backends.use(linop.backends.alone()):
            whole = layers.MixtureOfExperts(Partition((1,)), features, 2 * features, EXPERTS, K)
        whole.load_state_dict(state)
        hand = by_hand(comm, state)
        every = torch.randn(ROUTINGS, comm.size * tokens, features)
        mine = every[:, comm.rank * tokens : (comm.rank + 1) * tokens].contiguous()
        leaves = [x.requires_grad_() for x in mine.unbind()]
        wholes = [x.requires_grad_() for x in every.unbind()]

        def step(call: Callable[[Tensor], Tensor], x: Tensor, parameters: Any) -> Any:
            for p in (x, *parameters):
                p.grad = None
            y = call(x)
            y.backward(y.detach())
            return x.grad, [p.grad for p in parameters]

        own = [p for p in net.parameters() if p is not None]
        turns = {name: cycle(leaves) for name in ("hand", "linop", "fixed")}

        def fixed(step: Any = step, turns: Any = turns, net: Any = net, own: Any = own) -> Any:
            with layers.fixed_shapes():
                return step(net, next(turns["fixed"]), own)

        all_of = cycle(wholes)
        sides = {
            "whole": lambda step=step, whole=whole, all_of=all_of: step(
                whole, next(all_of), [*whole.parameters()]
            ),
            "hand": lambda step=step, hand=hand, turns=turns: step(
                hand[0], next(turns["hand"]), hand[1]
            ),
            "linop": lambda step=step, net=net, turns=turns, own=own: step(
                net, next(turns["linop"]), own
            ),
            "fixed": fixed,
        }
        wanted = sides["whole"]()[0][comm.rank * tokens : (comm.rank + 1) * tokens].clone()
        for run in list(sides.values())[1:]:
            assert (run()[0] - wanted).abs().max() < 1e-4 * wanted.abs().max()
        for _ in range(2 * ROUTINGS):  # plans of all these routings
            sides["linop"]()
        found = [*interleaved(comm, sides, seconds).medians.values()]
        ratios = ", ".join(f"{t / found[1]:.2f}" for t in found[2:])
        each = [f"{t:.0f}" for t in found]
        yield tokens, features, *each, ratios, f"{planned(comm, tokens, features):.0f}"


def planned(comm: Any, tokens: int, features: int) -> float:
    """Microseconds to make the operator of a routing, and its plans of both directions."""
    X = linop.TensorSpace((comm.size * tokens, features), Partition((comm.size,)), np.float32)
    times = []
    for seed in range(3):
        indices = np.random.default_rng(seed).integers(EXPERTS, size=(comm.size * tokens, K))
        comm.Barrier()
        begun = time.perf_counter()
        D = linop.dispatch(X, linop.Routing(indices, EXPERTS))
        plan = D.compile(linop.backends.current())
        plan(np.zeros(X.local_shape(comm.rank), np.float32))
        times.append(1e6 * (time.perf_counter() - begun))
    return float(np.median(times))


def by_hand(comm: Any, state: dict[str, Tensor]) -> tuple[Callable[[Tensor], Tensor], Any]:
    """The layer in mpi4py, with backward written out, and its parameters."""
    size, rank = comm.size, comm.rank
    share = EXPERTS // size
    mine = slice(rank * share, (rank + 1) * share)
    router = state["router"].clone().requires_grad_()
    up = state["gate_up_proj"][mine].clone().requires_grad_()
    down = state["down_proj"][mine].clone().requires_grad_()

    def exchanged(x: Tensor, sent: Any, received: Any) -> Tensor:
        n = x.shape[1]
        into = torch.empty(int(received.sum()), n)
        comm.Alltoallv(
            [x.contiguous().numpy(), (sent * n, None)], [into.numpy(), (received * n, None)]
        )
        return into

    class Rows(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Tensor, sent: Any, received: Any) -> Tensor:
            ctx.counts = received, sent
            return exchanged(x, sent, received)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return exchanged(gradient, *ctx.counts), None, None

    class Router(torch.autograd.Function):  # type: ignore[misc]
        """The weight, whose gradients are summed at rank 0, as the layer has it there."""

        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            given = weight.detach().clone()
            comm.Bcast(given.numpy())
            return given

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            total = torch.zeros_like(gradient)
            comm.Reduce(gradient.contiguous().numpy(), total.numpy())
            return total

    def mixture(x: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(x, Router.apply(router))
        indices, gates = routed(logits, K, True)
        flat = indices.reshape(-1).numpy()
        counts, theirs = np.bincount(flat, minlength=EXPERTS), np.empty((size, share), np.int64)
        comm.Alltoall(counts, theirs)
        order = torch.from_numpy(np.argsort(flat.astype(np.uint16), kind="stable"))
        sent, received = counts.reshape(size, share).sum(1), theirs.sum(1)
        there = Rows.apply(x.index_select(0, order // K), sent, received)
        keys = np.repeat(np.tile(np.arange(share), size), theirs.reshape(-1))
        arrived = torch.from_numpy(np.argsort(keys.astype(np.uint16), kind="stable"))
        rows = there.index_select(0, arrived)
        found = []
        for own, a, b in zip(rows.split(theirs.sum(0).tolist()), up, down, strict=True):
            gate, value = torch.nn.functional.linear(own, a).chunk(2, -1)
            found.append(torch.nn.functional.linear(torch.nn.functional.silu(gate) * value, b))
        back = torch.cat(found).index_select(0, arrived.argsort())
        each = Rows.apply(back, received, sent).index_select(0, order.argsort())
        return torch.bmm(gates.unsqueeze(1), each.view(len(x), K, -1)).squeeze(1)

    return mixture, [router, up, down]


if __name__ == "__main__":
    typer.run(main)
