"""Updates and versions of the parameters that a schedule reads, and the group actions on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from linop.errors import ArgumentError, expect
from linop.schedules.actions import COMPUTE, GROUP, Kind
from linop.schedules.schedule import Schedule
from linop.schedules.schedule_errors import (
    GroupOrderError,
    MissingVersionError,
    UpdateError,
    VersionError,
)


def check_updates(schedule: Schedule) -> None:
    """Every gradient in one update of its stage, if there are updates, of the same micro-batches on
    all stages; and reduced before, if its stage has reductions.

    Raises:
        UpdateError: as it says.
    """
    updated = any(action.kind == Kind.UPDATE for row in schedule.workers for action in row)
    reduced = {a.stage for row in schedule.workers for a in row if a.kind == Kind.REDUCE_GRAD}
    taken: dict[int, list[list[int]]] = {s: [] for s in range(schedule.stages)}
    for row in schedule.workers:
        fresh: dict[int, set[int]] = defaultdict(set)  # gradients since the last update
        partial: dict[int, set[int]] = defaultdict(set)  # and since the last reduction
        for action in row:
            s = action.stage
            if (
                action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
                and action.micro_batch is not None
            ):
                fresh[s].add(action.micro_batch)
                partial[s].add(action.micro_batch)
            elif action.kind == Kind.REDUCE_GRAD:
                if not partial.pop(s, None):
                    raise UpdateError(f"stage {s}: {action} without a gradient since the last")
            elif action.kind == Kind.UPDATE:
                if not fresh[s]:
                    raise UpdateError(f"stage {s}: an update without a gradient since the last")
                if s in reduced and partial[s]:
                    raise UpdateError(
                        f"stage {s}: an update before the reduction of {_of(partial[s])}"
                    )
                taken[s].append(sorted(fresh.pop(s)))
        for s, left in fresh.items():
            if updated and left:
                raise UpdateError(f"stage {s}: no update after the backwards of {_of(left)}")
        for s, left in partial.items():
            if s in reduced and left:
                raise UpdateError(f"stage {s}: no reduction after the backwards of {_of(left)}")
    for s, groups in taken.items():
        for number, (mine, first) in enumerate(zip(groups, taken[0], strict=False)):
            if mine != first:
                raise UpdateError(
                    f"update {number + 1}: of {_of(mine)} on stage {s}, of {_of(first)} on stage 0"
                )


def _of(micro_batches: Collection[int]) -> str:
    numbers = sorted(micro_batches)
    return f"micro-batch{'es' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def check_versions(schedule: Schedule, kept: Mapping[int, int]) -> None:
    """One version of the parameters for the forward and the backward of a micro-batch; it exists,
    and is one of the newest.

    Args:
        kept: largest number of versions, by stage; stages without entry keep all that are read.

    Raises:
        VersionError, MissingVersionError: as those say.
    """
    for worker, row in enumerate(schedule.workers):
        newest: dict[int, int] = defaultdict(int)
        forward: dict[tuple[int, int | None], int] = {}
        for action in row:
            s = action.stage
            if action.kind == Kind.UPDATE:
                newest[s] += 1
            if action.kind not in COMPUTE:
                continue
            version = newest[s] if action.version is None else action.version
            if version > newest[s]:
                raise MissingVersionError(
                    f"worker {worker}: {action} reads version {version}, but only {newest[s]} "
                    "updates precede it"
                )
            if s in kept and version <= newest[s] - kept[s]:
                raise MissingVersionError(
                    f"worker {worker}: {action} reads version {version}, which is gone: the newest "
                    f"is {newest[s]}, and stage {s} keeps {kept[s]}"
                )
            read = forward.setdefault((s, action.micro_batch), version)
            if version != read:
                raise VersionError(
                    f"worker {worker}: {action} reads version {version}, its forward read {read}; "
                    f"name the version: {s}{action.kind}{action.micro_batch}@{read}"
                )


def check_groups(schedule: Schedule, replicas: Sequence[Schedule]) -> None:
    """The same group actions in the same order on each worker and on that worker of all replicas.

    Raises:
        GroupOrderError: as it says.
    """
    if not isinstance(replicas, Sequence):
        raise ArgumentError(f"replicas: a list of schedules expected, given {replicas!r}")
    mine = schedule.only(GROUP).workers
    for number, replica in enumerate(replicas, 1):
        expect(f"replica {number}", replica, Schedule)
        theirs = replica.only(GROUP).workers
        if len(theirs) != len(mine):
            raise GroupOrderError(
                f"replica {number}: {len(theirs)} workers, but replica 0 has {len(mine)}"
            )
        for worker, (first, other) in enumerate(zip(mine, theirs, strict=True)):
            if first != other:
                at = next(
                    (i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b),
                    min(len(first), len(other)),
                )
                names = [str(row[at]) if at < len(row) else "nothing" for row in (first, other)]
                raise GroupOrderError(
                    f"worker {worker}: group action {at} is {names[0]} in replica 0, {names[1]} in "
                    f"replica {number}"
                )
