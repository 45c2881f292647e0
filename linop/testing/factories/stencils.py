"""The factory of stencils, with coefficients and boundaries of every kind."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import numpy as np
from hypothesis import strategies as st

import linop
from linop import LinearOperator, TensorSpace
from linop.stencils.boundaries import Boundary
from linop.testing.describing import EVERY, Description, seeds, tensor_of, tensors, whole_numbers
from linop.testing.factories.registry import operator_factory

KINDS = ("number", "number", "array", "vector", "function")


@st.composite
def _stencils(draw: st.DrawFn, workers: int) -> Description:
    """A tensor, the boundary of each dimension, and for each tap an offset, the kind of its
    coefficient, and a seed."""
    source = draw(tensors(workers, dtypes=EVERY))
    ndim = len(source["shape"])
    offsets = st.tuples(*[st.integers(-3, 3)] * ndim)
    taps = st.tuples(offsets, st.sampled_from(KINDS), seeds)
    return {
        "source": source,
        "boundary": tuple(draw(st.sampled_from(get_args(Boundary))) for _ in range(ndim)),
        "taps": tuple(draw(st.lists(taps, max_size=5, unique_by=lambda tap: tap[0]))),
    }


@operator_factory(_stencils, pure=False)
def stencil(source: Any, boundary: Any, taps: Any) -> LinearOperator:
    X = tensor_of(source)
    weights = {offset: _coefficient(X, kind, seed) for offset, kind, seed in taps}
    return linop.stencil(X, weights, boundary)


def global_coefficients(shape: Any, dtype: str, seed: int) -> np.ndarray:
    """Coefficients that vary, of a global shape."""
    return whole_numbers(shape, np.dtype(dtype), seed)


def _coefficient(X: TensorSpace, kind: str, seed: int) -> Any:
    values = global_coefficients(X.global_shape, X.dtype.name, seed)
    if kind == "number":
        return global_coefficients((), X.dtype.name, seed)[()]
    if kind == "vector":
        return X.scatter(values)
    if kind == "function":
        return partial(_of_block, X.global_shape, X.dtype.name, seed)
    return values


def _of_block(shape: Any, dtype: str, seed: int, at: Any) -> np.ndarray:
    return global_coefficients(shape, dtype, seed)[(*at, ...)]
