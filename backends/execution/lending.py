"""Memory of results: lent at every call, and told by a weak reference when nobody sees it any more.

What a user gets is a new array over an object that is no array. Views, buffers and tensors of it,
whatever they are made of, end at that object, which so lives as long as anybody can see the memory.
No references are counted: what a count means is one interpreter's affair.

The end may be told in any thread, and while garbage is collected: what hears of it does one atomic
thing.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from linop.backends.execution import alignment
from linop.spaces.scalars import Array

KEPT = 3
"""Free buffers that a plan keeps for a large result."""


class Buffer:
    """Memory that arrays of one form are made over.

    Args:
        raw: bytes, contiguous and writeable.
        start: where in them an array begins.
    """

    def __init__(
        self, raw: Array, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._form = shape, dtype
        self._raw: Any = raw
        self._start = start
        self._owner: Callable[[Any, int], Any] = (ctypes.c_char * (raw.nbytes - start)).from_buffer

    def array(self, over: Callable[[], object] | None = None) -> Array:
        """A new array.

        Args:
            over: is called when nobody sees the memory by way of this array any more.
        """
        owner = self._owner(self._raw, self._start)
        if over is not None:
            loan = _Loan(owner, _end)
            loan.over = over
            _LOANS[id(loan)] = loan
        return np.ndarray(*self._form, owner)


class Lender:
    """New arrays of one form, in memory that an earlier one had if nobody sees that any more."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._form = shape, dtype
        self._free: deque[Buffer] = deque(maxlen=KEPT)

    def __call__(self) -> Array:
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = Buffer(*alignment.memory(*self._form), *self._form)
        # Weakly: buffers are not kept for a plan that is gone.
        free = weakref.ref(self._free)

        def over() -> None:
            left = free()
            if left is not None:
                left.append(buffer)

        return buffer.array(over)


class _Loan(weakref.ref[Any]):
    """A weak reference to the owner of an array's memory, with what is done when it is gone."""

    __slots__ = ("over",)
    over: Callable[[], object]


_LOANS: dict[int, _Loan] = {}
"""All loans under way, by identity: a weak reference that is gone tells nothing."""


def _end(loan: _Loan) -> None:
    del _LOANS[id(loan)]
    loan.over()
