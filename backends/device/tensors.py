"""Tensors of torch that share memory with a device's arrays, and torch's stream."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from linop.spaces.scalars import Array


class Tensors:
    """Conversion between a device's arrays and tensors, by DLPack.

    Args:
        module: CuPy, or a module with its names.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def array(self, tensor: Any) -> Array:
        """Array that shares memory with a tensor."""
        array: Array = self._module.from_dlpack(tensor)
        return array

    def tensor(self, torch: Any, array: Array) -> Any:
        """Tensor that shares memory with an array."""
        return torch.from_dlpack(array)

    def stream(self, torch: Any) -> AbstractContextManager[Any]:
        """Context in which operations are queued on torch's current stream."""
        cuda = self._module.cuda
        stream = torch.cuda.current_stream(cuda.Device().id)
        if hasattr(cuda.Stream, "from_external") and hasattr(stream, "__cuda_stream__"):
            entered: AbstractContextManager[Any] = cuda.Stream.from_external(stream)
        else:  # before CuPy 14
            entered = cuda.ExternalStream(stream.cuda_stream)
        return entered
