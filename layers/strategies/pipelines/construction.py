"""The parts of a pipeline, checked before anything is sent: the same on all workers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from linop.backends import Backend
from linop.caching import cached_property
from linop.errors import ArgumentError, BackendError, expect
from linop.schedules import Action, Kind, Schedule, check
from linop.schedules.actions import COMPUTE, GROUP
from linop.spaces.partition import Partition
from linop.strategies.pipelines.batches import dims_checked
from linop.strategies.pipelines.execution import Graph, Pair, ordered
from linop.strategies.pipelines.exported import Stages
from linop.strategies.pipelines.forms import ALL, Output


@dataclass(frozen=True)
class Plan:
    """A pipeline's stages, edges and actions.

    Attributes:
        graph: its edges.
        table: the schedule, with messages.
        grids: workers of each row.
        slots: of each edge, (a, b) for outputs and (b, a) for gradients.
        groups: micro-batches of each update of the last stage.
        worker: this worker.
        mine: this worker's stages.
    """

    graph: Graph
    table: Schedule
    grids: Sequence[Partition]
    slots: Mapping[Pair, int]
    groups: Sequence[Sequence[int]]
    worker: int
    mine: Sequence[int]

    @property
    def digest(self) -> str:
        """Text that is equal on workers with equal plans."""
        grids = [(grid.shape, grid.workers) for grid in self.grids]
        text = repr((self.table.to_csv(), self.graph.outputs, grids, sorted(self.slots.items())))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def stages(self) -> int:
        return self.table.stages

    @cached_property
    def is_first(self) -> bool:
        """True if this worker takes the input."""
        return any(not self.graph.sources[s] for s in self.mine)

    @cached_property
    def is_last(self) -> bool:
        """True if this worker has the output."""
        return any(not self.graph.sinks[s] for s in self.mine)

    def grid(self, stage: int) -> Partition:
        """Workers of a stage."""
        return self.grids[self.graph.place[stage]]

    def shares_backwards(self, stage: int) -> bool:
        """True if several workers have the stage, and one whose output it takes."""
        row = self.graph.place[stage]
        sources = self.graph.sources[stage]
        return self.grid(stage).size > 1 and any(self.graph.place[a] == row for a in sources)

    def forwards(self, micro_batches: int) -> Schedule:
        """The part of the table that evaluates the first micro-batches."""
        kinds = Kind.FORWARD, Kind.SEND_F, Kind.RECV_F
        rows = [
            tuple(
                action
                for action in row
                if action.kind in kinds and (action.micro_batch or 0) < micro_batches
            )
            for row in self.table.workers
        ]
        return Schedule(tuple(rows), self.table.name)

    def row_of(self, table: Schedule) -> Sequence[Action]:
        """This worker's actions."""
        pairs = zip(table.workers, self.grids, strict=True)
        return next((row for row, grid in pairs if self.worker in grid), ())

    @property
    def row(self) -> Sequence[Action]:
        """This worker's actions of a step."""
        return self.row_of(self.table)


def planned(
    stages: Sequence[Any],
    schedule: Schedule,
    backend: Backend,
    workers: Sequence[int | Partition] | None,
    edges: Sequence[tuple[Any, ...]] | None,
    slots: int | None,
) -> Plan:
    """The plan of a pipeline, of arguments of `linop.strategies.Pipeline`.

    Raises:
        ArgumentError, BackendError: they do not fit together. ScheduleError: the schedule is wrong.
    """
    expect("schedule", schedule, Schedule)
    if backend.worker is None or backend.workers is None:
        raise BackendError(
            f"backend {backend.name!r} holds all workers; a pipeline runs on one worker of a "
            f"program: start it by linop.launch, or mpiexec"
        )
    if backend.arrays.device != "cpu":
        raise BackendError(
            f"backend {backend.name!r} has arrays in {backend.arrays.memory}; pipelines run on "
            f"backends of host memory until now"
        )
    if slots is not None and slots < 1:
        raise ArgumentError(f"slots: at least 1 expected, given {slots}")
    schedule = _with_groups(_with_updates(schedule))
    count = schedule.stages
    if len(stages) != count:
        raise ArgumentError(f"{len(stages)} stages given; the schedule has {count}")
    lacking = [s for s in range(count) if s not in schedule.placement]
    if lacking:
        raise ArgumentError(f"stages {lacking} without workers: they are in no row of the schedule")
    chain = [(s, s + 1, None) for s in range(count - 1)]
    if edges is None:
        edges = stages.edges if isinstance(stages, Stages) else chain
    outputs = _outputs(edges, count)
    pairs = list(outputs)
    found = check(schedule, edges=pairs, sends="eager" if slots is None else slots)
    grids = _grids(schedule, workers, backend.workers)
    graph = Graph(outputs, schedule.placement)
    table = found.schedule
    mine = [s for s in range(count) if backend.worker in grids[schedule.placement[s]]]
    for s in mine:
        if not callable(stages[s]):
            raise ArgumentError(
                f"stage {s}: a torch.nn.Module expected, or a function of a partition that makes "
                f"one, given {stages[s]!r}"
            )
    given = found.slots if slots is None else dict.fromkeys(found.slots, slots)
    groups = _groups(schedule)
    return Plan(graph, table, grids, given, groups, backend.worker, mine)


def options_checked(
    loss: Any,
    reduction: Any,
    count: Any,
    optimizer: Any,
    recompute: Any,
    max_norm: Any,
    batch_dims: Any,
) -> tuple[Any, ...]:
    """Options of `linop.strategies.Pipeline`, for comparison with those of other workers.

    Raises:
        ArgumentError: one is not as expected.
    """
    for name, given in (("loss", loss), ("count", count), ("optimizer", optimizer)):
        if given is not None and not callable(given):
            raise ArgumentError(f"{name}: a function or None expected, given {given!r}")
    if not isinstance(reduction, str) or reduction not in ("sum", "mean"):
        raise ArgumentError(f"reduction 'sum' or 'mean' expected, given {reduction!r}")
    if count is not None and reduction != "mean":
        raise ArgumentError(
            f"count: it weights micro-batches in a mean, and reduction={reduction!r} is a sum; "
            f"reduction='mean' expected"
        )
    expect("recompute", recompute, bool)
    most = None if max_norm is None else norm_checked(max_norm)
    dims = dims_checked(batch_dims)
    return loss is None, reduction, count is None, optimizer is None, recompute, most, dims


def norm_checked(given: Any) -> float:
    """The largest norm of the gradients, as a number.

    Raises:
        ArgumentError: it is none from 0.
    """
    try:
        most = float(given)
    except Exception:  # of whatever the user gives
        most = math.nan
    if isinstance(given, str) or not most >= 0:
        raise ArgumentError(f"max_norm: a number from 0 expected, given {given!r}")
    return most


def optimizer_checked(made: Any) -> Any:
    """Result of a user's function of parameters.

    Raises:
        ArgumentError: it is no optimizer.
    """
    if not callable(getattr(made, "step", None)):
        raise ArgumentError(f"optimizer: it makes {made!r}; a torch optimizer expected")
    return made


def _with_updates(schedule: Schedule) -> Schedule:
    """A schedule without updates, as torch writes them, with those of every stage at the end; but
    of forwards alone, none."""
    kinds = {action.kind for row in schedule.workers for action in row}
    if Kind.UPDATE in kinds or not kinds & {*COMPUTE} - {Kind.FORWARD}:
        return schedule
    rows = [
        (*row, *(Action(s, Kind.UPDATE) for s in sorted({action.stage for action in row})))
        for row in schedule.workers
    ]
    return Schedule(tuple(rows), schedule.name)


def _with_groups(schedule: Schedule) -> Schedule:
    """A schedule with group actions, and those that it leaves out, of stages that have some."""
    rows = []
    for row in schedule.workers:
        actions = list(row)
        for s in sorted({action.stage for action in row if action.kind in GROUP}):
            actions = _completed(actions, s)
        rows.append(tuple(actions))
    return Schedule(tuple(rows), schedule.name)


def _completed(row: Sequence[Action], s: int) -> list[Action]:
    """A row with all group actions of a stage: beside UNSHARD the last RESHARD, and REDUCE_GRAD,
    before updates; beside REDUCE_GRAD alone UNSHARD and RESHARD around every computation, as
    modules that gather by themselves do.

    Raises:
        ArgumentError: its first one is RESHARD.
    """
    unshard, reshard = Action(s, Kind.UNSHARD), Action(s, Kind.RESHARD)
    own = [action.kind for action in row if action.stage == s]
    moves = [kind for kind in own if kind in (Kind.UNSHARD, Kind.RESHARD)]
    if not moves:
        here = [action.stage == s and action.kind in COMPUTE for action in row]
        pairs = zip(row, here, strict=True)
        each = [(unshard, action, reshard) if inner else (action,) for action, inner in pairs]
        return [action for some in each for action in some]
    if moves[0] == Kind.RESHARD:
        raise ArgumentError(
            f"stage {s}: {reshard} before any {unshard}; a step begins with sharded parameters"
        )
    found = list(row)
    updates = [k for k, a in enumerate(row) if a.stage == s and a.kind == Kind.UPDATE]
    if moves[-1] == Kind.UNSHARD and updates:
        found.insert(updates[-1], reshard)
    if Kind.REDUCE_GRAD not in own:
        for k in reversed(updates):
            found.insert(k, Action(s, Kind.REDUCE_GRAD))
    return found


def _outputs(edges: Sequence[Any], stages: int) -> dict[Pair, list[Output]]:
    """The outputs that go along each edge."""
    outputs: dict[Pair, list[Output]] = {}
    for edge in edges:
        if len(edge) not in (2, 3) or not 0 <= edge[0] < edge[1] < stages:
            raise ArgumentError(
                f"edge {edge}: two of the stages 0 to {stages - 1} expected, the first one lower, "
                f"and the number or the name of an output, or None for all"
            )
        a, b, k = (*edge, 0)[:3]
        taken = outputs.setdefault((a, b), [])
        known = k is None or isinstance(k, str) or k >= 0
        if not known or k in taken or ALL in taken or (k is None and taken):
            raise ArgumentError(f"edge {edge}: each output of a stage once, from 0, expected")
        taken.append(ALL if k is None else k)
    ends = [s for s in range(stages) if not any(a == s for a, *_ in edges)]
    if ends != [stages - 1]:
        raise ArgumentError(
            f"edges {list(edges)}: the last stage alone has the output; stages {ends[:-1]} lead "
            f"nowhere"
        )
    return {pair: ordered(taken) for pair, taken in outputs.items()}


def _grids(
    schedule: Schedule, workers: Sequence[int | Partition] | None, there: int
) -> list[Partition]:
    rows = len(schedule.workers)
    given = range(rows) if workers is None else workers
    if len(given) != rows:
        raise ArgumentError(f"workers: {rows} expected, one for each row, given {len(given)}")
    grids = [w if isinstance(w, Partition) else Partition((1,), (w,)) for w in given]
    every = [w for grid in grids for w in grid.workers]
    if len(set(every)) < len(every):
        raise ArgumentError(f"workers {every}: each in one row of the schedule expected")
    missing = [w for w in every if w >= there]
    if missing:
        raise BackendError(
            f"stages of workers {missing} without workers: here there are {there}; start more: "
            f"linop.launch(main, workers=…), or mpiexec -n …"
        )
    for grid in grids:
        if grid.shape[0] > 1:
            raise ArgumentError(f"workers {grid!r}: a grid whose first axis has extent 1 expected")
    return grids


def _groups(schedule: Schedule) -> list[list[int]]:
    """Micro-batches between updates of the last stage; the last ones may have none."""
    groups: list[list[int]] = [[]]
    last = schedule.stages - 1
    for action in (a for row in schedule.workers for a in row if a.stage == last):
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and action.micro_batch is not None:
            groups[-1].append(action.micro_batch)
        elif action.kind == Kind.UPDATE:
            groups.append([])
    return [group for group in groups if group]


def check_updates_last(plan: Plan, what: str) -> None:
    """Check that all gradients are there at the first update of each worker.

    Raises:
        ArgumentError: they are not.
    """
    for row in plan.table.workers:
        kinds = [action.kind for action in row]
        first = kinds.index(Kind.UPDATE) if Kind.UPDATE in kinds else len(kinds)
        if any(kind != Kind.UPDATE for kind in kinds[first:]):
            raise ArgumentError(
                f"{what}: the gradients of all stages are there at an update if updates come "
                f"last in the schedule; those of {plan.table.name!r} do not"
            )
