"""Copies and sums of boxes on a device: small boxes are fused into one kernel.

Launching a kernel takes some microseconds, in which a device moves hundreds of kilobytes. So
consecutive moves of small, disjoint boxes between the same two buffers are fused: one kernel moves
them by index arrays, made at binding. Larger boxes have a kernel each, without index arrays.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from linop.backends.device.device_arrays import DeviceArrays
from linop.backends.device.host_transfer import Crossing
from linop.backends.execution.copies import SMALL, Move, Moving, Piece
from linop.backends.execution.emitter import Code
from linop.backends.execution.stage import Lines
from linop.backends.execution.views import Cell, View
from linop.spaces.scalars import Array

Key = tuple[Cell, Cell, bool]
"""Cells that a kernel writes and reads, and True if it adds."""


class Fusing(Moving):
    """Copies and sums of boxes on a device, and between device and host memory.

    Args:
        crossing: emits copies between device and host memory.
        arrays: array module of the device.
    """

    def __init__(
        self, code: Code, dtype: np.dtype[Any], crossing: Crossing, arrays: DeviceArrays
    ) -> None:
        super().__init__(code, dtype)
        self._crossing = crossing
        self._arrays = arrays
        self._done: list[Lines] = []
        self._groups: dict[Key, list[Move]] = {}

    def pieces(self, move: Move) -> list[Piece]:
        if _apart(move):
            return self._crossing.putting(move, self._dtype)
        return super().pieces(move)

    def steps(self, move: Move) -> list[Lines]:
        if not self._fits(move):
            return [*self.gathered(), *super().steps(move)]
        if any(_meet(move.target, other.target) for g in self._groups.values() for other in g):
            self._close()
        key = move.target.memory, move.source.memory, move.accumulate
        self._groups.setdefault(key, []).append(move)
        return []

    def _fits(self, move: Move) -> bool:
        """True if a move may be fused with others."""
        if (
            _apart(move)
            or move.coefficient != 1
            or move.fresh is not None
            or move.keeps is not None
        ):
            return False
        size = move.target.size * self._dtype.itemsize
        return 0 < size <= SMALL and self._arrays.has_kernels(self._dtype)

    def gathered(self) -> list[Lines]:
        self._close()
        done, self._done = self._done, []
        return done

    def _close(self) -> None:
        """Emit the gathered moves, so that later steps follow them."""
        for (to, of, accumulate), moves in self._groups.items():
            if len(moves) == 1:
                self._done += super().steps(moves[0])
                continue
            about = {"bytes": sum(move.about["bytes"] for move in moves)}
            label = f"{moves[0].label}, and {len(moves) - 1} more"
            self._done.append(Lines(label, [self._at_once(to, of, accumulate, moves)], about))
        self._groups = {}

    def _at_once(self, to: Cell, of: Cell, accumulate: bool, moves: list[Move]) -> str:
        """Call of the kernel that does several moves."""
        code, name = self._code, self._code.name
        written = self._indices([_places(move.target) for move in moves])
        read = self._indices([_places(move.source) for move in moves])
        target, source = (View(cell, cell.shape).array(code) for cell in (to, of))
        kernel = name(self._arrays.boxes(accumulate))
        return f"{kernel}({source}, {name(read)}, {name(written)}, {target})"

    def _indices(self, places: list[Array]) -> Array:
        """Concatenated indices as one array on the device, of int32 if they fit, else int64."""
        flat = np.concatenate(places)
        narrow = flat.max() <= np.iinfo(np.int32).max
        return self._arrays.put(flat.astype(np.int32 if narrow else np.int64))


def _apart(move: Move) -> bool:
    """True if the source or the target of a move is in host memory."""
    return move.target.cell.apart or move.source.cell.apart


def _slices(view: View) -> tuple[slice, ...]:
    """Slices of a view in the array of its `memory`."""
    if view.cell.within:
        begin = view.cell.within[1]
        return (slice(begin, begin + view.size),)
    whole = tuple(slice(0, n) for n in view.shape)
    return whole if view.index is None else view.index[: len(whole)]


def _places(view: View) -> Array:
    """Flat indices of a view's elements in the array of its `memory`."""
    shape, places = view.memory.shape, np.zeros((), np.int64)
    for axis, part in enumerate(_slices(view)):
        step = math.prod(shape[axis + 1 :])
        places = places[..., None] + np.arange(part.start, part.stop) * step
    return places.reshape(-1)


def _meet(one: View, other: View) -> bool:
    """True if two boxes have an element in common."""
    if one.memory is not other.memory:
        return False
    pairs = zip(_slices(one), _slices(other), strict=True)
    return all(a.start < b.stop and b.start < a.stop for a, b in pairs)
