"""Pinned host memory, from and to which a device copies asynchronously."""

from __future__ import annotations

from typing import Any

import numpy as np

from linop.backends.device.streams import Streams
from linop.backends.engine.arrays.interface import Arrays
from linop.spaces.scalars import Array


class HostMemory(Arrays):
    """Array module of the host regions of plans on a device: new arrays are pinned.

    Args:
        cuda: CuPy's submodule of that name.
    """

    def __init__(self, cuda: Any, streams: Streams) -> None:
        self._cuda = cuda
        self._streams = streams

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        self._streams.let_go()
        size = int(np.prod(shape, dtype=np.int64))
        memory = self._cuda.alloc_pinned_memory(max(1, size * dtype.itemsize))
        return np.frombuffer(memory, dtype, size).reshape(shape)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        array = self.empty(shape, dtype)
        array.fill(0)
        return array

    def down(self, source: Array, target: Array) -> Any:
        """Queue a copy of a contiguous device array to a pinned one; returns the event of its
        end."""
        source.get(  # type: ignore[attr-defined]
            stream=self._streams.current, out=target, blocking=False
        )
        return self._streams.mark()

    def up(self, source: Array, target: Array) -> None:
        """Queue a copy of a pinned array to a contiguous device array."""
        target.set(source, stream=self._streams.current)  # type: ignore[attr-defined]
