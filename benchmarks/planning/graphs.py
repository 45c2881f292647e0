"""Time per step of expressions in which nodes are used several times. ``python
benchmarks/planning/graphs.py``

One recurrence, ``u_, u = u, S @ u - u_``, and random graphs of movements and local maps, of 100 and
of 1,000 steps. Medians of the processor time of several graphs, in microseconds a step, and the
ratio of the longer to the shorter ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from statistics import median
from time import process_time
from typing import Any

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


def parts(make: Callable[[], LinearOperator]) -> dict[str, float]:
    """Seconds of processor time, by what is done."""
    found: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = process_time()
        result = work()
        found[name] = process_time() - start
        return result

    op = timed("build, print", lambda: (op := make(), str(op), op.H)[0])
    x = SPACE.zeros()
    timed("apply, check", lambda: (op(x), linop.testing.check_adjoint(op)))
    timed("plan", lambda: (lower_all(op.stages), lower_all(op.H.stages)))
    timed("verify", lambda: linop.verify_plans(op))
    with timed("compile", lambda: linop.backends.get("threads").compile(op)) as plan:
        timed("run", lambda: [plan(x) for _ in range(3)])
    return found


CASES: dict[str, Callable[[int, int], LinearOperator]] = {
    "recurrence": recurrence,
    "movements, near": lambda n, seed: graph(n, seed, 0, True),
    "movements, far": lambda n, seed: graph(n, seed, 0, False),
    "local maps, near": lambda n, seed: graph(n, seed, 0.3, True),
    "local maps, far": lambda n, seed: graph(n, seed, 0.3, False),
}


def main() -> None:
    names = list(parts(lambda: recurrence(10, 0)))
    print(f"| {' | '.join(['graph', 'steps', *names, 'all'])} |")
    print("| --- " * (len(names) + 3) + "|")
    for name, make in CASES.items():
        runs: dict[int, list[list[float]]] = {steps: [] for steps in STEPS}
        for seed in range(RUNS):
            for steps, found in runs.items():
                seconds = list(parts(partial(make, steps, seed)).values())
                found.append([1e6 * one / steps for one in (*seconds, sum(seconds))])
        rows = [[median(column) for column in zip(*each, strict=True)] for each in runs.values()]
        for steps, row in zip(STEPS, rows, strict=True):
            print(f"| {name} | {steps} | {' | '.join(f'{value:.0f}' for value in row)} |")
        few, many = rows
        ratios = (f"{b / a:.2f}" for a, b in zip(few, many, strict=True))
        print(f"| {name} | ratio | {' | '.join(ratios)} |", flush=True)


if __name__ == "__main__":
    main()
