"""Laplacians: their stencil, three ways, and their symmetry; their errors."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import TensorSpace
from linop.errors import ArgumentError, LinopError, ShapeError
from linop.stencils.boundaries import Boundary
from linop.testing.describing import seeds
from support.contracts.laplacians import is_second_differences
from support.contracts.stencils import NUMPY
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

shapes = st.lists(st.integers(2, 6), min_size=1, max_size=3).map(tuple)
boundaries = st.sampled_from(sorted(NUMPY))


@given(shapes, st.integers(1, 4), boundaries, seeds)
def test_in_one_process(shape: Any, workers: int, boundary: Boundary, seed: int) -> None:
    is_second_differences(linop.backends.get("reference"), shape, workers, boundary, seed)


@given(shapes, st.integers(1, 4), boundaries, seeds)
def test_on_threads(shape: Any, workers: int, boundary: Boundary, seed: int) -> None:
    on_threads(workers, is_second_differences, shape, workers, boundary, seed)


@needs_mpi
@given(shapes, st.sampled_from([2, 3]), boundaries, seeds)
def test_on_ranks(shape: Any, ranks: int, boundary: Boundary, seed: int) -> None:
    on_ranks(ranks, is_second_differences, shape, ranks, boundary, seed)


@pytest.mark.parametrize("boundary", sorted(NUMPY))
def test_it_is_symmetric_unless_reflected(boundary: Boundary) -> None:
    A = linop.laplacian(TensorSpace((5, 4), (2, 2)), (1.0, 2.5), boundary)
    assert A.H.equals(A) == (boundary != "reflect")


def test_it_is_negative_definite() -> None:
    values = linop.laplacian(TensorSpace((5, 4), 2)).eigs(symmetric=True)
    assert -8 < min(values) <= max(values) < 0


@pytest.mark.parametrize(
    ("kind", "words", "weights"),
    [
        (
            ShapeError,
            "one weight, or 2, one for each dimension; given .* shape \\(3,\\)",
            (1, 1, 1),
        ),
        (ArgumentError, "weights are numbers; given 'ab'", "ab"),
    ],
)
def test_wrong_weights_are_named(kind: type[LinopError], words: str, weights: Any) -> None:
    with pytest.raises(kind, match=f"laplacian: {words}"):
        linop.laplacian(TensorSpace((5, 4), 1), weights)
    with pytest.raises(ArgumentError, match="laplacian: expected a TensorSpace"):
        linop.laplacian((5, 4))  # type: ignore[arg-type]
