"""Limits of what a load reads from a checkpoint, which may be made to exhaust who loads it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from linop.backends.together.settings import LOAD_BYTES, LOAD_DEPTH, LOAD_TIME
from linop.errors import BackendError
from linop.layers.state.state_tensors import StateTensor

TIMES, MORE = 64, 64 * 2**20
"""Bytes of a checkpoint by default, at most: so many times those of the model, and so many more.
The state of Adam in float64 for a model in bfloat16 takes 12 times those of the model."""
_ELEMENT = 8
"""Bytes of an element whose dtype is not known yet."""


class Limits:
    """Limits of one load on one worker.

    Args:
        wanted: bytes of the model's tensors.

    Attributes:
        depth: levels of objects within each other.
        depth_from: the setting, in words.

    Raises:
        ArgumentError: a variable of a limit is invalid.
    """

    def __init__(self, wanted: int) -> None:
        depth, most, seconds = LOAD_DEPTH.found(), LOAD_BYTES.found(), LOAD_TIME.found()
        self.depth: int = depth.checked()
        self.depth_from = depth.words
        given = most.checked()
        self._most = TIMES * wanted + MORE if given is None else given
        self._most_from = (
            f"{TIMES} times the {wanted} bytes of the model's tensors, and {MORE} more, by default"
            if given is None
            else most.words
        )
        self._read = 0
        self._until = time.monotonic() + seconds.checked()
        self._until_from = seconds.words

    def take(self, count: int, what: str) -> None:
        """Count bytes that are going to be read.

        Args:
            what: the file, for the error.

        Raises:
            BackendError: together with those before they are too many.
        """
        self._read += count
        if self._read > self._most:
            raise BackendError(
                f"{what} takes {self._read} bytes; at most {self._most} are read "
                f"({self._most_from}; set {LOAD_BYTES.variable} if the file is right)"
            )

    def check_time(self) -> None:
        """Check the time since the load began.

        Raises:
            BackendError: it is too long.
        """
        if time.monotonic() > self._until:
            raise BackendError(
                f"reading it takes too long ({self._until_from}; set {LOAD_TIME.variable})"
            )


def bytes_of(items: Iterable[StateTensor]) -> int:
    """Bytes of global tensors."""
    return sum(
        math.prod(item.shape) * (_ELEMENT if item.dtype is None else item.dtype.itemsize)
        for item in items
    )
