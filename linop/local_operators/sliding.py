"""Convolution as a local operator, inside one worker's memory. The input that it needs from other
workers is moved by `linop.operators.halo`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy

from linop.errors import ShapeError
from linop.local_operators.functions import (
    RegionOrSpace,
    as_space,
    local_operator,
    single_region,
)
from linop.local_operators.matrices import check_values
from linop.normal_form.maps import Function
from linop.operators.halo import PerDim, per_dim
from linop.operators.operator import LinearOperator
from linop.provenance import records_origin
from linop.spaces.array_modules import Namespace
from linop.spaces.scalars import Array, array_of, sparse_dtype


@records_origin
def convolution(
    kernel: npt.ArrayLike,
    domain: RegionOrSpace,
    codomain: RegionOrSpace,
    *,
    stride: PerDim = 1,
    padding: int | Sequence[int | tuple[int, int]] = 0,
    dilation: PerDim = 1,
    name: str = "C",
) -> LinearOperator:
    """Convolution as in torch.nn: cross-correlation of one region, padded with zeros, with a kernel
    that is not flipped.

    Args:
        kernel: an array of as many dimensions as the region.
        domain, codomain: one region each; the codomain's shape is that of the output.
        stride, dilation: one number, or one per dimension.
        padding: one number, or per dimension a number or (left, right).
        name: the symbol.

    Raises:
        ShapeError: shapes or parameters do not fit; the message has the output's shape.
        DTypeError: the space's dtype cannot represent one of the kernel's numbers.
    """
    source, target = as_space(domain, np.float64), as_space(codomain, np.float64)
    region, result = single_region("convolution", source), single_region("convolution", target)
    weights = array_of(kernel, "convolution")
    check_values("convolution", weights, source.dtype)
    weights = weights.astype(source.dtype, copy=False)
    if weights.ndim != region.ndim or 0 in weights.shape:
        raise ShapeError(
            f"convolution: kernel of shape {weights.shape} for a region of shape {region.shape}"
        )
    spread = _spread(weights, per_dim("dilation", dilation, region.ndim, 1))
    steps = per_dim("stride", stride, region.ndim, 1)
    window = _Window(region.shape, spread, steps, _pads(padding, region.ndim))
    nothing = result.size == 0 and region.size == 0  # a worker without a block
    if result.shape != window.output and not nothing:
        raise ShapeError(f"convolution: output of shape {window.output}; {result.shape} given")
    if not result.size:

        def port(namespace: Namespace) -> tuple[Function, Function]:
            zeros = namespace.module.zeros
            return (
                lambda x: zeros(result.shape, source.dtype),
                lambda y: zeros(region.shape, source.dtype),
            )

        return local_operator(
            source,
            target,
            port,
            name,
            lambda: scipy.sparse.csr_array((0, region.size), dtype=sparse_dtype(source.dtype)),
        )
    return local_operator(source, target, window.port, name, window.matrix)


@dataclass(frozen=True)
class _Window:
    """A kernel that slides over a padded region.

    Attributes:
        shape: of the region.
        kernel: with the zeros of dilation.
        steps: the stride of each dimension.
        pads: (left, right) of each dimension.
    """

    shape: tuple[int, ...]
    kernel: Array
    steps: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]

    @property
    def padded(self) -> tuple[int, ...]:
        return tuple(n + a + b for n, (a, b) in zip(self.shape, self.pads, strict=True))

    @property
    def full(self) -> tuple[int, ...]:
        """The shape of the output at stride 1."""
        columns = zip(self.padded, self.kernel.shape, strict=True)
        return tuple(max(0, n - k + 1) for n, k in columns)

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(-(-n // s) for n, s in zip(self.full, self.steps, strict=True))

    @property
    def every(self) -> tuple[Any, ...]:
        """The index of the output in the output at stride 1."""
        return (*(slice(None, None, s) for s in self.steps), ...)

    @property
    def inside(self) -> tuple[Any, ...]:
        """The index of the region in the padded region."""
        bounds = zip(self.shape, self.pads, strict=True)
        return (*(slice(a, a + n) for n, (a, _) in bounds), ...)

    def port(self, namespace: Namespace) -> tuple[Function, Function]:
        """(forward, adjoint) for an array module. On NumPy arrays they call `scipy.signal`; on
        others they sum over the kernel's elements, which is exact for integers."""
        if namespace.ndarray is np.ndarray:
            return self.forward, self.backward
        zeros = namespace.module.zeros
        read = [(self.read_by(offset), w) for offset, w in np.ndenumerate(self.kernel) if w]

        def forward(x: Any) -> Any:
            whole, y = zeros(self.padded, x.dtype), zeros(self.output, x.dtype)
            whole[self.inside] = x
            for part, weight in read:
                y += whole[part] * weight
            return y

        def backward(y: Any) -> Any:
            whole = zeros(self.padded, y.dtype)
            for part, weight in read:
                there = whole[part]
                there += y * np.conj(weight)
            return whole[self.inside].copy()

        return forward, backward

    def read_by(self, offset: tuple[int, ...]) -> tuple[Any, ...]:
        """The index of the elements of the padded region that are multiplied by the kernel element
        at `offset`."""
        bounds = zip(offset, self.full, self.steps, strict=True)
        return (*(slice(o, o + n, s) for o, n, s in bounds), ...)

    def forward(self, x: Array) -> Array:

        whole = np.zeros(self.padded, x.dtype)
        whole[self.inside] = x
        full: Array = np.asarray(scipy.signal.correlate(whole, np.conj(self.kernel), "valid"))
        result: Array = full[self.every].astype(x.dtype)
        return result

    def backward(self, y: Array) -> Array:

        spaced = np.zeros(self.full, y.dtype)
        spaced[self.every] = y
        whole: Array = np.asarray(scipy.signal.convolve(spaced, np.conj(self.kernel), "full"))
        result: Array = whole[self.inside].astype(y.dtype)
        return result

    def matrix(self) -> scipy.sparse.csr_array:
        """The sparse matrix: one entry for each pair of kernel element and output, whose column is
        the padded input at (output index * stride + offset), unless that is padding."""
        number: Array = np.full(self.padded, -1)
        number[self.inside] = np.arange(math.prod(self.shape)).reshape(self.shape)
        rows, columns, values = [], [], []
        for offset, weight in np.ndenumerate(self.kernel):
            part: list[Any] = [slice(o, o + n) for o, n in zip(offset, self.full, strict=True)]
            read = number[(*part, ...)][self.every].ravel()
            written = np.flatnonzero(read >= 0)
            rows.append(written)
            columns.append(read[written])
            values.append(np.full(len(written), weight))
        index = (np.concatenate(rows), np.concatenate(columns))
        data = np.concatenate(values).astype(sparse_dtype(self.kernel.dtype))
        shape = (math.prod(self.output), math.prod(self.shape))
        matrix = scipy.sparse.csr_array((data, index), shape=shape)
        matrix.eliminate_zeros()  # from dilation
        return matrix


def _spread(kernel: Array, dilation: tuple[int, ...]) -> Array:
    """The dilated kernel: zeros between its elements."""
    shape = tuple(d * (n - 1) + 1 for d, n in zip(dilation, kernel.shape, strict=True))
    wide: Array = np.zeros(shape, kernel.dtype)
    every: list[Any] = [slice(None, None, d) for d in dilation]
    wide[(*every, ...)] = kernel
    return wide


def _pads(padding: Any, ndim: int) -> tuple[tuple[int, int], ...]:
    """(left, right) of each dimension.

    Raises:
        ShapeError: another number of dimensions, or a negative width.
    """
    items = [padding] * ndim if isinstance(padding, Integral) else list(padding)
    pairs = [(p, p) if isinstance(p, Integral) else tuple(p) for p in items]
    if len(pairs) != ndim or any(len(p) != 2 or min(p) < 0 for p in pairs):
        raise ShapeError(f"padding: {padding!r} for {ndim} dimensions; numbers from 0 expected")
    return tuple((int(a), int(b)) for a, b in pairs)
