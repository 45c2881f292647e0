"""Instructions: a bound plan as data. Each instruction is a few operations, with the attributes
that a trace shows, and the test by which ``start`` knows whether it would have to wait.

Transports supply those of messages (`linop.backends.engine.roads.communication`), a device replaces
copies (`linop.backends.device`), and `linop.backends.engine.execution.emitter` turns all into text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from linop.backends.engine.execution.numbers import Condition, Field, Item, Joined, Number, Variable
from linop.backends.engine.execution.views import Buffer, View
from linop.normal_form.maps import LocalMap
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
    them `fresh`."""

    local: LocalMap
    sources: Sequence[View]
    results: Sequence[Buffer]


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


Operation = Clear | Copy | Add | Call | Apply | Contiguous | Set | If | For | Spin | Settle


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
