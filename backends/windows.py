"""Programs whose workers share a machine: every transfer is one copy into the receiver's memory.

What a worker receives into lives in a window that all ranks of the machine map. A receiver says at
the start of a run that its memory is ready, and which of its arrays for results it is going to use;
a sender then writes the elements where they belong, strided to strided, and says that it is done.
What is to be summed goes to memory beside the result, and is added by the receiver in its order.

One number each says so: the run's, which only grows. Its writer is one worker, its reader one
other, and it has a cache line of its own. Stores are seen in order on x86; elsewhere the window is
synchronised before a number is written and after it is read.
"""

from __future__ import annotations

import platform
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from linop.backends.execute import Program, Stage
from linop.backends.shared import Block, Pool
from linop.backends.strided import Cell, View, copying, fixed
from linop.backends.transport import Who
from linop.plan import Plan, Receive, Send, Wait
from linop.region import Region
from linop.scalars import Array

SLOTS = 3
"""Arrays for each large result. One is always left: with all others in use, the result is copied."""
_LINE = 64
"""Bytes of a cache line."""
_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")
"""Whether stores are seen in the order in which they were made."""

Until = Callable[[Callable[[], bool], Who], None]
"""Waits until something is so; raises where it takes too long."""


@dataclass
class Place:
    """Where a sender is to write one part: at these offsets of a block (one for each array that the
    result may be in, or one only), with these strides."""

    offsets: list[int]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass
class Offer:
    """What one worker tells another before a plan's first run: where its block is, where to say
    that a stage is sent, where to say that memory is ready, and where parts are to go."""

    segment: int
    ready: int | None = None
    done: dict[int, int] = field(default_factory=dict)
    places: dict[int, list[Place]] = field(default_factory=dict)


class Windows(Program):
    """A plan over shared memory. Made in two steps, since workers have to tell each other where
    things are: `offers` says what to tell whom, `connect` takes what they said."""
