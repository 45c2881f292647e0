"""Transport over torch.distributed: messages by gloo's point-to-point operations, control messages
through a store.

Gloo cannot be polled, and a wait with a timeout that expires ends all connections of its process.
So a wait for a message blocks in gloo, for the full limit. What ends it earlier is the end of the
connections: a worker that fails closes its own, after its alarm; and a thread that hears why a wait
has to end waits for a message that nobody sends, for a millisecond
(`linop.backends.torchrun.waits`). At the next gathering of all workers connections are
opened anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from linop.backends.together.agreement import ALL, Gathering, gathering, in_words
from linop.backends.together.matching import Matching
from linop.backends.together.recorder import at_place
from linop.backends.together.transport import ANY, Awaited, Item, Who, awaited, peers_named
from linop.backends.torchrun.signed_store import LONGEST
from linop.backends.torchrun.store_channel import keep
from linop.backends.torchrun.waits import ProcessGroupWaits, ThreadWait
from linop.errors import BackendError, communication
from linop.spaces.scalars import Array

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_PATIENCE = 1.0
"""Seconds for an alarm to arrive after the end of a connection."""
_SOON = 1e-3
"""Seconds between looks for it."""
_NOBODYS = 0
"""Tag of a message that nobody sends."""


class Processes(ProcessGroupWaits, Gathering):
    """One process's transport (`linop.backends.together.transport.Transport`).

    Args:
        connect: a new process group of gloo, of the same workers; collective. None if there cannot
            be another one than the given.
        group: the first process group. No other messages point to point go through it.
        store, key: as of a `linop.backends.torchrun.store_channel.StoreChannel`.
        limit: longest wait, in seconds.

    Attributes:
        ranks: its workers, as ranks of the default process group.
    """

    name = "torch.distributed (gloo)"
    spins = 0

    def __init__(
        self,
        group: dist.ProcessGroup,
        connect: Callable[[], dist.ProcessGroup] | None,
        store: Store,
        key: bytes,
        limit: float,
    ) -> None:
        self._group: dist.ProcessGroup | None = group
        self._connect = connect
        self._interrupted = -1
        """Generation of connections whose waits were interrupted here."""
        self._closed = ""
        self._timeout = timedelta(seconds=min(limit, LONGEST))
        super().__init__(store, key, dist.get_rank(group), dist.get_world_size(group), limit)
        self.matching = Matching(self.workers)
        self.limit, self.ranks = limit, dist.get_process_group_ranks(group)
        self.out_of_step = False
        self.eager: dict[int, int] = {}

    # Messages

    def packed(self, peer: int) -> int:
        del peer
        return 256 * 1024  # a copy of so much takes less time than a message

    def receiver(self, peer: int, tag: int, buffer: Array) -> _Message:
        return _Message(dist.irecv, peer, tag, buffer)

    def sender(self, peer: int, tag: int, buffer: Array) -> _Message:
        return _Message(dist.isend, peer, tag, buffer)

    def starter(self, requests: list[_Message]) -> Callable[[], object]:
        return partial(self._start, requests)

    def _start(self, requests: list[_Message]) -> None:
        group = self._group
        if group is None:
            raise self._is_closed()
        for request in requests:
            try:
                request.work = request.begin(request.tensor, None, group, request.tag, request.peer)
            except (RuntimeError, ValueError) as error:
                why = _first_line(error)
            else:
                continue
            self._lost(partial(peers_named, [request.peer]), request.peer, why)

    def receive(self, peer: int, tag: int, buffer: Array) -> _Message:
        request = self.receiver(peer, tag, buffer)
        self._start([request])
        return request

    def send(self, peer: int, tag: int, buffer: Array) -> _Message:
        request = self.sender(peer, tag, buffer)
        self._start([request])
        return request

    def test(self, pending: Sequence[_Message | None]) -> bool:
        """True if all requests were waited for: gloo does not tell of others."""
        return all(request is None or request.work is None for request in pending)

    def tests(self, pending: Sequence[_Message]) -> Sequence[Callable[[], bool]]:
        return ()

    def wait(self, pending: Sequence[_Message], who: Who) -> None:
        lost: tuple[int, str, float] | None = None
        with ThreadWait(self, who) as wait:
            for request in pending:
                if request.work is None:
                    continue
                try:
                    request.work.wait(self._timeout)
                except RuntimeError as error:
                    lost = request.peer, _first_line(error), time.monotonic() - wait.begun
                    break
                request.work = None
        if lost is not None:
            self._lost(who, *lost)

    def free(self, requests: Sequence[_Message]) -> None:
        """Nothing to release."""

    def abandon(self, receives: Sequence[_Message], sends: Sequence[_Message]) -> None:
        if not self.test([*receives, *sends]):
            for request in (*receives, *sends):
                request.work = None
            self._close()

    # Connections

    def _close(self, why: str = "") -> None:
        """Close the connections, which ends the waits of all workers for this one.

        Args:
            why: the reason; kept if it is the first one given.
        """
        group, self._group = self._group, None
        if group is not None:
            self._closed = ""
            with suppress(RuntimeError, ValueError):  # the program may have ended all groups
                dist.destroy_process_group(group)
        self._closed = self._closed or why

    def _is_closed(self) -> BackendError:
        how = (
            "compile a plan on all workers, which opens them anew"
            if self._connect is not None
            else "start the program again"
        )
        return BackendError(
            f"the connections of torch.distributed were closed, which ended the calls of all "
            f"plans: {self._closed or 'a run was not finished'}; {how}"
        )

    def _reopen(self) -> None:
        if self._connect is not None:
            self._close("others opened them anew")
            self.generation += 1
            self._group = self._connect()

    def _interruption(self) -> Callable[[], object]:
        return partial(self._interrupt, self._group, self.generation)

    def _interrupt(self, group: dist.ProcessGroup | None, generation: int) -> None:
        if group is None:
            return
        self._interrupted = generation
        for peer in range(self.workers):
            if peer != self.worker:  # the first that is still there ends all
                with suppress(RuntimeError, ValueError):
                    self._await_nothing(group, peer)

    @staticmethod
    def _await_nothing(group: dist.ProcessGroup, peer: int) -> None:
        """A wait whose timeout expires: it closes all connections of its process."""
        nothing = torch.empty(1, dtype=torch.uint8)
        work: Any = dist.irecv(nothing, None, group, _NOBODYS, peer)
        work.wait(timedelta(milliseconds=1))

    def _lost(self, who: Who, peer: int, why: str, waited: float = 0) -> NoReturn:
        """Raise the reason why a connection ended.

        Args:
            why: gloo's text.
            waited: seconds of the wait that it ended.
        """
        busy, begun = self.busy, time.monotonic()
        if waited >= self._limit:
            self._raise_stuck(who, f"a wait took longer than {self._limit:g} s")
        while time.monotonic() - begun < _PATIENCE and self._group is not None:
            self._take_alarms(busy)
            if self._stuck_now():
                self._raise_stuck(who)
            if peer in self.channel.ended:
                self._raise_stuck(who, "deadlock")
            time.sleep(_SOON)
        if self._group is None:
            raise self._is_closed()
        words = at_place(awaited(who()).words)
        text = f"the connection to worker {peer} ended during a wait for {words}: {why}"
        self._close(text)
        raise BackendError(text)

    # Control messages

    @communication()
    def _exchanged(self, mine: Item, doing: str, about: object) -> list[Item]:
        self.busy = ANY
        if self.workers == 1:
            return [mine]
        number = self._number(self.channel.epoch)

        def who() -> Awaited:
            late = self.channel.missing()
            first = gathering(late[0], doing, about) if late else in_words(doing, about)
            return Awaited(first, late, key=ALL, number=number)

        closed = self._group is None or self._interrupted == self.generation
        said = self.until(self.channel.meet((mine, closed)), who, None)
        self._gathered(number)
        if any(closed for _, closed in said):
            self._reopen()
        return [mine if w == self.worker else item for w, (item, _) in enumerate(said)]

    def post(self, peer: int, item: object) -> None:
        self.channel.say(peer, item)

    def fetch(self, peer: int, who: Who, patience: float | None = None) -> Any:
        found = self.until(lambda: self.channel.heard(peer), who, peer, patience)
        return None if found is None else found[0]

    def forked(self) -> None:
        """Make every use in a fork of the process raise: its connections are the parent's."""
        keep(self._group)
        self._group, self._connect = None, None
        self._closed = "this process is a fork of the worker's"
        self.channel.forked()
        self.told = False


class _Message:
    """A message: its memory as a tensor, and torch's work while it is under way."""

    __slots__ = ("begin", "peer", "tag", "tensor", "work")

    def __init__(self, begin: Callable[..., Any], peer: int, tag: int, buffer: Array) -> None:
        self.begin = begin
        self.peer = peer
        self.tag = tag
        self.tensor = _tensor(buffer)
        self.work: Any = None


class _Writeable:
    """The memory of a read-only array, which torch only reads but warns of."""

    def __init__(self, array: Array) -> None:
        self._array = array
        shown = array.__array_interface__
        self.__array_interface__ = {**shown, "data": (shown["data"][0], False)}


def _tensor(buffer: Array) -> torch.Tensor:
    """The bytes of a contiguous array: a movement does not depend on values."""
    data = buffer.reshape(-1).view(np.uint8)
    return torch.from_numpy(data if data.flags.writeable else np.asarray(_Writeable(data)))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
