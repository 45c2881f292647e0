"""Copies between host and device memory in plans on a device, and local maps in host memory.

Copies are queued on the current stream, like all operations of the device, without a wait. The host
waits for the last of them (`settle`) before it reads or writes host memory itself: before NumPy
computes there, and at the end of a run, when results are read and arguments may change. It waits
for the copies only, not for later operations of the stream.

Host buffers of a plan are pinned, so that copies are asynchronous. For a user's array that is not
pinned, CUDA's rules differ: a copy to it has completed when the queueing call returns, and a copy
from it has been read by then; so the host waits in that call, and the result is still correct.
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
    """Emission of the steps of a device plan that involve host regions.

    Args:
        arrays: array module of the device.
        code: source of the run that the lines belong to.

    Attributes:
        used: True if the run has any of these steps.
    """

    def __init__(self, arrays: DeviceArrays, code: Code) -> None:
        self._device = arrays
        self._code = code
        self.used = False
        self._queued: list[tuple[Any, Array]] = []
        weakref.finalize(self, arrays.hold, self._queued).atexit = False

    def over(self) -> bool:
        """True if all queued copies are complete."""
        return not self._queued or self._queued[-1][0].done

    def settle(self) -> None:
        """Wait until all queued copies are complete."""
        if self._queued:
            self._queued[-1][0].synchronize()
        self._queued.clear()

    # Copies of arrays

    def down(self, target: Array, source: Array) -> None:
        """Queue a copy from the device to a contiguous array in host memory."""
        if source.size:
            whole = self._device.module.ascontiguousarray(source)
            self._queued.append((self._device.down(whole, target), target))

    def up(self, target: Array, source: Array) -> None:
        """Queue a copy from host memory to a contiguous array of the device."""
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
        """Queue a copy to new host memory; valid after `settle`."""
        target = self._device.host.empty(source.shape, source.dtype)
        self.down(target, source)
        return target

    def there(self, source: Array) -> Array:
        """Queue a copy to new device memory."""
        target = self._device.empty(source.shape, source.dtype)
        self.up(target, source)
        return target

    # Lines of a run

    def settling(self) -> str:
        """Line that waits for the queued copies."""
        self.used = True
        return f"{self._code.name(self.settle)}()"

    def putting(self, move: Move, dtype: np.dtype[Any]) -> list[Piece]:
        """Lines that set a box to a multiple of another, or add it, if at least one of them is in
        host memory."""
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
        """Lines of a local map with at least one host region. If all its regions are in host
        memory, it runs there; else on the device, with its host regions copied to and from it."""
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
    """Function of two NumPy arrays that copies or adds; compiled separately, since the run's source
    has the device's functions."""
    code = Code(NUMPY)
    target, source = (View(Cell(shape, name), shape) for name in ("target", "source"))
    return code.function(["target", "source"], do(code, target, source, dtype, coefficient))
