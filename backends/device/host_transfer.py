"""Copies between main memory and a device's, and work in main memory beside a device's queue.

Copies are queued on the current stream, as all work of the device is, and wait for nothing. The
host waits for the last of them (`settle`) where it reads or writes main memory itself: before NumPy
computes there, and when a run ends, for then results are read and arguments are changed. What it
waits for is the copies, not what the device was given to do after them.

What a plan makes in main memory is pinned, so that the device copies while the host goes on. Of a
user's array, which may not be, CUDA knows other rules: a copy to it is over when the call that
queues it returns, and one from it when it was read; so the host waits there, and nothing is wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from linop.backends.device.device_arrays import DeviceArrays
from linop.backends.execution.arrays import NUMPY, arrays_of_map
from linop.backends.execution.copies import Move, Piece
from linop.backends.execution.emitter import Code
from linop.backends.execution.views import Cell, View, adding, copying
from linop.normal_form.maps import LocalMap
from linop.spaces.scalars import Array, Scalar


class Crossing:
    """What a plan on a device does with regions in main memory.

    Args:
        arrays: the device's.
        code: of the run that the lines are part of.

    Attributes:
        used: whether a run has any of its lines.
    """

    def __init__(self, arrays: DeviceArrays, code: Code) -> None:
        self._device = arrays
        self._code = code
        self.used = False
        self._queued: list[tuple[Any, Array]] = []
        weakref.finalize(self, arrays.hold, self._queued).atexit = False

    def over(self) -> bool:
        """Whether all copies are done."""
        return not self._queued or self._queued[-1][0].done

    def settle(self) -> None:
        """Wait until they are."""
        if self._queued:
            self._queued[-1][0].synchronize()
        self._queued.clear()

    # Copies of arrays

    def down(self, target: Array, source: Array) -> None:
        """Queue a copy to a contiguous array in main memory."""
        if source.size:
            whole = self._device.module.ascontiguousarray(source)
            self._queued.append((self._device.down(whole, target), target))

    def up(self, target: Array, source: Array) -> None:
        """Queue a copy to a contiguous array of the device."""
        if not source.size:
            return
        if not source.flags.c_contiguous:
            self.settle()
            packed = self._device.host.empty(source.shape, source.dtype)
            packed[...] = source
            source = packed
        self._device.up(source, target)
        self._queued.append((self._device.mark(), source))

    def here(self, source: Array) -> Array:
        """A copy in main memory, once it is settled."""
        target = self._device.host.empty(source.shape, source.dtype)
        self.down(target, source)
        return target

    def there(self, source: Array) -> Array:
        """A copy on the device."""
        target = self._device.empty(source.shape, source.dtype)
        self.up(target, source)
        return target

    # Lines of a run

    def settling(self) -> str:
        """The line that waits."""
        self.used = True
        return f"{self._code.name(self.settle)}()"

    def putting(self, move: Move, dtype: np.dtype[Any]) -> list[Piece]:
        """What sets a box to a multiple of another, or adds that to it, where one of them or both
        are in main memory."""
        target, source, coefficient = move.target, move.source, move.coefficient
        self.used = True
        code, name = self._code, self._code.name
        to, of = target.text(code), source.text(code)
        do = adding if move.accumulate else copying
        at_once = coefficient == 1 and not move.accumulate and target.contiguous
        if not target.cell.apart:
            ready = None if source.contiguous else self.over
            if at_once:
                return [([f"{name(self.up)}({to}, {of})"], ready)]
            there = View(Cell(source.shape, code.local()), source.shape)
            brought = f"{there.cell.name} = {name(self.there)}({of})"
            return [([brought, *do(code, target, there, dtype, coefficient)], ready)]
        if at_once and not source.cell.apart:
            return [([f"{name(self.down)}({to}, {of})"], None)]
        pieces: list[Piece] = []
        if not source.cell.apart:
            here = code.local()
            pieces = [([f"{here} = {name(self.here)}({of})"], None)]
            of = here
        work = name(_in_main_memory(do, target.shape, dtype, coefficient))
        return [*pieces, ([self.settling(), f"{work}({to}, {of})"], self.over)]

    def applying(self, local: LocalMap, read: Sequence[Cell], made: Sequence[Cell]) -> Piece:
        """A local map of which a region is in main memory. It computes there if all are; else on
        the device, and what is in main memory is brought there and back."""
        self.used = True
        name, arrays = self._code.name, arrays_of_map(local, self._device)
        given = [View(cell, cell.shape).text(self._code) for cell in read]
        results = ", ".join(cell.name for cell in made)
        call = f"[{results}] = {name(local.on(arrays))}"
        if arrays is not self._device:
            return [self.settling(), f"{call}([{', '.join(given)}])"], self.over
        there, here = name(self.there), name(self.here)
        pairs = zip(read, given, strict=True)
        given = [f"{there}({text})" if cell.apart else text for cell, text in pairs]
        after = [f"{cell.name} = {here}({cell.name})" for cell in made if cell.apart]
        return [f"{call}([{', '.join(given)}])", *after], None


def _in_main_memory(
    do: Callable[..., list[str]],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    coefficient: Scalar,
) -> Callable[[Array, Array], None]:
    """A copy or a sum as a function of two boxes: texts of a device's runs have other names."""
    code = Code(NUMPY)
    target, source = (View(Cell(shape, name), shape) for name in ("target", "source"))
    return code.function(["target", "source"], do(code, target, source, dtype, coefficient))
