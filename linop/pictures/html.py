"""Operators and plans as notebooks show them: a small table, and the picture where it fits. They
raise nothing, and take long for no operator: what is too large is said instead."""

from __future__ import annotations

from typing import Protocol

from linop.errors import LinopError
from linop.pictures.operators import Drawn, draw
from linop.planning.prediction.cost import cost
from linop.spaces.showing import table
from linop.svg import escaped, short

_REGIONS, _DEPTH, _STEPS = 50_000, 200, 40
"""Regions of domain and codomain, nesting of an expression, and movements up to which a picture is
made unasked."""
_COUNTED, _SYMBOL, _SPACE = 512, 200, 160
_TEXT, _LINES = 64, 400
"""Workers of a plan of all whose steps are listed, and lines of them."""


class Shown(Drawn, Protocol):
    """An operator to show."""

    @property
    def loops(self) -> bool:
        """True if it has time loops."""

    @property
    def depth(self) -> int:
        """Of its expression."""

    @property
    def shape(self) -> tuple[int, int]:
        """(codomain.size, domain.size)."""


class Planned(Protocol):
    """A plan."""

    @property
    def op(self) -> Shown:
        """Its operator."""

    def describe(self) -> str:
        """Its steps, as text."""


def operator_html(op: Shown) -> str:
    """Symbol, spaces, size and messages of an operator, and its picture."""
    m, n = op.shape
    rows = [
        ("domain", short(str(op.domain), _SPACE)),
        ("codomain", short(str(op.codomain), _SPACE)),
        ("shape, dtype", f"{m} × {n}, {op.domain.dtype.name}"),
    ]
    reason = _too_large(op)
    picture = ""
    if not reason:
        try:
            if len(op.stages.workers) <= _COUNTED:
                rows.append(("messages", _messages(op)))
            picture = draw(op)._repr_html_()
        except LinopError as error:
            reason = short(str(error), _SPACE)
    if reason:
        picture = f"<p>No picture: {escaped(reason)}.</p>"
    caption = f"{type(op).__name__} {short(op.symbol(), _SYMBOL)}"
    return f"<div>{table(caption, (), rows)}{picture}</div>"


def plan_html(plan: Planned, where: str, one: bool) -> str:
    """Operator and place of a plan, its steps to unfold, and the operator's picture.

    Args:
        where: backend and worker, as text.
        one: True for the plan of one worker.
    """
    op = plan.op
    steps = ""
    if not _too_large(op) and (one or len(op.stages.workers) <= _TEXT):
        try:
            lines = plan.describe().splitlines()
        except LinopError as error:
            lines = [short(str(error), _SPACE)]
        left = len(lines) - _LINES
        lines = [*lines[:_LINES], *([f"… {left:,} more lines"] if left > 0 else [])]
        text = escaped("\n".join(lines))
        steps = f"<details><summary>steps</summary><pre>{text}</pre></details>"
    return f"<div><p>Plan {escaped(where)}, of</p>{operator_html(op)}{steps}</div>"


def _too_large(op: Shown) -> str:
    """Why an operator has no picture unasked; empty if it has one."""
    if op.loops:
        return "it has time loops"
    if len(op.domain) + len(op.codomain) > _REGIONS:
        return f"more than {_REGIONS:,} regions; op.draw(workers=…) draws some workers"
    if op.depth > _DEPTH:
        return "a deep expression; op.draw() draws it"
    if len(op.stages.movements) > _STEPS:
        return f"{len(op.stages.movements)} steps; op.draw() draws some of them"
    return ""


def _messages(op: Shown) -> str:
    """Messages and bytes of the operator and of its adjoint."""
    there, back = cost(op), cost(op.H)
    return (
        f"{there.messages:,} ({there.bytes:,} bytes); of the adjoint {back.messages:,} "
        f"({back.bytes:,} bytes)"
    )
