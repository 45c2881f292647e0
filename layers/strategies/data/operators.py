"""The operators of data parallel training, on flat tensors, as many elements as a bucket has.

E is the identity from a replicated region to a copy on each worker, which moves nothing; its
adjoint is the all-reduce. B is the broadcast from a server; its adjoint is the sum-reduce.
"""

from __future__ import annotations

from typing import Any

from linop.backends.autograd.dtypes import numpy_dtype
from linop.errors import ArgumentError
from linop.operators.algebra import in_steps
from linop.operators.collectives import broadcast, repartition
from linop.operators.operator import LinearOperator
from linop.operators.ring import ring_all_gather
from linop.spaces.decomposition import COPIES, REPLICATED
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace

ALGORITHMS = "all-reduce", "ring"


def copies(size: int, dtype: Any, group: Partition) -> TensorSpace:
    """A copy of a flat tensor on each worker of a grid of one axis.

    Args:
        dtype: torch's.
    """
    return TensorSpace((size,), group, numpy_dtype(dtype), [COPIES])


def replication(size: int, dtype: Any, group: Partition) -> LinearOperator:
    """E, from one replicated tensor to copies."""
    Y = copies(size, dtype, group)
    return repartition(Y.like(group, [REPLICATED]), Y)


def from_server(size: int, dtype: Any, group: Partition, server: int) -> LinearOperator:
    """B, from one worker to copies."""
    X = TensorSpace((size,), Partition((1,), [server]), numpy_dtype(dtype))
    return broadcast(X, group)


def summation(
    size: int,
    dtype: Any,
    group: Partition,
    algorithm: str = "all-reduce",
    server: int | None = None,
) -> LinearOperator:
    """Sum of the workers' gradients: E.H; the same as steps around a ring, E E.H = G G.H; or B.H.

    Raises:
        ArgumentError: there is no such algorithm, or no such server.
    """
    if algorithm not in ALGORITHMS:
        names = " or ".join(map(repr, ALGORITHMS))
        raise ArgumentError(f"algorithm: {names} expected, given {algorithm!r}")
    if server is not None:
        if algorithm != "all-reduce" or server not in group:
            raise ArgumentError(
                f"server: a worker of {group!r}, without algorithm=, expected; given {server!r} "
                f"and {algorithm!r}"
            )
        return from_server(size, dtype, group, server).H
    if algorithm == "ring" and group.size > 1:
        G = ring_all_gather(TensorSpace((size,), group, numpy_dtype(dtype)))
        return in_steps(G, G.H)
    return replication(size, dtype, group).H
