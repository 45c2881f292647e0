"""From stages to the plan of one worker.

In this version every movement becomes point-to-point messages, one per pair of workers and stage.
All workers derive the same global order from the same canonical transfers, so messages cannot
cross.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np

from linop.boxes import Table, canonical
from linop.errors import BackendError
from linop.movement import Movement
from linop.plan import Advance, Alias, Apply, Make, Message, Plan, Put, Receive, Send, Step, Wait
from linop.region import Region
from linop.routing import Routes, routes_into, routes_out_of
from linop.space import Space
from linop.stages import Layer, Stages


def lower(stages: Stages, worker: int) -> Plan:
    """The plan of one worker.

    Raises:
        BackendError: a local map spans several workers.
    """
    steps: list[Step] = []
    stages = stages.factored
    for k, movement in enumerate(stages.movements):
        steps += _movement_steps(movement, worker, 2 * k)
        if k < len(stages.layers):
            before, after = movement.codomain, stages.movements[k + 1].domain
            steps += _layer_steps(stages.layers[k], before, after, worker, 2 * k + 1)
    inputs, outputs = stages.domain.on(worker), stages.codomain.on(worker)
    return Plan(worker, stages.domain.dtype, inputs, outputs, tuple(steps))


def workers_of(stages: Stages) -> tuple[int, ...]:
    """Every worker that has something to do."""
    return stages.workers


def _movement_steps(movement: Movement, worker: int, stage: int) -> Iterator[Step]:
    incoming, outgoing = routes_into(movement, worker), routes_out_of(movement, worker)
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
    overlapping, covered = _coverage(table.take(incoming.row), len(movement.codomain))
    whole = _kept(movement, incoming, worker)
    for region in movement.codomain.on(worker):
        number = movement.codomain.index[region.name]
        if number in whole:
            early.append(Alias(whole[number], region))
            continue
        accumulate = bool(overlapping[number])
        early.append(Make(region, accumulate or int(covered[number]) < region.size))
        for k in np.flatnonzero(table.dst[incoming.row] == number):
            transfer = movement.transfer(incoming.row[k], incoming.table)
            sender = int(incoming.sender[k])
            local = sender == worker
            source = transfer.source if local else Message(sender, int(offsets[k]))
            put = Put(transfer.target, source, transfer.coefficient, accumulate)
            # Sums keep the order of workers, so they wait for all; the rest need not.
            (early if local and not accumulate else late).append(put)
    yield from early
    if any(incoming.sender != worker):
        yield Wait(stage)
    yield from late
    yield Advance(stage)


def _layer_steps(
    layer: Layer, before: Space, after: Space, worker: int, stage: int
) -> Iterator[Step]:
    if not layer:
        return
    made: set[str] = set()
    for call in layer:
        sides = (*call.map.domain.regions, *call.map.codomain.regions)
        if len({r.workers for r in sides}) > 1:
            held = ", ".join(f"{r.name} on {r.workers}" for r in sides)
            raise BackendError(
                f"local operator {call.map.symbol} spans several workers ({held}); "
                f"move its regions to one worker first"
            )
        made.update(call.outputs)
        if worker in call.workers:
            yield Apply(call, tuple(after[name] for name in call.outputs))
    for region in after.on(worker):
        if region.name not in made:
            yield Alias(before[region.name], region)
    yield Advance(stage)


def _by(keys: np.ndarray, entries: Iterable[int]) -> Iterator[tuple[int, list[int]]]:
    """Entries grouped by an already sorted key."""
    for key, group in groupby(entries, key=lambda k: int(keys[k])):
        yield key, list(group)


def _message_offsets(incoming: Routes, worker: int) -> np.ndarray:
    """Where in its sender's message each entry starts."""
    offsets = np.zeros(len(incoming.row), np.int64)
    for _, entries in _by(incoming.sender, range(len(incoming.row))):
        sizes = incoming.volume[entries]
        offsets[entries] = np.cumsum(sizes) - sizes
    return offsets


def _coverage(rows: Table, regions: int) -> tuple[np.ndarray, np.ndarray]:
    """Per destination region: whether boxes overlap, and how many elements they cover."""
    ones = np.ones(len(rows))
    counted = canonical(
        Table(rows.dst, np.zeros_like(rows.dst), rows.at, rows.at, rows.extent, ones)
    )
    overlapping = np.zeros(regions, bool)
    covered = np.zeros(regions, np.int64)
    overlapping[counted.dst[counted.coef > 1]] = True
    np.add.at(covered, counted.dst, counted.extent.prod(axis=1))
    return overlapping, covered


def _kept(movement: Movement, incoming: Routes, worker: int) -> dict[int, Region]:
    """Destination regions (by number) that are a local source region, whole and unchanged."""
    table = incoming.table
    numbers, count = np.unique(table.dst[incoming.row], return_counts=True)
    single = set(numbers[count == 1].tolist())
    kept: dict[int, Region] = {}
    for k in np.flatnonzero(incoming.sender == worker):
        row = incoming.row[k]
        if int(table.dst[row]) in single and table.coef[row] == 1:
            transfer = movement.transfer(row, table)
            if transfer.source.whole and transfer.target.whole:
                kept[int(table.dst[row])] = transfer.source.region
    return kept
