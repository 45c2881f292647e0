"""Factories of distributed Fourier transforms and spectral convolutions, on any block
decompositions without overlaps."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

import linop
from linop import LinearOperator
from linop.testing.describing import (
    COMPLEX,
    Description,
    extents,
    seeds,
    tensor_of,
    tensors,
    whole_numbers,
)
from linop.testing.factories.registry import operator_factory


@st.composite
def _transforms(draw: st.DrawFn, workers: int) -> Description:
    source = draw(tensors(workers, dtypes=COMPLEX))
    axes = tuple(d for d in range(len(source["shape"])) if draw(st.booleans()))
    return {
        "source": source,
        "axes": draw(st.sampled_from([None, axes])),
        "norm": draw(st.sampled_from(["ortho", "backward", "forward"])),
        "out": draw(st.sampled_from(["same", "transposed"])),
        "route": draw(st.sampled_from(["auto", "slab", "pencil"])),
    }


@operator_factory(_transforms, pure=False, exact=False)
def distributed_fft(source: Any, **options: Any) -> LinearOperator:
    return linop.fft(tensor_of(source), **options)


@st.composite
def _convolutions(draw: st.DrawFn, workers: int) -> Description:
    """A tensor whose first dimension holds channels, or none, and all others are transformed."""
    ndim = draw(st.integers(1, 3))
    source = draw(tensors(workers, dtypes=COMPLEX, ndim=ndim))
    mixes = ndim > 1 and draw(st.booleans())
    space = source["shape"][1:] if mixes else source["shape"]
    modes = tuple(draw(st.integers(0, n)) for n in space)
    return {
        "source": source,
        "modes": modes,
        "channels": draw(extents(3)) if mixes else None,
        "seed": draw(seeds),
    }


@operator_factory(_convolutions, pure=False, exact=False)
def spectral_convolution(source: Any, modes: Any, channels: Any, seed: Any) -> LinearOperator:
    X = tensor_of(source)
    if channels is None:
        weights = whole_numbers(modes, np.result_type(X.dtype, np.complex64), seed)
        return linop.fourier.spectral_convolution(X, weights)
    shape = channels, *X.global_shape[1:]
    bounds = {d: X.bounds[d] for d in range(1, X.ndim)}
    Y = linop.TensorSpace(shape, X.partition, X.dtype, X.axes, "y", bounds=bounds, memory=X.memory)
    weights = whole_numbers((X.global_shape[0], channels, *modes), X.dtype, seed)
    return linop.fourier.spectral_convolution(X, weights, channels=0, codomain=Y)


@st.composite
def _real_convolutions(draw: st.DrawFn, workers: int) -> Description:
    """Of real tensors: the last dimension is transformed, its modes are those from 0."""
    drawn = tensors(workers, dtypes=("float64", "float32"), ndim=draw(st.integers(1, 3)))
    source = draw(drawn.filter(lambda of: of["shape"][-1]))  # the halved one is not empty
    *others, last = source["shape"]
    modes = (*(draw(st.integers(0, n)) for n in others), draw(st.integers(0, last // 2 + 1)))
    return {"source": source, "modes": modes, "channels": None, "seed": draw(seeds)}


@operator_factory(_real_convolutions, pure=False, exact=False)
def spectral_convolution_of_real(**described: Any) -> LinearOperator:
    return spectral_convolution(**described).over_reals()
