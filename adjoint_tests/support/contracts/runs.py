"""Contracts of the runs of a bound plan: those that overlap, are ahead, nested, released, and the
checks of later calls. As in `support.contracts.plans`, each is ``contract(backend, *arguments)``.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np

import linop
from linop import COPIES, Partition, TensorSpace
from linop.backends import Backend
from linop.errors import (
    ArgumentError,
    BackendError,
    DTypeError,
    LinopError,
    RegionError,
    ShapeError,
)
from support.contracts.plans import (
    LARGE,
    OPERATORS,
    SMALL,
    argument,
    collected,
    mine,
    raised,
    result,
    same,
    size,
    spread,
    total,
    works,
)


def runs_overlap(backend: Backend, seed: int) -> None:
    """Runs of different plans are started and finished in any order that all workers share, with
    calls in between: each gives its own result."""
    choice = random.Random(seed)
    names = choice.choices(list(OPERATORS), k=3)
    plans = [OPERATORS[name](size(backend)).compile(backend) for name in names]
    plans += [plan.H for plan in plans]
    running: dict[int, int] = {}
    kept: list[tuple[int, int, Any]] = []
    for step in range(20):
        k = choice.randrange(len(plans))
        if k in running:
            kept.append((k, running.pop(k), plans[k].finish()))
        elif choice.random() < 0.6:
            plans[k].start(argument(plans[k], step))
            running[k] = step
        else:
            kept.append((k, step, plans[k](argument(plans[k], step))))
    kept += [(k, step, plans[k].finish()) for k, step in running.items()]
    for k, step, y in kept:
        same(y, result(plans[k], step), (names, k, step))


def senders_may_be_ahead(backend: Backend) -> None:
    """Of those who receive late: every message is that of its call."""
    n = size(backend)
    for length in (SMALL, LARGE):
        plan = spread(n, length).compile(backend)
        works(plan)
        if mine(backend) < n - 1:
            time.sleep(0.05)
        for seed in range(4):
            same(plan(argument(plan, seed)), result(plan, seed), (length, seed))


def long_sums_may_be_ahead(backend: Backend) -> None:
    """A message that is summed in pieces, while its sender is a call ahead: 512 KiB, the longest of
    which two are under way."""
    plan = collected(size(backend), 1 << 16).compile(backend)
    x, y = argument(plan, 1), result(plan, 1)
    for k in range(50):
        same(plan(x), y, k)


def stages_keep_apart(backend: Backend) -> None:
    """A plan of two stages is under way while another of the same lengths begins and ends."""
    n = size(backend)
    first, second = (OPERATORS["total in shares"](n).compile(backend) for _ in range(2))
    for seed in range(3):
        first.start(argument(first, seed))
        second.start(argument(second, seed + 1))
        same(second.finish(), result(second, seed + 1))
        same(first.finish(), result(first, seed))


BUSY = "while an earlier run is not finished"


def one_run_at_a_time(backend: Backend) -> None:
    """A second run of a plan is refused, on this thread or on another; the first one goes on."""
    plan, other = (OPERATORS["stencil"](size(backend)).compile(backend) for _ in range(2))
    for one in (plan, plan.H, plan):
        assert "finish without a start" in raised(BackendError, one.finish)
        x = argument(one, 1)
        one.start(x)
        for call in (one, one.start):
            assert BUSY in raised(BackendError, lambda call=call, x=x: call(x))
        said: list[str] = []
        thread = threading.Thread(
            target=lambda one=one, x=x, said=said: said.append(raised(BackendError, lambda: one(x)))
        )
        thread.start()
        thread.join()
        assert len(said) == 1 and BUSY in said[0]
        works(other)
        same(one.finish(), result(one, 1))
    works(plan)


def a_plan_inside_a_plan(backend: Backend) -> None:
    """A local operator may call other plans, and not its own."""
    n = size(backend)
    space = TensorSpace((SMALL,), Partition((n,)), axes=(COPIES,))
    inner = total(n).compile(backend)
    said: list[str] = []

    def calls(x: np.ndarray) -> np.ndarray:
        said.append(raised(BackendError, lambda: plan(x)))
        once: np.ndarray = inner(x)
        return once

    locally = [linop.local(r, r, calls, calls) for r in space.regions]
    plan = (linop.all_reduce(space) @ linop.direct_sum(*locally)).compile(backend)
    for _ in range(3):
        same(plan(np.ones(SMALL)), np.full(SMALL, float(n * n)))
    assert len(said) == 3 and all(BUSY in text for text in said)


def released_plans_end(backend: Backend) -> None:
    """A plan that was given back cannot be called, nor its adjoint; its results live on."""
    n = size(backend)
    for name in ("total", "large stencil"):
        with OPERATORS[name](n).compile(backend) as plan:
            adjoint = plan.H
            kept = plan(argument(plan, 1)), adjoint(argument(adjoint, 2))
        for one in (plan, adjoint):
            x = argument(one, 1)
            for call in (one, one.start):
                raised(BackendError, lambda call=call, x=x: call(x))
        plan.release()
        works(OPERATORS[name](n).compile(backend))
        same(kept[0], result(plan, 1))
        same(kept[1], result(adjoint, 2))


def several_regions_are_checked_in_later_calls(backend: Backend) -> None:
    """A dict that does not fit fails in the fourth call as it does in the first, on every worker,
    and new data give new results."""
    shifts = [
        linop.shift(
            TensorSpace((2 * (backend.workers or 1),), Partition((backend.workers or 1,)), name=n),
            1,
        )
        for n in "xy"
    ]
    op = linop.direct_sum(*shifts)
    plan, me = op.compile(backend), backend.worker or 0
    names = [r.name for r in op.domain.on(me)]
    kept = []
    for call in range(4):
        values = op.domain.integers(call)
        result = plan({name: values[name] for name in names})
        wanted = op(values)
        assert list(result) == names
        kept.append((result, {name: wanted[name] for name in names}))
    for result, wanted in kept:
        assert all(np.array_equal(result[name], wanted[name]) for name in names)
    good = {name: np.ones(2) for name in names}
    first = names[0]
    for bad, error in [
        ({}, RegionError),
        ({first: good[first]}, RegionError),
        (good | {"z": np.ones(2)}, RegionError),
        (good | {first: np.ones(3)}, ShapeError),
        (good | {first: np.ones(2, complex)}, DTypeError),
        (np.ones(2), ArgumentError),
    ]:
        plan = op.compile(backend)
        for _ in range(3):
            plan(good)
        try:
            plan(bad)
        except (error, LinopError) as caught:
            assert isinstance(caught, error), (bad, caught)
        else:
            raise AssertionError(bad)
