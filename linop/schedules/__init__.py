"""Pipeline schedules as data: for each worker an ordered tuple of actions (`linop.schedules`).

Generators make those of the literature; tables of users are as good. `check` proves that a schedule
is complete, in order, free of deadlock, consistent in its versions of weights, and within a limit
of memory; `simulate` predicts time, bubble and peak memory; `linop.strategies.Pipeline` runs what
passes the check. Nothing here needs torch.
"""

from linop.schedules.actions import Action, Kind
from linop.schedules.checker import CheckedSchedule, check
from linop.schedules.generators import (
    GENERATORS,
    backward_first,
    gpipe,
    interleaved,
    one_forward_one_backward,
    pipedream,
    pipedream_2bw,
    zero_bubble_h1,
)
from linop.schedules.live_memory import Sizes
from linop.schedules.schedule import Schedule, with_messages
from linop.schedules.schedule_errors import ScheduleError
from linop.schedules.simulation import Simulation, simulate

__all__ = [
    "GENERATORS",
    "Action",
    "CheckedSchedule",
    "Kind",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "Sizes",
    "backward_first",
    "check",
    "gpipe",
    "interleaved",
    "one_forward_one_backward",
    "pipedream",
    "pipedream_2bw",
    "simulate",
    "with_messages",
    "zero_bubble_h1",
]
