"""Copies and sums of boxes on a device: small boxes are fused into one kernel.

Launching a kernel takes some microseconds, in which a device moves hundreds of kilobytes. So
consecutive copies of small, disjoint boxes between the same two buffers are fused: one kernel moves
them by index arrays, made at binding. Larger boxes have a kernel each, without index arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from linop.backends.device.device_arrays import DeviceArrays
from linop.backends.engine.execution.instructions import Call, Copy, Instruction
from linop.backends.engine.execution.views import Buffer, View, whole
from linop.backends.engine.roads.packing import FUSED
from linop.spaces.scalars import Array

Key = tuple[Buffer, Buffer, bool]
"""Buffers that a kernel writes and reads, and True if it adds."""
Group = list[tuple[Instruction, Copy]]


def fused(
    instructions: Iterable[Instruction], arrays: DeviceArrays, dtype: np.dtype[Any]
) -> Iterator[Instruction]:
    """A run's instructions, with consecutive copies of small boxes fused. Other instructions stay
    where they are among them."""
    groups: dict[Key, Group] = {}
    for each in instructions:
        copy = _fusible(each, arrays, dtype)
        meets = copy is None or any(
            _meet(copy.target, other.target) for group in groups.values() for _, other in group
        )
        if meets:
            yield from _closed(groups, arrays)
            groups = {}
        if copy is None:
            yield each
        else:
            key = copy.target.memory, copy.source.memory, copy.accumulate
            groups.setdefault(key, []).append((each, copy))
    yield from _closed(groups, arrays)


def _fusible(each: Instruction, arrays: DeviceArrays, dtype: np.dtype[Any]) -> Copy | None:
    """The copy of an instruction that may be fused with others; None if it may not."""
    match each.operations:
        case [Copy(coefficient=1, creates=False, keeps=None) as copy]:
            on_host = copy.target.buffer.on_host or copy.source.buffer.on_host
            size = copy.target.size * dtype.itemsize
            fits = 0 < size <= FUSED and arrays.kernels.take(dtype) and not on_host
            return copy if fits else None
    return None


def _closed(groups: dict[Key, Group], arrays: DeviceArrays) -> Iterator[Instruction]:
    for key, group in groups.items():
        if len(group) == 1:
            yield group[0][0]
            continue
        about = {"bytes": sum(each.about["bytes"] for each, _ in group)}
        label = f"{group[0][0].label}, and {len(group) - 1} more"
        yield Instruction(label, [_kernel(key, [copy for _, copy in group], arrays)], about)


def _kernel(key: Key, copies: list[Copy], arrays: DeviceArrays) -> Call:
    """Call of the kernel that does several copies."""
    target, source, accumulate = key
    written = _indices([_places(copy.target) for copy in copies], arrays)
    read = _indices([_places(copy.source) for copy in copies], arrays)
    return Call(arrays.kernels.boxes(accumulate), (whole(source), read, written, whole(target)))


def _indices(places: list[Array], arrays: DeviceArrays) -> Array:
    """Concatenated indices as one array on the device, of int32 if they fit, else int64."""
    flat = np.concatenate(places)
    narrow = flat.max() <= np.iinfo(np.int32).max
    return arrays.put(flat.astype(np.int32 if narrow else np.int64))


def _places(view: View) -> Array:
    """Flat indices of a view's elements in the array of its `memory`."""
    shape, places = view.memory.shape, np.zeros((), np.int64)
    for axis, part in enumerate(view.slices):
        step = math.prod(shape[axis + 1 :])
        places = places[..., None] + np.arange(part.start, part.stop) * step
    return places.reshape(-1)


def _meet(one: View, other: View) -> bool:
    """True if two boxes have an element in common."""
    if one.memory is not other.memory:
        return False
    pairs = zip(one.slices, other.slices, strict=True)
    return all(a.start < b.stop and b.start < a.stop for a, b in pairs)
