"""Layouts of a tensor over the workers of an axis, and the operator between any two of them.

A layout is the role of the axis in a `linop.TensorSpace`: `REPLICATED`, one tensor that all workers
hold; `COPIES`, one on each that counts by itself; or the dimension that is split. It decides each
collective, and the adjoint the one of backward:

=========== ============ ================= =====================
from        to           forward           backward
=========== ============ ================= =====================
REPLICATED  COPIES       nothing (E)       all-reduce
COPIES      REPLICATED   all-reduce (E.H)  nothing
a dimension COPIES       all-gather (G)    reduce-scatter
COPIES      a dimension  reduce-scatter    all-gather
a dimension REPLICATED   all-gather        slice
REPLICATED  a dimension  slice             all-gather
a dimension another      all-to-all        all-to-all
=========== ============ ================= =====================
"""

from __future__ import annotations

from typing import Any

from linop.errors import ArgumentError
from linop.normal_form.matching import along
from linop.operators.named_movement import collective
from linop.operators.operator import LinearOperator
from linop.spaces.decomposition import COPIES, REPLICATED, Axis, Role
from linop.spaces.tensor import TensorSpace

Layout = Axis
"""`linop.REPLICATED`, `linop.COPIES`, or a dimension; negative ones count from the last."""


def layout_of(given: Any, what: str) -> Layout:
    """A layout that a user gives: one of ours, or torch's ``Replicate()`` or ``Shard(dim)``.

    Raises:
        ArgumentError: it is none.
    """
    if isinstance(given, Role) or (isinstance(given, int) and not isinstance(given, bool)):
        return given
    if hasattr(given, "is_replicate"):
        if given.is_replicate():
            return REPLICATED
        if given.is_shard():
            return int(given.dim)
    raise ArgumentError(
        f"{what}={given!r}: linop.REPLICATED, linop.COPIES or the dimension that is split expected"
    )


def in_words(layout: Layout | None) -> str:
    """A layout for errors; None is that of a tensor that differs between workers."""
    if layout is None:
        return "different on each worker"
    if layout is REPLICATED:
        return "whole on all workers (REPLICATED)"
    return "a copy on each (COPIES)" if layout is COPIES else f"split along dimension {layout}"


def between(X: TensorSpace, Y: TensorSpace) -> LinearOperator:
    """The operator from one layout of a tensor to another, both over a partition of one axis."""
    ends = X.axes[0], Y.axes[0]
    cut = [isinstance(layout, int) for layout in ends]
    if cut == [True, False]:
        name = "G"
    elif ends[0] is COPIES:
        name = "RS" if cut[1] else "R"
    else:
        name = "P" if cut[1] else "E"
    own = along(X, ()) if ends == (COPIES, COPIES) else ()  # otherwise each would get their sum
    return collective(name, f"{_short(ends[0])}→{_short(ends[1])}", X, Y, own)


def _short(layout: Layout) -> str:
    return str(layout) if isinstance(layout, int) else layout.name[:1]
