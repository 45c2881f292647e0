"""Stages run by MPI's nonblocking collectives, where workers do not share memory.

`linop.planning.collective_selection` chooses them and rewrites the plan; here is the call for each
kind, and the communicators of groups. A program has those it uses for itself while it lives: plans
may be under way at the same time, and begun in another order on another rank.
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
"""Programs of one group that may live at the same time; the next ones use messages."""

Taken = tuple[tuple[int, ...], int]
"""A group, and which of its communicators."""


class Waiting(Protocol):
    """What of a transport is needed here."""

    comm: MPI.Intracomm

    def wait(self, pending: Sequence[MPI.Request], who: Who) -> None: ...


class Groups:
    """The communicators of groups of ranks. They are made once, used by a program at a time, and
    freed with those they were made from."""

    def __init__(self, ranks: Waiting) -> None:
        self._ranks = ranks
        self._comms: dict[tuple[int, ...], list[MPI.Comm]] = {}
        self._free: dict[tuple[int, ...], int] = {}

    def take(self, group: tuple[int, ...]) -> int | None:
        """The number of a communicator that no program of any member uses; None if there are too
        many of them. Collective over the group."""
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
        """A program that used a communicator is gone."""
        if taken[0] in self._free:
            self._free[taken[0]] |= 1 << taken[1]

    def close(self) -> None:
        """Free all of them; collective, and in one order everywhere."""
        for _, comms in sorted(self._comms.items()):
            for comm in comms:
                comm.Free()
        self._comms, self._free = {}, {}


class Collectives(Messages):
    """A plan some of whose stages are run by collectives of MPI. `with_collectives` makes them."""

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
        # Some member may get nothing.
        gets = (arrivals or fixed(np.zeros(0, self.plan.dtype))).text(self.code)
        sending, pending = self._sending, self._receiving.get(stage.number, [None])
        begun = f"{name(sending)}[{len(sending)}] = {name(pending)}[0]"
        sending.append(None)
        self._receivers.append(self.plan.worker)  # not known
        self._begun.append(begun)
        begin = name(partial(_begun, _CALLS[found.kind][1](exchange)))
        self.step(f"begin the {found}", f"{begun} = {begin}({gives}, {gets})")

    def end(self) -> None:
        super().end()
        if self._begun:
            self.step("let go of what was sent", *(f"{begun} = None" for begun in self._begun))

    def _contribution(self, stage: Stage, step: Send) -> str:
        """Where all that this worker sends lies, one after the other."""
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
        # its communicator is lost. MPI may use the buffers of what has begun.
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
    """A plan over messages, and over collectives where they are chosen; collective over its
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
    """What one worker brings to one collective, and where it gets its own."""

    found: Pattern
    comm: MPI.Comm
    dtype: np.dtype[Any]
    parts: bool
    """Whether it brings anything."""
    gets: bool
    """Whether it gets anything."""
    sent: tuple[int, ...]
    """Elements for each member, and below from each, of an all-to-all."""
    received: tuple[int, ...]

    @property
    def root(self) -> int:
        return self.found.group.index(self.found.root or 0)

    def sizes(self, elements: Sequence[int]) -> list[int]:
        """Bytes of each member, in the order of the group."""
        return [many * self.dtype.itemsize for many in elements]


Begin = Callable[[Array, Array], MPI.Request]
"""Begins a collective, given what a worker brings, and where it gets its own."""


def _broadcast(x: Exchange) -> Begin:
    comm, root, gets = x.comm, x.root, x.gets
    return lambda mine, theirs: comm.Ibcast([_bytes(theirs if gets else mine), MPI.BYTE], root)


def _reduce(x: Exchange) -> Begin:
    comm, root = x.comm, x.root
    if not x.gets:
        return lambda mine, theirs: comm.Ireduce(_flat(mine), None, MPI.SUM, root)
    if not x.parts:  # the root has the sum of the others
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
    """A request that refers to the buffers that MPI reads and writes as long as it lives: those of
    some collectives of mpi4py do not."""

    buffers: tuple[Any, ...] = ()


def _begun(begin: Begin, mine: Array, theirs: Array) -> MPI.Request:
    """A collective that has begun, with its buffers."""
    request = Holding(begin(mine, theirs))
    request.buffers = begin, mine, theirs  # it may have one of its own
    return request


def _readable(array: Array) -> Array:
    """An array as MPI can add its numbers: contiguous, and aligned."""
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else array.copy()


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _flat(array: Array) -> Array:
    return array.reshape(-1)


def _give_back(groups: Groups, taken: Sequence[Taken]) -> None:
    """A program is gone, with no run under way."""
    for one in taken:
        groups.give(one)
