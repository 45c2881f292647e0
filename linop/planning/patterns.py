"""Recognition of collectives: broadcast, all-reduce, … from the transfers of a movement alone.

Operators' names are not used. The routes of a stage between a closed group of workers fall into
*bundles*: equal boxes on some workers D, each the sum of boxes on some workers S. The sizes of S
and D determine the collective::

    every bundle     from one worker            from all S
    to one worker    all-to-all (if all do)     reduce; reduce-scatter, if to several in turn
    to all of D      broadcast; all-gather      all-reduce, if S is D

and everything else is point-to-point. Transposition swaps S and D, so adjoints of collectives are
recognised without further rules. Lowering always plans messages between pairs of workers
(`linop.planning.lowering`); a backend may run a recognised collective in another way
(`linop.planning.collective_selection`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np

from linop.normal_form.boxes import FEW, Ints, Table, canonical, each_meets, row_keys, totals
from linop.normal_form.columns import ones
from linop.normal_form.movement import Movement
from linop.normal_form.space_tables import number_of
from linop.planning.placement import Placement
from linop.planning.routing import Exchange, Routes, exchange
from linop.spaces.exact import Exact, shown

MOST_PAIRS = 2**18
"""Largest number of (sender, receiver) pairs of a group that is examined."""


class Kind(StrEnum):
    """Kind of communication of a worker in a movement stage."""

    LOCAL = "local"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    POINT_TO_POINT = "point-to-point"

    @property
    def collective(self) -> bool:
        """True for communication of a closed group of workers: not local, not point-to-point."""
        return self not in (Kind.LOCAL, Kind.POINT_TO_POINT)

    @property
    def sums(self) -> bool:
        """True for reductions: boxes of several workers are summed."""
        return self in (Kind.REDUCE, Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)


@dataclass(frozen=True)
class Pattern:
    """Communication of a worker in a movement; equal for all members of a collective's group."""

    kind: Kind
    group: tuple[int, ...]
    """The workers of a collective, sorted; else the worker and those it exchanges messages with."""
    counts: tuple[int, ...] = ()
    """Elements per member of a collective, in group order, or a single number if all are equal: the
    elements that a member contributes (broadcast, reduce, all-reduce, all-gather), receives
    (reduce-scatter), or sends to all others together (all-to-all)."""
    root: int | None = None
    """The worker that sends a broadcast, or receives a reduction; else None."""
    coefficient: Exact = 1
    """The common coefficient of all transfers."""
    aligned: bool = True
    """True if all messages pack the boxes of the bundles in the same order."""

    def count(self, worker: int) -> int:
        """The entry of `counts` for a member."""
        return self.counts[self.group.index(worker) if len(self.counts) > 1 else 0]

    def __str__(self) -> str:
        if self.kind is Kind.LOCAL:
            return "local"
        text = f"{self.kind} over workers {spans(self.group)}"
        if not self.counts:
            return text
        if self.root is not None:
            way = "from" if self.kind is Kind.BROADCAST else "to"
            text = f"{self.kind} {way} worker {self.root} over workers {spans(self.group)}"
        many = f"{self.counts[0]}" if len(self.counts) == 1 else f"up to {max(self.counts)}"
        scale = "" if self.coefficient == 1 else f", times {shown(self.coefficient)}"
        return f"{text}, {many} elements each{scale}"


def pattern(
    movement: Movement,
    worker: int,
    known: Exchange | None = None,
    placement: Placement | None = None,
) -> Pattern:
    """The pattern of a worker in a movement; all members of a group find the same. Cached.

    Computed from the worker's routes and, if these may belong to a collective, from those of its
    group, in time proportional to their number.

    Args:
        known: the routes of the worker, and of others, if already computed.
        placement: of the workers; by default on one machine.
    """
    found: dict[int, Pattern] = movement.kept.setdefault((Pattern, placement), {})
    if worker in found:
        return found[worker]

    def routed(workers: Ints) -> Exchange:
        return exchange(movement, workers, placement)

    known = known or routed(np.array([worker]))
    senders, receivers = known.peers(worker)
    mine = _collective(worker, senders, receivers, known, routed)
    if mine is None:
        peers = {*senders, *receivers}
        kind = Kind.POINT_TO_POINT if peers else Kind.LOCAL
        mine = Pattern(kind, tuple(sorted({*peers, worker})))
    for member in mine.group if mine.kind.collective else (worker,):
        found[member] = mine
    return mine


def _collective(
    me: int,
    senders: list[int],
    receivers: list[int],
    known: Exchange,
    routed: Callable[[Ints], Exchange],
) -> Pattern | None:
    """The collective of a worker's group, or None if its messages do not form one.

    In a collective, every sender in S sends to every receiver in D except itself. So a worker that
    both sends and receives knows S and D; for others, they are completed from the routes of one
    peer. That peer's S and D are compared first, before the routes of the whole group are computed:
    this excludes halo exchanges early.

    Args:
        senders, receivers: other workers that the worker receives from and sends to, sorted.
        known: the routes of some workers.
        routed: computes those of others.
    """
    if not senders + receivers:
        return None
    them = (senders or receivers)[0]
    if them not in known.workers:
        known = routed(np.array([them]))
    their_senders, their_receivers = map(set, known.peers(them))
    S, D = set(senders), set(receivers)
    if S and D:
        S, D = S | {me}, D | {me}
    elif S:
        D = their_receivers | ({them} if their_senders else set())
    else:
        S = their_senders | ({them} if their_receivers else set())
    if len(S) * len(D) > MOST_PAIRS:
        return None
    if their_senders != (S - {them} if them in D else set()):
        return None
    if their_receivers != (D - {them} if them in S else set()):
        return None
    if min(len(S), len(D)) > 1 and not (S <= D or D <= S):
        return None
    every = routed(np.array(sorted(S | D)))
    return _classified(every.coming) if every.closed else None


def _classified(entries: Routes) -> Pattern | None:
    """The pattern of a closed group's routes, by the table in the module's docstring; or None.

    1. No box overlaps another of its end. 2. What is exchanged, with the local copies that belong
    to it, has one coefficient. 3. The numbers of senders and receivers of boxes say which
    collective it is. 4. Routes are bundled, and the order of bundles in messages compared.
    5. Elements are counted by member.
    """
    # 1
    t = entries.table.take(entries.row)
    sources = _Boxes.of(t, entries.sender, t.src, t.of)
    targets = _Boxes.of(t, entries.receiver, t.dst, t.at)
    if not (sources.disjoint and targets.disjoint):
        return None
    # 2
    remote = entries.sender != entries.receiver
    # A local copy belongs to the collective if its source is sent too, or its target received.
    part = sources.shared(remote) | targets.shared(remote)
    entries, t = entries.of(part), t.take(part)
    source, target, remote = sources.box[part], targets.box[part], remote[part]
    sender, receiver = entries.sender, entries.receiver
    if not (t.coef == t.coef[0]).all():
        return None
    if _repeat(source, receiver) or _repeat(target, sender):
        return None
    # 3
    S, D = np.unique(sender), np.unique(receiver)
    group = np.union1d(S, D)
    froms, tos = np.bincount(target)[target], np.bincount(source)[source]
    all_S, all_D = bool((froms == len(S)).all()), bool((tos == len(D)).all())
    one_S, one_D = bool((froms == 1).all()), bool((tos == 1).all())
    root: int | None = None
    match (len(S) > 1, len(D) > 1):
        case (True, True) if all_S and all_D and np.array_equal(S, D):
            kind = Kind.ALL_REDUCE
        case (False, True) if all_D:
            kind, root = Kind.BROADCAST, int(S[0])
        case (True, False) if all_S:
            kind, root = Kind.REDUCE, int(D[0])
        case (True, True) if one_S and all_D and np.isin(S, D).all():
            kind = Kind.ALL_GATHER
        case (True, True) if all_S and one_D and np.isin(D, S).all():
            kind = Kind.REDUCE_SCATTER
        case (True, True) if one_S and one_D and _everybody(sender[remote], receiver[remote]):
            kind = Kind.ALL_TO_ALL
        case _:
            return None
    # 4. A bundle is numbered by its one box, or by that of its first contributor.
    bundle = target if kind.sums else source
    if kind is Kind.ALL_REDUCE:
        first = np.zeros(int(target.max()) + 1, np.int64)
        first[target[sender == S[0]]] = source[sender == S[0]]
        bundle = first[target]
        if _several(source, bundle):
            return None
    # Messages are packed by row of the table: is the order of bundles the same in all?
    message = row_keys(
        np.zeros_like(sender) if all_S else sender, np.zeros_like(receiver) if all_D else receiver
    )
    position = _rank(row_keys(receiver, sender))
    aligned = not _several(row_keys(message, position), bundle)
    # 5
    whose, box = (receiver, target) if kind is Kind.REDUCE_SCATTER else (sender, source)
    # Count each box once, however many receive it.
    _, once = np.unique(box, return_index=True)
    if kind is Kind.ALL_TO_ALL:
        once = np.flatnonzero(remote)
    size = totals(np.searchsorted(group, whose[once]), entries.volume[once], len(group))
    counts = size[size > 0][:1] if root is not None or (size == size[0]).all() else size
    return Pattern(
        kind,
        tuple(group.tolist()),
        tuple(int(n) for n in counts),
        root,
        number_of(t.coef[0]),
        aligned,
    )


@dataclass(frozen=True, eq=False)
class _Boxes:
    """One end of routes: box number of each entry, and True if distinct boxes are disjoint."""

    box: Ints
    disjoint: bool

    def shared(self, some: np.ndarray) -> np.ndarray:
        """Mask of the entries that have the box of one of some entries, given by a mask."""
        has = np.zeros(len(self.box), bool)
        has[self.box[some]] = True
        return has[self.box]

    @staticmethod
    def of(t: Table, worker: Ints, region: Ints, start: Ints) -> _Boxes:
        keys = row_keys(worker, region, *start.T, *t.extent.T)
        _, first, box = np.unique(keys, return_index=True, return_inverse=True)
        held = row_keys(worker[first], region[first])
        n, low, extent = len(first), start[first], t.extent[first]
        if n <= FEW:
            meet = each_meets(low, low + extent) & (held[:, None] == held)
            return _Boxes(box.reshape(-1), np.count_nonzero(meet) == n)
        each = Table(held, np.zeros(n, np.int64), low, low, extent, ones(n))
        return _Boxes(box.reshape(-1), not (canonical(each).coef > 1).any())


def _repeat(a: Ints, b: Ints) -> bool:
    """True if a pair (a[k], b[k]) occurs twice."""
    keys = row_keys(a, b)
    return len(np.unique(keys)) < len(keys)


def _several(key: Ints, value: Ints) -> bool:
    """True if a key occurs with several values."""
    return len(np.unique(row_keys(key, value))) > len(np.unique(key))


def _everybody(sender: Ints, receiver: Ints) -> bool:
    """True if every worker sends to every other one."""
    n = len(np.unique(sender))
    pairs = len(np.unique(row_keys(sender, receiver)))
    return np.array_equal(np.unique(sender), np.unique(receiver)) and pairs == n * (n - 1)


def _rank(key: Ints) -> Ints:
    """For each entry, the number of earlier entries of the same key."""
    order = np.argsort(key, kind="stable")
    begins = np.flatnonzero(np.diff(key[order], prepend=key[order][:1] - 1))
    rank = np.empty(len(key), np.int64)
    lengths = np.diff(begins, append=len(key))
    rank[order] = np.arange(len(key)) - np.repeat(begins, lengths)
    return rank


def spans(numbers: tuple[int, ...]) -> str:
    """Increasing numbers as text; runs of three or more are written with a dash."""
    cuts = [0, *(k + 1 for k, (a, b) in enumerate(pairwise(numbers)) if b != a + 1), len(numbers)]
    runs = [numbers[a:b] for a, b in pairwise(cuts)]
    texts = [
        f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs if run
    ]
    return ", ".join(texts)
