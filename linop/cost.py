"""What an operator costs: messages and bytes of every worker, found without running anything."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from linop.routing import routes
from linop.stages import Stages


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


def cost(stages: Stages) -> Cost:
    """The cost of running stages one after the other."""
    workers: dict[int, Traffic] = {}
    messages = total = busy = 0
    for movement in stages.movements:
        all_routes = routes(movement)
        remote = all_routes.of(all_routes.sender != all_routes.receiver)
        ends = np.stack([remote.sender, remote.receiver], axis=1)
        pairs, which = np.unique(ends, axis=0, return_inverse=True)
        sizes = np.zeros(len(pairs), np.int64)
        np.add.at(sizes, which.reshape(-1), remote.volume * movement.domain.dtype.itemsize)
        for (sender, receiver), size in zip(pairs.tolist(), sizes.tolist(), strict=True):
            source = workers.setdefault(sender, Traffic())
            target = workers.setdefault(receiver, Traffic())
            source.messages_sent += 1
            source.bytes_sent += size
            target.messages_received += 1
            target.bytes_received += size
        messages += len(pairs)
        total += int(sizes.sum())
        busy += bool(len(pairs))
    return Cost(messages, total, busy, dict(sorted(workers.items())))
