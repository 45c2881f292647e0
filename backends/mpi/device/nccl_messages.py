"""Messages between devices over NCCL, as instructions: one exchange a stage.

All messages of a worker in a stage are one group of NCCL's, which matches messages by their order.
So before a worker queues an exchange, each of its peers confirms by a message of MPI, with the
plan's tag, that it queues the same one, in the call of the same number. A worker that makes another
call, or none, is found there, before anything is queued.

Workers share the order of calls, `start` and `finish`, but `start` goes as far as it can without
waiting, which differs between workers. So it queues the exchange of stage 0 only.

All messages lie in device memory; those from and to host regions are copied there. The host waits
in each stage for the messages that come, and at the end for those that leave.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from linop.backends.engine.execution.instructions import Call, Views, instruction
from linop.backends.engine.execution.layout import Layout
from linop.backends.engine.execution.stage import Stage
from linop.backends.engine.execution.views import View
from linop.backends.engine.roads.call_numbers import (
    CALL,
    Calls,
    Numbers,
    check_step,
    never,
)
from linop.backends.engine.roads.communication import Communication, Instructions
from linop.backends.engine.roads.packing import Packing
from linop.backends.mpi.device.nccl import Nccl, Queued
from linop.backends.mpi.transport import Ranks
from linop.backends.together.transport import Awaited, peers_named
from linop.planning.plan import Receive
from linop.spaces.scalars import Array

_QUEUED = 0.5
"""Progress in a stage (`Awaited.at`) after its exchange is queued, beyond its confirmation."""


class NcclMessages(Communication):
    """Messages of a bound plan over NCCL.

    Args:
        about: gives the plan's name for messages to users.
        calls: call counter of all plans of the same workers.
    """

    def __init__(
        self,
        layout: Layout,
        transport: Ranks,
        tag: int,
        about: Callable[[], str],
        nccl: Nccl,
        calls: Calls | None,
    ) -> None:
        self.layout = layout
        self._ranks = transport
        self._tag = tag
        self._about = about
        self._nccl = nccl
        self._calls = calls
        numbers = Numbers(layout.messages, layout.dtype, None, never, about)  # they are in none
        self._packing = Packing(layout, numbers, in_host_memory=False)
        self._leaving: dict[int, list[tuple[int, View]]] = {}
        self._coming: dict[int, list[tuple[Receive, View]]] = {}
        self._queued: dict[int, Queued] = {}
        layout.place(layout.zeros, small_stay=True)
        self.inbox = [self._inbox(stage) for stage in layout.stages]
        self._confirmations = {s.number: self._confirmation(s) for s in layout.stages}

    def _inbox(self, stage: Stage) -> dict[int, View]:
        self._coming[stage.number], inbox = self._packing.arriving(stage)
        return inbox

    def _confirmation(self, stage: Stage) -> Confirmation:
        peers = [send.peer for send in stage.sends]
        peers += [receive.peer for receive in stage.receives if receive.peer not in peers]
        return Confirmation(self._ranks, self._tag, peers)

    def begin(self) -> Instructions:
        if self._calls is not None:
            yield instruction("count the call", *self._calls.counting())

    def sends(self, stage: Stage) -> Instructions:
        made, packed = self._packing.packed(stage, stage.sends)
        yield from made
        self._leaving[stage.number] = [(step.peer, view) for step, view in packed]

    def depart(self, stage: Stage) -> Instructions:
        number = stage.number
        leaving, coming = self._leaving[number], self._coming[number]
        confirmation = self._confirmations[number]
        if not confirmation.peers:
            return
        receivers = [peer for peer, _ in leaving]
        senders = [step.peer for step, _ in coming]

        def exchange(call: int, sent: Sequence[Array], received: Sequence[Array]) -> None:
            with self._nccl.turn:
                self._confirm(number, call)
                self._queued[number] = self._nccl.exchange(
                    list(zip(receivers, sent, strict=True)),
                    list(zip(senders, received, strict=True)),
                    lambda: self._awaited(number),
                )

        views = Views(view for _, view in leaving), Views(view for _, view in coming)
        step = instruction(
            f"exchange with {peers_named(confirmation.peers)}",
            Call(exchange, [CALL, *views]),
            ready=None if number == 0 else lambda: False,
            peers=confirmation.peers,
            bytes=sum(self.layout.bytes_of(view.size) for _, view in leaving),
        )
        yield replace(step, together=number == 0)

    def _confirm(self, stage: int, call: int) -> None:
        """Wait until all peers of a stage are about to queue its exchange, in the same call."""
        confirmation = self._confirmations[stage]

        def who() -> Awaited:
            late = confirmation.late()
            words = f"{peers_named(late)} in stage {stage} of {self._about()}"
            return Awaited(words, late, stage)

        confirmation.mine[0] = call
        confirmation.start()
        self._ranks.wait(confirmation.requests, who)
        for peer, theirs in zip(confirmation.peers, confirmation.theirs, strict=True):
            check_step(peer, int(theirs[0]), call, self._about)

    def _awaited(self, stage: int, at: float | None = None) -> Awaited:
        """Description of the wait for an exchange."""
        peers, queued = self._confirmations[stage].peers, stage + _QUEUED
        words = f"messages of {peers_named(peers)} over NCCL in stage {stage} of {self._about()}"
        return Awaited(words, peers, queued if at is None else at, needs=queued)

    def wait(self, stage: Stage) -> Instructions:
        coming = self._coming[stage.number]

        def wait() -> None:
            queued = self._queued.pop(stage.number)
            self._nccl.wait(queued, lambda: self._awaited(stage.number))

        yield instruction(
            str(stage.waits),
            Call(wait),
            ready=lambda: self._queued[stage.number].event.done,
            peers=[step.peer for step, _ in coming],
            bytes=sum(self.layout.bytes_of(step.size) for step, _ in coming),
        )

    def end(self) -> Instructions:
        if any(stage.sends for stage in self.layout.stages):
            yield instruction("wait until all is sent", Call(self._sent), ready=self._are_over)

    def _sent(self) -> None:
        while self._queued:
            stage, queued = self._queued.popitem()
            self._nccl.wait(queued, partial(self._awaited, stage, math.inf))

    def _are_over(self) -> bool:
        return all(queued.event.done for queued in self._queued.values())

    def describe(self) -> str:
        return WAY

    def release(self) -> None:
        for confirmation in self._confirmations.values():
            confirmation.release()

    def abandon(self) -> None:
        self._nccl.close(f"a call of {self._about()} was interrupted")
        for confirmation in self._confirmations.values():
            confirmation.abandon()


class Confirmation:
    """Messages of MPI by which a worker and the peers of an exchange tell each other that they are
    about to queue it.

    Attributes:
        mine: number of this worker's call; `theirs`: those of the peers' calls.
    """

    def __init__(self, transport: Ranks, tag: int, peers: list[int]) -> None:
        self._transport = transport
        self.peers = peers
        self.mine: Array = np.zeros(1, np.int64)
        self.theirs: list[Array] = [np.zeros(1, np.int64) for _ in peers]
        pairs = zip(peers, self.theirs, strict=True)
        self._receives = [transport.receiver(peer, tag, theirs) for peer, theirs in pairs]
        self._sends = [transport.sender(peer, tag, self.mine) for peer in peers]
        self.requests: list[Any] = [*self._receives, *self._sends]
        self.start = transport.starter(self.requests)
        self.release = weakref.finalize(self, transport.free, self.requests)
        self.release.atexit = False

    def late(self) -> list[int]:
        """Peers that have not confirmed."""
        pairs = zip(self.peers, self._receives, strict=True)
        return [peer for peer, one in pairs if not self._transport.test([one])]

    def abandon(self) -> None:
        """Abandon the requests of an unfinished run."""
        self._transport.abandon(self._receives, self._sends)
        self.release.detach()


WAY = "messages over NCCL, and agreement on each exchange over MPI"
