"""All agree, or all raise: exchanges of small objects among workers, and work that may fail on some
of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from linop.backends.together.transport import MEET, Item, Transport
from linop.errors import LinopError, restated, was_told

Value = TypeVar("Value")


class Failure(NamedTuple):
    """A worker's error in work of all workers."""

    error: LinopError
    told: bool
    """True if another worker raised it there."""

    @staticmethod
    def of(error: Exception) -> Failure:
        """A failure that can be sent."""
        return Failure(restated(error, str(error)), was_told(error))


class Meeting(ABC):
    """Workers that exchange objects."""

    @abstractmethod
    def gather_objects(self, mine: Item, doing: str = MEET, about: str = "") -> list[Item]:
        """All workers' messages, by worker: small objects, of classes that
        `linop.backends.together.messages` sends. Collective.

        Args:
            doing, about: the activity, equal on all workers, and its object, in words.

        Raises:
            BackendError: workers are in different activities; on every worker.
        """

    def together(
        self, work: Callable[[], tuple[Value, Item]], what: str, doing: str
    ) -> tuple[Value, list[Item]]:
        """Result of local work, which may fail on some workers, and by worker its second half,
        which is sent. Collective.

        Args:
            what: name of the public function, for the error.
            doing: as in `gather_objects`.

        Raises:
            LinopError: it failed on a worker; on every worker. If several failed, the first one's,
                of those that failed by themselves and were not told so by another one.
        """
        problem: Exception | None = None
        said: Any
        try:
            result, said = work()
        except Exception as error:
            problem, said = error, Failure.of(error)
        everybodys = self.gather_objects(said, doing)
        failures = [(w, one) for w, one in enumerate(everybodys) if isinstance(one, Failure)]
        if failures:
            worker, (first, _) = min(failures, key=lambda pair: pair[1].told)
            raise restated(first, f"{what}: on worker {worker}: {first}") from problem
        return result, everybodys

    def each(self, work: Callable[[], Value], what: str, doing: str) -> Value:
        """Result of local work, which may fail on some workers; see `together`. Collective."""
        return self.together(lambda: (work(), None), what, doing)[0]


class OnTransport(Meeting):
    """All workers of a transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def gather_objects(self, mine: Item, doing: str = MEET, about: str = "") -> list[Item]:
        return self._transport.gather_all(mine, doing, about)
