"""What the executor needs of arrays: NumPy's, in main memory. Those of a device are in
`linop.backends.device.device_arrays`, by the same names.

A plan is bound with one of these, and everything that differs between kinds of memory is asked of
it then: a run asks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import combinations
from typing import Any

import numpy as np

from linop.backends.execution import alignment
from linop.errors import ArgumentError
from linop.normal_form.maps import LocalMap
from linop.spaces.array_modules import Namespace
from linop.spaces.scalars import Array, Scalar

_FEW = 12


class Arrays(Namespace):
    """NumPy's arrays.

    Attributes:
        asynchronous: whether work is queued, on a stream, and done after the call that asks for it.
        device: the type of the device of tensors that share memory with them, as torch names it.
        plain: the flag of an array that results can be written to as it is.
        wide_items: whether short runs of elements are copied faster as one item each
            (`linop.backends.execution.views`).
        memory: where they are, in words.
    """

    asynchronous = False
    device = "cpu"
    plain = "carray"
    wide_items = True
    memory = "main memory"

    @property
    def functions(self) -> Mapping[str, Any]:
        """What every text of a run may name (`linop.backends.execution.emitter`)."""
        module = self.module
        return {
            "add": module.add,
            "contiguous": module.ascontiguousarray,
            "empty": module.empty,
            "multiply": module.multiply,
            "ndarray": self.ndarray,
            "zeros": module.zeros,
        }

    def of(self, memory: str) -> Arrays:
        """Those of the regions in a kind of memory (`linop.spaces.region.MEMORIES`)."""
        del memory
        return self

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """New memory."""
        return alignment.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """The same, of zeros."""
        array: Array = self.module.zeros(shape, dtype)
        return array

    def fetched(self, array: Array) -> Array:
        """An array of these as one of NumPy's, when all is done that was queued before; a copy only
        where it has to be."""
        return array

    def copyto(self, target: Array, source: Array) -> None:
        """Set all of an array."""
        self.module.copyto(target, source)

    def may_share_memory(self, one: Array, other: Array) -> bool:
        """True if two arrays may have an element in common; exactly, in main memory."""
        return np.may_share_memory(one, other) and np.shares_memory(one, other)

    def near(self, arrays: Sequence[Array]) -> Iterable[tuple[int, int]]:
        """Pairs of arrays, by number, of which `may_share_memory` need be asked."""
        return _near(arrays)

    def writeable(self, array: Array) -> bool:
        """Whether an array may be written to."""
        return array.flags.writeable

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Check that there are arrays of a dtype.

        Raises:
            DTypeError: there are none.
        """

    def multiple_added(self, dtype: np.dtype[Any], scale: Scalar) -> Callable[..., Any] | None:
        """What adds a multiple of an array to another in one pass: ``f(target, source)``; None
        where that takes two."""
        del dtype, scale
        return None

    def following(self) -> Callable[[], None] | None:
        """For plans that have memory of their own: what is called when a run begins, so that it
        comes after the last one, whatever the streams of both; None where that is no question."""
        return None

    def surroundings(self) -> AbstractContextManager[Any]:
        """The device and the stream of this thread, to be entered by another that works for it."""
        return nullcontext()


NUMPY = Arrays()


def arrays_of_map(local: LocalMap, arrays: Arrays) -> Arrays:
    """What a local map computes with: a plan's arrays, or those of all its regions."""
    kinds = {arrays.of(region.memory) for s in (local.domain, local.codomain) for region in s}
    return kinds.pop() if len(kinds) == 1 else arrays


def arrays_named(given: str | Arrays) -> Arrays:
    """Arrays by the name of their package, or as they are.

    Raises:
        ArgumentError: there are none of that name. MissingExtraError, BackendError: CuPy is not
            installed, or finds no GPU.
    """
    if isinstance(given, Arrays):
        return given
    if given == NUMPY.name:
        return NUMPY
    if given == "cupy":
        from linop.backends.device.device_arrays import cupy_arrays

        return cupy_arrays()
    raise ArgumentError(f"arrays: expected 'numpy' or 'cupy', given {given!r}")


def _near(arrays: Sequence[Array]) -> Iterator[tuple[int, int]]:
    """Pairs of arrays of NumPy's, by number, that may share memory: all that lies between the first
    and the last byte of one meets that of the other. Of few arrays all pairs: asking is sooner."""
    if len(arrays) <= _FEW:
        yield from combinations(range(len(arrays)), 2)
        return
    spans = sorted((*_span(array), k) for k, array in enumerate(arrays) if array.size)
    open_: list[tuple[int, int]] = []
    for low, high, k in spans:
        open_ = [(end, j) for end, j in open_ if end > low]
        yield from ((j, k) for _, j in open_)
        open_.append((high, k))


def _span(array: Array) -> tuple[int, int]:
    """The address of an array's first byte, and that after its last."""
    start: int = array.__array_interface__["data"][0]
    if array.flags.forc:
        return start, start + array.nbytes
    ways = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    back, on = (sum(way for way in ways if (way > 0) is up) for up in (False, True))
    return start + back, start + on + array.itemsize
