"""Vectors of direct sums: joined of their parts, and split, in one process and on workers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import Partition, Region, Space, TensorSpace
from linop.errors import ArgumentError, SpaceError
from linop.spaces.direct_sums import DirectSumSpace
from linop.testing.describing import seeds
from support.contracts.tensors_of_ranks import regularised
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

tensors = st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3))


def _tensor(described: tuple[int, int, int], name: str) -> TensorSpace:
    n, m, cuts = described
    return TensorSpace((n, m), Partition((cuts,)), name=name)


@given(st.lists(tensors, min_size=1, max_size=4), seeds)
def test_split_undoes_join(described: list[tuple[int, int, int]], seed: int) -> None:
    parts = [_tensor(one, f"part{k}") for k, one in enumerate(described)]
    whole = DirectSumSpace(parts)
    vectors = [X.integers(seed + k) for k, X in enumerate(parts)]
    joined = whole.join(*vectors)
    assert joined.equals(whole.scatter(*(X.gather(v) for X, v in zip(parts, vectors, strict=True))))
    assert joined.inner(joined) == sum(v.inner(v) for v in vectors)
    back = whole.split(joined)
    assert all(v.equals(w) for v, w in zip(vectors, back, strict=True))


def test_names_of_parts_may_differ() -> None:
    """As those of blocks, which are renamed where they clash."""
    X = _tensor((4, 2, 2), "x")
    A = linop.identity(X)
    R = linop.block([[A], [2 * A]])
    x = X.integers(0)
    assert R(x).equals(R.codomain.join(x, 2 * x))


def test_errors_of_join_and_split() -> None:
    X, Y = _tensor((4, 2, 2), "x"), _tensor((4, 2, 1), "y")
    whole = DirectSumSpace([X, Y])
    with pytest.raises(ArgumentError, match="join: 2 parts, 1 vectors given"):
        whole.join(X.zeros())
    with pytest.raises(SpaceError, match="join, part 1"):
        whole.join(X.zeros(), X.zeros())
    with pytest.raises(SpaceError, match="join, part 0"):
        whole.join(Y.zeros(), X.zeros())
    with pytest.raises(SpaceError, match="join, part 1"):
        whole.join(X.zeros(), Space(Region("y", (4, 2)), np.float32).zeros())
    with pytest.raises(ArgumentError):
        whole.join(X.zeros(), np.zeros((4, 2)))  # type: ignore[arg-type]
    with pytest.raises(SpaceError, match="split"):
        whole.split(X.zeros())


@pytest.mark.parametrize("workers", [1, 3])
def test_on_threads(workers: int) -> None:
    on_threads(workers, regularised)


@needs_mpi
def test_on_ranks() -> None:
    on_ranks(2, regularised)
