"""Stages of a plan as MPI's nonblocking collectives, between workers without shared memory.

`linop.planning.collective_selection` selects them and rewrites the plan; this module has the MPI
call of each kind, and the communicators of groups. Each program has communicators of its own: plans
may overlap, and start in different orders on different ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from linop.backends.execution.stage import Stage
from linop.backends.execution.views import View, copying, fixed
from linop.backends.transports.call_numbers import Calls
from linop.backends.transports.mpi_transport import keep
from linop.backends.transports.point_to_point import Messages, piece, straight
from linop.backends.transports.transport import Transport, Who
from linop.planning.collective_selection import Choice, chosen, collected
from linop.planning.patterns import Kind, Pattern
from linop.planning.plan import GROUP, Collective, Plan, Receive, Send
from linop.spaces.scalars import Array

_PLANS = 63
"""Programs with collectives per group at the same time; further ones use messages."""

Taken = tuple[tuple[int, ...], int]
"""A group of workers, and the index of one of its communicators."""


class Waiting(Protocol):
    """Interface of the transport that `Groups` uses."""

    comm: MPI.Intracomm

    def wait(self, pending: Sequence[MPI.Request], who: Who) -> None: ...


class Groups:
    """Pool of communicators by group of ranks. Each is used by one program at a time, and freed
    with the backend's communicator."""

    def __init__(self, ranks: Waiting) -> None:
        self._ranks = ranks
        self._comms: dict[tuple[int, ...], list[MPI.Comm]] = {}
        self._free: dict[tuple[int, ...], int] = {}

    def take(self, group: tuple[int, ...]) -> int | None:
        """Index of a communicator that no member's program uses; None if all `_PLANS` are in use.
        Collective over the group."""
        if group not in self._comms:
            every = self._ranks.comm.Get_group()
            members = every.Incl(list(group))
            self._comms[group] = [self._ranks.comm.Create_group(members)]
            self._free[group] = 0
            members.Free()
            every.Free()
        comms = self._comms[group]
        mine, common = np.array([self._free[group]], np.uint64), np.zeros(1, np.uint64)
        request = Holding(comms[0].Iallreduce(mine, common, MPI.BAND))
        request.buffers = mine, common
        try:
            self._ranks.wait([request], lambda: "its group to bind the same plan")
        except BaseException:
            keep(request)
            raise
        shared = int(common[0])
        if not shared:
            if len(comms) > _PLANS:
                return None
            comms.append(comms[0].Dup())
            return len(comms) - 1
        number = (shared & -shared).bit_length() - 1
        self._free[group] &= ~(1 << number)
        return number

    def comm(self, taken: Taken) -> MPI.Comm:
        return self._comms[taken[0]][taken[1]]

    def give(self, taken: Taken) -> None:
        """Return a released program's communicator to the pool."""
        if taken[0] in self._free:
            self._free[taken[0]] |= 1 << taken[1]

    def close(self) -> None:
        """Free all communicators; collective, in the same order on every rank."""
        for _, comms in sorted(self._comms.items()):
            for comm in comms:
                comm.Free()
        self._comms, self._free = {}, {}


class Collectives(Messages):
    """A plan bound to messages and to MPI collectives for some stages; built by
    `with_collectives`."""

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        tag: int,
        about: Callable[[], str],
        calls: Calls | None,
        groups: Groups,
        stages: dict[int, tuple[Pattern, int]],
        reasons: Sequence[str],
    ) -> None:
        self._reasons = reasons
        self._together = {
            stage: (found, groups.comm((found.group, number)))
            for stage, (found, number) in stages.items()
        }
        self._arrivals: dict[int, View] = {}
        self._begun: list[str] = []
        rewritten = collected(plan, {stage: one for stage, (one, _) in stages.items()})
        super().__init__(rewritten, transport, tag, about, calls)
        taken = list(dict.fromkeys((one.group, number) for one, number in stages.values()))
        self._back = weakref.finalize(self, _give_back, groups, taken)
        self._back.atexit = False

    def receives(self, stage: Stage, steps: Sequence[Receive]) -> dict[int, View]:
        if all(step.peer != GROUP for step in steps):
            return super().receives(stage, steps)
        (step,) = steps
        puts = stage.incoming(GROUP)
        at_once = straight(stage, puts, step)
        where = stage.target(puts[0]) if at_once else self.buffer(step.size)
        self._arrivals[stage.number] = where
        self._receiving[stage.number] = [None]
        return {} if at_once else {id(put): piece(where, put) for put in puts}

    def sends(self, stage: Stage, steps: Sequence[Send]) -> None:
        if all(step.peer != GROUP for step in steps):
            super().sends(stage, steps)
            return
        (step,) = steps
        assert isinstance(step, Collective)
        found, comm = self._together[stage.number]
        arrivals = self._arrivals.get(stage.number)
        exchange = Exchange(
            found,
            comm,
            self.plan.dtype,
            bool(step.parts),
            arrivals is not None,
            step.sent,
            step.received,
        )
        name, gives = self.code.name, self._contribution(stage, step)
        # This worker may receive nothing.
        gets = (arrivals or fixed(np.zeros(0, self.plan.dtype))).text(self.code)
        sending, pending = self._sending, self._receiving.get(stage.number, [None])
        begun = f"{name(sending)}[{len(sending)}] = {name(pending)}[0]"
        sending.append(None)
        self._receivers.append(self.plan.worker)  # no single receiver
        self._begun.append(begun)
        begin = name(partial(_begun, _CALLS[found.kind][1](exchange)))
        self.step(f"begin the {found}", f"{begun} = {begin}({gives}, {gets})")

    def end(self) -> None:
        super().end()
        if self._begun:
            self.step("let go of what was sent", *(f"{begun} = None" for begun in self._begun))

    def _contribution(self, stage: Stage, step: Send) -> str:
        """Expression of a contiguous array with all that this worker sends; packed first if
        necessary."""
        sources = [stage.source(part) for part in step.parts]
        if len(sources) == 1 and sources[0].contiguous:
            return f"{self.code.name(_readable)}({sources[0].text(self.code)})"
        buffer = fixed(np.zeros(step.size, self.plan.dtype))
        offset = 0
        for source in sources:
            end = offset + source.size
            part = fixed(buffer.get()[offset:end].reshape(source.shape))
            self.step("pack for the group", *copying(self.code, part, source, self.plan.dtype))
            offset = end
        return buffer.text(self.code)

    def awaited(self, stage: int) -> tuple[str, Sequence[int]]:
        if stage not in self._together:
            return super().awaited(stage)
        found = self._together[stage][0]
        others = [worker for worker in found.group if worker != self.plan.worker]
        return f"all to come to the {found}", others

    def describe(self) -> str:
        return "; ".join([super().describe(), *self._reasons])

    def abandon(self) -> None:
        # A collective cannot be cancelled; and others may have begun one that was not begun here:
        # its communicator is lost. MPI may still use the buffers of started collectives.
        for stage in self._together:
            for request in self._receiving.pop(stage, ()):
                if request:
                    keep(request)
        self._back.detach()
        super().abandon()

    def release(self) -> None:
        super().release()
        self._back()


def with_collectives(
    plan: Plan,
    transport: Transport,
    tag: int,
    about: Callable[[], str],
    calls: Calls | None,
    groups: Groups,
    choice: Choice,
) -> Messages:
    """Bind a plan to messages, and to collectives where selected; collective over the plan's
    workers."""
    stages: dict[int, tuple[Pattern, int]] = {}
    numbers: dict[tuple[int, ...], int | None] = {}
    reasons = []
    for stage, (found, use, why) in sorted(chosen(plan, choice).items()):
        if use:
            if found.group not in numbers:
                numbers[found.group] = groups.take(found.group)
            number = numbers[found.group]
            if number is None:
                use, why = False, "too many plans of this group live"
            else:
                stages[stage] = found, number
        how = f"MPI_{_CALLS[found.kind][0]}" if use else "messages"
        reasons.append(f"{found} by {how} ({why})")
    return Collectives(plan, transport, tag, about, calls, groups, stages, reasons)


@dataclass(frozen=True)
class Exchange:
    """One worker's arguments of one collective."""

    found: Pattern
    comm: MPI.Comm
    dtype: np.dtype[Any]
    parts: bool
    """True if this worker contributes elements."""
    gets: bool
    """True if this worker receives elements."""
    sent: tuple[int, ...]
    """Elements sent to each member in an all-to-all; `received` is the number from each."""
    received: tuple[int, ...]

    @property
    def root(self) -> int:
        return self.found.group.index(self.found.root or 0)

    def sizes(self, elements: Sequence[int]) -> list[int]:
        """Bytes by member, in group order."""
        return [many * self.dtype.itemsize for many in elements]


Begin = Callable[[Array, Array], MPI.Request]
"""``begin(mine, theirs)``: start a collective with this worker's contribution and its receive
buffer."""


def _broadcast(x: Exchange) -> Begin:
    comm, root, gets = x.comm, x.root, x.gets
    return lambda mine, theirs: comm.Ibcast([_bytes(theirs if gets else mine), MPI.BYTE], root)


def _reduce(x: Exchange) -> Begin:
    comm, root = x.comm, x.root
    if not x.gets:
        return lambda mine, theirs: comm.Ireduce(_flat(mine), None, MPI.SUM, root)
    if not x.parts:  # a root that contributes nothing of its own
        zeros = np.zeros(x.found.counts[0], x.dtype)
        return lambda mine, theirs: comm.Ireduce(zeros, _flat(theirs), MPI.SUM, root)
    return lambda mine, theirs: comm.Ireduce(_flat(mine), _flat(theirs), MPI.SUM, root)


def _all_reduce(x: Exchange) -> Begin:
    comm = x.comm
    return lambda mine, theirs: comm.Iallreduce(_flat(mine), _flat(theirs), MPI.SUM)


def _all_gather(x: Exchange) -> Begin:
    comm = x.comm
    sizes = x.sizes([x.found.count(w) for w in x.found.group])
    return lambda mine, theirs: comm.Iallgatherv(
        [_bytes(mine), MPI.BYTE], [_bytes(theirs), sizes, MPI.BYTE]
    )


def _reduce_scatter(x: Exchange) -> Begin:
    comm = x.comm
    counts = [x.found.count(w) for w in x.found.group]
    return lambda mine, theirs: comm.Ireduce_scatter(_flat(mine), _flat(theirs), counts, MPI.SUM)


def _all_to_all(x: Exchange) -> Begin:
    comm = x.comm
    sent, received = x.sizes(x.sent), x.sizes(x.received)
    return lambda mine, theirs: comm.Ialltoallv(
        [_bytes(mine), sent, MPI.BYTE], [_bytes(theirs), received, MPI.BYTE]
    )


_CALLS = {
    Kind.BROADCAST: ("Ibcast", _broadcast),
    Kind.REDUCE: ("Ireduce", _reduce),
    Kind.ALL_REDUCE: ("Iallreduce", _all_reduce),
    Kind.ALL_GATHER: ("Iallgatherv", _all_gather),
    Kind.REDUCE_SCATTER: ("Ireduce_scatter", _reduce_scatter),
    Kind.ALL_TO_ALL: ("Ialltoallv", _all_to_all),
}


class Holding(MPI.Request):
    """A request that keeps the buffers of MPI alive; mpi4py does not for some collectives."""

    buffers: tuple[Any, ...] = ()


def _begun(begin: Begin, mine: Array, theirs: Array) -> MPI.Request:
    """Start a collective; return its request, which keeps the buffers alive."""
    request = Holding(begin(mine, theirs))
    request.buffers = begin, mine, theirs  # `begin` may own a buffer, too
    return request


def _readable(array: Array) -> Array:
    """The array, or a copy that MPI can reduce: contiguous and aligned."""
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else array.copy()


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _flat(array: Array) -> Array:
    return array.reshape(-1)


def _give_back(groups: Groups, taken: Sequence[Taken]) -> None:
    """Finalizer of a program without an unfinished run: return its communicators."""
    for one in taken:
        groups.give(one)
