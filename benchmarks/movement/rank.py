"""Program of each rank of a job on operators: ``python -m benchmarks.movement.rank JSON``, with the
JSON of a `benchmarks.harness.task.Task`.

Rank 0 prints one line of JSON, marked by `MARK`, for each comparison.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import linop
from benchmarks.harness.counting import counted
from benchmarks.harness.sides import Rival, Run, add_sides, emit, software, timed
from benchmarks.harness.task import ONE_BUFFER, SIZES, Task
from benchmarks.movement import halos, stencil  # noqa: F401 they register cases
from benchmarks.movement.cases import CASES, Case, Entry
from benchmarks.movement.peers import PEERS, available
from linop.errors import LinopError


def main(task: Task) -> None:
    """Go through the cases. Collective."""
    comm = MPI.COMM_WORLD.Dup()
    backend = linop.backends.get("mpi")
    emit(comm, {"machine": software(comm)})
    peers = available(comm) if task.peers else {}
    if task.peers:
        emit(comm, {"peers": peers})
    for entry in CASES:
        sizes = wanted(entry, task, comm.size)
        for size in sizes:
            case = entry.build(comm, size)
            absent = {}
            for name, add in PEERS.get(entry.name, []) if task.peers else []:
                if not peers[name].startswith("missing"):
                    add(comm, case)
                elif size == sizes[0]:
                    absent[f"forward/{name}"] = "not installed"
            found = compare(comm, case, backend, task.seconds)
            found["failed"] |= absent
            emit(comm, {"name": entry.name, "size": size, "ranks": comm.size, **found})


def wanted(entry: Entry, task: Task, ranks: int) -> list[int]:
    """Sizes in bytes at which a task runs a case on a number of ranks."""
    if task.only and not any(part in entry.name for part in task.only):
        return []
    if ranks < 2 if entry.ranks is None else ranks not in entry.ranks:
        return []
    if (entry.name not in PEERS) if task.peers else entry.peers_only:
        return []
    least = SIZES[0] if task.peers else 0
    sizes = [s for s in entry.sizes if least <= s <= task.largest]
    if not task.sizes:
        return sizes
    free = set(SIZES[:2]) <= set(entry.sizes)  # a case that takes any size
    return [s for s in task.sizes if free or s in sizes]


def compare(comm: MPI.Intracomm, case: Case, backend: Any, seconds: float) -> dict[str, Any]:
    """Check and time one case: times, rounds, MPI calls, and errors of the sides that failed or
    gave another result than linop."""
    plan = case.op.compile(backend)
    takes_out = "out" in inspect.signature(type(plan).__call__).parameters
    sides: dict[str, Run] = {}
    failed: dict[str, str] = {}
    if case.solver is not None:
        ours_first: dict[str, Callable[[int], Rival]] = {"linop": partial(case.solver, plan)}
        solvers = ours_first | case.solvers
        case.forward = {name: make(10) for name, make in solvers.items()}
        add_sides(comm, "forward", case.forward, sides, failed)
        calls = {
            name: per_iteration(comm, case.forward[name].run, make(20).run)
            for name, make in solvers.items()
        }
        return timed(comm, sides, seconds) | {"failed": failed, "calls": calls}
    for direction, bound, given, rivals in (
        ("forward", plan, case.x, case.forward),
        ("adjoint", plan.H, case.y, case.adjoint),
    ):
        ours = {"linop": Rival(partial(bound, given))}
        if takes_out:
            ours["linop out="] = with_out(bound, given, case.in_place)
        if direction == case.one_buffer:  # where it is refused, its plan is broken
            own = plan.op.compile(backend) if bound is plan else plan.op.H.compile(backend)
            ours[ONE_BUFFER] = Rival(partial(own, given, out=given))
        add_sides(comm, direction, ours | rivals, sides, failed)
        if case.in_place and f"{direction}/linop out=" in sides:
            del sides[f"{direction}/linop"]  # its copies would drive the others' data out of cache
    calls = {name: total(comm, counted(run)) for name, run in sides.items()}
    return timed(comm, sides, seconds) | {"failed": failed, "calls": calls}


def with_out(bound: Any, given: Any, in_place: bool) -> Rival:
    """linop's side with ``out=``: a preallocated result; in place if `in_place`, unless the plan
    refuses that."""
    if in_place:
        both = np.array(given)
        with contextlib.suppress(LinopError):
            bound(both, out=both)
            return Rival(partial(bound, both, out=both))
    result = bound(given)
    if isinstance(result, np.ndarray):
        result = np.empty_like(result)
    return Rival(partial(bound, given, out=result))


def total(comm: MPI.Intracomm, calls: Mapping[str, float] | None) -> dict[str, float] | None:
    """MPI calls by name, of the rank that makes most; None if not counted. Collective."""
    every = comm.allgather(calls)
    return None if None in every else max(every, key=lambda c: sum(c.values()))


def per_iteration(comm: MPI.Intracomm, ten: Run, twenty: Run) -> dict[str, float] | None:
    """MPI calls of one iteration, by name: a tenth of what 20 iterations make beyond 10.
    Collective."""
    few, many = counted(ten), counted(twenty)
    if few is None or many is None:
        return None
    added = {name: (n - few.get(name, 0)) / 10 for name, n in many.items()}
    return total(comm, {name: n for name, n in added.items() if n})


if __name__ == "__main__":
    main(Task.parse(sys.argv[1]))
