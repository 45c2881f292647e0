"""Factories of local operators, and of their compositions with collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import scipy
from hypothesis import strategies as st

import linop
from linop import LinearOperator, Region, Space
from linop.testing.describing import (
    COMPLEX,
    EVERY,
    Description,
    boxes,
    dtype_of,
    holders,
    part_of,
    rarely,
    seeds,
    shapes,
    space_of,
    spaces,
    tensor_of,
    tensors,
    whole_numbers,
)
from linop.testing.factories.collectives import halos, kernels
from linop.testing.factories.registry import operator_factory


@st.composite
def _matrices(draw: st.DrawFn, workers: int, dtypes: Sequence[str] = EVERY) -> Description:
    """Two spaces on the same workers, and a seed for the matrix between them."""
    held = draw(holders(workers))
    dtype = draw(st.sampled_from(dtypes))

    def side(letter: str) -> Description:
        count = draw(st.sampled_from([1, 2, 1, 2, 0]))
        rank = draw(st.integers(0, 2))
        regions = tuple((f"{letter}{k}", draw(shapes(rank, 3)), held) for k in range(count))
        return {"regions": regions, "dtype": dtype}

    return {"domain": side("x"), "codomain": side("y"), "seed": draw(seeds)}


def _values(domain: Space, codomain: Space, seed: int) -> np.ndarray:
    return whole_numbers((codomain.size, domain.size), domain.dtype, seed)


@operator_factory(_matrices, pure=False)
def dense_matrix(domain: Any, codomain: Any, seed: Any) -> LinearOperator:
    source, target = space_of(domain), space_of(codomain)
    return linop.local_operators.matrix(_values(source, target, seed), source, target)


@operator_factory(_matrices, pure=False)
def sparse_matrix(domain: Any, codomain: Any, seed: Any) -> LinearOperator:
    source, target = space_of(domain), space_of(codomain)
    return linop.local_operators.matrix(
        scipy.sparse.csc_array(_values(source, target, seed)), source, target
    )


@operator_factory(_matrices, pure=False)
def pair_of_functions(domain: Any, codomain: Any, seed: Any) -> LinearOperator:
    source, target = space_of(domain), space_of(codomain)
    A = _values(source, target, seed)
    forward = partial(_applied, A, source, target)
    return linop.local(source, target, forward, partial(_applied, A.conj().T, target, source))


def _applied(A: np.ndarray, before: Space, after: Space, x: Any) -> Any:
    """A times the flattened argument: a bare array if the side has one region, otherwise a dict by
    region name; None for no region."""
    given = before.vector({} if x is None else x)
    result = after.unflatten(A @ before.flatten(given)).arrays
    return next(iter(result.values())) if len(result) == 1 else result


@operator_factory(_matrices, pure=False)
def of_scipy(domain: Any, codomain: Any, seed: Any) -> LinearOperator:
    source, target = space_of(domain), space_of(codomain)
    op = scipy.sparse.linalg.aslinearoperator(_values(source, target, seed))
    return linop.local_operators.from_scipy(op, source, target)


@operator_factory(lambda workers: _matrices(workers, ("float64", "complex128")), pure=False)
def of_scipy_without_dtype(domain: Any, codomain: Any, seed: Any) -> LinearOperator:
    """An operator of functions alone, whose dtype SciPy guesses."""
    source, target = space_of(domain), space_of(codomain)
    A = _values(source, target, seed)
    op = scipy.sparse.linalg.LinearOperator(
        A.shape, matvec=partial(np.matmul, A), rmatvec=partial(np.matmul, A.conj().T)
    )
    return linop.local_operators.from_scipy(op, source, target)


@st.composite
def _regions(draw: st.DrawFn, workers: int, dtypes: Sequence[str] = EVERY) -> Description:
    """One region, and a seed."""
    shape = draw(shapes(draw(st.integers(0, 3)), 4))
    space = {"regions": (("x", shape, draw(holders(workers))),)}
    return {"space": {**space, "dtype": draw(st.sampled_from(dtypes))}, "seed": draw(seeds)}


@operator_factory(_regions, pure=False)
def diagonal(space: Any, seed: Any) -> LinearOperator:
    domain = space_of(space)
    return linop.local_operators.diagonal(
        whole_numbers(domain.regions[0].shape, domain.dtype, seed), domain
    )


@operator_factory(lambda workers: _regions(workers, COMPLEX), pure=False, exact=False)
def fft(space: Any, seed: Any) -> LinearOperator:
    del seed
    return linop.local_operators.fft(space_of(space))


@st.composite
def _restrictions(draw: st.DrawFn, workers: int) -> Description:
    space = draw(spaces(workers, EVERY, most=1))
    shape = space["regions"][0][1]
    least = 0 if draw(rarely) else 1
    indices = st.lists(st.integers(0, math.prod(shape) - 1), min_size=least, max_size=5)
    keep = draw(boxes(shape) if not math.prod(shape) or draw(st.booleans()) else indices)
    return {"space": space, "keep": keep}


@operator_factory(_restrictions, pure=False)
def restriction(space: Any, keep: Any) -> LinearOperator:
    domain = space_of(space)
    chosen = part_of(domain, ("x0", keep)) if isinstance(keep, tuple) else np.array(keep, int)
    return linop.local_operators.restriction(domain, chosen)


@st.composite
def _convolutions(draw: st.DrawFn, workers: int) -> Description:
    ndim = draw(st.integers(1, 2))
    kernel = draw(kernels(ndim))
    more = 3
    if draw(rarely):
        # So large that SciPy prefers Fourier transforms, in few outputs.
        size, more = (41, 20) if ndim == 1 else (13, 4)
        kernel |= {"kernel_size": (size,) * ndim, "dilation": (1,) * ndim}
    left = tuple(draw(st.integers(0, 2)) for _ in range(ndim))
    columns = zip(*(kernel[k] for k in ("kernel_size", "padding", "dilation")), left, strict=True)
    least = [max(1, d * (size - 1) + 1 - p - a) for size, p, d, a in columns]
    return {
        "shape": tuple(n + draw(st.integers(0, more)) for n in least),
        "left": left,
        **kernel,
        "to": draw(holders(workers)),
        "dtype": draw(st.sampled_from(EVERY)),
        "seed": draw(seeds),
    }


@operator_factory(_convolutions, pure=False)
def convolution(
    shape: Any,
    left: Any,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    to: Any,
    dtype: Any,
    seed: Any,
) -> LinearOperator:
    kernel = whole_numbers(kernel_size, dtype, seed)
    pads = list(zip(left, padding, strict=True))
    columns = zip(shape, kernel_size, stride, pads, dilation, strict=True)
    out = tuple((n + sum(p) - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in columns)
    domain = Space(Region("x", shape, to), dtype_of(dtype))
    codomain = Space(Region("y", out, to), dtype_of(dtype))
    options = {"stride": stride, "padding": pads, "dilation": dilation}
    return linop.local_operators.convolution(kernel, domain, codomain, **options)


@operator_factory(
    lambda workers: halos(workers, EVERY, ("split", "copies"), uneven=False), pure=False
)
def blur(source: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any) -> LinearOperator:
    """A distributed convolution: local convolutions after a halo exchange."""
    X = tensor_of(source)
    H = linop.halo_exchange(X, kernel_size, stride, padding, dilation)
    geometry = {w: _halo_of(X, w, kernel_size, stride, padding, dilation) for w in X.workers}
    values = whole_numbers(kernel_size, X.dtype, 7)
    blocks = []
    for region in H.codomain.regions:
        (worker,) = region.workers
        dims = geometry[worker]
        pads = [(h.left_padding, h.right_padding) for h in dims]
        columns = zip(region.shape, kernel_size, stride, pads, dilation, strict=True)
        out = tuple(max(0, (n + sum(p) - d * (k - 1) - 1) // s + 1) for n, k, s, p, d in columns)
        domain = Space(region, X.dtype)
        codomain = Space(Region(f"y@{worker}", out, worker, X.memory), X.dtype)
        options = {"stride": stride, "padding": pads, "dilation": dilation}
        blocks.append(linop.local_operators.convolution(values, domain, codomain, **options))
    return linop.direct_sum(*blocks) @ H


def _halo_of(X: linop.TensorSpace, worker: int, *kernel: Any) -> tuple[linop.HaloDim, ...]:
    """The halo geometry of a worker. `linop.halo_geometry` takes no grid axes with copies, so it is
    called for the grid of those that split, in the order of dimensions."""
    at = X.partition.coordinates(worker)
    grid = [X.partition.shape[X.axes.index(d)] if d in X.axes else 1 for d in range(X.ndim)]
    here = [at[X.axes.index(d)] if d in X.axes else 0 for d in range(X.ndim)]
    partition = linop.Partition(grid)
    return linop.halo_geometry(X.global_shape, partition, *kernel)[partition.worker(here)]


@st.composite
def _mixed_with_fft(draw: st.DrawFn, workers: int) -> Description:
    source = draw(
        tensors(workers, dtypes=COMPLEX, roles=("split",), ndim=2, grid=(draw(st.integers(1, 4)),))
        if workers >= 4
        else tensors(workers, dtypes=COMPLEX, roles=("split",), ndim=2, grid=(1,))
    )
    return {"source": source}


@operator_factory(_mixed_with_fft, pure=False, exact=False)
def fft_after_gather(source: Any) -> LinearOperator:
    """G* F G for a gather G and a Fourier transform F of the whole tensor on one worker."""
    X = tensor_of(source)
    G = linop.gather(X)
    F = linop.local_operators.fft(G.codomain, G.codomain)
    return G.H @ F @ G
