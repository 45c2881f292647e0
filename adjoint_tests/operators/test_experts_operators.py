"""Dispatch to experts is its 0/1 matrix; what comes back is its adjoint."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import linop
from linop import Partition, Routing, TensorSpace
from linop.errors import ArgumentError, PartitionError, ShapeError
from linop.spaces.partition import balanced
from linop.testing.factories.experts import routing_of, routings


@st.composite
def cases(draw: Any) -> Any:
    tokens, workers = draw(st.integers(0, 60)), draw(st.integers(1, 8))
    ends = sorted(
        draw(st.lists(st.integers(0, tokens), min_size=workers - 1, max_size=workers - 1))
    )
    lengths = np.diff([0, *ends, tokens]).tolist()
    return tokens, workers, lengths, draw(routings(tokens))


def naive(described: Any, tokens: int) -> tuple[Any, list[int]]:
    """The matrix of dispatch, slot after slot, and the slots of each expert."""
    k, capacity = described["k"], described["capacity"]
    indices = np.array(described["indices"], int).reshape(tokens, k)
    taken: dict[int, list[tuple[int, int]]] = {e: [] for e in range(described["experts"])}
    for choice in range(k):
        for token in range(tokens):
            slots = taken[indices[token, choice]]
            if capacity is None or len(slots) < capacity:
                slots.append((token, choice))
    rows = [sorted(slots) for slots in taken.values()]
    matrix = np.zeros((sum(map(len, rows)), tokens), np.int64)
    for slot, (token, _) in enumerate(s for slots in rows for s in slots):
        matrix[slot, token] = 1
    return matrix, [len(slots) for slots in rows]


EVERYTHING_TO_ONE = {"indices": (2,) * 12, "k": 2, "experts": 5, "capacity": None}


FIRST_CHOICES_FIRST = {"indices": (0, 1, 0, 1, 0, 1), "k": 2, "experts": 2, "capacity": 2}


@example((3, 2, [1, 2], FIRST_CHOICES_FIRST))
@example((6, 4, [0, 5, 0, 1], EVERYTHING_TO_ONE))
@example((6, 4, [0, 5, 0, 1], EVERYTHING_TO_ONE | {"capacity": 0}))
@example((0, 3, [0, 0, 0], EVERYTHING_TO_ONE | {"indices": ()}))
@given(cases())
def test_dispatch_is_its_matrix(case: Any) -> None:
    tokens, workers, lengths, described = case
    routing = routing_of(described)
    matrix, sizes = naive(described, tokens)
    assert routing.sizes.tolist() == sizes
    X = TensorSpace((tokens, 2), Partition((workers,)), np.int64, sizes={0: lengths})
    D = linop.dispatch(X, routing)
    ends = np.cumsum([0, *balanced(described["experts"], workers)])
    rows = [sum(sizes[a:b]) for a, b in pairwise(ends)]
    assert [region.shape for region in D.codomain.regions] == [(n, 2) for n in rows]
    assert np.array_equal(D.to_matrix().toarray(), np.kron(matrix, np.eye(2, dtype=int)))
    assert np.array_equal(D.H.to_matrix().toarray(), np.kron(matrix.T, np.eye(2, dtype=int)))
    if described["capacity"] is None:  # each token in k slots, and no slot of two
        assert (D.H @ D).equals(described["k"] * linop.identity(X))


@given(cases(), st.integers(0, 99))
def test_combine_is_the_adjoint_of_gates(case: Any, seed: int) -> None:
    tokens, workers, lengths, described = case
    routing, k = routing_of(described), described["k"]
    X = TensorSpace((tokens, 1), Partition((workers,)), sizes={0: lengths})
    drawn = np.random.default_rng(seed).integers(1, 9, (tokens, k)) / 16
    drawn[:, -1] = 1 - drawn[:, :-1].sum(1)  # exact: sixteenths
    D, C = linop.dispatch(X, routing), linop.combine(X, routing, drawn)
    matrix, _ = naive(described, tokens)
    weights = np.diag(drawn.reshape(-1)[routing.slots])
    assert np.array_equal(C.to_matrix().toarray(), matrix.T @ weights)
    if described["capacity"] is None:
        assert np.array_equal((C @ D).to_matrix().toarray(), np.eye(tokens))


def test_mistakes() -> None:
    X = TensorSpace((3, 2), Partition((2,)))
    with pytest.raises(ShapeError, match=r"indices of shape \(3,\); \(tokens, experts of each\)"):
        Routing([0, 1, 2], 3)
    with pytest.raises(ArgumentError, match="experts 0 to 3 given, where there are 3: 0 to 2"):
        Routing([[0], [1], [3]], 3)
    with pytest.raises(ArgumentError, match="indices of float64; integers expected"):
        Routing([[0.5]], 3)
    with pytest.raises(ArgumentError, match="capacity=-1; numbers from 1 and from 0"):
        Routing([[0]], 3, -1)
    with pytest.raises(ShapeError, match=r"a routing of 1 tokens for a tensor of shape \(3, 2\)"):
        linop.dispatch(X, Routing([[0]], 3))
    with pytest.raises(ShapeError, match=r"gates of shape \(3, 2\); \(3, 1\) expected"):
        linop.combine(X, Routing([[0], [1], [2]], 3), np.ones((3, 2)))
    gaps = TensorSpace((3, 2), Partition((2,)), bounds={0: ((0, 1), (2, 3))})
    with pytest.raises(PartitionError, match="blocks of X must follow one another"):
        linop.dispatch(gaps, Routing([[0], [1], [2]], 3))
