"""Lowering: from stages to the plan of one worker.

Every movement becomes point-to-point messages, one per pair of workers and stage, annotated with
the collective that they form, if any. All workers derive the same global order from the same
canonical transfers, so messages cannot cross. Rewriting of stages and of plans belongs to
`linop.planning.pipeline`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import numpy as np

from linop.normal_form.boxes import FEW, Ints, Table, canonical, each_meets
from linop.normal_form.columns import ones
from linop.normal_form.maps import Layer
from linop.normal_form.movement import Movement
from linop.normal_form.stages import Stages
from linop.planning.passes import prepared
from linop.planning.patterns import Pattern, pattern
from linop.planning.plan import (
    Advance,
    Alias,
    Apply,
    Make,
    Message,
    Plan,
    Put,
    Receive,
    Send,
    Step,
    Wait,
)
from linop.planning.routing import Routes, routes_into, routes_out_of
from linop.spaces.exact import Exact, rounded
from linop.spaces.region import Region
from linop.spaces.scalars import Scalar
from linop.spaces.space import Space


def lower(stages: Stages, worker: int) -> Plan:
    """The plan of one worker, after all passes (`linop.planning.passes`).

    Raises:
        BackendError: a local map spans several workers.
    """
    return lower_without_passes(prepared(stages), worker)


def lower_without_passes(stages: Stages, worker: int) -> Plan:
    """The plan of one worker, without any pass.

    Raises:
        BackendError: a local map spans several workers.
    """
    steps: list[Step] = []
    patterns: list[Pattern] = []
    for k, movement in enumerate(stages.movements):
        incoming, outgoing = routes_into(movement, worker), routes_out_of(movement, worker)
        patterns.append(pattern(movement, worker, incoming, outgoing))
        steps += _movement_steps(movement, worker, 2 * k, incoming, outgoing)
        if k < len(stages.layers):
            before, after = movement.codomain, stages.movements[k + 1].domain
            own = stages.calls_by_worker[k].get(worker, ())
            steps += _layer_steps(own, before, after, worker, 2 * k + 1) if stages.layers[k] else ()
    inputs, outputs = stages.domain.on(worker), stages.codomain.on(worker)
    return Plan(worker, stages.domain.dtype, inputs, outputs, tuple(steps), tuple(patterns))


def workers_of(stages: Stages) -> tuple[int, ...]:
    """Every worker that holds a region in any stage, sorted."""
    return stages.workers


def _movement_steps(
    movement: Movement, worker: int, stage: int, incoming: Routes, outgoing: Routes
) -> Iterator[Step]:
    offsets = _message_offsets(incoming, worker)
    for peer, entries in _by(incoming.sender, range(len(incoming.row))):
        if peer != worker:
            yield Receive(stage, peer, int(sum(incoming.volume[k] for k in entries)))
    for peer, entries in _by(outgoing.receiver, range(len(outgoing.row))):
        parts = (movement.transfer(outgoing.row[k], outgoing.table).source for k in entries)
        yield Send(stage, peer, tuple(parts))

    early: list[Step] = []
    late: list[Step] = []
    table = incoming.table
    whole = _aliases(movement, incoming, worker)
    order = np.argsort(table.dst[incoming.row], kind="stable")
    numbers = table.dst[incoming.row][order]
    for region in movement.codomain.on(worker):
        number = movement.codomain.numbering.index[region.name]
        if number in whole:
            early.append(Alias(whole[number], region))
            continue
        found = order[slice(*np.searchsorted(numbers, [number, number + 1]))]
        # By the first holder of the source, whichever holder sends it: all holders of a replicated
        # target sum in the same order.
        rows = incoming.row[found]
        counts = [movement.domain.numbering.at(k).workers[0] for k in table.src[rows]]
        by_worker = np.lexsort((rows, np.array(counts, np.int64)))
        found, rows = found[by_worker], rows[by_worker]
        written, sums = summation(table.at[rows], table.extent[rows])
        covered = int(incoming.volume[found][~sums].sum()) == region.size
        early.append(Make(region, zeroed=not covered))
        for k in written:
            transfer = movement.transfer(rows[k], table)
            sender = int(incoming.sender[found[k]])
            local = sender == worker
            source = transfer.source if local else Message(sender, int(offsets[found[k]]))
            factor = _factor(transfer.coefficient, movement.domain.dtype)
            put = Put(transfer.target, source, factor, bool(sums[k]))
            # Accumulations keep this order; local puts that set can run before the wait.
            (early if local and not sums[k] else late).append(put)
    yield from early
    if any(incoming.sender != worker):
        yield Wait(stage)
    yield from late
    yield Advance(stage)


def _factor(coefficient: Exact, dtype: np.dtype[Any]) -> Scalar:
    """A coefficient rounded once to the dtype, as a factor of arrays; 1 stays an int."""
    factor: Scalar = 1 if coefficient == 1 else rounded(coefficient, dtype)
    return factor


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
    for group in _overlapping(at, stop):
        if len(group) > 1:
            low, high = at[group].min(axis=0), stop[group].max(axis=0)
            holds = ((at[group] == low) & (stop[group] == high)).all(axis=1)
            sums[group] = True
            if holds.any():
                sums[group[np.argmax(holds)]] = False
    return np.argsort(sums, kind="stable"), sums


def _overlapping(at: Ints, stop: Ints) -> list[Ints]:
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


def _layer_steps(
    own: Layer, before: Space, after: Space, worker: int, stage: int
) -> Iterator[Step]:
    for call in own:
        yield Apply(call, tuple(after[name] for name in call.outputs))
    made = {name for call in own for name in call.outputs}
    for region in after.on(worker):
        if region.name not in made:
            yield Alias(before[region.name], region)
    yield Advance(stage)


def _by(keys: np.ndarray, entries: Iterable[int]) -> Iterator[tuple[int, list[int]]]:
    """Entries grouped by key; keys are sorted."""
    for key, group in groupby(entries, key=lambda k: int(keys[k])):
        yield key, list(group)


def _message_offsets(incoming: Routes, worker: int) -> np.ndarray:
    """Offset, in elements, of each entry in its sender's message."""
    offsets = np.zeros(len(incoming.row), np.int64)
    for _, entries in _by(incoming.sender, range(len(incoming.row))):
        sizes = incoming.volume[entries]
        offsets[entries] = np.cumsum(sizes) - sizes
    return offsets


def _aliases(movement: Movement, incoming: Routes, worker: int) -> dict[int, Region]:
    """Source regions, by number of the destination region, of the destinations that alias one: the
    same worker and memory, the entire region, coefficient 1, no other term."""
    table = incoming.table
    numbers, count = np.unique(table.dst[incoming.row], return_counts=True)
    single = set(numbers[count == 1].tolist())
    kept: dict[int, Region] = {}
    for k in np.flatnonzero(incoming.sender == worker):
        row = incoming.row[k]
        if int(table.dst[row]) in single and table.coef[row] == 1:
            transfer = movement.transfer(row, table)
            source, target = transfer.source, transfer.target
            if source.whole and target.whole and source.memory == target.memory:
                kept[int(table.dst[row])] = source.region
    return kept
