"""Time per step of expressions in which nodes are used several times: built, printed, applied,
checked and lowered. ``python benchmarks/planning/graphs.py``

One recurrence, ``u_, u = u, S @ u - u_``, and random graphs of movements and local maps. Minimum,
median and maximum of the runs, in microseconds a step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from statistics import median
from time import process_time

import numpy as np

import linop
from linop import LinearOperator, Region, Space
from linop.planning.lowering import lower_all

RUNS = 5
STEPS = (100, 1000)
X, Y = Region("x", 4, 0), Region("y", 4, 1)
SPACE = Space([X, Y])
FLIP = linop.local_operators.matrix(np.eye(4)[::-1].copy(), X, X)
LOCAL = linop.direct_sum(FLIP, linop.identity(Space(Y)))
MOVES = (linop.copy(SPACE, X, Y), linop.add(SPACE, X[0:2], Y[2:4]), linop.move(SPACE, Y, X))


def recurrence(steps: int, seed: int) -> LinearOperator:
    before, now = linop.identity(SPACE), MOVES[seed % len(MOVES)]
    for _ in range(steps):
        before, now = now, MOVES[seed % len(MOVES)] @ now - before
    return now


def graph(steps: int, seed: int, local: float, near: bool) -> LinearOperator:
    """A random graph: each node is made of the latest and another, of the latest three or of all.

    Args:
        local: the fraction of local maps among the leaves.
    """
    draw = random.Random(seed)
    nodes = [linop.identity(SPACE), MOVES[0]]
    for _ in range(steps):
        a, b = nodes[-1], draw.choice(nodes[-3:] if near else nodes)
        leaf = LOCAL if draw.random() < local else draw.choice(MOVES)
        nodes.append(draw.choice((leaf @ a - b, leaf @ a + 0.5 * b, leaf @ b + a)))
    return nodes[-1]


def all_steps(make: Callable[[], LinearOperator]) -> float:
    """Seconds of processor time to build, print, apply, lower and verify."""
    start = process_time()
    op = make()
    str(op)
    lower_all(op.stages)
    lower_all(op.H.stages)
    op(SPACE.zeros())
    linop.verify_plans(op)
    return process_time() - start


CASES: dict[str, Callable[[int, int], LinearOperator]] = {
    "recurrence": recurrence,
    "movements, near": lambda n, seed: graph(n, seed, 0, True),
    "movements, far": lambda n, seed: graph(n, seed, 0, False),
    "local maps, near": lambda n, seed: graph(n, seed, 0.3, True),
    "local maps, far": lambda n, seed: graph(n, seed, 0.3, False),
}


def main() -> None:
    all_steps(lambda: recurrence(10, 0))
    print(f"{'graph':18}{'steps':>6}{'min':>8}{'median':>8}{'max':>8}{'ratio':>7}")
    for name, make in CASES.items():
        first = 0.0
        for steps in STEPS:
            runs = [all_steps(partial(make, steps, seed)) * 1e6 / steps for seed in range(RUNS)]
            first = first or median(runs)
            row = f"{min(runs):8.0f}{median(runs):8.0f}{max(runs):8.0f}"
            print(f"{name:18}{steps:6}{row}{median(runs) / first:7.2f}")


if __name__ == "__main__":
    main()
