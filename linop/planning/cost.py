"""What an operator costs: messages and bytes of every worker, found without running anything."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from linop.planning.network import Network
from linop.planning.simulation import Staged, simulate


@dataclass
class Traffic:
    """What one worker sends and receives in one application of an operator."""

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0


@dataclass(frozen=True)
class Cost:
    """Messages and bytes of one application of an operator; one message per pair of workers and
    movement stage. Workers that exchange nothing are left out of `workers`."""

    messages: int = 0
    bytes: int = 0
    stages: int = 0
    """Movement stages in which any message is sent."""
    workers: dict[int, Traffic] = field(default_factory=dict)
    seconds: float | None = None
    """Until all workers are done, where a network was given: see `linop.simulate`."""
    bytes_between_memories: int = 0
    """Copied by all workers together from one of their memories to another (host and device)."""


def cost(op: Staged, network: Network | None = None) -> Cost:
    """The cost of one application."""
    found = simulate(op, network)
    busy = np.flatnonzero(found.messages_sent + found.messages_received)
    columns = (found.messages_sent, found.bytes_sent, found.messages_received, found.bytes_received)
    traffic = zip(*(column[busy].tolist() for column in columns), strict=True)
    workers = dict(zip(found.workers[busy].tolist(), (Traffic(*t) for t in traffic), strict=True))
    seconds = None if network is None else found.time
    between = int(found.bytes_between_memories.sum())
    return Cost(found.messages, found.bytes, found.stages, workers, seconds, between)
