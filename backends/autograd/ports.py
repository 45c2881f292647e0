"""Conversion between the tensors and the arrays of one region, which share their memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from linop.backends.autograd.dtypes import is_of, numpy_dtype
from linop.backends.base import Backend
from linop.backends.device.device_arrays import DeviceArrays
from linop.backends.execution.arguments import held
from linop.backends.execution.arrays import Arrays
from linop.errors import ArgumentError, DTypeError
from linop.spaces.region import Region
from linop.spaces.scalars import Array
from linop.spaces.space import Space


class Port:
    """Conversion of a region's tensors to NumPy arrays, and back.

    Args:
        backend: of the plan that takes or gives the arrays.
        dtype: torch's dtype of the tensors.
        kind: the arrays of the region's memory.

    Attributes:
        tensor: function that converts an array.
    """

    def __init__(self, backend: Backend, region: Region, dtype: Any, kind: Arrays) -> None:
        self.name, self.kind = region.name, kind
        self._backend, self._region, self._dtype = backend.name, region, dtype
        # Of bfloat16, which is ml_dtypes' among arrays, torch takes the bits.
        self._bits = numpy_dtype(dtype) if dtype is torch.bfloat16 else None
        self.tensor: Callable[[Array], Any] = torch.from_numpy if self._bits is None else _of_bits

    def array(self, tensor: Any) -> Array:
        """Array of a tensor; the plan checks its shape.

        Raises:
            ArgumentError, DTypeError: type, dtype, layout or device are not those expected.
        """
        if is_of(tensor, self._dtype):
            try:
                array: Array = tensor.numpy()
                return array
            except (RuntimeError, TypeError):
                pass  # not a plain tensor: the checks below cost plain ones nothing
        return self._checked(tensor)

    def zeros(self) -> Any:
        return torch.zeros(self._region.shape, dtype=self._dtype, device=self.kind.device)

    def _checked(self, tensor: Any) -> Array:
        if not isinstance(tensor, torch.Tensor):
            raise self._unfit(f"{type(tensor).__name__} given, torch.Tensor expected")
        if tensor.dtype is not self._dtype:
            raise DTypeError(
                f"tensor of region {self.name!r}: dtype {tensor.dtype} given, {self._dtype} "
                f"expected; convert it with .to({self._dtype})"
            )
        if tensor.layout is not torch.strided:
            raise self._unfit(
                f"layout {tensor.layout} given, torch.strided expected; convert it with .to_dense()"
            )
        if tensor.device.type != self.kind.device:
            memory = self._region.memory
            do = "work" if memory == "default" else f"have regions of {memory!r} memory"
            raise self._unfit(
                f"on device {tensor.device}, while plans of {self._backend!r} {do} in "
                f"{self.kind.memory}; move it with .to({self.kind.device!r})"
            )
        try:
            plain = tensor.detach().resolve_conj().resolve_neg()  # these views are lazy
            if self._bits is not None:
                return self._shared(plain.view(torch.int16)).view(self._bits)
            return self._shared(plain)
        except (RuntimeError, TypeError, BufferError) as error:
            raise self._unfit(f"it has no memory that could be read: {error}") from None

    def _shared(self, plain: Any) -> Array:
        array: Array = plain.numpy()
        return array

    def _unfit(self, words: str) -> ArgumentError:
        return ArgumentError(f"tensor of region {self.name!r}: {words}")


class DevicePort(Port):
    """Conversion of tensors to device arrays, by DLPack."""

    kind: DeviceArrays

    def __init__(self, backend: Backend, region: Region, dtype: Any, kind: DeviceArrays) -> None:
        super().__init__(backend, region, dtype, kind)
        self.tensor = partial(_of_device, kind, self._bits)

    def array(self, tensor: Any) -> Array:
        return self._checked(tensor)

    def _shared(self, plain: Any) -> Array:
        return self.kind.of_tensor(plain)


def ports(backend: Backend, space: Space, dtype: Any) -> list[Port]:
    """Conversions of the regions of a space that a backend's worker holds, in their order."""
    found: list[Port] = []
    for region in held(space, backend.worker):
        kind = backend.arrays.of(region.memory)
        if isinstance(kind, DeviceArrays):
            found.append(DevicePort(backend, region, dtype, kind))
        else:
            found.append(Port(backend, region, dtype, kind))
    return found


def _of_bits(array: Array) -> Any:
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def _of_device(arrays: DeviceArrays, bits: object, array: Array) -> Any:
    if bits is None:
        return arrays.to_tensor(torch, array)
    return arrays.to_tensor(torch, array.view(np.int16)).view(torch.bfloat16)
