"""Contracts of messages over NCCL alone: calls that go wrong end in errors, on every rank, and the
communicator is opened anew. This module must not import MPI when it is imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import linop
from linop.backends import Backend, BoundPlan
from linop.backends.device.device_arrays import DeviceArrays
from linop.backends.device.host_transfer import Crossing
from linop.errors import BackendError, DeadlockError, LinopError, MissingExtraError
from support.contracts.mpi import other_communicators
from support.contracts.plans import SMALL, mine, raised, result, size, total
from support.device.operators import PLACED, given, same
from support.device.running import shown, simulated_arrays

if TYPE_CHECKING:
    from mpi4py import MPI


def works(arrays: DeviceArrays, plan: BoundPlan) -> None:
    for one in (plan, plan.H):
        for seed in range(3):
            same(arrays, one(given(arrays, one, seed)), result(one, seed))


def failing(workers: int, calls: list[str]) -> linop.LinearOperator:
    """Sums over all workers, before and after a local map that raises what is in the list, on the
    last worker."""
    X = linop.TensorSpace((SMALL,), linop.Partition((workers,)), axes=(linop.COPIES,))

    def may_fail(x: Any) -> Any:
        if calls:
            raise ValueError(calls.pop())
        return x * 2

    last = dict.fromkeys(X.regions[-1:], may_fail)
    maps = [last.get(region, lambda x: x * 2) for region in X.regions]
    local = [linop.local(r, r, one, one) for r, one in zip(X.regions, maps, strict=True)]
    return linop.all_reduce(X) @ linop.direct_sum(*local) @ linop.all_reduce(X)


def a_failure_is_heard_and_mended(backend: Backend, arrays: DeviceArrays) -> None:
    """If a local map fails between two exchanges, all hear of it; other plans say why they
    cannot be called; and once all have compiled a plan, everything works."""
    calls: list[str] = []
    other, plan = (
        op.compile(backend) for op in (total(size(backend)), failing(size(backend), calls))
    )
    for trial in range(3):
        works(arrays, other)
        works(arrays, plan)
        if mine(backend) == size(backend) - 1:
            calls.append("too hot")
        x = given(arrays, plan, 1)
        try:
            plan(x)
        except (ValueError, LinopError) as error:
            assert "too hot" in str(error), error
        else:
            raise AssertionError("an error expected")
        if trial % 2 and size(backend) > 1:
            y = given(arrays, other, 1)
            text = raised(BackendError, partial(other, y))
            assert "compile a plan on all workers" in text or "was interrupted" in text, text
            other = total(size(backend)).compile(backend)
        plan = failing(size(backend), calls).compile(backend)


def missing_calls_end(backend: Backend, arrays: DeviceArrays) -> None:
    """A call that one worker leaves out, or one of another plan, is an error on all; no message of
    one plan is taken for another's."""
    n, me = size(backend), mine(backend)
    for odd in (0, n - 1):
        plans = [total(n).compile(backend) for _ in range(2)]
        for plan in plans:
            works(arrays, plan)
        called = plans[me == odd]
        text = raised(DeadlockError, partial(called, given(arrays, called, 1)))
        assert f"worker {odd}" in text and "in stage 0 of plan" in text, text
        plan = total(n).compile(backend)
        works(arrays, plan)
        x = given(arrays, plan, 1)
        left_out = partial(total(n).compile, backend)  # which all do together
        text = raised(DeadlockError, left_out if me == odd else partial(plan, x))
        assert f"worker {odd} in stage 0 of plan" in text and "to compile" in text, text
    works(arrays, total(n).compile(backend))


@contextmanager
def changed(thing: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(thing, name)
    setattr(thing, name, value)
    try:
        yield
    finally:
        setattr(thing, name, before)


def errors_of_nccl_are_told(backend: Backend, arrays: DeviceArrays) -> None:
    """An error that NCCL reports on one rank ends the calls of all."""
    from support.device.simulated_nccl import NcclCommunicator

    n, me = size(backend), mine(backend)
    plan = failing(n, []).compile(backend)
    works(arrays, plan)
    fault = "a cable was cut" if me == n - 1 else ""
    x = given(arrays, plan, 1)
    with changed(NcclCommunicator, "fault", fault):
        text = raised(BackendError, partial(plan, x))
    assert "a cable was cut" in text, text
    works(arrays, total(n).compile(backend))


def ranks_without_nccl_are_told(comm: MPI.Comm) -> None:
    """Before anything is opened, on every rank."""
    from support.device.simulated import Device, cuda

    arrays = simulated_arrays()
    get = partial(linop.backends.get, "cupy", way="nccl", wait_limit=10, arrays=arrays)
    own = comm.Dup()
    if comm.size > 1:
        with changed(Device, "shared", True):
            text = raised(BackendError, lambda: get(comm=own))
        assert f"workers {[*range(comm.size)]} share the GPU 0000:00:00.0" in text, text
        assert "way='staged'" in text, text
    odd = comm.rank == comm.size - 1
    with changed(cuda.nccl, "available", not odd):
        text = raised(MissingExtraError, lambda: get(comm=own))
    assert f"worker {comm.size - 1}: way 'nccl': CuPy finds no NCCL: pip install" in text, text
    backend = get(comm=own)
    with shown(arrays, to_mpi=False):
        works(arrays, total(comm.size).compile(backend))
    own.Free()


def ranks_that_fail_to_open_are_told(comm: MPI.Comm) -> None:
    """Others do not wait for them for ever, and what they sent reaches no later communicator."""
    from support.device import simulated_nccl

    arrays = simulated_arrays()
    own = comm.Dup()

    def nobody(*given: Any) -> None:
        raise simulated_nccl.NcclError("NCCL_ERROR_SYSTEM_ERROR: no socket")

    which = nobody if comm.rank == comm.size - 1 else simulated_nccl.NcclCommunicator
    with changed(simulated_nccl, "NcclCommunicator", which):
        text = raised(
            BackendError if comm.size == 1 else DeadlockError,
            lambda: linop.backends.get("cupy", comm=own, way="nccl", wait_limit=3, arrays=arrays),
        )
    assert "no socket" in text or "open NCCL" in text, text
    other_communicators(comm)


def slow_copies_do_not_keep_a_start_back(backend: Backend, arrays: DeviceArrays) -> None:
    """`start` queues its messages on every rank, though copies from host memory are not over on one
    of them: else the others would wait for it in `start`, and it for them in its next call."""
    over = Crossing.over
    if mine(backend) == 0:
        Crossing.over = lambda crossing: False  # type: ignore[method-assign]
    try:
        plan = PLACED["beside"](size(backend)).compile(backend)
        then = total(size(backend)).compile(backend)
        for first in (plan, plan.H):
            first.start(given(arrays, first, 1))
            same(arrays, then(given(arrays, then, 1)), result(then, 1))
            same(arrays, first.finish(), result(first, 1))
    finally:
        Crossing.over = over  # type: ignore[method-assign]
