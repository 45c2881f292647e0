"""Array module of a device: CuPy, or a module with the same names.

It makes, converts and checks arrays. Beside it are the device's `streams` and events, pinned
`host_memory` and copies from and to it, `kernels`, and `tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from linop.backends.device.host_memory import HostMemory
from linop.backends.device.kernels import Kernels, copied_in_words
from linop.backends.device.streams import Streams
from linop.backends.device.tensors import Tensors
from linop.backends.engine.arrays.interface import Arrays
from linop.backends.engine.execution.instructions import Instruction
from linop.errors import BackendError, DTypeError, MissingExtraError
from linop.spaces.scalars import Array, Scalar


class DeviceArrays(Arrays):
    """Array module of a device.

    Args:
        module: CuPy, or a module with its names.
        scipy: ``scipy(name)``: the counterpart of a SciPy submodule for these arrays.
        device: torch's device type of tensors that share memory with these arrays.
    """

    asynchronous = True
    plain = "c_contiguous"
    wide_items = False
    copy_runs = staticmethod(copied_in_words)
    long = 16 * 2**20  # of shorter ones, it costs the host more than it saves on an H100
    small = 0  # its memory pool is as fast

    def __init__(self, module: Any, scipy: Callable[[str], Any], device: str = "cuda") -> None:
        self.module = module
        self.name = module.__name__
        self.ndarray = module.ndarray
        self.device = device
        self.memory = f"memory of a {device} device"
        self.streams = Streams(module.cuda)
        self.host = HostMemory(module.cuda, self.streams)
        self.kernels = Kernels(module)
        self.tensors = Tensors(module)
        self._scipy = scipy
        self._dtypes: set[np.dtype[Any]] = set()

    @property
    def functions(self) -> Mapping[str, Any]:
        return {**super().functions, "contiguous": self.contiguous}

    def contiguous(self, array: Array) -> Array:
        """The array, or a contiguous copy: of the same shape, while CuPy's function makes a vector
        of a single number."""
        if not array.flags.c_contiguous:
            array = self.module.ascontiguousarray(array)
        return array

    def put(self, array: Any) -> Array:
        there: Array = self.module.asarray(array)
        return there

    def taken(self, result: Any) -> Any:
        return result

    def scipy(self, part: str) -> Any:
        return self._scipy(part)

    def of(self, memory: str) -> Arrays:
        return self.host if memory == "host" else self

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        array: Array = self.module.empty(shape, dtype)
        return array

    def fetched(self, array: Array) -> Array:
        here: Array = self.module.asnumpy(array)
        return here

    def may_share_memory(self, one: Array, other: Array) -> bool:
        kinds = {type(one), type(other)}
        if len(kinds) > 1:
            return False
        if self.ndarray not in kinds:
            return super().may_share_memory(one, other)
        return bool(self.module.may_share_memory(one, other))

    def writeable(self, array: Array) -> bool:
        return getattr(array.flags, "writeable", True)

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        if dtype in self._dtypes:
            return
        try:
            one = self.module.zeros((), dtype)
            self.module.add(one, one)
        except (TypeError, ValueError) as error:
            raise DTypeError(f"{self.name} has no arrays of {dtype}: {error}") from None
        self._dtypes.add(dtype)

    def multiple_added(self, dtype: np.dtype[Any], scale: Scalar) -> Callable[..., Any] | None:
        return self.kernels.multiple_added(dtype, scale)

    def adapted(
        self, instructions: Iterable[Instruction], dtype: np.dtype[Any]
    ) -> tuple[Sequence[Instruction], Callable[[], None] | None]:
        # They know this module.
        from linop.backends.device.fused_copies import fused
        from linop.backends.device.host_transfer import Crossing

        crossing = Crossing(self)
        crossed = crossing.crossed(instructions, dtype)
        return list(fused(crossed, self, dtype)), crossing.settle

    def following(self) -> Callable[[], None]:
        return self.streams.following()

    def surroundings(self) -> AbstractContextManager[Any]:
        return self.streams.entered(self.module.cuda.Device(), self.streams.current)


@cache
def cupy_arrays() -> DeviceArrays:
    """Array module of CuPy.

    Raises:
        MissingExtraError: CuPy is not installed. BackendError: it finds no GPU.
    """
    try:
        import cupy
    except ImportError as error:
        raise MissingExtraError(
            f"arrays on GPUs need CuPy: pip install 'linop-algebra[cupy]' ({error})"
        ) from None
    why = no_device(cupy)
    if why:
        raise BackendError(
            f"CuPy finds no GPU: {why}. Plans of the backends 'threads' and 'mpi' run without one"
        )
    return DeviceArrays(cupy, lambda part: import_module(f"cupyx.scipy.{part}"))


def no_device(cupy: Any) -> str:
    """Reason for which CuPy finds no GPU; empty if it finds one."""
    try:
        return "" if cupy.cuda.runtime.getDeviceCount() else "the driver knows none"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return str(error)
