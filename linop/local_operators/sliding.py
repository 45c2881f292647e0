"""Convolution as a local operator, inside one worker's memory. The input that it needs from other
workers is moved by `linop.operators.halo`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy

from linop.caching import cached_property
from linop.errors import ShapeError
from linop.local_operators.functions import (
    RegionOrSpace,
    as_space,
    local_operator,
    single_region,
)
from linop.normal_form.maps import Function
from linop.operators.halo import PerDim, per_dim
from linop.operators.operator import LinearOperator
from linop.provenance import records_origin
from linop.spaces.array_modules import Namespace
from linop.spaces.scalars import Array, of_dtype, sparse_dtype

Index = tuple[Any, ...]


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
    that is not flipped. Its sums are formed directly, never by a Fourier transform, so that it is
    its matrix by the rule in `linop.local_operators`.

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
    weights = of_dtype(kernel, source.dtype, "convolution")
    if weights.ndim != region.ndim or 0 in weights.shape:
        raise ShapeError(
            f"convolution: kernel of shape {weights.shape} for a region of shape {region.shape}"
        )
    steps = per_dim("stride", stride, region.ndim, 1)
    spread = per_dim("dilation", dilation, region.ndim, 1)
    window = _Window(region.shape, weights, steps, spread, _pads(padding, region.ndim))
    nothing = result.size == 0 and region.size == 0  # a worker without a block
    if result.shape != window.output and not nothing:
        raise ShapeError(f"convolution: output of shape {window.output}; {result.shape} given")
    if nothing:
        window = replace(window, result=result.shape)
    return local_operator(source, target, window.port, name, window.matrix)


@dataclass(frozen=True)
class _Window:
    """A kernel that slides over a padded region.

    Attributes:
        shape: of the region.
        kernel: without the zeros of dilation.
        steps, spread: the stride and the dilation of each dimension.
        pads: (left, right) of each dimension.
        result: the shape of the output, if it is not `output`: it is empty, then.
    """

    shape: tuple[int, ...]
    kernel: Array
    steps: tuple[int, ...]
    spread: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    result: tuple[int, ...] | None = None

    @property
    def output(self) -> tuple[int, ...]:
        """The shape of the output."""
        if self.result is not None:
            return self.result
        sizes = zip(self.shape, self.kernel.shape, self.steps, self.spread, self.pads, strict=True)
        return tuple(max(0, -(-(n + a + b - d * (k - 1)) // s)) for n, k, s, d, (a, b) in sizes)

    @cached_property
    def terms(self) -> list[tuple[Index, Index, Any]]:
        """Per element of the kernel that is not zero and meets the region: the elements of the
        region that it multiplies, those of the output that the products belong to, and itself."""
        found = []
        for offset, weight in np.ndenumerate(self.kernel):
            if weight != 0 and (both := self._met(offset)):
                found.append((*both, weight))
        return found

    def _met(self, offset: tuple[int, ...]) -> tuple[Index, Index] | None:
        """Indices at which a kernel element reads and writes; None if it meets padding alone."""
        read, written = [], []
        for k, n, m, s, d, (a, _) in zip(
            offset, self.shape, self.output, self.steps, self.spread, self.pads, strict=True
        ):
            first = d * k - a  # the element of the region that it multiplies for output 0
            start, stop = max(0, -(first // s)), min(m, (n - 1 - first) // s + 1)
            if start >= stop:
                return None
            written.append(slice(start, stop))
            read.append(slice(first + s * start, first + s * (stop - 1) + 1, s))
        return (*read, ...), (*written, ...)

    def port(self, namespace: Namespace) -> tuple[Function, Function]:
        """(forward, adjoint) for an array module: sums over the kernel's elements, each as one
        product of whole arrays. Padding, and the zeros of kernel and dilation, multiply nothing."""
        zeros, wide = namespace.module.zeros, sparse_dtype(self.kernel.dtype)
        terms = [(read, written, wide.type(weight)) for read, written, weight in self.terms]

        def forward(x: Any) -> Any:
            y, given = zeros(self.output, wide), x.astype(wide, copy=False)
            for read, written, weight in terms:
                here = y[written]
                here += given[read] * weight
            return y.astype(x.dtype, copy=False)

        def backward(y: Any) -> Any:
            x, given = zeros(self.shape, wide), y.astype(wide, copy=False)
            for read, written, weight in terms:
                here = x[read]
                here += given[written] * np.conj(weight)
            return x.astype(y.dtype, copy=False)

        return forward, backward

    def matrix(self) -> scipy.sparse.csr_array:
        """The sparse matrix: one entry per product of `terms`."""
        inputs = np.arange(math.prod(self.shape)).reshape(self.shape)
        outputs = np.arange(math.prod(self.output)).reshape(self.output)
        index = [(outputs[to].ravel(), inputs[of].ravel()) for of, to, _ in self.terms]
        values = [np.full(len(at), w) for (at, _), (*_, w) in zip(index, self.terms, strict=True)]
        none = np.zeros(0, np.int64)
        at = np.concatenate([none, *(rows for rows, _ in index)])
        of = np.concatenate([none, *(columns for _, columns in index)])
        data = np.concatenate([np.zeros(0, self.kernel.dtype), *values])
        return scipy.sparse.csr_array(
            (data.astype(sparse_dtype(self.kernel.dtype)), (at, of)), (outputs.size, inputs.size)
        )


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
