"""Small sample operators of every kind in linop, which ``linop verify`` checks without a target."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import linop
from linop.operators.operator import LinearOperator
from linop.spaces.decomposition import COPIES, REPLICATED
from linop.spaces.partition import Partition
from linop.spaces.region import Region
from linop.spaces.space import Space
from linop.spaces.tensor import TensorSpace


def samples(workers: int) -> Iterator[tuple[str, LinearOperator]]:
    """(name, operator) pairs over the given number of workers."""
    yield from _memory(workers)
    line, one = Partition((workers,)), Partition((1,))
    split = TensorSpace((2 * workers + 1, 5), line)
    copied = TensorSpace((2 * workers + 1, 5), line, axes=(COPIES,))
    shared = TensorSpace((2 * workers + 1, 5), line, axes=(REPLICATED,))
    single = TensorSpace((2 * workers + 1, 5), one)
    yield "scatter", linop.scatter(single, line)
    yield "gather", linop.gather(split)
    yield "broadcast", linop.broadcast(single, line)
    yield "sum_reduce", linop.sum_reduce(copied, one)
    yield "all_reduce", linop.all_reduce(copied)
    yield "ring_all_reduce", linop.ring_all_reduce(copied)
    yield "ring_all_gather", linop.ring_all_gather(split)
    yield "all_gather, copies", linop.all_gather(split)
    yield "all_gather, replicated", linop.all_gather(split, into=REPLICATED)
    yield "reduce_scatter", linop.reduce_scatter(copied)
    yield "all_to_all", linop.all_to_all(split, 0, 1)
    yield "repartition", linop.repartition(split, Partition((1, workers), range(workers)[::-1]))
    yield "replicated to copies", linop.repartition(shared, copied)
    yield "shift", linop.shift(split, 1)
    routing = linop.Routing([[n % 3, 2] for n in range(2 * workers + 1)], 4, workers + 1)
    yield "dispatch", linop.dispatch(split, routing)
    yield "combine", linop.combine(split, routing, [[2, 3]] * (2 * workers + 1))
    yield "halo_exchange", linop.halo_exchange(split, (4, 3), stride=(2, 1), padding=(1, 0))
    yield "halo_exchange, in place", linop.halo_exchange(split, 3, padding=1, in_place=True)
    yield "pad, zeros", linop.pad(split, ((1, 2), (-1, 1)))
    yield "pad, reflect", linop.pad(split, ((2, 1), (0, 3)), "reflect")
    yield "pad, circular", linop.pad(split, ((2, 1), (1, -2)), "circular")
    star = {(0, 0): 2.0, (2, 0): np.ones((2 * workers + 1, 5)), (0, -1): -1.0}
    yield "stencil", linop.stencil(split, star, ("reflect", "periodic"))
    kernel = np.outer([1.0, -2.0, 1.0], [1.0, 0.0, -1.0])
    needed = linop.halo_exchange(split, 3)
    results = TensorSpace((2 * workers - 1, 3), line, name="y")
    ends = zip(needed.codomain.regions, results.regions, strict=True)
    local = [linop.local_operators.convolution(kernel, a, b) for a, b in ends]
    yield "convolution ∘ halo_exchange", linop.direct_sum(*local) @ needed


def _memory(workers: int) -> Iterator[tuple[str, LinearOperator]]:
    a, b = Region("a", (3, 2)), Region("b", (3, 2), workers - 1)
    alone, both = Space(a), Space([a, b])
    yield "allocate", linop.allocate(alone, b)
    yield "deallocate", linop.deallocate(both, b)
    yield "clear", linop.clear(both, b[1:, :])
    yield "add", linop.add(both, a, b)
    yield "copy, in place", linop.copy(both, a[:2, :], b[1:, :])
    yield "copy, out of place", linop.copy(alone, a, b)
    yield "move, in place", linop.move(both, a, b)
    yield "move, out of place", linop.move(alone, a, b)
