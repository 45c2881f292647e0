"""The work of ``linop doctor --mpi``, on the ranks of a job: latency and bandwidth of MPI inside a
machine and between machines, and ranks that are bound badly."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

SMALL, LARGE = 8, 1 << 20
"""Bytes of the messages of which latency and bandwidth are taken."""
SECONDS = 0.3
"""Time for each pair of ranks and size."""
_MOST = 8
"""Machines beside the first that are measured against it."""
_NAP = 1e-3


class Rank(NamedTuple):
    """Facts about one rank: its machine, the cores it may run on, and all cores of the machine."""

    machine: int
    """Lowest rank on the same machine."""
    host: str
    cores: frozenset[int]
    all_cores: int


@dataclass(frozen=True)
class Link:
    """Two ranks, and messages between them.

    Attributes:
        latency: half of a round trip of `SMALL` bytes, in seconds; the median.
        bandwidth: bytes per second of messages of `LARGE` bytes, in the median.
    """

    ranks: tuple[int, int]
    hosts: tuple[str, str]
    latency: float
    bandwidth: float


def facts(comm: MPI.Intracomm) -> list[Rank]:
    """Facts about all ranks; collective."""
    from mpi4py import MPI

    from linop.backends.mpi.backend import machine_of
    from linop.backends.mpi.objects import gathered

    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    here = machine_of(comm), MPI.Get_processor_name(), frozenset(cores), os.cpu_count() or 1
    return gathered(comm, Rank(*here))


def links(comm: MPI.Intracomm, ranks: Sequence[Rank]) -> list[Link]:
    """Measured links: inside the first machine with several ranks, and from the first machine to
    each other one; the same on every rank. Collective, in some seconds."""
    from linop.backends.mpi.objects import gathered

    found = []
    for pair in _pairs(ranks):
        times = [_round_trip(comm, pair, size) / 2 for size in (SMALL, LARGE)]
        latency, long = gathered(comm, times)[pair[0]]
        hosts = ranks[pair[0]].host, ranks[pair[1]].host
        found.append(Link(pair, hosts, latency, LARGE / long))
    return found


def _pairs(ranks: Sequence[Rank]) -> Iterator[tuple[int, int]]:
    machines = _by_machine(ranks)
    for members in machines.values():
        if len(members) > 1:
            yield members[0], members[1]
            break
    firsts = list(machines)
    for other in firsts[1 : 1 + _MOST]:
        yield firsts[0], other


def _by_machine(ranks: Sequence[Rank]) -> Mapping[int, list[int]]:
    machines: dict[int, list[int]] = defaultdict(list)
    for number, rank in enumerate(ranks):
        machines[rank.machine].append(number)
    return machines


def _round_trip(comm: MPI.Intracomm, pair: tuple[int, int], size: int) -> float:
    """Seconds of a round trip between two ranks, the median; 0 elsewhere. Collective: the other
    ranks sleep meanwhile."""
    found: list[float] = []
    if comm.rank in pair:
        mine, theirs = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        first, peer = comm.rank == pair[0], pair[comm.rank == pair[0]]
        goes = np.ones(1, np.uint8)
        ends = time.perf_counter() + SECONDS
        while goes[0]:
            begun = time.perf_counter()
            if first:
                goes[0] = begun < ends or len(found) < 3
                comm.Send(goes, peer)
                begun = time.perf_counter()
                comm.Send(mine, peer)
                comm.Recv(theirs, peer)
                found.append(time.perf_counter() - begun)
            else:
                comm.Recv(goes, peer)
                comm.Recv(theirs, peer)
                comm.Send(mine, peer)
    done = comm.Ibarrier()
    while not done.Test():
        time.sleep(_NAP)
    return float(np.median(found)) if found else 0.0


def faults(ranks: Sequence[Rank]) -> list[str]:
    """Bad bindings of ranks to cores, and how to mend them, in words; empty if there are none."""
    said = []
    for members in _by_machine(ranks).values():
        first, many = ranks[members[0]], len(members)
        bound = frozenset[int]().union(*(ranks[k].cores for k in members))
        names = f"ranks {', '.join(map(str, members))} on {first.host}"
        if 0 < len(bound) < min(many, first.all_cores):
            cores = ", ".join(map(str, sorted(bound)))
            said.append(
                f"{names} are bound to core{'s' * (len(bound) > 1)} {cores} of {first.all_cores}, "
                f"and wait for each other; start them with mpiexec --bind-to none"
            )
        elif many > first.all_cores:
            said.append(
                f"{names} share {first.all_cores} cores, so they wait for each other: start fewer; "
                f"Open MPI's yield their cores with OMPI_MCA_mpi_yield_when_idle=1"
            )
    return said
