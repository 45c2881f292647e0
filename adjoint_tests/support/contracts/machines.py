"""Operators on ranks of several machines, beside the interpreted expression."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import linop
from linop import COPIES, LinearOperator, Partition, TensorSpace
from linop.tools.samples import samples

LENGTHS = 7, 8192, 24_000, 60_000
"""Elements of 8 bytes: messages in one packet, in two and three pieces, and too long for pieces."""


def operators(workers: int) -> Iterator[tuple[str, LinearOperator]]:
    """All samples, and collectives of several lengths."""
    yield from samples(workers)
    line, one = Partition((workers,)), Partition((1,))
    for n in LENGTHS:
        copied = TensorSpace((n,), line, axes=[COPIES])
        split = TensorSpace((n,), line)
        square = TensorSpace((int(n**0.5) + 3,) * 2, Partition((workers, 1)))
        yield f"broadcast {n}", linop.broadcast(TensorSpace((n,), one), line)
        yield f"all_reduce {n}", linop.all_reduce(copied)
        yield f"reduce_scatter {n}", linop.reduce_scatter(copied)
        yield f"all_gather {n}", linop.all_gather(split)
        yield f"repartition {n}", linop.repartition(square, Partition((1, workers)))
        yield f"halo {n}", linop.halo_exchange(square, 3, padding=1)
        yield f"twice {n}", 3 * linop.all_reduce(copied) + linop.all_reduce(copied)


def all_are_right(backend: Any, calls: int = 3) -> int:
    """Every operator and its adjoint, on whole numbers, call after call, the last one in two
    halves. The number of results compared."""
    here = backend.worker
    found = 0
    for name, forward in operators(backend.workers):
        for op in (forward, forward.H):
            plan = op.compile(backend)
            for seed in range(calls):
                numbers = np.random.default_rng(seed)
                every = {
                    r.name: numbers.integers(-9, 10, r.shape).astype(op.dtype)
                    for r in op.domain.regions
                }
                wanted = op(op.domain.vector(every))
                mine = {r.name: every[r.name] for r in op.domain.on(here)}
                x = mine if len(mine) > 1 else next(iter(mine.values()), None)
                if seed == calls - 1:
                    plan.start(x)
                    y = plan.finish()
                else:
                    y = plan(x)
                results = op.codomain.on(here)
                got = y if len(results) > 1 else {r.name: y for r in results}
                for region in results:
                    assert np.array_equal(got[region.name], wanted[region.name]), (name, op, seed)
                    found += 1
            plan.release()
    return found
