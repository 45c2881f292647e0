"""Stages run by MPI's nonblocking collectives, where workers do not share memory.

`linop.backends.together` chooses them and rewrites the plan; here is the call for each kind, and
the communicators of groups. A program has those it uses for itself while it lives: plans may be
under way at the same time, and begun in another order on another rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from linop.backends.execute import Stage
from linop.backends.messages import Messages, piece, straight
from linop.backends.strided import View, copying, fixed
from linop.backends.together import GROUP, Choice, chosen, collected
from linop.backends.transport import Transport, Who
from linop.patterns import Kind, Pattern
from linop.plan import Plan, Receive, Send
from linop.scalars import Array

_PLANS = 63
"""Programs of one group that may live at the same time; the next ones use messages."""

Get = Callable[[], Array]
Taken = tuple[tuple[int, ...], int]
"""A group, and which of its communicators."""


class Waiting(Protocol):
    """What of a transport is needed here."""

    comm: MPI.Comm

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
        request = comms[0].Iallreduce(mine, common, MPI.BAND)
        self._ranks.wait([request], lambda: "its group to bind the same plan")
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
    """A plan some of whose stages are run by collectives of MPI. `collectives` makes them."""

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        tag: int,
        groups: Groups,
        stages: dict[int, tuple[Pattern, int]],
        reasons: Sequence[str],
    ) -> None:
        self._reasons = reasons
        self._together = {
            stage: (found, groups.comm((found.group, number)))
            for stage, (found, number) in stages.items()
        }
        self._arrivals: dict[int, Get] = {}
        super().__init__(
            collected(plan, {stage: one for stage, (one, _) in stages.items()}), transport, tag
        )
        taken = list(dict.fromkeys((one.group, number) for one, number in stages.values()))
        self._back = weakref.finalize(self, _give_back, groups, taken, self._sending)
        self._back.atexit = False

    def receive(self, stage: Stage, step: Receive) -> dict[int, View]:
        if step.peer != GROUP:
            return super().receive(stage, step)
        puts = stage.incoming(GROUP)
        at_once = len(puts) == 1 and straight(stage.target(puts[0]), puts[0], step.size)
        where = stage.target(puts[0]) if at_once else self._buffer(step.size)
        self._arrivals[stage.number] = where.getter
        self._receiving[stage.number] = [None]
        self._peers[stage.number] = [GROUP]
        return {} if at_once else {id(put): piece(where, put) for put in puts}

    def send(self, stage: Stage, step: Send) -> None:
        if step.peer != GROUP:
            super().send(stage, step)
            return
        found, comm = self._together[stage.number]
        gives = self._contribution(stage, step)
        begin = _CALLS[found.kind](found, comm, self.plan, step, gives, self._arrivals.get(stage.number))
        sending, pending = self._sending, self._receiving.get(stage.number, [None])
        k = len(sending)
        sending.append(None)

        def launch() -> None:
            sending[k] = pending[0] = begin()

        self.step(f"begin the {found}", launch)

    def _contribution(self, stage: Stage, step: Send) -> Get:
        """Where all that this worker sends lies, one after the other."""
        sources = [stage.source(part) for part in step.parts]
        if len(sources) == 1 and sources[0].contiguous:
            get = sources[0].getter
            return lambda: np.ascontiguousarray(get())
        buffer = fixed(np.zeros(step.size, self.plan.dtype))
        offset = 0
        for source in sources:
            end = offset + source.size
            part = fixed(buffer.get()[offset:end].reshape(source.shape))
            self.step("pack for the group", copying(part, source, self.plan.dtype))
            offset = end
        return buffer.getter

    def late(self, peer: int) -> str:
        return "its group" if peer == GROUP else super().late(peer)

    def describe(self) -> str:
        return "; ".join([super().describe(), *self._reasons])

    def release(self) -> None:
        super().release()
        self._back()


def collectives(
    plan: Plan, transport: Transport, tag: int, groups: Groups, choice: Choice
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
        how = f"MPI_{_NAMES[found.kind]}" if use else "messages"
        reasons.append(f"{found} by {how} ({why})")
    return Collectives(plan, transport, tag, groups, stages, reasons)


Begin = Callable[[], MPI.Request]


def _broadcast(
    found: Pattern, comm: MPI.Comm, plan: Plan, step: Send, gives: Get, gets: Get | None
) -> Begin:
    root = found.group.index(found.root or 0)
    get = gives if gets is None else gets
    return lambda: comm.Ibcast([_bytes(get()), MPI.BYTE], root)


def _reduce(
    found: Pattern, comm: MPI.Comm, plan: Plan, step: Send, gives: Get, gets: Get | None
) -> Begin:
    root = found.group.index(found.root or 0)
    if gets is None:
        return lambda: comm.Ireduce(_flat(gives()), None, MPI.SUM, root)
    if not step.parts:  # the others' sum alone
        zeros = np.zeros(found.counts[0], plan.dtype)
        return lambda: comm.Ireduce(zeros, _flat(gets()), MPI.SUM, root)
    return lambda: comm.Ireduce(_flat(gives()), _flat(gets()), MPI.SUM, root)


def _all_reduce(
    found: Pattern, comm: MPI.Comm, plan: Plan, step: Send, gives: Get, gets: Get | None
) -> Begin:
    assert gets is not None
    return lambda: comm.Iallreduce(_flat(gives()), _flat(gets()), MPI.SUM)


def _all_gather(
    found: Pattern, comm: MPI.Comm, plan: Plan, step: Send, gives: Get, gets: Get | None
) -> Begin:
    assert gets is not None
    sizes = [found.count(w) * plan.dtype.itemsize for w in found.group]
    return lambda: comm.Iallgatherv([_bytes(gives()), MPI.BYTE], [_bytes(gets()), sizes, MPI.BYTE])


def _reduce_scatter(
    found: Pattern, comm: MPI.Comm, plan: Plan, step: Send, gives: Get, gets: Get | None
) -> Begin:
    counts = [found.count(w) for w in found.group]
    get = gets or fixed(np.zeros(0, plan.dtype)).getter
    return lambda: comm.Ireduce_scatter(_flat(gives()), _flat(get()), counts, MPI.SUM)


_CALLS = {
    Kind.BROADCAST: _broadcast,
    Kind.REDUCE: _reduce,
    Kind.ALL_REDUCE: _all_reduce,
    Kind.ALL_GATHER: _all_gather,
    Kind.REDUCE_SCATTER: _reduce_scatter,
}
_NAMES = {
    Kind.BROADCAST: "Ibcast",
    Kind.REDUCE: "Ireduce",
    Kind.ALL_REDUCE: "Iallreduce",
    Kind.ALL_GATHER: "Iallgatherv",
    Kind.REDUCE_SCATTER: "Ireduce_scatter",
}


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _flat(array: Array) -> Array:
    return array.reshape(-1)


def _give_back(groups: Groups, taken: Sequence[Taken], requests: Sequence[MPI.Request]) -> None:
    """A program is gone. If a run of it was interrupted, MPI may still write to its memory."""
    if MPI.Is_finalized():
        return
    left = [r for r in requests if r is not None and not r.Test()]
    _LOST.extend(left)
    if not left:
        for one in taken:
            groups.give(one)


_LOST: list[MPI.Request] = []
"""Requests that nobody is going to complete; they keep their buffers."""
