"""Convolution as a local operator, inside one worker's memory. The input that it needs from other
workers is moved by `linop.operators.halo`."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from linop.errors import ShapeError
from linop.local_operators.functions import (
    RegionOrSpace,
    as_space,
    local_operator,
    single_region,
)
from linop.local_operators.sliding_sums import Fill, Run, SlidingSums
from linop.normal_form.maps import Function
from linop.operators.halo import PerDim, edge_widths, per_dim
from linop.operators.operator import LinearOperator
from linop.provenance import records_origin
from linop.spaces.array_modules import Namespace
from linop.spaces.scalars import of_dtype


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
    that is not flipped. Its sums are formed directly (`linop.local_operators.sliding_sums`), never
    by a Fourier transform, so that it is its matrix by the rule in `linop.local_operators`.

    Args:
        kernel: an array of as many dimensions as the region.
        domain, codomain: one region each; the codomain's shape is that of the output.
        stride, dilation: one number, or one per dimension.
        padding: one number, or per dimension a number or (left, right).
        name: the symbol.

    Raises:
        ShapeError: shapes or parameters do not fit; the message has the output's shape.
        DTypeError: the space's dtype cannot represent one of the kernel's numbers.

    Example:
        >>> x, y = linop.Region("x", 4), linop.Region("y", 4)
        >>> C = linop.local_operators.convolution([1.0, 0.0, -1.0], x, y, padding=1)
        >>> (C @ np.array([1.0, 2.0, 4.0, 8.0])).tolist()
        [-2.0, -3.0, -6.0, 4.0]
        >>> (C.H @ np.array([1.0, 0.0, 0.0, 0.0])).tolist()
        [0.0, -1.0, 0.0, 0.0]
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
    pads = edge_widths("padding", padding, region.ndim)
    sizes = zip(region.shape, weights.shape, steps, spread, pads, strict=True)
    output = tuple(max(0, -(-(n + a + b - d * (k - 1)) // s)) for n, k, s, d, (a, b) in sizes)
    nothing = result.size == 0 and region.size == 0  # a worker without a block
    if result.shape != output and not nothing:
        raise ShapeError(f"convolution: output of shape {output}; {result.shape} given")
    taps = [(at, weight) for at, weight in np.ndenumerate(weights) if weight != 0]
    bulk = tuple(Run(a, 0, n) for n, (a, _) in zip(region.shape, pads, strict=True))
    sums = SlidingSums(
        sources=(region.shape,),
        fills=(Fill(0, bulk),),
        target=result.shape,
        steps=steps,
        offsets=tuple(tuple(map(operator.mul, at, spread)) for at, _ in taps),
        weights=tuple(weight for _, weight in taps),
        dtype=source.dtype,
    )

    def port(namespace: Namespace) -> tuple[Function, Function]:
        pair = functools.cache(lambda: sums.functions(namespace))  # planned by who applies it
        return (lambda x: pair()[0]([x])[0]), (lambda y: pair()[1]([y])[0])

    return local_operator(source, target, port, name, sums.matrix)
