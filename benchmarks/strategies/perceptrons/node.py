"""The step of a strategy on a machine: computing time from the sizes, and communication by
`linop.simulate` from the operators of the model's evaluation and of its Jacobian's adjoint."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
import scipy.optimize

import linop
from benchmarks.strategies.perceptrons.runs import INPUTS, Configuration, Log, mlp
from linop import LinearOperator
from linop.networks import chain
from linop.networks.derivatives import FixedPoint
from linop.networks.maps import Points
from linop.planning import Network, Placement

PASSES = 3
"""Products of a layer: its value, the gradient of its weights, and that of its inputs."""


@cache
def operators(c: Configuration) -> tuple[LinearOperator, LinearOperator]:
    """Messages of a step: the network's evaluation, and the adjoint of its Jacobian. The loss stays
    on each worker, as in the authors' program."""
    strategy = "all-reduce" if c.strategy == "serial" else c.strategy
    model = mlp.mlp(strategy, c.workers, c.sizes, c.batch, dtype=np.float32)
    links: Any = model.map
    local = links if strategy == "tensor" else chain(*links.links[:-1])
    points = Points(FixedPoint)
    return local.evaluation(points), local.jacobian_at(points, model.names).H


def steps(c: Configuration) -> int:
    """Steps of one epoch of MNIST."""
    return 60_000 // c.batch


def communication(
    c: Configuration, network: Network, placement: Placement | None = None
) -> tuple[float, int]:
    """(seconds, bytes of all workers) of one step."""
    found = [linop.simulate(op, network, placement) for op in operators(c)]
    return sum(each.time for each in found), sum(each.bytes for each in found)


@dataclass(frozen=True)
class Node:
    """Times, in seconds, of a machine that all workers share."""

    per_multiply_add: float
    per_input: float
    """Per number of the batch that a worker reads: no strategy divides it further."""
    latency: float
    """Per message, at each of its two ends (`linop.planning.Network.latency`)."""
    per_byte: float
    """Per byte, at each of its two ends."""
    per_byte_of_node: float
    """Per byte that all workers send together: they share the memory of the node."""

    def network(self) -> Network:
        return Network(self.latency, self.per_byte, 0.0, 0.0)

    def computing(self, c: Configuration) -> float:
        """Seconds of computing of one step, on each worker."""
        return float(np.dot(_work(c), (self.per_multiply_add, self.per_input)))

    def step(self, c: Configuration) -> float:
        """Seconds of one step."""
        seconds, size = communication(c, self.network())
        return self.computing(c) + seconds + self.per_byte_of_node * size

    def __str__(self) -> str:
        return ", ".join(f"{f.name} {getattr(self, f.name) * 1e9:.3g} ns" for f in fields(self))


def _work(c: Configuration) -> tuple[int, int]:
    """Multiply-adds of a worker in one step, and numbers of the batch that it reads."""
    tensor = c.strategy == "tensor"
    rows = c.batch if tensor else c.batch // c.workers
    sizes = [INPUTS, *[c.width // c.workers if tensor else c.width] * c.layers, c.sizes[-1]]
    return PASSES * rows * sum(a * b for a, b in itertools.pairwise(sizes)), rows * INPUTS


def fit(known: Iterable[tuple[Configuration, Log]]) -> Node:
    """The node nearest to measured epochs, in relative error: first computing, from runs of one
    worker, then messages, from the others. Least squares without negative times, as if latencies
    and bytes of the slowest worker added up; they do where all workers send alike."""
    known = list(known)
    one = [(_work(c), log.seconds / log.steps) for c, log in known if c.workers == 1]
    work = _nearest([row for row, _ in one], [t for _, t in one])
    alone = Node(*work, 0.0, 0.0, 0.0)
    rows, times, done = [], [], []
    for c, log in known:
        if c.workers > 1:
            latencies, size = communication(c, Network(1.0, 0.0, 0.0, 0.0))
            rows.append((latencies, communication(c, Network(0.0, 1.0, 0.0, 0.0))[0], size))
            times.append(log.seconds / log.steps)
            done.append(alone.computing(c))
    return Node(*work, *_nearest(rows, times, done))


def _nearest(rows: Any, times: Any, done: Any = 0.0) -> list[float]:
    """x ≥ 0 such that rows x + done is nearest to times, in relative error."""
    t = np.array(times)
    found: Any = scipy.optimize.nnls(np.array(rows) / t[:, None], (t - done) / t)[0]
    return [float(x) for x in found]
