"""Sums of plans that do not depend on workers: contracts for threads, ranks, processes of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

import linop
from linop import COPIES, LinearOperator, Partition, Region, Space, TensorSpace
from linop.backends.engine.worker import Worker
from linop.spaces.reproducible_sums import exact_sum, tree_sum

kinds = st.sampled_from(["", "wide", "cancelling", "ties", "special"])
"""Of terms: alike; of wildly different magnitudes; whose sum is far smaller; halfway between two
numbers; with infinities and NaN."""


def bits(x: np.ndarray) -> bytes:
    """Bytes of an array, with one NaN: its sign is the processor's choice in sums of two."""
    parts = x.view(x.real.dtype) if x.ndim else x.reshape(1).view(x.real.dtype)
    return np.where(np.isnan(parts), np.array(np.nan, parts.dtype), parts).tobytes()


def drawn_terms(
    rng: np.random.Generator, dtype: np.dtype[Any], many: int, size: int, kind: str
) -> list[np.ndarray]:
    """Terms of a sum, of one kind; contiguous."""
    real = np.empty((), dtype).real.dtype
    info, shape = np.finfo(real), (many, size * (2 if dtype.kind == "c" else 1))
    with np.errstate(all="ignore"):
        x = rng.standard_normal(shape)
        if kind in ("wide", "cancelling", "special"):
            x = x * 2.0 ** rng.integers(info.minexp - info.nmant, info.maxexp - 1, shape)
        if kind == "ties":
            x = rng.integers(-2, 3, shape) * 2.0 ** rng.integers(-info.nmant - 2, 2, shape)
        x = x.astype(real)
    x[~np.isfinite(x)] = 1
    if kind == "cancelling" and many > 1:
        x[many // 2] = -x[0]
    if kind == "special":
        where = rng.random(shape) < 0.1
        x[where] = rng.choice([np.inf, -np.inf, np.nan, -0.0], int(where.sum()))
    return [row.view(dtype) for row in x]


def total_of(workers: Sequence[int], root: Sequence[int], size: int, dtype: Any) -> LinearOperator:
    """The sum of regions, on one worker each, into one on others."""
    terms = [Region(f"x{k}", (size,), w) for k, w in enumerate(workers)]
    y = Region("y", (size,), tuple(root))
    op = linop.allocate(Space(terms, dtype), y)
    for term in terms:
        op = linop.add(op.codomain, term, y) @ op
    for term in terms:
        op = linop.deallocate(op.codomain, term) @ op
    return op


def has_the_bits_of_one_process(backend: Worker, kind: str, size: int, sums: str) -> None:
    """An all-reduce, its adjoint and a reduce-scatter of the workers, at once and in halves."""
    workers, me = backend.workers, backend.worker
    grid = Partition((workers,))
    for dtype in ("float32", "float64", "complex128"):
        Y = TensorSpace((size,), grid, dtype, axes=[COPIES])
        terms = drawn_terms(np.random.default_rng(size), np.dtype(dtype), workers, size, kind)
        with np.errstate(all="ignore"):
            wanted = (exact_sum if sums == "exact" else tree_sum)(*terms)
        plan = linop.all_reduce(Y, [0]).compile(backend, sums=sums)
        for one in (plan, plan.H):
            for _ in range(2):
                assert bits(one(terms[me])) == bits(wanted)
            one.start(terms[me])
            assert bits(one.finish()) == bits(wanted)
            assert bits(one(terms[me], out=np.empty(size, dtype))) == bits(wanted)
        scattered = linop.reduce_scatter(Y)
        found = scattered.compile(backend, sums=sums)(terms[me])
        assert bits(found) == bits(wanted[scattered.codomain.slices(me)])


def has_them_wherever_terms_are(
    backend: Worker, workers: Sequence[int], size: int, seed: int, kind: str
) -> None:
    """Exact sums of terms that some workers have several of, others none."""
    root = [backend.workers - 1, 0][: backend.workers]
    op = total_of(workers, sorted({*root}), size, "float64")
    terms = drawn_terms(np.random.default_rng(seed), np.dtype("float64"), len(workers), size, kind)
    own = {f"x{k}": terms[k] for k, w in enumerate(workers) if w == backend.worker}
    given = own if len(own) > 1 else next(iter(own.values()), None)
    found = op.compile(backend, sums="exact")(given)
    if backend.worker in root:
        assert bits(found) == bits(exact_sum(*terms))
    else:
        assert found is None


def says_its_sums(backend: Worker, sums: str) -> None:
    """An option of the backend is that of its plans, and of its parts."""
    assert backend.sums == sums
    part = backend.part([backend.worker])
    assert part.sums == sums
    Y = TensorSpace((3,), Partition((backend.workers,)), axes=[COPIES])
    x = np.full(3, [1.0, 1e16, 1.0, -1e16][backend.worker % 4])
    terms = [np.full(3, [1.0, 1e16, 1.0, -1e16][k % 4]) for k in range(backend.workers)]
    add = exact_sum if sums == "exact" else tree_sum
    assert bits(linop.all_reduce(Y, [0]).compile(backend)(x)) == bits(add(*terms))
