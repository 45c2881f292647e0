"""Lowering: from stages to the plan of one worker.

Every movement becomes point-to-point messages, one per pair of workers and stage, annotated with
the collective that they form, if any. All workers derive the same global order from the same
canonical transfers, so messages cannot cross. Rewriting of stages and of plans belongs to
`linop.planning.passes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from linop.normal_form.boxes import FEW, Ints, Table, canonical, each_meets
from linop.normal_form.columns import ones
from linop.normal_form.movement import Movement
from linop.normal_form.stages import Stages
from linop.planning.patterns import Pattern, pattern
from linop.planning.placement import Placement
from linop.planning.plan import (
    Advance,
    Alias,
    Apply,
    LoweredPlan,
    Make,
    Message,
    Put,
    Receive,
    Send,
    Step,
    Wait,
)
from linop.planning.routing import Exchange, Routes, exchange, held
from linop.planning.stage_passes import prepared
from linop.spaces.exact import Exact, rounded
from linop.spaces.region import Subset
from linop.spaces.scalars import Scalar
from linop.spaces.space import Space


def lower(stages: Stages, worker: int, placement: Placement | None = None) -> LoweredPlan:
    """The plan of one worker, after all passes (`linop.planning.stage_passes`).

    Args:
        placement: of the workers, the same on all of them, here and below; by default on one
            machine.

    Raises:
        BackendError: a local map spans several workers.
    """
    return lower_without_passes(prepared(stages, placement), worker, placement)


def lower_all(
    stages: Stages, placement: Placement | None = None, workers: Sequence[int] | None = None
) -> list[LoweredPlan]:
    """The plans of some workers: each as `lower` makes it, in a fraction of the time.

    Args:
        workers: sorted; by default all that hold a region.

    Raises:
        BackendError: a local map spans several workers.
    """
    workers = stages.workers if workers is None else workers
    return _lowered(prepared(stages, placement), workers, placement)


def lower_without_passes(
    stages: Stages, worker: int, placement: Placement | None = None
) -> LoweredPlan:
    """The plan of one worker, without any pass.

    Raises:
        BackendError: a local map spans several workers.
    """
    (plan,) = _lowered(stages, (worker,), placement)
    return plan


def workers_of(stages: Stages) -> tuple[int, ...]:
    """Every worker that holds a region in any stage, sorted."""
    return stages.workers


def _lowered(
    stages: Stages, workers: Sequence[int], placement: Placement | None
) -> list[LoweredPlan]:
    """The plans of some workers, sorted, by whole-array arithmetic over all of them."""
    steps: dict[int, list[Step]] = {worker: [] for worker in workers}
    patterns: dict[int, list[Pattern]] = {worker: [] for worker in workers}
    for k, movement in enumerate(stages.movements):
        routes = exchange(movement, np.array(workers, np.int64), placement)
        moves = _movement_steps(movement, routes, 2 * k)
        for worker in workers:
            patterns[worker].append(pattern(movement, worker, routes, placement))
            own = movement.domain.on(worker) if stages.carried[k] else None
            taken = None if own is None else tuple(region.name for region in own)
            steps[worker] += (*moves[worker], Advance(2 * k, taken))
            if k < len(stages.layers) and stages.layers[k]:
                steps[worker] += _layer_steps(stages, k, worker)
    inputs, outputs = stages.domain.on, stages.codomain.on
    return [
        LoweredPlan(
            w, stages.domain.dtype, inputs(w), outputs(w), tuple(steps[w]), tuple(patterns[w])
        )
        for w in workers
    ]


def _movement_steps(movement: Movement, routes: Exchange, stage: int) -> dict[int, list[Step]]:
    """The steps of some workers in a movement, by worker; without the `Advance`."""
    sent = _boxes(movement.domain, routes.leaving, "src", "of")
    steps: dict[int, list[Step]] = {}
    for worker, (early, late) in _writes(movement, routes).items():
        receives, sends = routes.receives.get(worker, ()), routes.sends.get(worker, ())
        steps[worker] = [
            *(Receive(stage, one.peer, one.size) for one in receives),
            *(Send(stage, one.peer, tuple(sent[one.first : one.stop])) for one in sends),
            *early,
            *((Wait(stage),) if receives else ()),
            *late,
        ]
    return steps


def _writes(movement: Movement, routes: Exchange) -> dict[int, tuple[list[Step], list[Step]]]:
    """The steps that make and set the new regions of some workers, by worker: (those before the
    wait, those after it). Local puts that set run before the wait; accumulations keep their
    order."""
    domain, codomain, coming = movement.domain, movement.codomain, routes.coming
    t, row = coming.table, coming.row
    holders, first, _ = domain.numbering.holders
    region = coming.receiver * len(codomain) + t.dst[row]
    # By the first holder of the source, whichever holder sends it: all holders of a replicated
    # target sum in the same order.
    order = np.lexsort((row, holders[first[t.src[row]]], region))
    holder, number = held(codomain, routes.workers)
    wanted, region = holder * len(codomain) + number, region[order]
    low, high = (np.searchsorted(region, wanted, side) for side in ("left", "right"))
    sums = _sums(t.at[row[order]], t.extent[row[order]], low, high)
    if sums.any():
        set_first = np.lexsort((sums, region))
        order, sums = order[set_first], sums[set_first]
    coming = coming.of(order)

    local = coming.sender == coming.receiver
    volume = np.append(0, np.cumsum(np.where(sums, 0, coming.volume)))
    covered = volume[high] - volume[low]
    targets = _boxes(codomain, coming, "dst", "at")
    own = iter(_boxes(domain, coming.of(local), "src", "of"))
    columns = (c.tolist() for c in (local, coming.sender, routes.offsets[order]))
    sources = [next(own) if here else Message(w, k) for here, w, k in zip(*columns, strict=True)]
    coef = t.coef[coming.row].tolist()
    factor = {number: _factor(number, domain.dtype) for number in set(coef)}
    puts = list(map(Put, targets, sources, map(factor.__getitem__, coef), sums.tolist()))

    steps: dict[int, tuple[list[Step], list[Step]]] = {w: ([], []) for w in routes.workers.tolist()}
    whens = (local & ~sums).tolist()
    columns = (c.tolist() for c in (holder, number, low, high, covered))
    for worker, k, a, b, many in zip(*columns, strict=True):
        made, (early, late) = codomain.numbering.at(k), steps[worker]
        if b == a + 1 and coef[a] == 1 and _keeps(puts[a]):
            early.append(Alias(puts[a].source.region, made))
            continue
        early.append(Make(made, zeroed=many != made.size))
        for put, now in zip(puts[a:b], whens[a:b], strict=True):
            (early if now else late).append(put)
    return steps


def _keeps(put: Put) -> bool:
    """True if a put is from an entire region to an entire region of the same memory."""
    source, target = put.source, put.target
    return (
        isinstance(source, Subset)
        and source.whole
        and target.whole
        and source.memory == target.memory
    )


def _boxes(space: Space, routes: Routes, numbers: str, starts: str) -> list[Subset]:
    """The box of each route in a space: one object for all routes of a transfer."""
    rows, which = np.unique(routes.row, return_inverse=True)
    low, extent = getattr(routes.table, starts)[rows], routes.table.extent[rows]
    numbering = space.numbering
    at = numbering.at if len(rows) < len(numbering) else space.regions.__getitem__
    regions = map(at, getattr(routes.table, numbers)[rows].tolist())
    made = [
        Subset(region, start[: region.ndim], stop[: region.ndim])
        for region, start, stop in zip(regions, _tuples(low), _tuples(low + extent), strict=True)
    ]
    return [made[k] for k in which.tolist()]


def _tuples(rows: Ints) -> list[tuple[int, ...]]:
    """Rows as tuples: one object for equal rows, since most workers' boxes are alike."""
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    return [known.setdefault(row, row) for row in zip(*rows.T.tolist(), strict=True)]


def _factor(coefficient: Exact, dtype: np.dtype[Any]) -> Scalar:
    """A coefficient rounded once to the dtype, as a factor of arrays; 1 stays an int."""
    factor: Scalar = 1 if coefficient == 1 else rounded(coefficient, dtype)
    return factor


def _sums(at: Ints, extent: Ints, low: Ints, high: Ints) -> np.ndarray:
    """Mask of the boxes that accumulate (`summation`), of many regions: those of region k are
    entries `low[k]` to `high[k]` - 1. Regions whose boxes are alike are looked at once."""
    sums = np.zeros(len(at), bool)
    known: dict[tuple[bytes, bytes], np.ndarray] = {}
    several = np.flatnonzero(high - low > 1)
    for a, b in zip(low[several].tolist(), high[several].tolist(), strict=True):
        boxes = at[a:b], extent[a:b]
        key = boxes[0].tobytes(), boxes[1].tobytes()
        if key not in known:
            known[key] = summation(*boxes)[1]
        sums[a:b] = known[key]
    return sums


def summation(at: Ints, extent: Ints) -> tuple[Ints, np.ndarray]:
    """The order in which boxes are written to a region, and a mask of those that accumulate: the
    same on every backend, so that sums are bitwise equal.

    Among boxes that overlap, the first that contains all the others is set, and the rest are
    accumulated, in order of worker. If none contains all others, all are accumulated into zeros.

    Args:
        at, extent: (n, d) boxes, sorted by worker.

    Returns:
        (n,) order of writing, boxes that are set first; (n,) mask of the accumulated, in the order
        given.
    """
    stop = at + extent
    sums = np.zeros(len(at), bool)
    for group in overlapping(at, stop):
        if len(group) > 1:
            low, high = at[group].min(axis=0), stop[group].max(axis=0)
            holds = ((at[group] == low) & (stop[group] == high)).all(axis=1)
            sums[group] = True
            if holds.any():
                sums[group[np.argmax(holds)]] = False
    return np.argsort(sums, kind="stable"), sums


def overlapping(at: Ints, stop: Ints) -> list[Ints]:
    """Connected components of overlapping boxes, as arrays of box numbers. More than `FEW` distinct
    boxes are not separated: either none overlap, or all are one group."""
    if len(at) <= FEW:
        label = _connected(each_meets(at, stop))
    else:
        boxes, which = np.unique(np.hstack([at, stop]), axis=0, return_inverse=True)
        label = _of_different(*np.hsplit(boxes, 2))[which.reshape(-1)]
    order = np.argsort(label, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(label[order])) + 1)


def _of_different(low: Ints, high: Ints) -> Ints:
    """The group of each of some distinct boxes, by number."""
    if len(low) <= FEW:
        return _connected(each_meets(low, high))
    zeros = np.zeros(len(low), np.int64)
    table = Table(zeros, zeros, low, low, high - low, ones(len(low)))
    overlap = (canonical(table).coef > 1).any()
    return zeros if overlap else np.arange(len(low))


def _connected(meet: np.ndarray) -> Ints:
    """Connected components of a symmetric (n, n) mask: for each, its least member. (Importing
    SciPy's version would add 0.2 seconds to a worker's first plan.)"""
    label = np.arange(len(meet))
    while True:
        least = np.where(meet, label, label[:, None]).min(axis=1, initial=len(meet))
        least = least[least]
        if np.array_equal(least, label):
            return label
        label = least


def _layer_steps(stages: Stages, layer: int, worker: int) -> Iterator[Step]:
    own = stages.calls_by_worker[layer].get(worker, ())
    for call in own:
        yield Apply(call, tuple(stages.result(layer, name) for name in call.outputs))
    yield Advance(2 * layer + 1, tuple(name for call in own for name in call.inputs))
