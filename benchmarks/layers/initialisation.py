"""Memory and time of constructing a layer, beside torch's whole one.

    mpiexec -n 2 python benchmarks/layers/initialisation.py

Each rank draws its rows of a weight of 16384×8192 in float32, 512 MiB. Peaks are those of the
process above what it had before (Linux); rank 0 prints its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import linop
from linop import Partition, layers

REPEATS = 5
ROWS, COLUMNS = 16384, 8192


def status(name: str) -> float:
    """A line of this process' memory, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def measured(make: Callable[[], Any]) -> tuple[float, list[float]]:
    """Peak in MiB, and seconds."""
    peak, seconds = 0.0, []
    for _ in range(REPEATS):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
        before, start = status("VmRSS"), time.perf_counter()
        made = make()
        seconds.append(time.perf_counter() - start)
        peak = max(peak, status("VmHWM") - before)
        del made
    return peak, seconds


def main(backend: Any) -> None:
    torch.set_num_threads(1)
    workers = backend.workers or 1
    P, P_W = Partition((1, 1)), Partition((workers, 1))
    layers.Linear(P, 8, 8, P_W=P_W)  # loads modules
    for name, make in (
        (f"layers.Linear on {workers}", lambda: layers.Linear(P, COLUMNS, ROWS, P_W=P_W)),
        ("torch.nn.Linear", lambda: torch.nn.Linear(COLUMNS, ROWS)),
    ):
        peak, seconds = measured(make)
        if not backend.worker:
            times = ", ".join(f"{t:.2f}" for t in (min(seconds), median(seconds), max(seconds)))
            print(f"{name}: peak {peak:.0f} MiB; minimum, median, maximum {times} s")


if __name__ == "__main__":
    ranks = linop.backends.get("mpi")
    with linop.backends.use(ranks):
        main(ranks)
