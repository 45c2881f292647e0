"""Contracts of an operator on every rank: a `PersistentJob` runs ``operator(comm, …)``.

The description of an operator comes from Hypothesis, in another process. Every rank builds the
operator, and finds by itself what the result must be. This module must not import MPI: that of
pytest's own process is never started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import linop
from linop import LinearOperator, Space, Vector
from linop.backends import Backend, BoundPlan
from linop.testing.describing import Description
from support.operators.catalogue import FACTORIES, built
from support.operators.properties import dot_products, rounding, same_arrays

if TYPE_CHECKING:
    from mpi4py import MPI


def operator(
    comm: MPI.Comm, name: str, description: Description, seed: int, messages: bool = False
) -> None:
    """`three_ways` on ranks.

    Args:
        messages: whether ranks exchange messages though they share memory.
    """
    backend = linop.backends.get("mpi", comm=comm, windows=False if messages else None)
    of_the_catalogue(backend, name, description, seed)


def of_the_catalogue(backend: Backend, name: str, description: Description, seed: int) -> None:
    """`three_ways`, for an operator of the catalogue."""
    op = built(name, description)
    three_ways(backend, op, seed, 0.0 if FACTORIES[name].exact else rounding(op))


def three_ways(backend: Backend, op: LinearOperator, seed: int, tolerance: float = 0.0) -> None:
    """Forward and adjoint are the reference's, on whole numbers exactly, and those of threads to
    the bit on any numbers; and the dot products agree, over all workers."""
    plan = op.compile(backend)
    assert plan.H.H is plan
    x, y = op.domain.integers(seed), op.codomain.integers(seed + 1)
    forward = applied(plan, x, op(x), tolerance)
    backward = applied(plan.H, y, op.H(y), tolerance)
    mine = [backend.vector(v.space, v.arrays) for v in (x, y)]
    dot_products(forward, mine[1], mine[0], backward, tolerance)
    under_way(plan, x, y, forward, backward)
    as_on_threads(plan, seed)
    report = linop.testing.check_adjoint(op, backend, seed=seed, trials=1)
    assert report, str(report)


def applied(plan: BoundPlan, whole: Vector, wanted: Vector, tolerance: float) -> Vector:
    """This rank's part of a plan's result is that of the wanted whole vector. The argument is left
    as it was, and shares no memory with the result."""
    given = plan.backend.vector(plan.domain, whole.copy())
    result = plan(given)
    worker = plan.backend.worker
    assert worker is not None
    assert list(result.arrays) == [region.name for region in plan.codomain.on(worker)]
    for name, array in result.arrays.items():
        same_arrays(array, wanted[name], tolerance)
        assert not any(np.shares_memory(array, other) for other in given.arrays.values())
    for name, array in given.arrays.items():
        same_arrays(array, whole[name])
    return result


def under_way(plan: BoundPlan, x: Vector, y: Vector, forward: Vector, backward: Vector) -> None:
    """The adjoint can be applied while the forward is under way, and arrays can be passed bare."""
    plan.start(bare(plan.domain, x, plan))
    between = plan.H(bare(plan.codomain, y, plan))
    same_bits(plan.finish(), bare(plan.codomain, forward, plan))
    same_bits(between, bare(plan.domain, backward, plan))


def as_on_threads(plan: BoundPlan, seed: int) -> None:
    """Numbers that round are rounded as they are on threads, again and again."""
    threads = plan.op.compile(linop.backends.get("threads"))
    for here, there in ((plan, threads), (plan.H, threads.H)):
        x = here.domain.random(seed)
        wanted = there(x)
        for _ in range(2):
            same_bits(here(bare(here.domain, x, plan)), bare(here.codomain, wanted, plan))


def bare(space: Space, vector: Vector, plan: BoundPlan) -> Any:
    """A vector's part on this rank, as a plan takes and gives it."""
    worker = plan.backend.worker
    assert worker is not None
    held = {region.name: vector[region.name] for region in space.on(worker)}
    return (held or None) if len(held) != 1 else next(iter(held.values()))


def same_bits(given: Any, wanted: Any) -> None:
    """Results of two plans are of the same form and have the same bits."""
    assert type(given) is type(wanted), (given, wanted)
    if isinstance(given, dict):
        assert list(given) == list(wanted)
        for name in given:
            same_bits(given[name], wanted[name])
    elif given is not None:
        assert (given.shape, given.dtype) == (wanted.shape, wanted.dtype)
        assert bits(given) == bits(wanted), (given, wanted)


def bits(array: np.ndarray) -> bytes:
    """The bytes of an array that numbers are made of: of a long double, 10 in 16."""
    data = np.ascontiguousarray(array)
    if data.dtype.char not in "gG":
        return data.tobytes()
    real = data.reshape(-1).view(np.longdouble)
    used = 10 if np.finfo(np.longdouble).nmant == 63 else real.itemsize
    return real.view(np.uint8).reshape(real.size, real.itemsize)[:, :used].tobytes()
