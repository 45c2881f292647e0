"""Simulation: messages, bytes and time of every worker, predicted from the normal form.

Whole-array arithmetic over the transfers of a stage, for tens of thousands of workers. The summary
of a simulation is in `linop.planning.prediction.cost`, its parameters in `linop.planning.network`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from linop.errors import SpaceError, expect
from linop.normal_form.boxes import Ints, totals
from linop.normal_form.movement import Movement
from linop.normal_form.stages import HasStages, stages_given
from linop.planning.network import ASSUMED, Network
from linop.planning.placement import Placement
from linop.planning.routing import memory_traffic, messages, routes_by_receiver
from linop.planning.stage_passes import prepared
from linop.spaces.region import LARGEST
from linop.text import aligned

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Simulation:
    """Predicted application of an operator. All arrays are (n,), aligned with `workers`.

    Example:
        >>> X = linop.TensorSpace((6,), linop.Partition(3))
        >>> found = linop.simulate(linop.halo_exchange(X, 3))
        >>> found.workers.tolist(), found.messages_sent.tolist(), found.bytes_sent.tolist()
        ([0, 1, 2], [0, 2, 1], [0, 24, 8])
        >>> bool(found.time == found.seconds.max())
        True
    """

    workers: Ints
    """The workers, in increasing order."""
    messages_sent: Ints
    messages_received: Ints
    bytes_sent: Ints
    bytes_received: Ints
    bytes_between_memories: Ints
    """Bytes that a worker copies from one kind of memory to another (host and device), without
    those of messages."""
    bytes_between_machines: Ints
    """Bytes that a worker sends to other machines; counted in `bytes_sent`, too."""
    sending: Seconds
    """Seconds spent sending."""
    waiting: Seconds
    """Seconds, after sending, spent receiving or waiting for other workers."""
    copying: Seconds
    """Seconds spent copying inside and between the worker's memories."""
    adding: Seconds
    """Seconds spent accumulating into regions."""
    stages: int
    """Number of movement stages in which any message is sent."""

    @property
    def seconds(self) -> Seconds:
        """Time, in seconds, at which each worker is done; (n,)."""
        return self.sending + self.waiting + self.copying + self.adding

    @property
    def time(self) -> float:
        """Seconds until all workers are done."""
        return float(self.seconds.max(initial=0.0))

    @property
    def messages(self) -> int:
        """Total number of messages."""
        return int(self.messages_sent.sum())

    @property
    def bytes(self) -> int:
        """Total number of bytes sent."""
        return int(self.bytes_sent.sum())

    def __str__(self) -> str:
        head = (
            f"{len(self.workers)} workers, {self.stages} stages with messages: "
            f"{self.messages} messages, {self.bytes} bytes, {self.time:.3g} s"
        )
        if not len(self.workers):
            return head
        slow = int(np.argmax(self.seconds))
        rows: list[tuple[str, ...]] = [
            ("", "mean", "most", f"slowest (worker {self.workers[slow]})")
        ]
        for name in (field.name for field in fields(self)):
            column = getattr(self, name)
            if name not in ("workers", "stages"):
                title = f"seconds {name}" if name.endswith("ing") else name.replace("_", " ")
                numbers = column.mean(), column.max(), column[slow]
                rows.append((title, *(f"{number:.3g}" for number in numbers)))
        return "\n".join([head, *aligned(rows)])


class StageTimes(NamedTuple):
    """A movement stage of a simulation; (n,) seconds by worker, and the messages, (m,) each.

    Attributes:
        begun: when each worker begins; gone: when it has sent; here: when it has received.
        copying, adding: seconds that follow.
        senders, receivers: numbers of the workers, positions among all; sizes: bytes; each:
            seconds at either end, without limits of machines' links.
    """

    begun: Seconds
    gone: Seconds
    here: Seconds
    copying: Seconds
    adding: Seconds
    senders: Ints
    receivers: Ints
    sizes: Ints
    each: Seconds


def simulate(
    op: HasStages, network: Network | None = None, placement: Placement | None = None
) -> Simulation:
    """Predict one application of an operator on a network.

    A stage sends one message for each pair of workers that exchange anything, of m bytes, say. With
    t the time at which a worker begins a stage::

        sent  = t + Σ(α + β m)                              over the messages it sends
        here  = max(sent, t + Σ(α + β m) over those it receives, sent of every sender)
        done  = here + copied bytes · (seconds a byte copied) + γ · added bytes

    and `done` is the t of the next stage; α and β are those of the message's level (inside a
    machine, or between machines). The bytes that all workers of a machine send to others, or
    receive from them, take no less than the machine's rate allows. Bytes added to a region are
    those that it receives beyond its size. The network has no hops, and no other contention; a byte
    copied between host and device memory takes as long as one copied inside either; local maps take
    no time.

    Args:
        op: the operator.
        network: by default the one that passes assume (`linop.planning.network.ASSUMED`).
        placement: the machine of each worker; by default all are on one.

    Raises:
        ArgumentError: `op` is no operator; a worker has no machine.
        SpaceError: 2**63 bytes or more are moved.

    Example:
        >>> X = linop.TensorSpace((8192,), linop.Partition(4096))
        >>> found = linop.simulate(linop.shift(X, 1))
        >>> found.messages, found.bytes, found.stages
        (4096, 65536, 1)
    """
    return simulated(op, network, placement)


def simulated(
    op: HasStages,
    network: Network | None,
    placement: Placement | None,
    watch: Callable[[StageTimes], None] | None = None,
) -> Simulation:
    """As `simulate`; `watch` is called with the times of each movement stage."""
    network = ASSUMED if network is None else expect("network", network, Network)
    stages = prepared(stages_given("simulate", op), placement)
    workers = np.array(stages.workers, np.int64)
    n = len(workers)
    machines = np.zeros(n, np.int64) if placement is None else placement.of(workers)
    counts = np.zeros((4, n), np.int64)
    sending, waiting, copying, adding = np.zeros((4, n))
    between, out = np.zeros((2, n), np.int64)
    busy = 0
    short = np.min_scalar_type(n)  # smallest dtype: all pairs are stored
    moved = 0.0
    for movement in stages.movements:
        itemsize = movement.domain.dtype.itemsize
        moved += _most_bytes(movement)
        begun = sending + waiting + copying + adding
        own, coming = np.zeros((2, n))
        copied, crossing, added, leaving, arriving = np.zeros((5, n), np.int64)
        ends: list[tuple[Ints, Ints]] = []
        watched: list[tuple[Ints, Ints, Ints, Seconds]] = []
        for some in routes_by_receiver(movement, placement):
            sender, receiver, elements = messages(some)
            s, r = np.searchsorted(workers, sender), np.searchsorted(workers, receiver)
            size, one = elements * itemsize, np.ones_like(elements)
            moved += float(elements.sum(dtype=float)) * itemsize
            if moved > LARGEST:
                raise SpaceError("simulate: 2**63 bytes or more are moved; fewer can be counted")
            for row, (end, of) in enumerate([(s, one), (r, one), (s, size), (r, size)]):
                counts[row] += totals(end, of, n)
            crosses = machines[s] != machines[r]
            leaving += totals(s[crosses], size[crosses], n)
            arriving += totals(r[crosses], size[crosses], n)
            each = network.seconds(size, crosses)
            own += np.bincount(s, each, n)
            coming += np.bincount(r, each, n)
            ends.append((s.astype(short), r.astype(short)))
            if watch is not None:
                watched.append((s, r, size, each))
            for column, more in zip(
                (copied, crossing, added), memory_traffic(movement, some, workers), strict=True
            ):
                column += more
        busy += any(len(s) for s, _ in ends)
        rate = network.per_byte_of_machine
        own = np.maximum(own, _through_link(begun, leaving, machines, rate) - begun)
        coming = np.maximum(coming, _through_link(begun, arriving, machines, rate) - begun)
        gone = begun + own
        here = np.maximum(gone, begun + coming)
        for s, r in ends:
            np.maximum.at(here, r, gone[s])
        between += crossing * itemsize
        out += leaving
        sending += own
        waiting += here - gone
        copies = np.asarray(copied * itemsize * network.per_byte_copied, np.float64)
        sums = np.asarray(added * itemsize * network.per_byte_added, np.float64)
        copying += copies
        adding += sums
        if watch is not None:
            joined = (np.concatenate(c) for c in zip(*watched, strict=True)) if watched else ()
            none = np.zeros(0, np.int64)
            messages_of = tuple(joined) or (none, none, none, none.astype(float))
            watch(StageTimes(begun, gone, here, copies, sums, *messages_of))
    sent, received, bytes_sent, bytes_received = counts
    return Simulation(
        workers,
        sent,
        received,
        bytes_sent,
        bytes_received,
        between,
        out,
        sending,
        waiting,
        copying,
        adding,
        busy,
    )


def _most_bytes(movement: Movement) -> float:
    """Bytes of the largest region in domain and codomain, as a float: cannot overflow."""
    sizes = (
        space.numbering.shapes.astype(float).prod(axis=1).max(initial=0.0)
        for space in (movement.domain, movement.codomain)
    )
    return float(max(sizes)) * movement.domain.dtype.itemsize


def _through_link(begun: Seconds, sizes: Ints, machines: Ints, rate: float) -> Seconds:
    """Time at which bytes have passed the links of machines, from when the first worker of each
    begins; (n,), zero for workers that exchange nothing with other machines.

    Args:
        begun: (n,) when each worker begins.
        sizes: (n,) bytes that each sends to other machines, or receives from them.
        machines: (n,) machine of each.
        rate: seconds per byte of a machine.
    """
    some = sizes > 0
    first = np.full(machines.max(initial=0) + 1, np.inf)
    np.minimum.at(first, machines[some], begun[some])
    return np.where(some, (first + rate * np.bincount(machines, sizes))[machines], 0.0)
