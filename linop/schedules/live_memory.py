"""Live memory of a schedule: activations, versions of parameters and message slots. It follows from
the order of each worker's actions, without times."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real

from linop.errors import ArgumentError, expect
from linop.schedules.actions import BACKWARDS, COMPUTE, Kind
from linop.schedules.schedule import Schedule

_MOST = sys.float_info.max


@dataclass(frozen=True)
class Sizes:
    """Sizes in bytes, by stage, for predictions of memory.

    Attributes:
        activations: of what the forward of one micro-batch keeps for the backward.
        weights: of one version of the parameters; empty for none.
        messages: of one message, by edge: stages (a, b) for outputs, (b, a) for their gradients.
        boundaries: of a stage's input of one micro-batch, which recomputation keeps in place of the
            activations; empty for none.

    Raises:
        ArgumentError: a size is no finite number from 0.

    Example:
        Activations of 100 bytes for each micro-batch, of which 1F1B holds two on the first stage:

        >>> sizes = linop.schedules.Sizes(activations=[100, 100], weights=[10, 10])
        >>> table = linop.schedules.one_forward_one_backward(2, 8)
        >>> linop.schedules.check(table, sizes=sizes).peak_bytes
        (210, 110)
    """

    activations: Sequence[float]
    weights: Sequence[float] = ()
    messages: Mapping[tuple[int, int], float] = field(default_factory=dict)
    boundaries: Sequence[float] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.messages, Mapping):
            raise ArgumentError(f"sizes: messages by edge expected, given {self.messages!r}")
        for name in ("activations", "weights", "boundaries", "messages"):
            given = getattr(self, name)
            if not isinstance(given, Collection) or isinstance(given, str):
                raise ArgumentError(f"sizes: {name} of each stage expected, given {given!r}")
            for size in self.messages.values() if given is self.messages else given:
                if not isinstance(size, Real) or not 0 <= size <= _MOST:  # type: ignore[operator]
                    raise ArgumentError(f"sizes: {name} from 0 expected, given {size!r}")


def expect_sizes(sizes: Sizes, schedule: Schedule) -> None:
    """Check that there is a size for each stage.

    Raises:
        ArgumentError: there is not.
    """
    expect("sizes", sizes, Sizes)
    for name in ("activations", "weights", "boundaries"):
        given = len(getattr(sizes, name))
        if given != schedule.stages and (name == "activations" or given):
            raise ArgumentError(
                f"sizes: {schedule.stages} {name} expected, one a stage, given {given}"
            )


@dataclass(frozen=True)
class Live:
    """Live data of a worker while it executes an action.

    Attributes:
        position: of the action in the worker's row.
        activations: by stage, the number of micro-batches after their forward (this one included)
            and not after their backward, B or W. With recomputation: from their backward on.
        boundaries: by stage, the same number with recomputation as without; 0 without.
        versions: by stage, the number of versions of the parameters: the newest, and those that are
            read later. An update whose old version nobody reads later counts none for it: it can
            be done in place.
    """

    position: int
    activations: Mapping[int, int]
    boundaries: Mapping[int, int]
    versions: Mapping[int, int]


def live(schedule: Schedule, worker: int, recompute: bool = False) -> Iterator[Live]:
    """Live data of a worker of a complete, ordered schedule, action by action; the mappings
    change as it goes on.

    Args:
        recompute: boundaries are kept, and activations made anew by the backward, B or I.
    """
    row = schedule.workers[worker]
    own = [s for s, w in schedule.placement.items() if w == worker]
    newest = dict.fromkeys(own, 0)
    last: dict[tuple[int, int], int] = {}  # position of the last read of each version
    for position, action in enumerate(row):
        if action.kind == Kind.UPDATE:
            newest[action.stage] += 1
        elif action.kind in COMPUTE:
            version = newest[action.stage] if action.version is None else action.version
            last[action.stage, version] = position
    by_position = {position: key for key, position in last.items()}
    newest = dict.fromkeys(own, 0)
    activations, boundaries = dict.fromkeys(own, 0), dict.fromkeys(own, 0)
    versions = dict.fromkeys(own, 1)
    makes = BACKWARDS if recompute else {Kind.FORWARD}
    for position, action in enumerate(row):
        s = action.stage
        if action.kind == Kind.UPDATE:
            versions[s] += last.get((s, newest[s]), -1) > position
            newest[s] += 1
        activations[s] += action.kind in makes
        boundaries[s] += recompute and action.kind == Kind.FORWARD
        yield Live(position, activations, boundaries, versions)
        done = action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        activations[s] -= done
        boundaries[s] -= recompute and done
        if position in by_position and by_position[position][1] < newest[s]:
            versions[s] -= 1


def peaks(schedule: Schedule) -> tuple[dict[int, int], dict[int, int]]:
    """Largest numbers of live activations and of versions of the parameters, by stage."""
    activations = dict.fromkeys(schedule.placement, 0)
    versions = dict.fromkeys(schedule.placement, 1)
    for worker, row in enumerate(schedule.workers):
        for action, now in zip(row, live(schedule, worker), strict=True):
            s = action.stage
            activations[s] = max(activations[s], now.activations[s])
            versions[s] = max(versions[s], now.versions[s])
    return activations, versions


def peak_bytes(
    schedule: Schedule, sizes: Sizes, slots: Mapping[tuple[int, int], int]
) -> list[tuple[float, int]]:
    """For each worker its largest number of live bytes, and the position of the action of it: with
    the slots of edges, each on the worker that receives."""
    worker = schedule.placement
    found = []
    for w in range(len(schedule.workers)):
        fixed = sum(
            count * sizes.messages.get(edge, 0)
            for edge, count in slots.items()
            if worker[edge[1]] == w
        )
        peak = (fixed, 0)
        for now in live(schedule, w, bool(sizes.boundaries)):
            held = sum(n * sizes.activations[s] for s, n in now.activations.items())
            if sizes.boundaries:
                held += sum(n * sizes.boundaries[s] for s, n in now.boundaries.items())
            if sizes.weights:
                held += sum(n * sizes.weights[s] for s, n in now.versions.items())
            if held + fixed > peak[0]:
                peak = (held + fixed, now.position)
        found.append(peak)
    return found
