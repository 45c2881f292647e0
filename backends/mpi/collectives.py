"""Stages of a plan as MPI's nonblocking collectives, between workers without shared memory.

`linop.planning.collective_selection` selects them and rewrites the plan; this module has the MPI
call of each kind, and the communicators of groups. Each program has communicators of its own: plans
may overlap, and start in different orders on different ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from linop.backends.engine.execution.instructions import (
    Call,
    Copy,
    Instruction,
    Interaction,
    Join,
    Packet,
    Set,
    instruction,
)
from linop.backends.engine.execution.layout import Layout
from linop.backends.engine.execution.numbers import Item
from linop.backends.engine.execution.stage import Stage
from linop.backends.engine.execution.views import View, cut, fixed
from linop.backends.engine.roads.call_numbers import Calls
from linop.backends.engine.roads.communication import Communication, Instructions
from linop.backends.engine.roads.packing import is_straight, piece
from linop.backends.engine.roads.point_to_point import Pending, PointToPoint, coming
from linop.backends.mpi.transport import keep
from linop.backends.together.transport import Awaited, Transport, Who
from linop.planning.collective_selection import Choice, chosen
from linop.planning.patterns import Kind, Pattern
from linop.planning.plan import GROUP, Collective, LoweredPlan, Send
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


class Collectives(Communication):
    """Messages of a bound plan some of whose stages are MPI collectives; the others are
    point-to-point messages.

    Args:
        stages: pattern, and index of the communicator of its group, of each stage that is a
            collective in the layout's plan.
        reasons: the choice for each pattern, in words.
    """

    def __init__(
        self,
        layout: Layout,
        transport: Transport,
        tag: int,
        about: Callable[[], str],
        calls: Calls | None,
        groups: Groups,
        stages: Mapping[int, tuple[Pattern, int]],
        reasons: Sequence[str],
    ) -> None:
        self.layout = layout
        self._about = about
        self._reasons = reasons
        self._together = {
            stage: (found, groups.comm((found.group, number)))
            for stage, (found, number) in stages.items()
        }
        self._single = PointToPoint(layout, transport, tag, about, calls, self._together)
        self._arrivals: dict[int, tuple[Packet, Item]] = {}
        self._begun: list[list[Item]] = []
        self.inbox = [
            self._inbox(stage) if stage.number in self._together else inbox
            for stage, inbox in zip(layout.stages, self._single.inbox, strict=True)
        ]
        taken = list(dict.fromkeys((one.group, number) for one, number in stages.values()))
        self._back = weakref.finalize(self, _give_back, groups, taken)
        self._back.atexit = False

    def _inbox(self, stage: Stage) -> dict[int, View]:
        if not stage.receives:
            return {}
        (step,) = stage.receives
        puts = stage.incoming(GROUP)
        at_once = is_straight(stage, puts, step)
        where = stage.target(puts[0]) if at_once else self._buffer(step.size)
        packet = Packet(GROUP, True, where)
        self._arrivals[stage.number] = (
            packet,
            self._single.requests.coming[stage.number].add(packet),
        )
        return {} if at_once else {id(put): piece(where, put) for put in puts}

    def _buffer(self, size: int) -> View:
        return fixed(np.zeros(size, self.layout.dtype))

    def begin(self) -> Instructions:
        return self._single.begin()

    def sends(self, stage: Stage) -> Instructions:
        if stage.number not in self._together:
            yield from self._single.sends(stage)
            return
        (step,) = stage.sends
        assert isinstance(step, Collective)
        found, comm = self._together[stage.number]
        comes, request = self._arrivals.get(stage.number, (None, None))
        ends = bool(step.parts), comes is not None
        exchange = Arguments(found, comm, self.layout.dtype, *ends, step.sent, step.received)
        packed, mine = self._contribution(stage, step)
        yield from packed
        theirs = self._buffer(0) if comes is None else comes.where
        goes = Packet(GROUP, False, mine)
        to = [self._single.requests.leaving.add(goes), *([] if request is None else [request])]
        self._begun.append(to)
        begin = Call(partial(_begun, _CALLS[found.kind][1](exchange)), [mine, theirs], to)
        join = Join([begin], found, goes, comes, step.sent, step.received)
        yield instruction(f"begin the {found}", join)

    def wait(self, stage: Stage) -> Instructions:
        if stage.number in self._together:
            yield self._single.requests.wait(stage, lambda: self._awaited(stage.number))
        else:
            yield from self._single.wait(stage)

    def _awaited(self, stage: int) -> Awaited:
        found = self._together[stage][0]
        others = [worker for worker in found.group if worker != self.layout.plan.worker]
        return coming(f"all to come to the {found}", others, stage, self._about)

    def end(self) -> Instructions:
        yield from self._single.end()
        if self._begun:
            gone = Interaction([Set(to, None) for to in self._begun])
            yield instruction("let go of what was sent", gone)

    def _contribution(self, stage: Stage, step: Send) -> tuple[list[Instruction], View]:
        """(instructions that pack it, the array) of all that this worker sends."""
        sources = [stage.source(part) for part in step.parts]
        if len(sources) == 1 and sources[0].contiguous:
            return [], sources[0]
        buffer, offset, made = self._buffer(step.size), 0, list[Instruction]()
        for source in sources:
            copy = Copy(cut(buffer, offset, source.shape), source)
            made.append(instruction("pack for the group", copy))
            offset += source.size
        return made, buffer

    def describe(self) -> str:
        return "; ".join([self._single.describe(), *self._reasons])

    def abandon(self) -> None:
        # A collective cannot be cancelled; and others may have begun one that was not begun here:
        # its communicator is lost. MPI may still use the buffers of started collectives.
        for stage in self._together:
            if stage in self._arrivals:
                self._keep(self._single.requests.coming.pop(stage))
        self._back.detach()
        self._single.abandon()

    @staticmethod
    def _keep(begun: Pending) -> None:
        for request in begun.requests:
            if request:
                keep(request)

    def release(self) -> None:
        self._single.release()
        self._back()


def taken_stages(
    plan: LoweredPlan, groups: Groups, choice: Choice
) -> tuple[dict[int, tuple[Pattern, int]], list[str]]:
    """The stages of a plan that run as collectives: pattern, and index of the group's communicator,
    by stage; and the choice for each pattern, in words. Collective over the plan's workers."""
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
    return stages, reasons


@dataclass(frozen=True)
class Arguments:
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


def _broadcast(x: Arguments) -> Begin:
    comm, root, gets = x.comm, x.root, x.gets
    return lambda mine, theirs: comm.Ibcast([_bytes(theirs if gets else mine), MPI.BYTE], root)


def _reduce(x: Arguments) -> Begin:
    comm, root = x.comm, x.root
    if not x.gets:
        return lambda mine, theirs: comm.Ireduce(_flat(mine), None, MPI.SUM, root)
    if not x.parts:  # a root that contributes nothing of its own
        zeros = np.zeros(x.found.counts[0], x.dtype)
        return lambda mine, theirs: comm.Ireduce(zeros, _flat(theirs), MPI.SUM, root)
    return lambda mine, theirs: comm.Ireduce(_flat(mine), _flat(theirs), MPI.SUM, root)


def _all_reduce(x: Arguments) -> Begin:
    comm = x.comm
    return lambda mine, theirs: comm.Iallreduce(_flat(mine), _flat(theirs), MPI.SUM)


def _all_gather(x: Arguments) -> Begin:
    comm = x.comm
    sizes = x.sizes([x.found.count(w) for w in x.found.group])
    return lambda mine, theirs: comm.Iallgatherv(
        [_bytes(mine), MPI.BYTE], [_bytes(theirs), sizes, MPI.BYTE]
    )


def _reduce_scatter(x: Arguments) -> Begin:
    comm = x.comm
    counts = [x.found.count(w) for w in x.found.group]
    return lambda mine, theirs: comm.Ireduce_scatter(_flat(mine), _flat(theirs), counts, MPI.SUM)


def _all_to_all(x: Arguments) -> Begin:
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
    mine = _readable(mine)
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
