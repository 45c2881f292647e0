"""Backends of some of the workers: contracts for threads, ranks and torch's processes."""

from __future__ import annotations

import numpy as np
import pytest

import linop
from linop import COPIES, Partition, TensorSpace
from linop.backends.engine.base import BoundPlan
from linop.backends.engine.worker import Worker
from linop.errors import BackendError


def sums_in_parts(backend: Worker) -> None:
    """Each part sums its own, in plans of its own; parts are divided again; a division is one."""
    me, workers = backend.worker, backend.workers
    for groups in ([[0, 2], [1]], [[0], [1, 2]], [[0, 1, 2]]):
        mine = next((g for g in groups if me in g), [3])
        part = backend.part(mine)
        assert backend.part(mine) is part
        assert (part.worker, part.workers) == (mine.index(me), len(mine)) or len(mine) == workers
        plan = linop.all_reduce(copies(len(mine))).compile(part)
        for _ in range(mine[0] + 1):  # parts are not in step
            assert plan(np.full(3, float(me))).tolist() == [sum(mine)] * 3
    half = backend.part([0, 1] if me in (0, 1) else [2, 3][: workers - 2])
    alone = half.part([half.worker])
    assert alone.workers == 1
    assert linop.all_reduce(copies(1)).compile(alone)(np.full(3, 7.0)).tolist() == [7] * 3


def refuses_parts(backend: Worker) -> None:
    """Parts that overlap, and workers outside of their own, are errors on all workers."""
    me = backend.worker
    with pytest.raises(BackendError, match=r"parts without common workers expected; given"):
        backend.part([0, 1] if me == 0 else [*range(1, backend.workers)])
    with pytest.raises(BackendError, match=r"worker 1: the workers of its part in ascending order"):
        backend.part([0])
    with pytest.raises(BackendError, match=r"worker 0: the workers of its part"):
        backend.part([*range(backend.workers)][::-1])


def ends_a_failed_part(backend: Worker) -> None:
    """A worker that fails ends its part on all workers, whatever they do in it; a part of the same
    workers for the same purpose is then another one."""
    for waits in (alone_in_a_plan, alone_in_a_compilation, alone_in_a_gathering):
        mine = [0, 1] if backend.worker in (0, 1) else [*range(2, backend.workers)]
        part = backend.part(mine, "test")
        assert part is not backend and part is backend.part(mine, "test")
        plan = linop.all_reduce(copies(len(mine))).compile(part)
        plan(np.ones(3))
        # All have come out of it: an alarm may be heard before a message that was sent earlier.
        backend.transport.gather_all(None, "after the plan")
        if backend.worker == 0:
            part.fail(BackendError("it fails"))
        if backend.worker == 1:
            for _ in range(2):
                with pytest.raises(BackendError, match="it fails"):
                    waits(part, plan)
        assert (part.failure is None) == (backend.worker not in (0, 1))


def alone_in_a_plan(part: Worker, plan: BoundPlan) -> None:
    plan(np.ones(3))
    if part.failure is None:  # it may have had the message
        plan(np.ones(3))


def alone_in_a_compilation(part: Worker, plan: BoundPlan) -> None:
    (2 * linop.all_reduce(copies(part.workers))).compile(part)


def alone_in_a_gathering(part: Worker, plan: BoundPlan) -> None:
    part.transport.gather_all(1, "wait")


def copies(workers: int) -> TensorSpace:
    return TensorSpace((3,), Partition((workers,)), axes=[COPIES])
