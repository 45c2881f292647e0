"""Program of each rank of a job on torch modules: ``python -m benchmarks.layers.rank JSON``, as
`benchmarks.movement.rank`."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from mpi4py import MPI

from benchmarks.harness.sides import Run, add_sides, emit, software, timed
from benchmarks.harness.task import Task
from benchmarks.layers import lenet, training  # noqa: F401 they register cases
from benchmarks.layers.cases import CASES, Entry
from benchmarks.movement.peers import start_torch


def main(task: Task) -> None:
    """Go through the cases. Collective."""
    comm = MPI.COMM_WORLD.Dup()
    torch.set_num_threads(1)
    if task.pinned:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})
    if task.peers:
        start_torch(comm)  # never destroyed: after DTensors that waits for ever
    emit(comm, {"machine": software(comm) | {"torch": torch.__version__}})
    for entry in CASES:
        for size in wanted(entry, task, comm.size):
            found = compare(comm, entry, size, task)
            emit(
                comm,
                {"name": entry.name, "kind": entry.kind, "size": size, "ranks": comm.size, **found},
            )


def wanted(entry: Entry, task: Task, ranks: int) -> list[int]:
    """Sizes in bytes at which a task runs a case on a number of ranks."""
    if task.only and not any(part in entry.name for part in task.only):
        return []
    if ranks not in entry.ranks:
        return []
    return [s for s in entry.sizes if s <= task.largest and (not task.sizes or s in task.sizes)]


def compare(comm: MPI.Intracomm, entry: Entry, size: int, task: Task) -> dict[str, Any]:
    """Check and time one case: times, and errors of the sides that failed or gave another result
    than linop."""
    sides = entry.build(comm, size, task.peers)
    runs: dict[str, Run] = {}
    failed: dict[str, str] = {}
    for direction in sides["linop"]:
        rivals = {name: of[direction] for name, of in sides.items() if direction in of}
        add_sides(comm, direction, rivals, runs, failed)
    return timed(comm, runs, task.seconds) | {"failed": failed}


if __name__ == "__main__":
    main(Task.parse(sys.argv[1]))
