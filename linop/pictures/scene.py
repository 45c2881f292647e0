"""Contents of a picture of an operator: regions of some workers, and arrows between them, as data.

Arrows are the transfers of the operator's normal form with their senders and receivers
(`linop.planning.routing`), as `linop.simulate` counts messages: nothing is known by an operator's
name. Of thousands of workers a few are shown, and only their rows of the tables are evaluated.
Layout is in `linop.pictures.layout`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from linop.errors import ArgumentError
from linop.normal_form.boxes import FEW, Ints, each_meets, row_keys
from linop.normal_form.maps import Call
from linop.normal_form.movement import Movement, Transfer
from linop.normal_form.space_tables import box_of
from linop.normal_form.stages import Stages
from linop.planning.routing import Routes, routes_into, routes_out_of
from linop.spaces.region import Region, Subset, integer
from linop.spaces.space import Space

MOST_WORKERS, FIRST_WORKERS = 8, 6
"""Workers up to which all are shown; of more, how many first ones, before the last."""
MOST_REGIONS = 4
"""Regions of a worker in one space that are shown."""
MOST_ARROWS = 160
"""Arrows of a movement that are shown one by one; more are joined by regions, up to as many."""
MOST_STEPS, FIRST_STEPS = 8, 5
"""Movements up to which all are shown; of more, how many first ones, before the last two."""
_KEPT = 64
"""Transfers that a joined arrow lists."""
_SPREAD = 4096
"""Regions, of all movements together, up to which regions that a movement carries are drawn."""

Worker = int | None
"""A worker; None for all that are not shown."""


@dataclass(frozen=True)
class Arrow:
    """Transfers from a region on a worker to a region on a worker, the same or another one.

    Attributes:
        sender, receiver: the workers; of arrows from or to workers that are not shown None.
        source, target: the smallest boxes that contain those of all transfers; None on a worker
            that is not shown.
        count: the number of transfers; of several from or to workers that are not shown, too.
        transfers: at most 64 of them; empty if an end is not shown.
        adds: True if elements of the target have other terms, too.
    """

    sender: Worker
    receiver: Worker
    source: Subset | None
    target: Subset | None
    count: int
    transfers: tuple[Transfer, ...] = ()
    adds: bool = False

    @property
    def message(self) -> bool:
        """True if another worker receives than the one that sends."""
        return self.sender is None or self.sender != self.receiver


@dataclass(frozen=True)
class Wire:
    """A line between a region and a local map of the same worker, by their numbers in their
    rows."""

    worker: int
    above: int
    below: int


@dataclass(frozen=True)
class Regions:
    """Regions of the shown workers in one space.

    Attributes:
        held: by worker, those that are shown.
        more: by worker, the number of those that are not.
        later: by worker, the same regions under the names that the next level knows them by.
    """

    space: Space
    held: Mapping[int, Sequence[Region]]
    more: Mapping[int, int]
    later: Mapping[int, Sequence[Region]]


@dataclass(frozen=True)
class Maps:
    """Local maps of the shown workers, by worker."""

    calls: Mapping[int, Sequence[Call]]


@dataclass(frozen=True)
class Gap:
    """Steps that are left out."""

    text: str


Level = Regions | Maps | Gap
Links = Sequence[Arrow] | Sequence[Wire]


@dataclass
class Scene:
    """The levels of a picture in the order of application, and the links between each two.

    Attributes:
        workers: those that are shown, sorted; hidden: the number of the others.
        left_out: sentences that say what is not drawn.
    """

    workers: tuple[int, ...]
    hidden: int
    levels: list[Level] = field(default_factory=list)
    links: list[Links] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def arrows(self) -> Iterator[Arrow]:
        """All arrows, movement by movement."""
        return (link for links in self.links for link in links if isinstance(link, Arrow))


def shown_workers(every: Sequence[int], chosen: Sequence[int] | None = None) -> tuple[int, ...]:
    """The workers that a picture shows: the chosen ones, or a few of all.

    Raises:
        ArgumentError: a chosen one is no worker of the operator.
    """
    if chosen is None:
        few = len(every) <= MOST_WORKERS
        return tuple(every) if few else (*every[:FIRST_WORKERS], every[-1])
    numbers = sorted({integer(worker, "draw: workers") for worker in chosen})
    known = set(every)
    for worker in numbers:
        if worker not in known:
            raise ArgumentError(
                f"draw: worker {worker} given; the operator is of {len(every)} workers"
                + (f", {every[0]} to {every[-1]}" if every else "")
            )
    if len(numbers) > 4 * MOST_WORKERS:
        raise ArgumentError(f"draw: {len(numbers)} workers given, at most {4 * MOST_WORKERS} fit")
    return tuple(numbers)


def scene_of(stages: Stages, workers: Sequence[int]) -> Scene:
    """The scene of an operator's normal form.

    Args:
        workers: those that are shown, sorted.
    """
    regions = sum(len(movement.domain) for movement in stages.movements) + len(stages.domain)
    if any(stages.carried) and regions <= _SPREAD and len(stages.movements) <= 2 * MOST_STEPS:
        stages = stages.spread
    scene = Scene(tuple(workers), len(stages.workers) - len(workers))
    scene.levels.append(_regions(scene, stages.domain))
    steps = range(len(stages.movements))
    for k in steps:
        if len(steps) > MOST_STEPS and FIRST_STEPS <= k < len(steps) - 2:
            if k == FIRST_STEPS:
                text = f"… {len(steps) - 2 - k} more steps"
                scene.left_out.append(f"{len(steps) - 2 - k} steps in the middle are not drawn")
                scene.levels += [
                    Gap(text),
                    _regions(scene, stages.movements[len(steps) - 2].domain),
                ]
                scene.links += [(), ()]
            continue
        _movement(scene, stages.movements[k], len(steps) == 1)
        if k < len(stages.layers) and stages.layers[k]:
            _layer(scene, stages, k)
        elif k + 1 < len(steps):
            _passed_on(scene, stages.movements[k + 1].domain)
    return scene


def _regions(scene: Scene, space: Space) -> Regions:
    held, more = {}, {}
    for worker in scene.workers:
        own = space.on(worker)
        held[worker] = own[:MOST_REGIONS]
        more[worker] = len(own) - len(held[worker])
    beyond = {worker: many for worker, many in more.items() if many}
    if beyond and not any("regions" in said for said in scene.left_out):
        worker, many = next(iter(beyond.items()))
        of_others = " (and others)" if len(beyond) > 1 else ""
        scene.left_out.append(f"{many} more regions of worker {worker}{of_others} are not drawn")
    return Regions(space, held, more, held)


def _movement(scene: Scene, movement: Movement, alone: bool) -> None:
    """Add the arrows of a movement and the regions that it gives; nothing for one that keeps all
    regions, perhaps under other names, unless it is the whole operator."""
    found = arrows(movement, scene.workers, scene.hidden > 0)
    after = _regions(scene, movement.codomain)
    before = scene.levels[-1]
    assert isinstance(before, Regions)
    if not alone and _renamed(scene, before, after, found):
        of_maps = scene.links and all(isinstance(link, Wire) for link in scene.links[-1])
        scene.levels[-1] = after if of_maps else replace(before, later=after.held)
        return
    if len(found) > MOST_ARROWS:
        scene.left_out.append(f"{len(found) - MOST_ARROWS} arrows are not drawn")
        found = found[:MOST_ARROWS]
    scene.links.append(found)
    scene.levels.append(after)


def _renamed(scene: Scene, before: Regions, after: Regions, found: Sequence[Arrow]) -> bool:
    """True if arrows keep all regions as they are, in order, apart from names."""
    kept: dict[tuple[int, str], str] = {}
    for arrow in found:
        if arrow.sender is None or arrow.message or arrow.count != 1:
            return False
        (only,) = arrow.transfers
        if not (only.source.whole and only.target.whole and only.coefficient == 1):
            return False
        kept[arrow.sender, only.source.region.name] = only.target.region.name
    return sum(map(len, before.held.values())) == len(found) and all(
        [kept.get((w, r.name)) for r in before.held[w]] == [r.name for r in after.held[w]]
        for w in scene.workers
    )


def _layer(scene: Scene, stages: Stages, k: int) -> None:
    """Add the local maps of a layer, and the regions that the next movement takes."""
    before = scene.levels[-1]
    assert isinstance(before, Regions)
    layer, shown = stages.layers[k], set(scene.workers)
    calls: dict[int, list[Call]] = {worker: [] for worker in scene.workers}
    for call in layer:
        for worker in call.workers[:1] if len(layer) > FEW else call.workers:
            if worker in shown and len(calls[worker]) < MOST_REGIONS:
                calls[worker].append(call)
    after = _regions(scene, stages.movements[k + 1].domain)
    into, out = [], []
    for worker in scene.workers:
        names = [region.name for region in before.later[worker]]
        results = [region.name for region in after.held[worker]]
        for number, call in enumerate(calls[worker]):
            into += [Wire(worker, names.index(n), number) for n in call.inputs if n in names]
            out += [Wire(worker, number, results.index(n)) for n in call.outputs if n in results]
    scene.levels += [Maps(calls), after]
    scene.links += [into, out]


def _passed_on(scene: Scene, space: Space) -> None:
    """The regions between two movements that follow one another, once if both have the same."""
    before, after = scene.levels[-1], _regions(scene, space)
    assert isinstance(before, Regions)
    if all(set(before.held[w]) == set(after.held[w]) for w in scene.workers):
        return
    same = []
    for worker in scene.workers:
        names = [region.name for region in before.held[worker]]
        for number, region in enumerate(after.held[worker]):
            if region.name in names:
                same.append(Wire(worker, names.index(region.name), number))
    scene.links.append(same)
    scene.levels.append(after)


def arrows(movement: Movement, workers: Sequence[int], hidden: bool) -> list[Arrow]:
    """The arrows of a movement that begin or end on some workers, of the regions that are shown.

    Args:
        workers: sorted. hidden: True if there are others.
    """
    if not workers:
        return []
    shown = np.array(workers, np.int64)
    coming = routes_into(movement, shown)
    known = np.isin(coming.sender, shown)
    adds = _overlapping(coming)
    into = _drawn(movement.codomain, workers, coming.receiver, coming.table.dst[coming.row])
    out = _drawn(movement.domain, workers, coming.sender, coming.table.src[coming.row])
    here, there = known & into & out, ~known & into
    found = list(_shown(movement, coming.of(here), adds[here]))
    if hidden:
        found += _from_others(movement, coming.of(there), adds[there])
        leaving = routes_out_of(movement, shown)
        out = _drawn(movement.domain, workers, leaving.sender, leaving.table.src[leaving.row])
        away = ~np.isin(leaving.receiver, shown)
        found += _to_others(movement, leaving.of(away & out))
    return found


def _drawn(space: Space, workers: Sequence[int], worker: Ints, region: Ints) -> np.ndarray:
    """Mask of the pairs of a worker and a region of it that are drawn."""
    pairs = [
        worker * len(space) + number
        for worker in workers
        for number in space.numbering.numbers_on(worker)[:MOST_REGIONS].tolist()
    ]
    return np.isin(worker * len(space) + region, pairs)


def _shown(movement: Movement, every: Routes, adds: np.ndarray) -> Iterator[Arrow]:
    """An arrow for each route between shown workers, or for all of two regions."""
    table = every.table
    ends = every.sender, every.receiver, table.src[every.row], table.dst[every.row]
    for rows in _groups(*ends) if len(every.row) > MOST_ARROWS else _each(len(every.row)):
        row, first = every.row[rows], rows[0]
        transfers = tuple(movement.transfer(one, table) for one in row[:_KEPT].tolist())
        yield Arrow(
            int(every.sender[first]),
            int(every.receiver[first]),
            _hull(movement.domain, table.src[row], table.of[row], table.extent[row]),
            _hull(movement.codomain, table.dst[row], table.at[row], table.extent[row]),
            len(row),
            transfers,
            bool(adds[rows].any()),
        )


def _from_others(movement: Movement, every: Routes, adds: np.ndarray) -> Iterator[Arrow]:
    table = every.table
    for rows in _groups(every.receiver, table.dst[every.row]):
        row = every.row[rows]
        box = _hull(movement.codomain, table.dst[row], table.at[row], table.extent[row])
        receiver = int(every.receiver[rows[0]])
        yield Arrow(None, receiver, None, box, len(row), adds=bool(adds[rows].any()))


def _to_others(movement: Movement, every: Routes) -> Iterator[Arrow]:
    table = every.table
    for rows in _groups(every.sender, table.src[every.row]):
        row = every.row[rows]
        box = _hull(movement.domain, table.src[row], table.of[row], table.extent[row])
        yield Arrow(int(every.sender[rows[0]]), None, box, None, len(row))


def _each(many: int) -> Iterator[Ints]:
    return (np.array([k]) for k in range(many))


def _groups(*columns: Ints) -> Iterator[Ints]:
    """The rows of each group of rows that are equal in all columns, by their values."""
    if not len(columns[0]):
        return
    keys = row_keys(*columns)
    order = np.argsort(keys, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(keys[order])) + 1)


def _hull(space: Space, numbers: Ints, starts: Ints, extents: Ints) -> Subset:
    """The smallest box that contains boxes of one region."""
    low = starts.min(axis=0)
    return box_of(space.numbering.at(int(numbers[0])), low, (starts + extents).max(axis=0) - low)


def _overlapping(every: Routes) -> np.ndarray:
    """Mask of the routes whose targets overlap with others of the same region and receiver."""
    adds = np.zeros(len(every.row), bool)
    table = every.table
    for rows in _groups(every.receiver, table.dst[every.row]):
        low = table.at[every.row[rows]]
        high = low + table.extent[every.row[rows]]
        if len(rows) <= FEW:
            meet = each_meets(low, high)
            np.fill_diagonal(meet, False)
            adds[rows] = meet.any(axis=1)
        else:  # as many elements arrive as the boxes' hull has, unless some overlap
            hull = (high.max(axis=0) - low.min(axis=0)).prod()
            adds[rows] = every.volume[rows].sum() > hull
    return adds
