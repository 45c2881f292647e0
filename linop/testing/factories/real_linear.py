"""Factories of operators that are linear over the real numbers alone: compositions through real and
complex spaces, on rows of real parts, where they are operators of one dtype."""

from __future__ import annotations

from typing import Any

from hypothesis import reject
from hypothesis import strategies as st

import linop
from linop import LinearOperator, Partition, TensorSpace
from linop.spaces.blocks import is_disjoint
from linop.testing.describing import COMPLEX, Description, tensor_of, tensors
from linop.testing.factories.registry import operator_factory

TAKES = {"real": linop.real, "imag": linop.imag, "conj": linop.conj}
_scalars = st.tuples(st.integers(-3, 3), st.integers(-3, 3))


@st.composite
def _steps(draw: st.DrawFn, workers: int) -> Description:
    """A complex tensor, and what is done with it: parts that are taken, multiples, and moves to the
    same blocks on other workers."""
    source = draw(tensors(workers, dtypes=COMPLEX, roles=("split",)))
    kinds = st.sampled_from([*TAKES, "move"])
    return {
        "source": source,
        "steps": tuple(draw(st.lists(kinds | _scalars, min_size=1, max_size=4))),
        "transposed": draw(st.booleans()),
    }


@operator_factory(_steps)
def real_parts(source: Any, steps: Any, transposed: Any) -> LinearOperator:
    """Of real results, further steps see complex ones."""
    return real_linear(source, steps, transposed).over_reals()


def real_linear(source: Any, steps: Any, transposed: Any = False) -> LinearOperator:
    """The composition of the steps, from a complex space."""
    X = tensor_of(source)
    op: Any = linop.identity(X)
    for step in steps:
        if isinstance(step, tuple):
            op = complex(*step) * op
        elif step == "move" and is_disjoint(X):
            op = linop.repartition(op.codomain, _reversed(op.codomain)) @ op
        elif step in TAKES:
            op = TAKES[step](op.codomain.with_dtype(X.dtype)) @ op
    return op.H if transposed else op


def _reversed(X: TensorSpace) -> TensorSpace:
    """The same blocks, on the workers in reverse."""
    workers = X.partition.workers[::-1]
    return X.like(Partition(X.partition.shape, workers), X.axes, dict(enumerate(X.bounds)))


@st.composite
def _transforms(draw: st.DrawFn, workers: int) -> Description:
    source = draw(tensors(workers, dtypes=("float64", "float32"), ndim=draw(st.integers(1, 3))))
    dims = [d for d, n in enumerate(source["shape"]) if n]
    if not dims:
        reject()
    axes = draw(st.lists(st.sampled_from(dims), min_size=1, unique=True))
    return {
        "source": source,
        "axes": tuple(axes),
        "norm": draw(st.sampled_from(["ortho", "backward", "forward"])),
        "route": draw(st.sampled_from(["auto", "slab", "pencil"])),
        "inverse": draw(st.booleans()),
    }


@operator_factory(_transforms, pure=False, exact=False)
def distributed_rfft(source: Any, inverse: Any, **options: Any) -> LinearOperator:
    make = linop.irfft if inverse else linop.rfft
    return make(tensor_of(source), **options).over_reals()
