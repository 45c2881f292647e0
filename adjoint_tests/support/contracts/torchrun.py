"""The backend ``torch``: SPMD programs as in `support.contracts.plans`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

import linop
from linop.backends import Backend
from linop.errors import ArgumentError, BackendError, DeadlockError
from linop.tools.samples import samples
from support.contracts.failing_calls import TROUBLES, failing
from support.contracts.mpi_operators import of_the_catalogue, three_ways
from support.contracts.plans import SMALL, mine, raised, same, size, total, works
from support.operators.properties import rounding, stays_exact

Cases = list[tuple[str, Any, int]]
"""Operators of the catalogue: factory, description, seed."""


def the_catalogue(backend: Backend, cases: Cases) -> None:
    """Operators of all kinds, each three ways."""
    for name, op in samples(size(backend)) if size(backend) % 2 == 0 else ():
        with _noted(name):
            three_ways(backend, op, 1, 0.0 if stays_exact(op) else rounding(op))
    for name, description, seed in cases:
        with _noted(f"{name}: {description}"):
            of_the_catalogue(backend, name, description, seed)


@contextmanager
def _noted(what: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(what)
        raise


# Calls that go wrong


def a_later_call_fails_everywhere(backend: Backend, trouble: str, delay: float) -> None:
    """A worker that fails in a later call tells the others, who wait for it. That closes the
    connections, which ends calls of other plans; the next compile opens them, for all plans whose
    calls did not fail.

    Args:
        delay: seconds that the others wait for it before it fails.
    """
    me, n = mine(backend), size(backend)
    for odd in (0, n - 1):
        error: list[Exception] = []
        plan = failing(n, odd, error).compile(backend)
        idle, other = (total(n).compile(backend) for _ in range(2))
        x = np.ones(SMALL)
        for _ in range(2):
            for one in (plan, plan.H, idle, other):
                one(x)
        given, (told, others) = x, TROUBLES[trouble]([], x)[1:]
        if me == odd:
            time.sleep(delay)
            given, told, others = TROUBLES[trouble](error, x)
        kind, words = told if me == odd else (others[0], f"worker {odd} in {plan.op!r}: ")
        begun = time.monotonic()
        try:
            plan(given)
        except kind as failure:
            assert words in str(failure) and others[1] in str(failure), failure
        else:
            raise AssertionError("an error expected")
        assert time.monotonic() - begun < 5 + delay
        text = raised(BackendError, lambda plan=plan, x=x: plan(x))
        assert "was interrupted: " in text and text.endswith("; compile it again"), text
        text = raised(BackendError, lambda other=other, x=x: other(x))
        assert "the connections of torch.distributed were closed" in text, text
        assert others[1] in text, text
        works(plan.op.compile(backend))
        works(idle)
        same(plan.H(x), np.full(SMALL, float(n)))
        raised(BackendError, lambda other=other, x=x: other(x))


LIMIT = 2.0


def waits_end(backend: Backend, when: str, odd: int) -> None:
    """If one worker leaves out a call, all that wait are told within the limit and seconds; then
    all can begin anew."""
    me, n = mine(backend), size(backend)
    plan = total(n).compile(backend)
    if when != "first call":
        works(plan)
    begun = time.monotonic()
    call: Callable[[], Any] = partial(plan, np.ones(SMALL))
    if when == "compile":
        call = partial(total(n).compile, backend)
    if me != odd:
        text = raised(DeadlockError, call)
        assert text.startswith("a wait took longer than 2 s: worker "), text
        assert f"worker {odd} does not wait in linop" in text, text
    else:
        time.sleep(LIMIT + 2)
        # It is told when it waits next.
        text = raised(DeadlockError, partial(total(n).compile, backend))
        assert text.startswith("a wait took longer than 2 s: worker "), text
    assert time.monotonic() - begun < LIMIT + 5
    works(total(n).compile(backend))


MISUSES: dict[str, Callable[[Backend, Any, Any], Any]] = {
    "a call is left out": lambda backend, plan, x: None,
    "the adjoint is called": lambda backend, plan, x: plan.H(x),
    "a norm is taken": lambda backend, plan, x: backend.vector(plan.domain, x).norm(),
    "another is compiled": lambda backend, plan, x: total(size(backend)).compile(backend),
}
"""Actions of the last worker while the others call a plan."""


def deadlocks_are_found(backend: Backend, misuse: str) -> None:
    """Long before the limit, with one text on all workers; then all can begin anew. Worker 0 then
    waits for the others in vain, which is the other way round."""
    me, n = mine(backend), size(backend)
    for odd in (n - 1, 0):
        plan = total(n).compile(backend)
        works(plan)
        begun, x = time.monotonic(), np.ones(SMALL)

        def wrong(plan: Any = plan, odd: int = odd, x: Any = x) -> None:
            (MISUSES[misuse] if me == odd else lambda _, plan, x: plan(x))(backend, plan, x)
            backend._meeting().gather_all(None, "meet at the end")  # type: ignore[union-attr]

        text = raised(DeadlockError, wrong)
        assert text.startswith("deadlock: worker 0 waits for "), text
        assert all(f"worker {w} waits for " in text for w in range(n)), text
        assert time.monotonic() - begun < 10
        works(total(n).compile(backend))
        said = backend._meeting().gather_all(text)  # type: ignore[union-attr]
        assert len(set(said)) == 1, said


def slow_workers_are_no_deadlock(backend: Backend, seconds: float) -> None:
    """Be they in their own code, in a local map of a plan, or before a compile."""
    me, n = mine(backend), size(backend)
    plan = total(n).compile(backend)
    works(plan)
    for odd in (0, n - 1):
        time.sleep(seconds * (me == odd))
        works(plan)
    X = plan.domain
    last = X.regions[-1]
    slow = linop.local(last, last, lambda a: (time.sleep(seconds), a)[1], lambda a: a)
    rest = linop.identity(linop.Space(X.regions[:-1]))
    op = plan.op @ linop.direct_sum(rest, slow)
    time.sleep(seconds * (me == 0))
    works(op.compile(backend))


# Backends


def groups_and_settings_are_checked(backend: Backend) -> None:
    """A group has its own backend, which is kept; what differs, or is no group, is an error on all
    workers, and other backends go on."""
    import torch.distributed as dist

    n, get = size(backend), partial(linop.backends.get, "torch")
    group, other = (dist.new_group(range(n), backend="gloo") for _ in range(2))
    text = raised(BackendError, lambda: get(group=group, debug=mine(backend) == 0))
    assert text.startswith("workers have different settings: debug="), text
    assert raised(BackendError, lambda: get(group="all")).startswith("group: expected a process g")
    raised(ArgumentError, lambda: get(group=other, wait_limit=-1))
    third = dist.new_group(range(n), backend="gloo")
    mine_too = get(group=third)
    assert mine_too is get(group=third) is not backend
    for one in (mine_too, backend):
        works(total(n).compile(one))


def forks_have_no_connections(backend: Backend) -> None:
    """A fork of a worker's process is told so, and disturbs nobody."""
    plan = total(size(backend)).compile(backend)
    works(plan)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            text = raised(BackendError, lambda: plan(np.ones(SMALL)))
            text += raised(BackendError, lambda: total(size(backend)).compile(backend))
            status = 0 if text.count("fork") == 2 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    works(plan)
