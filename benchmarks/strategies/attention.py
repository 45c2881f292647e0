"""Ring attention beside the same by hand, in mpi4py on the same torch, beside Ulysses, and beside
attention of the whole sequence in one process.

    python benchmarks/strategies/attention.py [--ranks 2] [--seconds 4.0]

It starts the MPI job itself, and prints a Markdown table: medians of interleaved steps (forward and
backward, causal, float32), of the slower rank. By hand, keys and values go around by `Isend` and
`Irecv` while a rank computes with torch's flash attention for CPUs, and backward is written out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout is measured, whatever is installed

from benchmarks.harness.jobs import show  # noqa: E402
from linop import layers  # noqa: E402
from linop.strategies import ContextParallel, Mesh  # noqa: E402

Tensor = Any
LENGTHS, HEADS, FEATURES = (256, 1024, 4096), 4, 64
TIMES = "whole µs", "by hand µs", "ring µs", "fixed shapes µs", "Ulysses µs"
TITLES = "tokens", "heads", *TIMES, "ring, fixed, Ulysses / by hand"
PLAIN = torch.nn.functional.scaled_dot_product_attention
flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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
    axis = Mesh(cp=-1)["cp"]
    ring, ulysses = ContextParallel(axis), ContextParallel(axis, "ulysses", zigzag=True)
    hand = by_hand(comm)
    for length in LENGTHS:
        torch.manual_seed(0)
        whole = [torch.randn(1, HEADS, length, FEATURES).requires_grad_() for _ in range(3)]
        mine = [ring.shard(x.detach(), 2).requires_grad_() for x in whole]

        def step(attention: Callable[..., Tensor], given: Sequence[Tensor] = mine) -> Tensor:
            y = attention(*given, is_causal=True)
            return torch.autograd.grad(y, given, y.detach())

        def fixed(step: Any = step) -> Tensor:
            with layers.fixed_shapes():
                return step(ring.scaled_dot_product_attention)

        steps = {
            "whole": lambda step=step, whole=whole: step(PLAIN, whole),
            "hand": lambda step=step: step(hand),
            "ring": lambda step=step: step(ring.scaled_dot_product_attention),
            "fixed": fixed,
            "ulysses": lambda step=step: step(ulysses.scaled_dot_product_attention),
        }
        if comm.size > HEADS:
            del steps["ulysses"]
        wanted = [ring.shard(x, 2) for x in steps["whole"]()]
        for run in list(steps.values())[1:]:
            for x, y in zip(run(), wanted, strict=True):
                assert (x - y).abs().max() < 1e-3 * y.abs().max()
        found = [*interleaved(comm, steps, seconds).medians.values()]
        ratios = ", ".join(f"{t / found[1]:.2f}" for t in found[2:])
        each = [f"{t:.0f}" for t in found] + [""] * (len(TIMES) - len(found))
        yield length, HEADS, *each, ratios


def by_hand(comm: Any) -> Callable[..., Tensor]:
    """Causal ring attention of zigzag blocks, with backward written out: keys and values go around,
    and with them, in backward, their gradients."""
    size, rank = comm.size, comm.rank

    def start(x: Tensor) -> tuple[Any, Tensor]:
        into = torch.empty_like(x)
        to, of = (rank + 1) % size, (rank - 1) % size
        requests = [comm.Irecv(into.numpy(), of), comm.Isend(x.numpy(), to)]
        return requests, into

    def finish(started: tuple[Any, Tensor]) -> Tensor:
        for request in started[0]:
            request.Wait()
        return started[1]

    def rows_and_columns(step: int, n: int) -> tuple[slice, slice]:
        whole, half = slice(0, n), n // 2
        if step == 0:
            return whole, whole
        if (rank - step) % size < rank:
            return whole, slice(0, half)
        return slice(half, n), whole

    class Ring(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            n, kv = q.shape[2], torch.stack([k, v])
            out = logs = None
            for step in range(size):
                moving = start(kv) if step < size - 1 else None
                rows, columns = rows_and_columns(step, n)
                part, part_logs = flash(
                    q[:, :, rows], *kv[:, :, :, columns].unbind(), 0.0, step == 0
                )
                part_logs = part_logs.unsqueeze(-1)
                if step == 0:
                    out, logs = part, part_logs
                else:
                    old = logs[:, :, rows]
                    new = torch.logaddexp(old, part_logs)
                    out[:, :, rows] = (
                        out[:, :, rows] * (old - new).exp() + part * (part_logs - new).exp()
                    )
                    logs[:, :, rows] = new
                if moving is not None:
                    kv = finish(moving)
            ctx.save_for_backward(q, k, v, out, logs)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            q, k, v, out, logs = ctx.saved_tensors
            n, kv = q.shape[2], torch.stack([k, v])
            of_q, moved = torch.zeros_like(q), None
            for step in range(size):
                moving = start(kv) if step < size - 1 else None
                rows, columns = rows_and_columns(step, n)
                each = flash_backward(
                    gradient[:, :, rows],
                    q[:, :, rows],
                    *kv[:, :, :, columns].unbind(),
                    out[:, :, rows],
                    logs[:, :, rows, 0],
                    0.0,
                    step == 0,
                )
                of_q[:, :, rows] += each[0]
                of_kv = torch.zeros_like(kv) if moved is None else finish(moved)
                of_kv[0][:, :, columns] += each[1]
                of_kv[1][:, :, columns] += each[2]
                moved = start(of_kv)
                if moving is not None:
                    kv = finish(moving)
            assert moved is not None
            of_kv = finish(moved)
            return of_q, of_kv[0], of_kv[1]

    def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        assert is_causal
        return Ring.apply(q, k, v)

    return attention


if __name__ == "__main__":
    typer.run(main)
