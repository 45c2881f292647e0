"""Interleaved timing: all sides of a comparison in one run, in a new random order each round. It
serves all rank programs."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

Run = Callable[[], Any]

SAMPLE = 2e-4
"""Seconds that a sample of the fastest side should take at least: shorter calls go in batches."""
MOST_CALLS = 50
ROUNDS = 5, 300
"""Fewest and most."""


class After(NamedTuple):
    """A side of which `run` alone is timed. Its argument is the result of `prepare`, which is not
    timed, and is followed by a barrier."""

    comm: MPI.Intracomm
    prepare: Run
    run: Callable[[Any], Any]

    def __call__(self) -> Any:
        return self.run(self.prepare())

    def seconds(self) -> float:
        """The time of one call. Collective."""
        given = self.prepare()
        self.comm.Barrier()
        begun = time.perf_counter()
        self.run(given)
        return time.perf_counter() - begun


class Timing(NamedTuple):
    """Microseconds a call, over rounds; in each, the time of the slowest rank."""

    min: float
    median: float
    max: float


class Measured(NamedTuple):
    """Results of one interleaved run, equal on every rank: times by side, numbers of rounds, and of
    calls in a sample."""

    times: dict[str, Timing]
    rounds: int
    batch: int

    @property
    def medians(self) -> dict[str, float]:
        return {name: time.median for name, time in self.times.items()}


def interleaved(comm: MPI.Intracomm, sides: Mapping[str, Run], seconds: float) -> Measured:
    """Time the sides against each other. Collective: all ranks give the same names.

    In each round every side is called `batch` times between a barrier and a look at the clock; a
    sample is the time of the slowest rank.

    Args:
        comm: for barriers and reductions.
        sides: functions to time, by name.
        seconds: approximate duration, if that gives a number of rounds within `ROUNDS`.
    """
    estimates = [_estimate(comm, run) for run in sides.values()]
    batch = min(max(int(SAMPLE / min(estimates)), 1), MOST_CALLS)
    fewest, most = ROUNDS
    rounds = min(max(int(seconds / (batch * sum(estimates))), fewest), most)
    order = list(enumerate(sides.values()))
    shuffle = random.Random(rounds).shuffle  # the same on every rank
    samples = np.empty((len(order), rounds))
    collecting = gc.isenabled()
    gc.disable()
    for number in range(rounds):
        shuffle(order)
        for side, run in order:
            comm.Barrier()
            samples[side, number] = _sample(run, batch)
        gc.collect(0)
    if collecting:
        gc.enable()
    comm.Allreduce(MPI.IN_PLACE, samples, MPI.MAX)
    micro = (samples / batch * 1e6).tolist()
    times = {
        name: Timing(min(row), statistics.median(row), max(row))
        for name, row in zip(sides, micro, strict=True)
    }
    return Measured(times, rounds, batch)


def _sample(run: Run, batch: int) -> float:
    calls = range(batch)
    if isinstance(run, After):
        return sum(run.seconds() for _ in calls)
    begun = time.perf_counter()
    for _ in calls:
        run()
    return time.perf_counter() - begun


def _estimate(comm: MPI.Intracomm, run: Run) -> float:
    """Seconds of a call after warm-up, on the slowest rank. Collective."""
    found = []
    for batch in (1, 3, 3):
        comm.Barrier()
        found.append(_sample(run, batch) / batch)
    slowest: float = comm.allreduce(min(found), MPI.MAX)
    return slowest
