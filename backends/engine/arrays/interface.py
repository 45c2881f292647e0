"""Array modules: the operations on arrays that the executor uses, for NumPy in host memory.
`linop.backends.device.device_arrays` has the same for a device.

A plan is bound with one of these; differences between kinds of memory are resolved then, not during
a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from linop.backends.engine.arrays import alignment
from linop.backends.engine.execution.instructions import Instruction
from linop.backends.engine.extensions import ARRAYS, found
from linop.normal_form.maps import LocalMap
from linop.spaces.array_modules import Namespace
from linop.spaces.scalars import Array, Scalar

SMALL = 32 * 1024


class Arrays(Namespace):
    """Array module of NumPy.

    Attributes:
        asynchronous: True if operations are queued on a stream, and may complete after the call
            returns.
        device: torch's device type of tensors that share memory with these arrays.
        plain: name of the flag that a result buffer must have to be written to directly.
        wide_items: True if short contiguous runs are copied faster as one item each
            (`linop.backends.engine.execution.views`).
        copy_runs: function of two arrays, the target first, that copies boxes of contiguous runs,
            if they have `long` bytes or more, faster than an assignment; None if there is none.
        memory: kind of memory, in words.
        small: bytes of results up to which a run allocates them, which is faster than a pool.
    """

    asynchronous = False
    device = "cpu"
    plain = "carray"
    wide_items = True
    copy_runs: Callable[[Array, Array], None] | None = None
    long = 0
    memory = "main memory"
    small = SMALL

    @property
    def functions(self) -> Mapping[str, Any]:
        """Functions that every generated source may call, by name
        (`linop.backends.engine.execution.emitter`)."""
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
        """Array module of the regions in a kind of memory (`linop.spaces.region.MEMORIES`)."""
        del memory
        return self

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """New, uninitialised array."""
        return alignment.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """New array of zeros."""
        array: Array = self.module.zeros(shape, dtype)
        return array

    def fetched(self, array: Array) -> Array:
        """A NumPy array with the contents, after all operations queued before; a copy only if
        necessary."""
        return array

    def copyto(self, target: Array, source: Array) -> None:
        """Copy all elements of `source` to `target`."""
        self.module.copyto(target, source)

    def may_share_memory(self, one: Array, other: Array) -> bool:
        """True if two arrays may have an element in common; exact in host memory."""
        return np.may_share_memory(one, other) and np.shares_memory(one, other)

    def writeable(self, array: Array) -> bool:
        """True if an array is writeable."""
        return array.flags.writeable

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Check that arrays can have a dtype.

        Raises:
            DTypeError: they cannot.
        """

    def multiple_added(self, dtype: np.dtype[Any], scale: Scalar) -> Callable[..., Any] | None:
        """Function ``f(target, source)`` that adds ``scale * source`` in one pass over memory; None
        if that takes two."""
        del dtype, scale
        return None

    def adapted(
        self, instructions: Iterable[Instruction], dtype: np.dtype[Any]
    ) -> tuple[Sequence[Instruction], Callable[[], None] | None]:
        """A run's instructions with copies as these arrays need them; and a function that waits for
        copies that may be under way when an instruction ends, or None."""
        del dtype
        return list(instructions), None

    def following(self) -> Callable[[], None] | None:
        """Function called at the start of a run, which orders it after the plan's previous run even
        if their streams differ; None where no streams exist."""
        return None

    def surroundings(self) -> AbstractContextManager[Any]:
        """Context that sets this thread's device and stream in another thread that works for it."""
        return nullcontext()


NUMPY = Arrays()
_OWN = {
    "numpy": f"{__name__}:_numpy",
    "cupy": "linop.backends.device.device_arrays:cupy_arrays",
}
"""Name of an array module to a function without arguments that returns it."""


def _numpy() -> Arrays:
    return NUMPY


def arrays_of_map(local: LocalMap, arrays: Arrays) -> Arrays:
    """Array module of a local map: that of its regions if all have the same kind of memory, else
    the plan's."""
    kinds = {arrays.of(region.memory) for s in (local.domain, local.codomain) for region in s}
    return kinds.pop() if len(kinds) == 1 else arrays


def arrays_named(given: str | Arrays) -> Arrays:
    """Array module by package name; an `Arrays` is returned as it is.

    Raises:
        ArgumentError: unknown name. MissingExtraError, BackendError: CuPy is not installed, or
            finds no GPU.
    """
    if isinstance(given, Arrays):
        return given
    arrays: Arrays = found(ARRAYS, _OWN, given, "arrays")()
    return arrays
