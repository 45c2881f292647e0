"""Contracts of a device under MPI alone: paths of messages, and numbers of host waits. This module
must not import MPI when it is imported."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import linop
from linop.backends import Backend
from linop.backends.device.device_arrays import DeviceArrays
from linop.backends.engine.parts_plan import PartsPlan
from linop.errors import ArgumentError
from support.contracts.plans import (
    OPERATORS,
    raised,
    size,
    total,
)
from support.device.nccl import changed
from support.device.operators import (
    columns,
    given,
)

if TYPE_CHECKING:
    from mpi4py import MPI
from support.device.running import shown, simulated_arrays


def hosts_wait_seldom(backend: Backend, arrays: DeviceArrays) -> None:
    """Under MPI: for the device, once a stage where MPI is given its memory; staged, once for each
    message that is sent, and once for the buffers of those that come; with NCCL never, but by
    polling. Never where a plan goes away: that may be at any moment, inside what would be
    interrupted by it."""
    from support.device.simulated import Counts

    for name, make in OPERATORS.items():
        plan: Any = make(size(backend)).compile(backend)
        x = given(arrays, plan, 1)
        plan(x)
        before = Counts.waits
        plan(x)
        waits = Counts.waits - before
        own = plan.plan if isinstance(plan, PartsPlan) else plan
        steps = own.plan.steps
        stages = {
            s.stage
            for s in steps
            if isinstance(s, linop.planning.plan.Send | linop.planning.plan.Receive)
        }
        receiving = {s.stage for s in steps if isinstance(s, linop.planning.plan.Receive)}
        most = len(stages) if backend.aware.yes else len(own.plan.sends) + len(receiving)  # type: ignore[attr-defined]
        assert waits <= (0 if "NCCL" in backend.way() else most), (name, waits, most)
        before = Counts.waits
        plan.release()
        del plan
        gc.collect()
        assert Counts.waits == before, name


def kernels_are_few(backend: Backend, arrays: DeviceArrays) -> None:
    """Under MPI: one for what a stage packs, one for what stays, one for what comes; and what leads
    from and to main memory alone has nothing to do with the device, unless NCCL sends it."""
    from support.device.simulated import Counts

    H = columns(size(backend))
    there = [] if "NCCL" in backend.way() else [(columns(size(backend), "host"), 0)]
    for op, most in [(H, 3), (H.H, 3), *there]:
        plan = op.compile(backend)
        x = given(arrays, plan, 1)
        plan(x)
        launches, waits = Counts.launches, Counts.waits
        plan(x)
        assert Counts.launches - launches <= most, (str(op), Counts.launches - launches)
        assert most or Counts.waits == waits, Counts.waits - waits


def ways_are_chosen_together(comm: MPI.Comm) -> None:
    """All ranks have to ask for one way; what MPI does not promise is not tried; and plans say
    so."""
    from support.device.simulated import Device

    arrays = simulated_arrays()
    for wanted, words in [
        ("staged", "pinned main memory: asked"),
        ("aware", "given the device's memory: asked for, and messages from device"),
        ("nccl", "messages over NCCL, and agreement on each exchange over MPI: NCCL 2.27.7"),
        ("auto", "says"),
    ]:
        own = comm.Dup()
        backend = linop.backends.get("cupy", comm=own, way=wanted, arrays=arrays)
        assert linop.backends.get("cupy", comm=own) is backend
        assert words in backend.way(), backend.way()
        assert len(set(comm.allgather(backend.way()))) == 1
        plan = total(comm.size).compile(backend)
        assert comm.size == 1 or backend.way() in plan.describe()
        own.Free()
    own = comm.Dup()
    with changed(Device, "shared", True):
        said = linop.backends.get("cupy", comm=own, arrays=arrays).way()
    why = "says" if comm.size == 1 else f"workers {[*range(comm.size)]} share a GPU"
    assert "pinned main memory" in said and why in said, said
    own.Free()
    own = comm.Dup()
    odd = "best" if comm.rank == 0 else "auto"
    text = raised(
        ArgumentError, lambda: linop.backends.get("cupy", comm=own, way=odd, arrays=arrays)
    )
    assert "way: expected auto, aware, staged or nccl, given 'best'" in text
    if comm.size > 1:
        odd = "aware" if comm.rank == 0 else "staged"
        text = raised(
            linop.errors.BackendError,
            lambda: linop.backends.get("cupy", comm=own, way=odd, arrays=arrays),
        )
        assert "different settings: way='aware' on worker 0 and way='staged' on" in text
    with shown(arrays, to_mpi=False):
        text = raised(
            linop.errors.BackendError,
            lambda: linop.backends.get("cupy", comm=own, way="aware", arrays=arrays),
        )
        assert "use way='staged'" in text, text
    own.Free()


def missing_gpus_are_told(comm: MPI.Comm) -> None:
    """A missing GPU, or GPU number, of one rank is an error of every rank, with its remedy."""
    arrays = simulated_arrays()
    own = comm.Dup()
    from support.requirements import missing_gpu  # pytest, which ranks seldom need

    if missing_gpu():
        mine = arrays if comm.rank else None
        try:
            linop.backends.get("cupy", comm=own, arrays=mine)
        except (linop.errors.BackendError, linop.errors.MissingExtraError) as error:
            assert "worker 0: " in str(error), error
            assert "linop-algebra[cupy]" in str(error) or "finds no GPU" in str(error), error
        else:
            raise AssertionError("an error expected")
    text = raised(
        linop.errors.BackendError,
        lambda: (
            linop.backends.get("cupy", comm=own, device=7 * comm.rank, arrays=arrays)
            if comm.size > 1
            else linop.backends.get("cupy", comm=own, device=7, arrays=arrays)
        ),
    )
    assert "wanted; there are 1" in text, text
    own.Free()
