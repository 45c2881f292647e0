"""Cost of an operator: messages and bytes of every worker, computed without running it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from linop.normal_form.stages import HasStages
from linop.planning.network import Network
from linop.planning.placement import Placement
from linop.planning.prediction.simulation import simulate


@dataclass
class Traffic:
    """Messages and bytes that one worker sends and receives in one application of an operator.

    Example:
        >>> X = linop.TensorSpace((6,), linop.Partition(3))
        >>> linop.halo_exchange(X, 3).cost().workers[1]
        Traffic(messages_sent=2, bytes_sent=24, messages_received=1, bytes_received=8)
    """

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0


@dataclass(frozen=True)
class Cost:
    """Messages and bytes of one application of an operator: one message per pair of workers and
    movement stage, in collectives too. `workers` omits those without messages.

    Example:
        >>> X = linop.TensorSpace((6,), linop.Partition(3))
        >>> cost = linop.halo_exchange(X, 3).cost()
        >>> cost.messages, cost.bytes, cost.stages
        (3, 32, 1)
    """

    messages: int = 0
    bytes: int = 0
    stages: int = 0
    """Number of movement stages in which any message is sent."""
    workers: dict[int, Traffic] = field(default_factory=dict)
    seconds: float | None = None
    """Predicted time until all workers are done (`linop.simulate`); None without a network."""
    bytes_between_memories: int = 0
    """Bytes that all workers copy from one kind of memory to another; messages not counted."""
    bytes_between_machines: int = 0
    """Bytes of messages between machines; 0 without a placement."""


def cost(op: HasStages, network: Network | None = None, placement: Placement | None = None) -> Cost:
    """The cost of one application; with a predicted time if a network is given."""
    found = simulate(op, network, placement)
    busy = np.flatnonzero(found.messages_sent + found.messages_received)
    columns = (found.messages_sent, found.bytes_sent, found.messages_received, found.bytes_received)
    traffic = zip(*(column[busy].tolist() for column in columns), strict=True)
    workers = dict(zip(found.workers[busy].tolist(), (Traffic(*t) for t in traffic), strict=True))
    seconds = None if network is None else found.time
    between = int(found.bytes_between_memories.sum())
    out = int(found.bytes_between_machines.sum())
    return Cost(found.messages, found.bytes, found.stages, workers, seconds, between, out)
