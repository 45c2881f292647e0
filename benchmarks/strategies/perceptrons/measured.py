"""Time of a training step on 1, 2 and 4 ranks of this machine, and the speed-up of an epoch.

    python benchmarks/strategies/perceptrons/measured.py

starts the MPI jobs itself, and writes results/measured.md.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # this checkout is measured, whatever is installed

import numpy as np  # noqa: E402

import linop  # noqa: E402
from benchmarks.harness.jobs import rows  # noqa: E402
from benchmarks.harness.report import markdown  # noqa: E402
from benchmarks.strategies.perceptrons.runs import RATE, Configuration, mlp, published  # noqa: E402

STEPS, WARM = 200, 5
RANKS = 1, 2, 4
STRATEGIES = {"server": 128, "all-reduce": 128, "ring": 128, "tensor": 512}
"""Width of the hidden layer of each."""


def measure(comm: Any) -> Iterator[Sequence[Any]]:
    """Program of a rank: each strategy's median and minimum seconds of a step. Data are random."""
    backend: Any = linop.backends.get("mpi")
    random = np.random.default_rng(0)
    for strategy, width in STRATEGIES.items():
        c = Configuration(strategy, 1, width, backend.workers)
        model = mlp.mlp(strategy, c.workers, c.sizes, c.batch, dtype=np.float32)
        theta = model.held(published.right_initial(c.sizes), backend.worker)
        x = random.random((c.batch, c.sizes[0]), np.float32)
        t = np.eye(c.sizes[-1], dtype=np.float32)[random.integers(0, 10, c.batch)]
        times = [time.perf_counter()]
        for _ in mlp.train(backend, model, theta, [(x, t)] * STEPS, RATE):
            times.append(time.perf_counter())
        gaps = [b - a for a, b in itertools.pairwise(times)]
        yield strategy, (statistics.median(gaps[WARM:]), min(gaps[WARM:]))


def main() -> None:
    """Measure; write the table."""
    found = {n: dict(rows(n, measure)) for n in RANKS}
    lines = []
    for strategy, width in STRATEGIES.items():
        times = {n: found[n][strategy] for n in RANKS}
        batch = {n: Configuration(strategy, 1, width, n).batch for n in RANKS}
        gains = {
            n: [a / b * batch[n] / batch[1] for a, b in zip(times[1], times[n], strict=True)]
            for n in RANKS
        }
        cells = [f"{median * 1e3:.3g} / {least * 1e3:.3g}" for median, least in times.values()]
        cells += [f"{median:.2f} / {least:.2f}" for n, (median, least) in gains.items() if n > 1]
        lines.append([strategy, f"1x{width}", *cells])
    head = [f"ms, {n} ranks" for n in RANKS] + [f"speed-up, {n} ranks" for n in RANKS[1:]]
    (Path(__file__).parents[1] / "results" / "measured.md").write_text(
        "# Steps measured\n\n"
        f"{os.cpu_count()} cores, which 4 ranks share; load average {os.getloadavg()[0]:.0f}. "
        f"Median / minimum of {STEPS - WARM} steps of rank 0. Where the load is above the cores, "
        "medians are times of the scheduler: ranks wait for others that are not running.\n\n"
        + markdown(("strategy", "network", *head), lines)
    )


if __name__ == "__main__":
    main()
