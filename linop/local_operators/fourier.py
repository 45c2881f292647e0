"""The discrete Fourier transform as a local operator."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy

from linop.errors import DTypeError, ShapeError
from linop.local_operators.functions import (
    RegionOrSpace,
    as_space,
    local_operator,
    single_region,
)
from linop.normal_form.maps import Function
from linop.operators.operator import LinearOperator
from linop.provenance import records_origin
from linop.spaces.array_modules import HOST, Namespace
from linop.spaces.region import Region
from linop.spaces.scalars import Array


@records_origin
def fft(
    domain: RegionOrSpace, codomain: RegionOrSpace | None = None, *, name: str = "F"
) -> LinearOperator:
    """The orthonormal n-d discrete Fourier transform of one region. Unitary: its adjoint is its
    inverse.

    Args:
        domain: one region, of a complex dtype; complex128 if a `Region` is given.
        codomain: by default a region ``<name>^`` of the same shape.
        name: the symbol.

    Raises:
        DTypeError: the space is not complex. ShapeError: domain and codomain differ in shape.
    """
    space = as_space(domain, np.complex128)
    region = single_region("fft", space)
    if space.dtype.kind != "c":
        raise DTypeError(f"fft: a space of dtype {space.dtype} given, a complex one expected")
    target = as_space(
        codomain or Region(f"{region.name}^", region.shape, region.workers, region.memory),
        space.dtype,
    )
    if single_region("fft", target).shape != region.shape:
        raise ShapeError(f"fft: domain {space} and codomain {target} differ in shape")

    def port(namespace: Namespace) -> tuple[Function, Function]:
        # Imported on use: it would be half of the time of `import linop`.
        transforms = namespace.scipy("fft")

        def forward(x: Array) -> Any:
            return transforms.fftn(x, norm="ortho").astype(space.dtype) if x.size else x.copy()

        def backward(y: Array) -> Any:
            return transforms.ifftn(y, norm="ortho").astype(space.dtype) if y.size else y.copy()

        return forward, backward

    def dense() -> scipy.sparse.sparray:
        forward, _ = port(HOST)
        units = np.eye(region.size).reshape(region.size, *region.shape)
        columns = [np.ravel(forward(unit.astype(space.dtype))) for unit in units]
        return scipy.sparse.csr_array(np.reshape(columns, (region.size, region.size)).T)

    return local_operator(space, target, port, name, dense)
