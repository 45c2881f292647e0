"""linop's own kernels, each made of one line of text for every dtype: the sum ``y += ax``
(`Arrays.multiple_added`), and many small boxes copied or added at once
(`linop.backends.device.fused_copies`); and copies in wide items (`Arrays.copy_runs`). Other
arithmetic on a device is its array module's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from linop.spaces.scalars import Scalar

Kernel = Callable[..., Any]


_WORDS: list[np.dtype[Any]] = [np.dtype(np.complex128), np.dtype(np.float64), np.dtype(np.float32)]
"""Items that a thread of a GPU can read and write at once."""


def copied_in_words(target: Any, source: Any) -> None:
    """Copy a box in items of up to 16 bytes, of which a kernel moves more in the same time; both
    arrays are of contiguous runs."""
    item = target.itemsize
    if target.strides[-1] == source.strides[-1] == item:
        lengths = [item * target.shape[-1], target.data.ptr, source.data.ptr]
        common = math.gcd(*lengths, *target.strides[:-1], *source.strides[:-1])
        for word in _WORDS:
            if word.itemsize > item and not common % word.itemsize:
                target, source = target.view(word), source.view(word)
                break
    target[...] = source


class Kernels:
    """Kernels of a device, each made when it is asked for first.

    Args:
        module: CuPy, or a module with its names.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._made: dict[str, Kernel] = {}

    def take(self, dtype: np.dtype[Any]) -> bool:
        """True if kernels can be compiled for a dtype."""
        return dtype.kind != "V"

    def multiple_added(self, dtype: np.dtype[Any], scale: Scalar) -> Kernel | None:
        """As `linop.backends.engine.arrays.interface.Arrays.multiple_added`."""
        if not self.take(dtype):
            return None
        # Two roundings, as on the host: the compiler would fuse multiply and add.
        kernel = self._kernel("multiple_added", "T x, T a", "T y", "y += a * x", ("--fmad=false",))
        factor = dtype.type(scale)
        return lambda target, source: kernel(source, factor, target)

    def boxes(self, accumulate: bool) -> Kernel:
        """Kernel ``f(source, of, to, target)`` that copies, or adds, elements ``source[of]`` to
        ``target[to]``, with flat indices."""
        kind, value = ("boxes_added", "y[to] + x[of]") if accumulate else ("boxes", "x[of]")
        return self._kernel(kind, "raw T x, I of, I to", "raw T y", f"y[to] = {value}")

    def _kernel(self, name: str, reads: str, writes: str, text: str, options: Any = ()) -> Kernel:
        if name not in self._made:
            self._made[name] = self._module.ElementwiseKernel(
                reads, writes, text, f"linop_{name}", options=options
            )
        return self._made[name]
