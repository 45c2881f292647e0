"""Error classes of `linop.schedules.check`: one for each way in which a schedule can be wrong."""

from __future__ import annotations

from linop.errors import LinopError
from linop.schedules.actions import Action


class ScheduleError(LinopError, ValueError):
    """Base class of what is wrong with a schedule.

    Example:
        Every error of `check` is one, and names the action:

        >>> try:
        ...     linop.schedules.check(linop.schedules.Schedule.from_csv("0B0,0F0"))
        ... except linop.schedules.ScheduleError as error:
        ...     print(type(error).__name__)
        DependencyError
    """


class PlacementError(ScheduleError):
    """A stage has actions on two workers."""


class DuplicateActionError(ScheduleError):
    """A forward, a backward, a send or a receive occurs twice, or a backward B beside its halves I
    and W."""


class MissingActionError(ScheduleError):
    """A stage lacks the forward of a micro-batch, its backward, or one half of that."""


class UnmatchedMessageError(ScheduleError):
    """A send without its receive, a receive without its send, an edge between two workers without
    either, or a message where there is no such edge."""


class DependencyError(ScheduleError):
    """An action precedes, on the same worker, one whose result it needs; or a stage computes while
    its parameters are sharded."""


class UpdateError(ScheduleError):
    """An update without gradients, gradients without update or reduction, or stages that update
    after different micro-batches."""


class VersionError(ScheduleError):
    """A backward reads another version of the parameters than its forward."""


class MissingVersionError(ScheduleError):
    """An action reads a version of the parameters that does not exist yet, or is no longer kept."""


class EdgeMismatchError(ScheduleError):
    """The two ends of an edge differ in shape or dtype."""


class MessageOrderError(ScheduleError):
    """The messages of an edge are received in another order than they are sent."""


class ScheduleDeadlockError(ScheduleError):
    """Workers wait for each other in a circle.

    Attributes:
        cycle: the workers of the circle with the actions at which they wait, each for the next.
    """

    cycle: tuple[tuple[int, Action], ...] = ()


class GroupOrderError(ScheduleError):
    """The members of a group execute their group actions in different orders."""


class MemoryLimitError(ScheduleError):
    """The live bytes of a worker exceed the limit."""
