"""Conversion between the tensors and the arrays of one region, which share their memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from linop.backends.autograd.dtypes import is_of, numpy_dtype
from linop.backends.device.device_arrays import DeviceArrays
from linop.backends.engine.base import Backend
from linop.errors import ArgumentError, DTypeError
from linop.spaces.region import Region
from linop.spaces.scalars import Array


class Port:
    """Conversion of a region's tensors to arrays of its memory, and back: NumPy's by NumPy's
    protocol, a device's by DLPack.

    Args:
        backend: of the plan that takes or gives the arrays.
        dtype: torch's dtype of the tensors.

    Attributes:
        tensor: function that converts an array.
    """

    def __init__(self, backend: Backend, region: Region, dtype: Any) -> None:
        self.name, self.kind = region.name, backend.arrays.of(region.memory)
        self._backend, self._region, self._dtype = backend.name, region, dtype
        self._fast = dtype
        self._shared: Callable[[Any], Array] = torch.Tensor.numpy
        tensor = torch.from_numpy
        if isinstance(self.kind, DeviceArrays):
            self._fast, self._shared = None, self.kind.tensors.array
            tensor = partial(self.kind.tensors.tensor, torch)
        # Of bfloat16, which is ml_dtypes' among arrays, torch takes the bits.
        self._bits = numpy_dtype(dtype) if dtype is torch.bfloat16 else None
        self.tensor: Callable[[Array], Any] = tensor
        if self._bits is not None:
            self.tensor = lambda array: tensor(array.view(np.int16)).view(dtype)

    def array(self, tensor: Any) -> Array:
        """Array of a tensor; the plan checks its shape.

        Raises:
            ArgumentError, DTypeError: type, dtype, layout or device are not those expected.
        """
        if is_of(tensor, self._fast):
            try:
                array: Array = tensor.numpy()
                return array
            except (RuntimeError, TypeError):
                pass  # not a plain tensor: the checks below cost plain ones nothing
        self._check(tensor)
        try:
            plain = tensor.detach().resolve_conj().resolve_neg()  # these views are lazy
            if self._bits is not None:
                return self._shared(plain.view(torch.int16)).view(self._bits)
            return self._shared(plain)
        except (RuntimeError, TypeError, BufferError) as error:
            raise self._unfit(f"it has no memory that could be read: {error}") from None

    @property
    def form(self) -> tuple[tuple[int, ...], Any]:
        """Shape and dtype of its tensors."""
        return tuple(self._region.shape), self._dtype

    def zeros(self) -> Any:
        return torch.zeros(self._region.shape, dtype=self._dtype, device=self.kind.device)

    def _check(self, tensor: Any) -> None:
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

    def _unfit(self, words: str) -> ArgumentError:
        return ArgumentError(f"tensor of region {self.name!r}: {words}")
