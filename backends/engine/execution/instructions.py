"""Instructions: a bound plan as data. Each instruction is a few operations, with the attributes
that a trace shows, and the test by which ``start`` knows whether it would have to wait.

The grammar: a run is instructions; the operations that move data are `Clear`, `Copy`, `Add`,
`Apply`, `Contiguous`, and what workers do together, an `Interaction`: `Post`, `Join` and
`Complete`, `Signal` and `Until`; a `For` repeats some of these. An interaction says what it does,
so that the programs of all workers can be proven together, and has the operations by which its road
does it. All else (`Call`, `Set`, `If`, `Spin`) is within an interaction, or done by a device.

Transports supply those of messages (`linop.backends.engine.roads.communication`), a device replaces
copies (`linop.backends.device`), and `linop.backends.engine.execution.emitter` turns all into text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from linop.backends.engine.execution.numbers import Condition, Field, Item, Joined, Number, Variable
from linop.backends.engine.execution.views import Buffer, View
from linop.normal_form.maps import LocalMap
from linop.planning.patterns import Pattern
from linop.spaces.scalars import Scalar

Ready = Callable[[], bool]


@dataclass(frozen=True, eq=False)
class Clear:
    """Fill the array of a region with zeros (`zeroed`). In a run that allocates its results:
    allocate it, if `allocates`."""

    buffer: Buffer
    zeroed: bool
    allocates: bool


@dataclass(frozen=True, eq=False)
class Copy:
    """Set a box to a multiple of another, or add that to it (`accumulate`).

    Attributes:
        creates: True if a run that allocates its results allocates the target here.
        keeps: name of the region that this copies onto itself: nothing is to be done if the
            region's memory is the argument's.
    """

    target: View
    source: View
    coefficient: Scalar = 1
    accumulate: bool = False
    creates: bool = False
    keeps: str | None = None


@dataclass(frozen=True, eq=False)
class Add:
    """Set a box to the sum of two others, in one pass; `creates` as of `Copy`."""

    target: View
    first: View
    second: View
    creates: bool = False


@dataclass(frozen=True, eq=False)
class Later:
    """Function without arguments that calls a function with the current values of variables."""

    function: Callable[..., Any]
    arguments: Sequence[Number] = ()


class Views(tuple[View, ...]):
    """Views that are passed as one list."""


@dataclass(frozen=True, eq=False)
class Call:
    """Call a function.

    Attributes:
        arguments: views, `Views`, numbers, `Later`, and objects bound for all runs.
        results: buffers or items that are set to the returned value; or, if `unpack`, buffers that
            are set to its items.
    """

    function: Callable[..., Any]
    arguments: Sequence[Any] = ()
    results: Sequence[Buffer | Item] = ()
    unpack: bool = False


@dataclass(frozen=True, eq=False)
class Apply:
    """Apply a local map to arrays. Its results are validated, and copied unless the map declares
    them `fresh`. A result whose buffer is the argument's overwrites it (`inside`)."""

    local: LocalMap
    sources: Sequence[View]
    results: Sequence[Buffer]

    @property
    def inside(self) -> bool:
        return [source.buffer for source in self.sources] == list(self.results)


@dataclass(frozen=True, eq=False)
class Contiguous:
    """Set a buffer to a box as a contiguous array: the box itself if it is contiguous."""

    result: Buffer
    source: View


@dataclass(frozen=True, eq=False)
class Set:
    """Set variables, fields and items to a number, or to None."""

    targets: Sequence[Variable | Field | Item]
    value: Number | int | None


@dataclass(frozen=True, eq=False)
class If:
    """Operations under a condition."""

    condition: Condition | Joined | Number
    then: Sequence[Operation]
    otherwise: Sequence[Operation] = ()


@dataclass(frozen=True, eq=False)
class For:
    """Operations for each of some tuples of values of variables."""

    variables: Sequence[Variable]
    values: Sequence[tuple[Any, ...]]
    body: Sequence[Operation]


@dataclass(frozen=True, eq=False)
class Spin:
    """Test a condition up to some number of times, and make a call if it never holds."""

    times: int
    condition: Condition | Joined
    otherwise: Call


@dataclass(frozen=True, eq=False)
class Settle:
    """Wait for copies between device and host memory."""


# What workers do together


@dataclass(frozen=True, eq=False)
class Interaction:
    """An operation of several workers; this class itself: one without data, of numbers of calls.

    Attributes:
        by: the operations by which it is done.
    """

    by: Sequence[Operation]


@dataclass(frozen=True, eq=False)
class Packet:
    """A message of a transport, or a piece of one.

    Attributes:
        peer: `linop.planning.plan.GROUP` for a part of a collective.
        where: contiguous memory that it is sent from, or received in.
        bytes: the piece: a range of the bytes of `where`; None: all.
    """

    peer: int
    incoming: bool
    where: View
    bytes: slice | None = None


@dataclass(frozen=True, eq=False)
class Post(Interaction):
    """Post receives, or begin to send. Packets between two workers arrive in the order sent. Until
    they are complete, nobody writes to their memory, and nobody reads that of a receive."""

    packets: Sequence[Packet]


@dataclass(frozen=True, eq=False)
class Complete(Interaction):
    """Wait until packets are complete."""

    packets: Sequence[Packet]


@dataclass(frozen=True, eq=False)
class Join(Interaction):
    """Begin a collective.

    Attributes:
        sends: this worker's contribution, which may be empty.
        receives: where its result comes to; None if it gets none.
        sent, received: as of `linop.planning.plan.Collective`.
    """

    found: Pattern
    sends: Packet
    receives: Packet | None
    sent: Sequence[int] = ()
    received: Sequence[int] = ()


class Sign(Enum):
    """The meaning of a signal in shared memory."""

    READY = "the receiver's memory may be written to"
    DONE = "a message is complete"
    PIECE = "a piece of a message is there"


class Flag(NamedTuple):
    """A signal of one worker for another, a number that grows from run to run.

    Attributes:
        stage: of the message; 0 for `Sign.READY`, which concerns all stages.
        turns: number of buffers that are used in turn, each with a signal of its own.
    """

    sign: Sign
    source: int
    target: int
    stage: int = 0
    turns: int = 1


@dataclass(frozen=True, eq=False)
class Signal(Interaction):
    """Give signals: those before it have been done.

    Attributes:
        ahead: runs that are signalled ahead of this one.
        piece: of `Sign.PIECE`, its number, from 1.
    """

    flags: Sequence[Flag]
    ahead: int = 0
    piece: Number | None = None


@dataclass(frozen=True, eq=False)
class Until(Interaction):
    """Wait for signals of this run; `piece` as of `Signal`."""

    flags: Sequence[Flag]
    piece: Number | None = None


Operation = (
    Clear | Copy | Add | Call | Apply | Contiguous | Set | If | For | Spin | Settle | Interaction
)


@dataclass(frozen=True, eq=False)
class Instruction:
    """A step of a run.

    Attributes:
        label: name in traces.
        about: attributes in traces: peers, bytes.
        ready: for an instruction that waits: returns True if it would not have to.
        stage: messages of later stages have not left before it.
        together: peers wait for each other in it, so `start` executes it on all of them: it waits
            for what comes before.
    """

    label: str
    operations: Sequence[Operation]
    about: Mapping[str, Any] = field(default_factory=dict)
    ready: Ready | None = None
    stage: float = math.inf
    together: bool = False


def instruction(
    label: str, *operations: Operation, ready: Ready | None = None, **about: Any
) -> Instruction:
    """An `Instruction`, with its operations and attributes as arguments."""
    return Instruction(label, operations, about, ready)
