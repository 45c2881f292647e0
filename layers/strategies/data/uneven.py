"""Steps of data parallel workers of which some have no batch: these take part in whatever the
others do, in the order in which they do it, until gradients are summed.

In such a step each collective call begins with a sum of 16 bytes that says what it is; where all
have a batch, nothing is added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from linop.backends import Backend
from linop.layers.agreement.input_agreement import agreement_of

FORWARD = "call linop.strategies.DataParallel"
SHARE = "call linop.strategies.DataParallel.share"
SUM = "sum gradients of linop.strategies.DataParallel"
TOTAL = "call linop.strategies.DataParallel.total"
CHECK = "call linop.strategies.DataParallel.check"
_FOLLOWED = FORWARD, SHARE, SUM
_FOLLOW = "call linop.strategies.DataParallel.without_batch"


class UnevenSteps:
    """Calls of workers with a batch, for those without. One object for each net.

    Attributes:
        open: True in a step in which some worker has no batch.
        without: True if that is this worker.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.open = self.without = False
        self._follows = False

    def begin(self, there: int, has: bool) -> None:
        """Begin a step.

        Args:
            there: number of workers with a batch; all, or none, if the steps are over.
            has: True if this worker has one.
        """
        self.open = 0 < there < (self._backend.workers or 1)
        self.without = self.open and not has

    def meet(self, doing: str, always: bool = False) -> None:
        """Say what this worker does, before its first message. Collective in such a step, where
        each other worker does the same, or follows.

        Args:
            always: in steps in which all have a batch, too.

        Raises:
            BackendError: they do not; on every worker.
        """
        if self._follows:
            return
        if self.open:
            agreement_of(self._backend).joint(doing, _FOLLOWED, doing)
        elif always:
            agreement_of(self._backend).sum(0, doing)

    @contextmanager
    def following(self) -> Iterator[Iterator[str]]:
        """Context of what workers with a batch do: an iterator over their calls, which ends before
        that in which gradients are summed, or if there is none with a batch. Collective."""
        self._follows = True
        try:
            yield self._calls()
        finally:
            self._follows = False

    def _calls(self) -> Iterator[str]:
        agreement = agreement_of(self._backend)
        while (call := agreement.joint(None, _FOLLOWED, _FOLLOW)) not in (None, SUM):
            yield call


def number_of(rows: Any) -> float:
    """A user's number; NaN of what is none."""
    try:
        return math.nan if isinstance(rows, bool | str) else float(rows)
    except Exception:  # of whatever the user gives
        return math.nan
