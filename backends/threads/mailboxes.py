"""Mailboxes: the transport between workers that are threads of a process
(`linop.backends.threads.group`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from linop.backends.engine.roads.call_numbers import PACKED
from linop.backends.threads.group import Group, Key
from linop.backends.together.agreement import Gathering, gathering
from linop.backends.together.deadlock import Key as About
from linop.backends.together.deadlock import Point
from linop.backends.together.matching import Matching
from linop.backends.together.messages import decoded, encoded
from linop.backends.together.recorder import Recorder
from linop.backends.together.transport import ANY, Alone, Item, Plans, Who, awaited
from linop.errors import LinopError
from linop.spaces.scalars import Array

_AGREE, _CALL = -1, -2
"""Tags of `gather_all` and `post`; plans have tags from 2 on."""


class Mailbox(Gathering):
    """One worker's transport (`linop.backends.together.transport.Transport`).

    Args:
        worker: its number among the members.
        members: workers of the group, by default all.
        part: number of this part of the workers; no other part of a member has it.
    """

    name = "mailboxes in memory"
    spins = 0

    def __init__(
        self,
        group: Group,
        worker: int,
        members: Sequence[int] | None = None,
        part: tuple[int, ...] = (),
    ) -> None:
        self._group = group
        self._members = range(group.workers) if members is None else members
        self._part = part
        self._parts = 0
        self.worker = worker
        self.workers = len(self._members)
        self.limit = group.limit
        self.matching = Matching(self.workers)
        self._address = self._members[worker], *part
        self.busy = ANY
        self.plans: Plans = Alone()
        self.points: dict[About, Point] = {}
        self.recorder = Recorder()
        self.out_of_step = False
        self.eager: dict[int, int] = {}

    def packed(self, peer: int) -> int:
        del peer
        return PACKED

    def part(self, workers: Sequence[int]) -> Mailbox:
        """Transport between some of the workers, numbered in ascending order. All workers call this
        in the same order, each with its own part."""
        self._parts += 1
        members = [self._members[worker] for worker in workers]
        me = workers.index(self.worker)
        return Mailbox(self._group, me, members, (*self._part, self._parts))

    def _to(self, peer: int, tag: int) -> Key:
        return self._members[self.worker], self._members[peer], tag, *self._part

    def _from(self, peer: int, tag: int) -> Key:
        return self._members[peer], self._members[self.worker], tag, *self._part

    def _told(self, who: Who) -> Who:
        """Description of a wait, for a report about all workers of the group."""
        if not self._part:
            return who
        members = ", ".join(map(str, self._members))
        return lambda: f"{awaited(who()).words} (of workers {members}, numbered from 0)"

    def receiver(self, peer: int, tag: int, buffer: Array) -> _Receive:
        return _Receive(self, peer, tag, buffer)

    def sender(self, peer: int, tag: int, buffer: Array) -> _Send:
        return _Send(self._group, self._to(peer, tag), buffer)

    def starter(self, requests: list[_Receive | _Send]) -> Callable[[], object]:
        if len(requests) == 1:
            return requests[0].start

        def start() -> None:
            for request in requests:
                request.start()

        return start

    def receive(self, peer: int, tag: int, buffer: Array) -> _Receive:
        request = self.receiver(peer, tag, buffer)
        request.start()
        return request

    def send(self, peer: int, tag: int, buffer: Array) -> _Send:
        request = self.sender(peer, tag, buffer)
        request.start()
        return request

    def hand(self, peer: int, tag: int, message: Any) -> None:
        """Send an object without a copy."""
        self._group.put(self._to(peer, tag), message)

    def has(self, peer: int, tag: int) -> bool:
        """True if a message has arrived."""
        return self._group.has(self._from(peer, tag))

    def take(self, peer: int, tag: int, size: int, dtype: np.dtype[Any]) -> Any:
        """Next message; wait for it."""
        who = f"a message from worker {peer} of plan {tag // 2}"
        return self.message(peer, tag, size, dtype, lambda: who)

    def message(self, peer: int, tag: int, size: int, dtype: np.dtype[Any], who: Who) -> Any:
        key = self._from(peer, tag)
        return self._group.message(key, self.plans, size, dtype, self._told(who))

    def test(self, pending: Sequence[_Receive | _Send]) -> bool:
        return all(request.ready() for request in pending)

    def tests(self, pending: Sequence[_Receive | _Send | None]) -> Sequence[Callable[[], bool]]:
        del pending
        return ()

    def wait(self, pending: Sequence[_Receive | _Send], who: Who) -> None:
        for request in pending:
            request.wait(who)

    def free(self, requests: Sequence[_Receive | _Send]) -> None:
        """Nothing to release."""

    def abandon(self, receives: Sequence[_Receive | _Send], sends: Sequence[_Send]) -> None:
        """Nothing to do: only `wait` writes to buffers."""

    def _exchanged(self, mine: Item, doing: str, about: object) -> list[Item]:
        everybody, data = range(self.workers), encoded(mine)
        for peer in everybody:
            if peer != self.worker:
                self._group.put(self._to(peer, _AGREE), data)

        def taken(peer: int) -> Item:
            key, who = self._from(peer, _AGREE), self._told(partial(gathering, peer, doing, about))
            said = self._group.take(key, self.plans, ANY, who)
            item: Item = mine if said == data else decoded(said)  # items are immutable
            return item

        return [mine if peer == self.worker else taken(peer) for peer in everybody]

    def post(self, peer: int, item: object) -> None:
        self._group.put(self._to(peer, _CALL), encoded(item))

    def fetch(self, peer: int, who: Who, patience: float | None = None) -> Any:
        key = self._from(peer, _CALL)
        data = self._group.take(key, self.plans, self.busy, self._told(who), patience)
        return None if data is None else decoded(data)

    def alarm(self, error: LinopError, tag: int, call: int) -> None:
        others = [(w, *self._part) for k, w in enumerate(self._members) if k != self.worker]
        self._group.alarm(others, error, tag, call)

    def alarmed(self) -> bool:
        return self._group.alarmed(self._address)

    def check(self, tag: int) -> None:
        self._group.check(self._from(self.worker, tag), self.plans, tag)

    def _end_if_told(self) -> None:
        self._group.look(self._from(self.worker, ANY), self.plans)


class _Send:
    """Send request: `start` puts a copy of the buffer into the receiver's mailbox."""

    def __init__(self, group: Group, key: Key, buffer: Array) -> None:
        self._group, self._key = group, key
        self._copied = buffer.copy

    def start(self) -> None:
        self._group.put(self._key, self._copied())

    def ready(self) -> bool:
        return True

    def wait(self, who: Who) -> None:
        """Nothing to wait for: `start` copied the buffer."""


class _Receive:
    """Receive request: `wait` takes the message from the mailbox and copies it to the buffer."""

    def __init__(self, mailbox: Mailbox, peer: int, tag: int, buffer: Array) -> None:
        self._mailbox, self._key, self._buffer = mailbox, mailbox._from(peer, tag), buffer
        self._group = mailbox._group
        self._due = False

    def start(self) -> None:
        self._due = True

    def ready(self) -> bool:
        return not self._due or self._group.has(self._key)

    def wait(self, who: Who) -> None:
        if not self._due:
            return
        buffer, mailbox = self._buffer, self._mailbox
        told = mailbox._told(who) if mailbox._part else who
        message = self._group.message(self._key, mailbox.plans, buffer.size, buffer.dtype, told)
        buffer[...] = message.reshape(buffer.shape)
        self._due = False
