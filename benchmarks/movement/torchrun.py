"""Movements of the backend ``torch``, over gloo, beside the same written with
`torch.distributed.batch_isend_irecv`:

    torchrun --nproc-per-node 2 benchmarks/movement/torchrun.py

A sample is the time of the slower of 2 processes; sides are interleaved, in a new random order each
round. It prints a Markdown table: ratio of the medians, and both in microseconds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import P2POp

import linop
from linop import COPIES, LinearOperator, Partition, TensorSpace
from linop.backends import Backend

SIZES = {"1 KiB": 1 << 10, "64 KiB": 1 << 16, "1 MiB": 1 << 20}
"""Bytes of a worker's block."""
Run = Callable[[], object]
Hand = Callable[[torch.Tensor, int], tuple[Run, torch.Tensor]]
P, ONE = Partition((2,)), Partition((1,))


def finish(operations: list[P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def exchange(x: torch.Tensor, y: torch.Tensor, me: int) -> Run:
    """Send all of x, and receive y."""
    operations = [P2POp(dist.irecv, y, 1 - me), P2POp(dist.isend, x, 1 - me)]
    return lambda: finish(operations)


def broadcast(x: torch.Tensor, me: int) -> tuple[Run, torch.Tensor]:
    y = x.clone()
    operations = [P2POp(dist.irecv, y, 0) if me else P2POp(dist.isend, x, 1)]

    def run() -> None:
        if not me:
            y.copy_(x)
        finish(operations)

    return run, y


def all_gather(x: torch.Tensor, me: int) -> tuple[Run, torch.Tensor]:
    y = torch.empty(2, len(x), dtype=x.dtype)
    move = exchange(x, y[1 - me], me)

    def run() -> None:
        y[me].copy_(x)
        move()

    return run, y.reshape(-1)


def all_reduce(x: torch.Tensor, me: int) -> tuple[Run, torch.Tensor]:
    other, y = torch.empty_like(x), torch.empty_like(x)
    move = exchange(x, other, me)

    def run() -> None:
        move()
        torch.add(x, other, out=y)

    return run, y


def repartition(x: torch.Tensor, me: int) -> tuple[Run, torch.Tensor]:
    """Rows to columns."""
    rows, columns = x.shape
    half = columns // 2
    y = torch.empty(2 * rows, half, dtype=x.dtype)
    ours, theirs = (slice(k * half, (k + 1) * half) for k in (me, 1 - me))
    packed = torch.empty(rows, half, dtype=x.dtype)
    move = exchange(packed, y[(1 - me) * rows : (2 - me) * rows], me)

    def run() -> None:
        packed.copy_(x[:, theirs])
        y[me * rows : (me + 1) * rows].copy_(x[:, ours])
        move()

    return run, y


def cases(items: int) -> dict[str, tuple[LinearOperator, Hand]]:
    """Operators, and the same by hand, for blocks of so many numbers."""
    columns = 2 << (items.bit_length() // 2 - 1)
    matrix = TensorSpace((2 * items // columns, columns), Partition((2, 1)))
    copies = TensorSpace((items,), P, axes=(COPIES,))
    return {
        "broadcast": (linop.broadcast(TensorSpace((items,), ONE), P), broadcast),
        "all-gather": (linop.all_gather(TensorSpace((2 * items,), P)), all_gather),
        "all-reduce": (linop.all_reduce(copies), all_reduce),
        "repartition": (linop.repartition(matrix, Partition((1, 2))), repartition),
    }


def medians(sides: list[Run], rounds: int) -> list[float]:
    """Microseconds of each side."""
    order, samples = list(enumerate(sides)), torch.zeros(len(sides), rounds, dtype=torch.float64)
    shuffle = random.Random(rounds).shuffle  # the same in both processes
    for number in range(-rounds // 10, rounds):
        shuffle(order)
        for side, run in order:
            dist.barrier()
            begun = time.perf_counter()
            run()
            samples[side, max(number, 0)] = time.perf_counter() - begun
    dist.all_reduce(samples, dist.ReduceOp.MAX)
    return [1e6 * statistics.median(row) for row in samples.tolist()]


def main(backend: Backend, rounds: int) -> None:
    me = backend.worker
    assert me is not None and backend.workers == 2, "for 2 processes"
    torch.set_num_threads(1)
    rows: dict[str, list[str]] = {}
    for size in SIZES.values():
        for name, (op, hand) in cases(size // 8).items():
            plan = op.compile(backend)
            here = op.domain.on(me)
            shape = here[0].shape if here else op.codomain.on(me)[0].shape
            x = np.random.default_rng(me).integers(-9, 9, shape).astype(float)
            given = x if here else None
            run, y = hand(torch.from_numpy(x), me)
            run()
            assert np.array_equal(plan(given), y.numpy()), name
            ours, theirs = medians([lambda p=plan, g=given: p(g), run], rounds)
            rows.setdefault(name, []).append(f"{ours / theirs:.2f} ({theirs:.0f} → {ours:.0f})")
    if me == 0:
        print("| movement |", " | ".join(SIZES), "|")
        print("| --- |", " | ".join("---" for _ in SIZES), "|")
        for name, row in rows.items():
            print(f"| {name} |", " | ".join(row), "|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    given = parser.parse_args()
    linop.launch(lambda backend: main(backend, given.rounds))
