"""Runs of table 1 of Wang and Cao (2022): their configurations, the authors' logs, and each run
here, right or with the authors' mistakes."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]  # this checkout, whatever is installed

import handwritten  # noqa: E402
import mlp  # noqa: E402

import linop  # noqa: E402
from benchmarks.strategies.perceptrons import published  # noqa: E402

LOGS = Path(__file__).with_name("logs.csv")
STRATEGIES = {"psrv": "server", "allreduce": "all-reduce", "mpara": "tensor", "serial": "serial"}
"""The logs' names of strategies, and ours; the serial program is any strategy on one worker."""
RATE, INPUTS, OUTPUTS = 0.1, 784, 10


@dataclass(frozen=True, order=True)
class Configuration:
    """A run: `layers` hidden layers of `width` units, trained for one epoch."""

    strategy: str
    layers: int
    width: int
    workers: int

    @property
    def sizes(self) -> list[int]:
        return [INPUTS, *[self.width] * self.layers, OUTPUTS]

    @property
    def batch(self) -> int:
        """Rows of all workers together."""
        return 256 if self.strategy == "tensor" else 32 * self.workers

    @property
    def network(self) -> str:
        return f"{self.layers}x{self.width}"


@dataclass(frozen=True)
class Log:
    """A run of the authors: seconds, first five losses, and the mean loss of the last tenth."""

    seconds: float
    steps: int
    first: tuple[float, ...]
    last: float


def logs(path: Path = LOGS) -> dict[Configuration, Log]:
    """The authors' runs."""
    found = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            shape = (int(row[name]) for name in ("hidden_layers", "hidden_size", "workers"))
            first = tuple(float(row[f"loss_{k}"]) for k in range(5))
            log = Log(
                float(row["seconds"]), int(row["steps"]), first, float(row["mean_of_last_tenth"])
            )
            found[Configuration(STRATEGIES[row["strategy"]], *shape)] = log
    return found


@dataclass(frozen=True)
class Run:
    """One epoch: the first losses; the mean of the last tenth of all, at least of one; means of up
    to `BINS` equal parts; and the share of the test images that are right."""

    first: tuple[float, ...]
    last: float
    curve: tuple[float, ...]
    accuracy: float
    seconds: float
    """Of this machine, with all workers on its cores: no speed-up is to be read from them."""

    def agrees(self, log: Log) -> list[bool]:
        """For each of the first losses, whether it has the printed digits of the log."""
        pairs = zip(self.first, log.first, strict=True)
        return [float(f"{here:.6g}") == there for here, there in pairs]


BINS = 20


def train(
    c: Configuration,
    data: tuple[handwritten.Images, handwritten.Images],
    mistakes: bool,
    steps: int | None = None,
) -> Run:
    """One epoch on threads, or `steps` of it.

    Args:
        data: for training, and for testing.
        mistakes: replay those of the authors.
    """
    training, test = data
    make, draw = (published.mlp, published.initial) if mistakes else (mlp.mlp, _initial)
    strategy = "all-reduce" if c.strategy == "serial" else c.strategy
    model = make(strategy, c.workers, c.sizes, c.batch, dtype=np.float32)
    weights = draw(strategy, c.workers, c.sizes)
    batches = list(islice(_batches(training, c), steps))

    def program(backend: Any) -> tuple[list[float], mlp.Arrays]:
        theta = model.held(weights, backend.worker)
        return list(mlp.train(backend, model, theta, batches, RATE)), theta

    begun = time.perf_counter()
    done = linop.launch(program, c.workers, backend="threads")
    seconds = time.perf_counter() - begun
    losses = np.array(done[-1][0])  # the logged loss is that of the last worker
    held = {name: array for _, theta in done for name, array in theta.items()}
    values = [_value(space, held) for space in model.parameters]
    return Run(
        tuple(losses[:5].tolist()),
        float(losses[-max(len(losses) // 10, 1) :].mean()),
        tuple(float(part.mean()) for part in np.array_split(losses, min(BINS, len(losses)))),
        mlp.accuracy(values, test.images.reshape(len(test.images), -1), test.labels),
        seconds,
    )


def _value(space: linop.TensorSpace, held: mlp.Arrays) -> np.ndarray:
    """A parameter, whole. Copies are terms of a sum: the biases that all workers add."""
    blocks = [held[region.name] for region in space.regions]
    if linop.COPIES in space.axes:
        return np.sum(blocks, axis=0)
    return space.gather({r.name: b for r, b in zip(space.regions, blocks, strict=True)})


def _initial(strategy: str, workers: int, sizes: Sequence[int]) -> list[np.ndarray]:
    del strategy, workers
    return published.right_initial(sizes)


def _batches(training: handwritten.Images, c: Configuration) -> Iterator[mlp.Batch]:
    """The batches of one epoch; of each, worker r of N takes rows r, r + N, r + 2 N, …"""
    for batch in mlp.batches_of(training, c.batch):
        if c.strategy == "tensor":
            yield batch
        else:
            x, t = (a.reshape(-1, c.workers, a.shape[1]).swapaxes(0, 1) for a in batch)
            yield x.reshape(c.batch, -1), t.reshape(c.batch, -1)
