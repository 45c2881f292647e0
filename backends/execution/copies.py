"""Emission of copies and sums of boxes in host memory, one step each.
`linop.backends.device.fused_copies` does the same on a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from linop.backends.execution.emitter import Code
from linop.backends.execution.stage import Lines, Ready
from linop.backends.execution.views import View, adding, copying
from linop.spaces.scalars import Scalar

SMALL = 256 * 1024
"""Largest box, in bytes, that a device fuses with others into one kernel."""

Piece = tuple[list[str], Ready | None]
"""Source lines of a step, and its `Ready` test if it waits."""


class Move(NamedTuple):
    """Assignment of a multiple of a box to another, or addition of it; `label`, `about`, `fresh`
    and `keeps` as in `Lines`."""

    label: str
    target: View
    source: View
    about: Mapping[str, Any]
    coefficient: Scalar = 1
    accumulate: bool = False
    fresh: Sequence[str] | None = None
    keeps: str | None = None


class Moving:
    """Copies and sums of boxes in host memory.

    Args:
        code: source of the run that the lines belong to.
        dtype: dtype of the plan.
    """

    def __init__(self, code: Code, dtype: np.dtype[Any]) -> None:
        self._code = code
        self._dtype = dtype

    def steps(self, move: Move) -> list[Lines]:
        """Steps of a move; empty if the move is deferred to `gathered`."""
        pieces = self.pieces(move)
        return [Lines(move.label, t, move.about, r, move.fresh, move.keeps) for t, r in pieces]

    def pieces(self, move: Move) -> list[Piece]:
        """Source lines of a move, as pieces."""
        do = adding if move.accumulate else copying
        return [(do(self._code, move.target, move.source, self._dtype, move.coefficient), None)]

    def gathered(self) -> list[Lines]:
        """Steps of deferred moves, to be emitted before any other step."""
        return []
