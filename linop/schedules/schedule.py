"""Schedules: an ordered tuple of actions for each worker, their text, and the messages between
stages. No times: those are what simulation finds."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from linop.caching import cached_property
from linop.errors import ArgumentError, expect
from linop.schedules.actions import COMPUTE, MESSAGES, Action, Kind, message

_KINDS = frozenset(Kind)


@dataclass(frozen=True)
class Schedule:
    r"""Actions of each worker of a pipeline, in the order in which it executes them. A worker here
    is a group of workers if its stages are cut over several.

    Attributes:
        workers: a tuple of actions for each worker.
        name: for messages and pictures.

    Raises:
        ArgumentError: it has no such actions: one of no kind, a number that is no integer from 0, a
            computation or message without a micro-batch, an update of one, a version of what reads
            none, or a peer of what is no message.

    Example:
        A table of your own, a line for each worker, as torch writes it:

        >>> mine = linop.schedules.Schedule.from_csv("0F0,0F1,0B0,0B1,0U\n1F0,1B0,1F1,1B1,1U")
        >>> mine.stages, mine.micro_batches, mine.placement
        (2, 2, {0: 0, 1: 1})
        >>> print(mine.only(["F"]).to_csv())
        0F0,0F1
        1F0,1F1
    """

    workers: tuple[tuple[Action, ...], ...]
    name: str = "schedule"

    def __post_init__(self) -> None:
        if not isinstance(self.workers, list | tuple):
            raise ArgumentError(f"schedule: expected rows of actions, given {self.workers!r}")
        for worker, row in enumerate(self.workers):
            if not isinstance(row, list | tuple):
                raise ArgumentError(f"worker {worker}: expected a row of actions, given {row!r}")
            for action in row:
                if wrong := _wrong(action):
                    raise ArgumentError(f"worker {worker}: {wrong}, given {action!r}")
        object.__setattr__(self, "workers", tuple(map(tuple, self.workers)))

    @cached_property
    def placement(self) -> dict[int, int]:
        """Worker of each stage, by the actions; of several, the first."""
        found: dict[int, int] = {}
        for worker, actions in enumerate(self.workers):
            for action in actions:
                found.setdefault(action.stage, worker)
        return dict(sorted(found.items()))

    @property
    def stages(self) -> int:
        """Number of stages."""
        return max(self.placement, default=-1) + 1

    @cached_property
    def micro_batches(self) -> int:
        """Number of micro-batches."""
        numbers = (a.micro_batch for row in self.workers for a in row if a.micro_batch is not None)
        return max(numbers, default=-1) + 1

    def only(self, kinds: Iterable[Kind]) -> Schedule:
        """The same schedule with actions of some kinds alone."""
        kept = frozenset(kinds)
        rows = tuple(tuple(a for a in row if a.kind in kept) for row in self.workers)
        return Schedule(rows, self.name)

    @classmethod
    def from_csv(cls, text: str, name: str = "schedule") -> Schedule:
        """Schedule in torch's text form: a line for each worker, its actions between commas; empty
        cells are idle time, which is left out, as blank lines at the end are. Of torch's
        ``(0F4;3B1)OVERLAP_F_B``, a forward and a backward that share their time, the order is kept,
        and no more. A byte-order mark at its start is skipped.

        Raises:
            ArgumentError: a cell is no action.
        """
        rows = []
        lines = expect("schedule", text, str).removeprefix("\ufeff").rstrip().splitlines()
        try:
            for cells in csv.reader(lines):
                parts = [part for cell in cells for part in _parts(cell) if part.strip()]
                rows.append(tuple(map(Action.parse, parts)))
        except (ArgumentError, csv.Error) as error:
            raise ArgumentError(f"line {len(rows) + 1}: {error}") from None
        return cls(tuple(rows), name)

    def to_csv(self) -> str:
        """The text that `from_csv` reads. torch reads it for schedules of computations alone, which
        `only` gives: it has no updates, and drops versions."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(
            [str(action) for action in row] or [""] for row in self.workers
        )
        return out.getvalue()


def _wrong(action: object) -> str:
    """The expectation that an action does not meet; empty if it is right."""
    if not isinstance(action, Action):
        return "expected an Action, as Action.parse makes it of text"
    if action.kind not in _KINDS:
        return f"expected a kind, one of {', '.join(Kind)}"
    optional = action.micro_batch, action.version, action.peer
    for number in (action.stage, *(number for number in optional if number is not None)):
        if not isinstance(number, int) or number < 0:
            return "numbers from 0 expected"
    compute, message = action.kind in COMPUTE, action.kind in MESSAGES
    if action.micro_batch is None and (compute or message):
        return f"{action} without a micro-batch"
    if action.micro_batch is not None and action.kind == Kind.UPDATE:
        return f"{action}: an update of the whole stage, without a micro-batch, expected"
    if action.version is not None and not compute:
        return f"{action}: a version of forwards and backwards alone expected"
    if action.peer is not None and not message:
        return f"{action}: a peer of sends and receives alone expected"
    return ""


def _parts(cell: str) -> list[str]:
    """Actions of a cell: several only if torch overlaps them."""
    overlapped = re.fullmatch(r"\s*\((.*)\)OVERLAP_F_B\s*", cell)
    return overlapped[1].split(";") if overlapped else [cell]


def chain(schedule: Schedule) -> list[tuple[int, int]]:
    """An edge from each stage to the next.

    Raises:
        ArgumentError: a stage between has no actions.
    """
    at = schedule.placement
    if len(at) != schedule.stages:
        lacking = next(s for s in range(schedule.stages) if s not in at)
        raise ArgumentError(
            f"stage {lacking}: no actions; expected some of all stages, 0 to {schedule.stages - 1}"
        )
    return [(stage, stage + 1) for stage in range(schedule.stages - 1)]


def expect_edges(schedule: Schedule, edges: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
    """Edges as a list of pairs of a schedule's stages, each once.

    Raises:
        ArgumentError: they are none.
    """
    at = schedule.placement
    if not isinstance(edges, Collection) or isinstance(edges, str):
        raise ArgumentError(f"edges: pairs of stages expected, given {edges!r}")
    found = []
    for edge in edges:
        if not (isinstance(edge, list | tuple) and len(edge) == 2 and edge[0] != edge[1]) or not (
            all(isinstance(stage, int) and stage in at for stage in edge)
        ):
            stages = ", ".join(map(str, at))
            raise ArgumentError(f"edges: two of the stages {stages} expected, given {edge!r}")
        found.append((edge[0], edge[1]))
    if len(set(found)) < len(found):
        raise ArgumentError(f"edges: each once expected, given {found}")
    return found


def with_messages(schedule: Schedule, edges: Sequence[tuple[int, int]] | None = None) -> Schedule:
    r"""A schedule of computations with the sends and receives between stages of different workers:
    each send directly after what makes its data, each receive directly before what needs it.

    Args:
        edges: pairs of stages between which data go forward, and gradients back; by default from
            each stage to the next.

    Raises:
        ArgumentError: a stage of an edge has no actions, or an edge is no pair.

    Example:
        >>> table = linop.schedules.Schedule.from_csv("0F0,0B0\n1F0,1B0")
        >>> print(linop.schedules.with_messages(table).to_csv())
        0F0,0SEND_F0,0RECV_B0,0B0
        1RECV_F0,1F0,1B0,1SEND_B0
    """
    at = expect("schedule", schedule, Schedule).placement
    edges = chain(schedule) if edges is None else expect_edges(schedule, edges)
    crossing = [(a, b) for a, b in edges if at[a] != at[b]]

    def around(action: Action) -> Iterable[Action]:
        stage, m = action.stage, action.micro_batch
        if action.kind not in COMPUTE or m is None:
            yield action
            return
        forward = action.kind == Kind.FORWARD

        before = [a for a, b in crossing if b == stage]
        after = [b for a, b in crossing if a == stage]
        if forward:
            yield from (message(stage, Kind.RECV_F, m, other) for other in before)
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            yield from (message(stage, Kind.RECV_B, m, other) for other in after)
        yield action
        if forward:
            yield from (message(stage, Kind.SEND_F, m, other) for other in after)
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            yield from (message(stage, Kind.SEND_B, m, other) for other in before)

    rows = [[each for action in row for each in around(action)] for row in schedule.workers]
    return Schedule(tuple(map(tuple, rows)), schedule.name)
