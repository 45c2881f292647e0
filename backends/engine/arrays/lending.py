"""Pool of result buffers: a buffer is lent at every call, and returns to the pool when a weak
reference reports that no array over it is left.

A result is a new array over an owner object that is not an array. All views, buffers and tensors
made of it refer to that owner, which thus lives as long as the memory is visible to anyone.
Reference counts are not read, since their meaning differs between interpreters.

The weak reference's callback may run in any thread, and during garbage collection; so it does one
atomic operation.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from linop.backends.engine.arrays import alignment
from linop.backends.engine.arrays.interface import Arrays
from linop.spaces.scalars import Array

KEPT = 3
"""Free buffers kept for each large result of a plan."""


class PooledBuffer:
    """Memory for arrays of one shape and dtype.

    Args:
        raw: contiguous, writeable array of uint8.
        start: offset of the array in `raw`, in bytes.
    """

    def __init__(
        self, raw: Array, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._form = shape, dtype
        self._raw: Any = raw
        self._start = start
        self._owner: Callable[[Any, int], Any] = (ctypes.c_char * (raw.nbytes - start)).from_buffer

    def array(self, over: Callable[[], object] | None = None) -> Array:
        """A new array over this memory.

        Args:
            over: called once nothing refers to the memory through this array any more.
        """
        owner = self._owner(self._raw, self._start)
        if over is not None:
            loan = _Loan(owner, _end)
            loan.over = over
            _LOANS[id(loan)] = loan
        return np.ndarray(*self._form, owner)


class Lender:
    """Allocator of arrays of one shape and dtype, which reuses the buffers of earlier arrays that
    are no longer referenced."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._form = shape, dtype
        self._free: deque[PooledBuffer] = deque(maxlen=KEPT)

    def __call__(self) -> Array:
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = PooledBuffer(*alignment.memory(*self._form), *self._form)
        # Weakly: buffers are not kept for a released plan.
        free = weakref.ref(self._free)

        def over() -> None:
            left = free()
            if left is not None:
                left.append(buffer)

        return buffer.array(over)


def lender(arrays: Arrays, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Callable[[], Array]:
    """Allocator of results: a pool, or that of the array module if it has a pool itself."""
    return partial(arrays.empty, shape, dtype) if arrays.asynchronous else Lender(shape, dtype)


class _Loan(weakref.ref[Any]):
    """Weak reference to the owner of an array's memory, with the callback for its end."""

    __slots__ = ("over",)
    over: Callable[[], object]


_LOANS: dict[int, _Loan] = {}
"""Current loans, by identity: a weak reference that is itself collected calls nothing."""


def _end(loan: _Loan) -> None:
    del _LOANS[id(loan)]
    loan.over()
