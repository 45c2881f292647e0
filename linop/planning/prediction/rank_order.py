"""Search for a placement of workers on the same machines that sends fewer bytes between them.

A heuristic: the quadratic assignment problem is NP-hard, and SciPy's solver for it stops where it
starts on the regular traffic of a grid of workers.
"""

from __future__ import annotations

import numpy as np

from linop.normal_form.stages import HasStages
from linop.planning.placement import Placement
from linop.planning.prediction.traffic import traffic_matrix

LARGEST = 512
"""Largest number of workers for which orders are searched: some seconds."""
_TRIES = 8
"""Searches for up to 256 workers; two for 512. The first begins with the placement, the others at
random."""


def better_order(op: HasStages, placement: Placement) -> Placement:
    """A placement with as many workers on each machine, for which an operator is predicted to send
    fewer bytes between machines, two-level collectives included; the same object if none is found,
    or if there are more than `LARGEST` workers.

    Raises:
        ArgumentError: a worker has no machine.
    """
    traffic = traffic_matrix(op)
    workers, n = traffic.workers, len(traffic.workers)
    here = placement.of(workers)
    if not 1 < n <= LARGEST:
        return placement
    both = (traffic.bytes + traffic.bytes.T).toarray().astype(float)
    random = np.random.default_rng(0)
    names = np.array(placement.names)
    best, least = placement, bytes_between(op, placement)
    for k in range(max(1, min(_TRIES, _TRIES * 256**2 // n**2))):
        machines = placement.machines.copy()
        machines[workers] = _swapped(both, random.permutation(here) if k else here)
        found = Placement(names[machines])
        if (size := bytes_between(op, found)) < least:
            best, least = found, size
    return best


def bytes_between(op: HasStages, placement: Placement) -> int:
    """Bytes that an operator sends between machines."""
    sizes = traffic_matrix(op, placement).by_machine(placement).bytes
    return int(sizes.sum() - sizes.diagonal().sum())


def _swapped(traffic: np.ndarray, machines: np.ndarray) -> np.ndarray:
    """The machines of workers after swaps of two workers, each the one that saves most, until none
    saves any.

    Args:
        traffic: (n, n) symmetric, bytes between workers; the diagonal is zero.
        machines: (n,) machine of each worker.
    """
    machines, every = machines.copy(), np.arange(len(machines))
    for _ in range(4 * len(machines)):
        on = np.zeros((len(machines), machines.max() + 1))
        on[every, machines] = 1
        near = (traffic @ on)[:, machines]  # [i, j]: between worker i and the machine of j
        gain = near - near[every, every][:, None]
        saved = gain + gain.T - 2 * traffic
        i, j = divmod(int(np.argmax(saved)), len(machines))
        if saved[i, j] <= 0:
            break
        machines[[i, j]] = machines[[j, i]]
    return machines
