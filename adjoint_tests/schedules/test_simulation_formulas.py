"""Simulated schedules against the formulas of the literature, as whole numbers and fractions.

p workers, M micro-batches, v chunks, s a stage; sizes: A activations of a micro-batch, b its
boundary, w a version of the parameters.
"""

from __future__ import annotations

from fractions import Fraction

import pytest

from linop.schedules import (
    Simulation,
    Sizes,
    backward_first,
    gpipe,
    interleaved,
    one_forward_one_backward,
    pipedream,
    pipedream_2bw,
    simulate,
    zero_bubble_h1,
)
from linop.schedules.actions import BACKWARDS, Kind

pytestmark = pytest.mark.slow

F, B = 3, 5
COSTS = {"F": F, "B": B}
A, b, w = 1000, 10, 1
"""Sizes that cannot be mistaken for each other in a sum."""
EVERY = pytest.mark.parametrize("p", range(1, 17))


def numbers(p: int) -> list[int]:
    """Numbers of micro-batches: fewer than stages, as many, more, and sometimes many more."""
    return sorted({1, p, 2 * p + 1, 64 if p in (3, 8, 16) else 1})


@EVERY
def test_gpipe(p: int) -> None:
    for M in numbers(p):
        found = simulate(gpipe(p, M), COSTS)
        assert found.idle == ((p - 1) * (F + B),) * p
        assert found.bubble_of_total == Fraction(p - 1, M + p - 1)
        assert found.bubble_of_ideal == Fraction(p - 1, M)
        assert found.peak_bytes(Sizes([A] * p)) == (M * A,) * p


@EVERY
def test_gpipe_with_recomputation(p: int) -> None:
    """B becomes F + B. The boundary of the micro-batch that is recomputed is one of the M."""
    for M in numbers(p):
        found = simulate(gpipe(p, M), COSTS, recompute=True)
        assert found.idle == ((p - 1) * (F + F + B),) * p
        assert found.bubble_of_total == Fraction(p - 1, M + p - 1)
        assert found.peak_bytes(Sizes([A] * p, boundaries=[b] * p)) == (M * b + A,) * p


@EVERY
def test_1f1b(p: int) -> None:
    for M in numbers(p):
        found = simulate(one_forward_one_backward(p, M), COSTS)
        assert found.time == (M + p - 1) * (F + B)
        assert found.bubble_of_total == Fraction(p - 1, M + p - 1)
        assert found.bubble_of_ideal == Fraction(p - 1, M)
        assert found.peak_activations == tuple(min(M, p - s) for s in range(p))


@pytest.mark.parametrize("p", [1, 2, 5])
def test_backward_first_takes_the_time_of_1f1b(p: int) -> None:
    for M in numbers(p):
        found = simulate(backward_first(p, M), COSTS)
        assert found.time == (M + p - 1) * (F + B)


@EVERY
def test_interleaved_1f1b(p: int) -> None:
    """A chunk's forward takes F/v; of p micro-batches alone all forwards are the warm-up, which
    holds less."""
    for v in range(1, 5):
        for M in sorted({p, 64 // p * p if p in (4, 16) else 2 * p}):
            costs = {kind: Fraction(cost, v) for kind, cost in COSTS.items()}
            found = simulate(interleaved(p * v, M, v), costs)
            assert found.idle == (Fraction((p - 1) * (F + B), v),) * p
            assert found.bubble_of_ideal == Fraction(p - 1, v * M)
            held = min(p + Fraction(p - 1, v), M)
            assert found.peak_activations[0] == v * held
            assert messages(found) == 2 * M * (v * p - 1 if p > 1 else 0)


def messages(simulation: Simulation) -> int:
    """Number of messages of a simulated schedule."""
    kinds = Kind.SEND_F, Kind.SEND_B
    return sum(timed.action.kind in kinds for row in simulation.workers for timed in row)


@EVERY
@pytest.mark.parametrize(("F", "I", "W"), [(1, 1, 1), (3, 5, 2), (2, 5, 3), (5, 2, 3), (3, 4, 9)])
def test_zero_bubble_h1(p: int, F: int, I: int, W: int) -> None:  # noqa: E741
    """The paper's (p−1)(F+I−W) holds for M ≥ p and W ≤ min(F, I). A longer W delays what waits for
    its worker, so that it fills no more than the shorter of F and I; of fewer micro-batches, fewer
    W fill anything."""
    for M in numbers(p)[:3]:
        found = simulate(zero_bubble_h1(p, M), {"F": F, "I": I, "W": W})
        filled = (min(p, M) - 1) * min(F, I, W)
        assert found.idle == ((p - 1) * (F + I) - filled,) * p
        if M >= p and W <= min(F, I):
            assert found.idle == ((p - 1) * (F + I - W),) * p
        assert found.peak_activations == (min(p, M),) * p


@EVERY
def test_pipedream(p: int) -> None:
    """From M = 2(p−s)−1 on, a stage holds as many versions as micro-batches; before that, the first
    micro-batches all read version 0."""
    for M in numbers(p):
        found = simulate(pipedream(p, M), COSTS)
        assert gaps(found) == [0] * p
        for s, held in enumerate(found.peak_bytes(Sizes([A] * p, [w] * p))):
            if M >= 2 * (p - s) - 1:
                assert held == (p - s) * (A + w)
            else:
                assert held < (p - s) * (A + w)


@EVERY
def test_pipedream_2bw(p: int) -> None:
    for M in (p, p + 1, 2 * p):
        found = simulate(pipedream_2bw(p, M, batches=3), COSTS)
        assert gaps(found) == [0] * p
        expected = tuple((p - s) * A + 2 * w for s in range(p))
        assert found.peak_bytes(Sizes([A] * p, [w] * p)) == expected


def gaps(simulation: Simulation) -> list[float]:
    """Idle time of each worker in its steady state: from its first backward to its last forward."""
    found = []
    for row in simulation.workers:
        work = [t for t in row if t.action.kind in BACKWARDS | {Kind.FORWARD}]
        first = next(t.start for t in work if t.action.kind in BACKWARDS)
        last = max((t.end for t in work if t.action.kind == Kind.FORWARD), default=first)
        busy = sum(t.end - t.start for t in work if first <= t.start < last)
        found.append(max(last - first, 0) - busy)
    return found


def test_gaps_are_seen() -> None:
    """A helper that must fail. By hand, with messages of 4: stage 1 does B1 from 18 to 23, and
    waits for F2, which stage 0 sends at 27, to 31."""
    assert gaps(simulate(one_forward_one_backward(2, 3), COSTS, edges=4)) == [0, 8]
