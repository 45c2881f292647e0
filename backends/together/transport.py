"""The `Transport` interface between workers: it moves buffers and control messages. Waits, and
alarms that end them, as transports and their users describe them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from linop.backends.together.deadlock import Key, Point
from linop.backends.together.recorder import Recorder
from linop.errors import LinopError, interrupt, restated
from linop.spaces.scalars import Array

Item = TypeVar("Item")
ANY = -2
"""Tag that stands for no plan."""
MEET = "meet"
"""Default name of a collective operation in `Transport.gather_all`."""


class Awaited(NamedTuple):
    """Description of a worker's wait: as text, and as the point that others must reach
    (`linop.backends.together.deadlock`)."""

    words: str
    peers: Sequence[int] = ()
    """Workers whose messages are missing; empty if unknown."""
    at: float = 0
    """Last stage whose messages this worker has sent."""
    needs: float | None = None
    """Stage that the others must reach; None for the same one."""
    back: int = 0
    """Number of runs by which the others may be behind."""
    key: Key | None = None
    """Key of the control exchange; None for the running plan."""
    number: int = 0
    """Number of the control exchange among those of its key."""
    ended: bool = False


Who = Callable[[], Awaited | str]
"""Function that describes a wait, called only when a report is needed."""


Counts = Mapping[tuple[int, ...], int | None]
"""Calls of a worker since the last collective compile, by group of workers; None where workers of
the group may differ."""


def awaited(said: Awaited | str) -> Awaited:
    return Awaited(said) if isinstance(said, str) else said


class Plans(Protocol):
    """Interface of a worker's plans that transports use."""

    def hear(self, tag: int, error: LinopError, call: int = 0) -> None:
        """Break the plan of a tag, unless it is broken already: another worker failed in the call
        of this number. `ANY`: break all of this backend."""

    def alarm(self, tag: int) -> LinopError | None:
        """Error of an alarm about this plan that has not been raised here yet, or None."""

    def running(self, tag: int) -> int:
        """Number of the plan's current call; 0 if it is not running."""

    def points(self) -> Mapping[Key, Point]:
        """This worker's progress in all plans and control exchanges."""

    def counts(self) -> Counts:
        """Number of calls of each group's plans."""

    def last_calls(self) -> str:
        """Last calls of this worker, oldest first, one per line."""


class Alone:
    """A `Plans` without plans."""

    def hear(self, tag: int, error: LinopError, call: int = 0) -> None:
        """Ignore the alarm."""

    def alarm(self, tag: int) -> None:
        return None

    def running(self, tag: int) -> int:
        return 0

    def points(self) -> Mapping[Key, Point]:
        return {}

    def counts(self) -> Counts:
        return {}

    def last_calls(self) -> str:
        return "  none\n"


class _Weakly:
    def __init__(self, plans: Plans) -> None:
        self._known = weakref.ref(plans)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._known() or Alone(), name)


def weakly(plans: Plans) -> Plans:
    """A worker's plans while they are there. Finalizers of plans hold their transport: if that held
    the worker, nothing that the worker keeps would ever be collected, these plans among it."""
    return cast(Plans, _Weakly(plans))


class Transport(Protocol):
    """One worker's messages to and from the others. Messages between two workers arrive in the
    order sent, for each tag. `receiver`, `sender`, `receive` and `send` return requests, which
    `test` and `wait` take."""

    name: str
    worker: int
    workers: int
    eager: dict[int, int]
    """By peer: bytes of the longest message that is sent without waiting for its receiver. Somewhat
    longer ones are sent in pieces; those to other peers are not."""
    busy: int
    """Tag of the running plan, whose alarms are raised at once; `ANY` if none is running."""
    plans: Plans
    spins: int
    """Number of polls before `wait`."""
    points: dict[Key, Point]
    """This worker's progress in control exchanges."""
    recorder: Recorder
    """Recorder of the worker's last calls."""
    out_of_step: bool
    """True once all workers were told that their numbers of calls differ."""

    def packed(self, peer: int) -> int:
        """Bytes of the longest message between this worker and a peer that the number of its call
        is appended to, the same on both; a longer one follows a message of its own
        (`linop.backends.engine.roads.call_numbers`)."""
        ...

    def receiver(self, peer: int, tag: int, buffer: Array) -> Any:
        """Persistent receive of exactly the buffer's size; `start` it for each message."""

    def sender(self, peer: int, tag: int, buffer: Array) -> Any:
        """Persistent send of the buffer; `start` it for each message."""

    def starter(self, requests: list[Any]) -> Callable[[], object]:
        """Function that starts persistent requests."""

    def receive(self, peer: int, tag: int, buffer: Array) -> Any:
        """Post one receive."""

    def send(self, peer: int, tag: int, buffer: Array) -> Any:
        """Start one send; the buffer must not change before it completes."""

    def test(self, pending: Sequence[Any]) -> bool:
        """True if all requests are complete."""

    def tests(self, pending: Sequence[Any]) -> Sequence[Callable[[], bool]]:
        """Functions that all return True once the requests are complete, for a run to poll before
        it calls `wait`; none if `wait` is as fast. Requests may be replaced in the list later if
        they are None now."""

    def wait(self, pending: Sequence[Any], who: Who) -> None:
        """Wait until all requests are complete.

        Raises:
            LinopError: another worker raised an alarm. DeadlockError: a deadlock was detected, or
                the limit is reached.
        """

    def free(self, requests: Sequence[Any]) -> None:
        """Free persistent requests."""

    def abandon(self, receives: Sequence[Any], sends: Sequence[Any]) -> None:
        """Abandon requests that may never complete; afterwards no receive buffer is written to."""

    def gather_all(
        self, item: Item, doing: str = MEET, about: object = "", key: int = 0
    ) -> list[Item]:
        """All-gather of small objects (`linop.backends.together.messages` says of which classes),
        by worker; collective over all workers. Each gets its own item, and copies of the
        others': one of those that are equal.

        Args:
            doing: name of the operation; must be the same on all workers.
            about: its subject, for a report of a wait.
            key: number that tells the operation from others of its name; the same on all workers.
                Threads of a worker may call different operations at once, in any order.

        Raises:
            BackendError: workers call different operations; on every worker.
        """

    def post(self, peer: int, item: object) -> None:
        """Send a control message to a worker."""

    def fetch(self, peer: int, who: Who, patience: float | None = None) -> Any:
        """Next control message of a worker; None if none arrives for `patience` seconds."""

    def alarm(self, error: LinopError, tag: int, call: int) -> None:
        """Raise an error on every other worker: at once if it waits in that call, or a later one,
        of the tag's plan; else when it makes the call. `ANY`: in all calls and waits."""

    def alarmed(self) -> bool:
        """True if there may be an alarm; costs almost nothing."""

    def check(self, tag: int) -> None:
        """Raise the error of another worker's alarm about this plan, if there is one."""


def peers_named(peers: Sequence[int]) -> str:
    """Workers as text."""
    return f"worker{'s' if len(peers) > 1 else ''} {', '.join(map(str, peers))}"


def heard(error: LinopError, tag: int) -> LinopError:
    """New instance of an alarm's error for the receiving worker, marked with the plan's tag so that
    it raises no further alarm."""
    mine = restated(error, str(error))
    mine.alarm = tag
    interrupt(mine)
    return mine
