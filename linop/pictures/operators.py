"""The picture of an operator: what moves between workers, and its adjoint beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from linop.errors import LinopError
from linop.normal_form.stages import HasStages
from linop.pictures.layout import Panel
from linop.pictures.scene import Scene, scene_of, shown_workers
from linop.pictures.shapes import Style, legend
from linop.planning.prediction.cost import cost
from linop.spaces.space import Space
from linop.svg import MARGIN, SOFT, Drawing, Picture, short

_BESIDE = 900.0
"""Pixels up to which operator and adjoint are side by side; wider ones are below each other."""
_COUNTED = 512
"""Workers up to which messages and bytes are counted."""
_TITLE = 44


class Drawn(HasStages, Protocol):
    """An operator to draw."""

    @property
    def domain(self) -> Space:
        """The space that it is applied to."""

    @property
    def codomain(self) -> Space:
        """The space of its results."""

    @property
    def H(self) -> Any:
        """The adjoint."""

    def symbol(self, latex: bool = False) -> str:
        """The operator in mathematical notation."""


def draw(op: Drawn, adjoint: bool = True, workers: Sequence[int] | None = None) -> Picture:
    """The picture of an operator: see `linop.LinearOperator.draw`."""
    stages = op.stages
    chosen = shown_workers(stages.workers, workers)
    pairs = [(op, scene_of(stages, chosen))]
    if adjoint:
        pairs.append((op.H, scene_of(op.H.stages, chosen)))
    style = Style.of([scene for _, scene in pairs])
    drawn = Drawing()
    kinds: set[str] = set()
    x, y = float(MARGIN), float(MARGIN)
    for k, (which, scene) in enumerate(pairs):
        more = _said(which)
        if k and turned(pairs[0][1], scene):
            more = f"the same arrows, turned round{'; ' if more else ''}{more}"
        title = short(which.symbol(), _TITLE)
        panel = Panel(drawn, scene, style, x, y, title, more, upward=bool(k))
        kinds |= panel.kinds
        if not k and len(pairs) > 1:
            if 2 * drawn.right + 40 <= _BESIDE:
                x = drawn.right + 40
            else:
                y = drawn.bottom + 26
    y = drawn.bottom + 26
    if kinds:
        y = legend(drawn, kinds, MARGIN, y) + 20
    for said in _left_out([scene for _, scene in pairs]):
        drawn.text(MARGIN, y, said, size=11, opacity=SOFT)
        y += 16
    return drawn.picture(_summary(op, pairs[0][1], adjoint))


def turned(one: Scene, other: Scene) -> bool:
    """True if the arrows of two scenes are the same, with their ends exchanged."""
    back = [(a.receiver, a.sender, a.target, a.source, a.count) for a in other.arrows]
    return Counter(back) == Counter(
        (a.sender, a.receiver, a.source, a.target, a.count) for a in one.arrows
    )


def _said(op: Drawn) -> str:
    """Messages and bytes of an application."""
    if len(op.stages.workers) > _COUNTED:
        return ""
    try:
        found = cost(op)
    except LinopError:  # more bytes than can be counted
        return ""
    if not found.messages:
        return "no message"
    return f"{found.messages:,} message{'s'[: found.messages != 1]}, {found.bytes:,} bytes"


def _left_out(scenes: Sequence[Scene]) -> list[str]:
    """Sentences about what is not drawn, each once."""
    every = [said for scene in scenes for said in scene.left_out]
    if scenes[0].hidden:
        every.insert(
            0, f"{scenes[0].hidden:,} workers are not drawn; numbers count their transfers"
        )
    return list(dict.fromkeys(f"{said[0].upper()}{said[1:]}." for said in every))


def _summary(op: Drawn, scene: Scene, adjoint: bool) -> str:
    messages = sum(arrow.message for arrow in scene.arrows)
    beside = ", and of its adjoint" if adjoint else ""
    workers = len(scene.workers) + scene.hidden
    return (
        f"Picture of the operator {short(op.symbol(), _TITLE)} on {workers} workers, with "
        f"{messages} arrows between workers{beside}"
    )
