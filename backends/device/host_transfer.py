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
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from linop.backends.device.device_arrays import DeviceArrays
from linop.backends.engine.arrays.interface import arrays_of_map
from linop.backends.engine.execution.emitter import copied_on_host
from linop.backends.engine.execution.instructions import (
    Add,
    Apply,
    Call,
    Copy,
    Instruction,
    Settle,
    Views,
    instruction,
)
from linop.backends.engine.execution.views import Buffer, View, whole
from linop.spaces.scalars import Array


class Crossing:
    """Instructions of a device plan that involve host regions.

    Args:
        arrays: array module of the device.
    """

    def __init__(self, arrays: DeviceArrays) -> None:
        self._device = arrays
        self._queued: list[tuple[Any, Array]] = []
        weakref.finalize(self, arrays.streams.hold, self._queued).atexit = False

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
            whole = self._device.contiguous(source)
            self._queued.append((self._device.host.down(whole, target), target))

    def up(self, target: Array, source: Array) -> None:
        """Queue a copy from host memory to a contiguous array of the device."""
        if not source.size:
            return
        if not source.flags.c_contiguous:
            self.settle()
            packed = self._device.host.empty(source.shape, source.dtype)
            packed[...] = source
            source = packed
        self._device.host.up(source, target)
        self._queued.append((self._device.streams.mark(), source))

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

    # Instructions

    def crossed(
        self, instructions: Iterable[Instruction], dtype: np.dtype[Any]
    ) -> Iterator[Instruction]:
        """A run's instructions, with those that involve host regions as the device does them."""
        used = False
        for each in instructions:
            found = list(self._of(each, dtype))
            used = used or found != [each]
            yield from found
        if used:
            yield instruction("wait for copies", Call(self.settle), ready=self.over)

    def _of(self, each: Instruction, dtype: np.dtype[Any]) -> Iterator[Instruction]:
        match each.operations:
            case [Copy() as copy] if _on_host(copy.target, copy.source):
                yield from self._copied(each, copy, dtype)
            case [Add() as add] if _on_host(add.target, add.first, add.second):
                for copy in Copy(add.target, add.first), Copy(add.target, add.second, 1, True):
                    yield from self._of(replace(each, operations=[copy]), dtype)
            case [Apply() as apply] if _on_host(*apply.sources, *map(whole, apply.results)):
                yield self._applied(each, apply)
            case [Settle()]:
                yield replace(each, operations=[Call(self.settle)], ready=self.over)
            case _:
                yield each

    def _copied(self, each: Instruction, copy: Copy, dtype: np.dtype[Any]) -> Iterator[Instruction]:
        """A copy with at least one end in host memory."""
        target, source = copy.target, copy.source
        at_once = copy.coefficient == 1 and not copy.accumulate and target.contiguous
        if not target.buffer.on_host:
            ready = None if source.contiguous else self.over
            if at_once:
                yield replace(each, operations=[Call(self.up, (target, source))], ready=ready)
                return
            there = Buffer(source.shape)
            bring = Call(self.there, [source], [there])
            then = Copy(target, whole(there), copy.coefficient, copy.accumulate)
            yield replace(each, operations=[bring, then], ready=ready)
            return
        if at_once and not source.buffer.on_host:
            yield replace(each, operations=[Call(self.down, (target, source))])
            return
        if not source.buffer.on_host:
            here = Buffer(source.shape, on_host=True)
            yield replace(each, operations=[Call(self.here, [source], [here])])
            source = whole(here)
        work = Call(copied_on_host(copy, dtype), (target, source))
        yield replace(each, operations=[Call(self.settle), work], ready=self.over)

    def _applied(self, each: Instruction, apply: Apply) -> Instruction:
        """A local map with at least one host region. If all its regions are in host memory, it runs
        there; else on the device, with its host regions copied to and from it."""
        arrays = arrays_of_map(apply.local, self._device)
        work = Call(apply.local.on(arrays), [Views(apply.sources)], apply.results, unpack=True)
        if arrays is not self._device:
            return replace(each, operations=[Call(self.settle), work], ready=self.over)
        before: list[Call] = []
        given: list[View] = []
        for view in apply.sources:
            there = Buffer(view.shape)
            if view.buffer.on_host:
                before.append(Call(self.there, [view], [there]))
            given.append(whole(there) if view.buffer.on_host else view)
        work = replace(work, arguments=[Views(given)])
        made = [one for one in apply.results if one.on_host]
        after = [Call(self.here, [whole(one)], [one]) for one in made]
        return replace(each, operations=[*before, work, *after])


def _on_host(*views: View) -> bool:
    """True if any of some views is in host memory."""
    return any(view.buffer.on_host for view in views)
