"""Actions: what a worker of a pipeline does, one after the other, as data and as text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from linop.errors import ArgumentError


class Kind(StrEnum):
    """Kind of an action; the values are torch's, but for `UPDATE`, which torch does not have.

    Example:
        Kinds compare with their texts, which tables have:

        >>> from linop.schedules import Kind
        >>> Kind("F").name, Kind.UPDATE == "U", [str(kind) for kind in Kind if "SEND" in kind]
        ('FORWARD', True, ['SEND_F', 'SEND_B'])
    """

    FORWARD = "F"
    BACKWARD = "B"
    """Both halves: gradients of the input and of the weights."""
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_F = "SEND_F"
    """Send the stage's output to the next stage."""
    RECV_F = "RECV_F"
    """Receive the stage's input from the stage before."""
    SEND_B = "SEND_B"
    """Send the gradient of the stage's input to the stage before."""
    RECV_B = "RECV_B"
    """Receive the gradient of the stage's output from the next stage."""
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    UPDATE = "U"
    """Update of the stage's parameters with the gradients of all backwards since the last one: it
    makes their next version."""


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
BACKWARDS = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})
"""Actions that need the gradient of the stage's output, and make that of its input."""
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
MESSAGES = SENDS | RECEIVES
GROUP = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})
"""Actions that the members of a sharded or replicated stage execute together."""
_TEXT = re.compile(
    r"(?P<stage>\d{1,9})"
    rf"(?P<kind>{'|'.join(sorted(Kind, key=len, reverse=True))})"
    r"(?P<micro>\d{1,9})?(@(?P<version>\d{1,9}))?(>(?P<peer>\d{1,9}))?",
    re.ASCII,
)


@dataclass(frozen=True, order=True)
class Action:
    """An action of one stage. Its text is torch's, as ``2F0``, with what torch lacks behind it:
    ``2F4@3`` reads version 3 of the parameters, ``0SEND_F2>3`` sends to stage 3.

    Attributes:
        stage: index of the stage; it carries the chunk (v chunks on a worker).
        micro_batch: index of the micro-batch; None for actions of no micro-batch.
        version: version of the parameters that a forward or backward reads, from 0, the number of
            updates before; None for the newest when it is executed.
        peer: stage at the other end of a send or receive; None for the neighbour.

    Example:
        >>> from linop.schedules import Action, Kind
        >>> action = Action.parse("2F0")
        >>> action.stage, action.kind.name, action.micro_batch
        (2, 'FORWARD', 0)
        >>> str(Action(0, Kind.SEND_F, 2, peer=3))
        '0SEND_F2>3'
    """

    stage: int
    kind: Kind
    micro_batch: int | None = None
    version: int | None = None
    peer: int | None = None

    def __str__(self) -> str:
        micro_batch = "" if self.micro_batch is None else self.micro_batch
        version = "" if self.version is None else f"@{self.version}"
        peer = "" if self.peer is None else f">{self.peer}"
        return f"{self.stage}{self.kind}{micro_batch}{version}{peer}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action with this text.

        Raises:
            ArgumentError: it is none.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ArgumentError(
                f"action: expected a stage, one of {', '.join(Kind)}, and a micro-batch, "
                f"as 2F0, numbers of up to 9 digits; given {text[:60]!r}"
            )
        micro, version, peer = (
            None if part is None else int(part)
            for part in (match["micro"], match["version"], match["peer"])
        )
        return cls(int(match["stage"]), Kind(match["kind"]), micro, version, peer)

    @property
    def other(self) -> int | None:
        """Stage at the other end of a send or receive; None for other kinds."""
        if self.kind not in MESSAGES:
            return None
        if self.peer is not None:
            return self.peer
        return self.stage + (1 if self.kind in (Kind.SEND_F, Kind.RECV_B) else -1)


def message(stage: int, kind: Kind, micro_batch: int, other: int) -> Action:
    """A send or receive of `stage` to or from the stage `other`; named in the action only if that
    is not the neighbour."""
    usual = Action(stage, kind, micro_batch)
    return usual if usual.other == other else Action(stage, kind, micro_batch, peer=other)
