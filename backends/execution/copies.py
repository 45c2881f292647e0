"""How boxes are copied and added, as steps of a run: in main memory, each at once; on a device see
`linop.backends.device.fused_copies`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from linop.backends.execution.emitter import Code
from linop.backends.execution.stage import Lines, Ready
from linop.backends.execution.views import View, adding, copying
from linop.spaces.scalars import Scalar

SMALL = 256 * 1024
"""Bytes of a box up to which a device moves it with others."""

Piece = tuple[list[str], Ready | None]
"""The lines of a step, and for one that waits, whether it would not have to."""


class Move(NamedTuple):
    """A box that is set to a multiple of another, or increased by that; the rest as in `Lines`."""

    label: str
    target: View
    source: View
    about: Mapping[str, Any]
    coefficient: Scalar = 1
    accumulate: bool = False
    fresh: Sequence[str] | None = None
    keeps: str | None = None


class Moving:
    """Copies and sums of boxes in main memory.

    Args:
        code: of the run that the lines are part of.
        dtype: of the plan.
    """

    def __init__(self, code: Code, dtype: np.dtype[Any]) -> None:
        self._code = code
        self._dtype = dtype

    def steps(self, move: Move) -> list[Lines]:
        """Those of a move, unless they come later."""
        pieces = self.pieces(move)
        return [Lines(move.label, t, move.about, r, move.fresh, move.keeps) for t, r in pieces]

    def pieces(self, move: Move) -> list[Piece]:
        """What does a move."""
        do = adding if move.accumulate else copying
        return [(do(self._code, move.target, move.source, self._dtype, move.coefficient), None)]

    def gathered(self) -> list[Lines]:
        """The steps that come later, and before any other."""
        return []
