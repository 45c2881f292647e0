"""Nonlinear time loops against the chain of their steps; schedules of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop.errors import ArgumentError, BackendError, LinopError, RegionError, SpaceError
from linop.loops import Checkpoints, Counts, Every, Optimal, evolution
from linop.loops.checkpoints import BACK, DROP, KEEP, LOAD, RUN, TURN
from support.contracts.loops import (
    is_fitted,
    is_the_chain_of_its_steps,
    logistic,
    taylors_rest_is_of_second_order,
    waves,
)
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

MISSING = find_spec("checkpoint_schedules") is None
needs_library = pytest.mark.skipif(MISSING, reason="checkpoint_schedules is not installed")
ENDS = ("", "s", "r", "sr", "rf", "srf")
"""Sources, receivers, and the final state beside the records."""
KINDS = (Every,) if MISSING else (Every, Optimal)
schedules = st.builds(lambda kind, k: kind(k), st.sampled_from(KINDS), st.integers(1, 6))


# Schedules


@given(schedules, st.integers(0, 30))
def test_schedules_meet_every_step_backwards(schedule: Checkpoints, n: int) -> None:
    """A machine that has states by their number alone runs them."""
    at, last, kept, back = 0, -1, set(), []
    most = ran = turns = 0
    for kind, step, stop in schedule.actions(n):
        if kind == KEEP:
            assert at == step and step not in kept
            kept.add(step)
        elif kind == LOAD:
            assert step in kept
            at = step
        elif kind == DROP:
            kept.remove(step)
        elif kind == RUN:
            assert at == step < stop <= n
            at, last, ran = stop, stop - 1, ran + stop - step
        elif kind == BACK:
            assert turns and last == step, "the derivative is at the step that ran last"
            back.append(step)
        else:
            assert kind == TURN and at == n
            turns += 1
        most = max(most, len(kept))
    assert back == list(reversed(range(n))) and turns == 1 and not kept
    assert schedule.predicted(n) == Counts(most, ran, ran - n)


@given(st.integers(1, 8), st.integers(1, 60))
def test_what_plain_schedules_take(k: int, n: int) -> None:
    states, steps, _ = Every(k).predicted(n)
    intervals, last = -(-n // k), (n - 1) % k + 1
    assert states == intervals + (max(k - 2, last - 1) if n > k and k > 1 else last - 1)
    assert states <= intervals + k - 1
    assert steps == (intervals - 1) * (3 * k - 1) + 2 * last - 1 < 3 * n
    assert Every(1).predicted(n) == Counts(n, 2 * n - 1, n - 1)


@needs_library
@given(st.integers(1, 8), st.integers(1, 60))
def test_what_optimal_schedules_take(states: int, n: int) -> None:
    from checkpoint_schedules.multistage import optimal_steps_binomial

    found = Optimal(states).predicted(n)
    assert found.states <= states
    assert found.steps == (optimal_steps_binomial(n, min(states, n - 1)) if n > 1 else 1)
    assert found.steps >= 2 * n - 1


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "checkpoint_schedules", None)
    with pytest.raises(ArgumentError, match=r"pip install \"linop-algebra\[checkpoints\]\""):
        Optimal(3)


# Loops


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_is_the_chain_of_its_steps(kind: Callable[[int], Checkpoints], ends: str) -> None:
    for n, k in ((0, 1), (1, 2), (4, 1 + len(ends))):
        is_the_chain_of_its_steps(linop.backends.get("threads"), n, ends, kind(k), n)
    is_the_chain_of_its_steps(linop.backends.get("reference"), 2, ends, kind(2), 7)


@pytest.mark.parametrize("workers", [1, 4])
def test_on_threads(workers: int) -> None:
    for ends, kept in (("", Every(1)), ("srf", Every(2))):
        on_threads(workers, is_the_chain_of_its_steps, 3, ends, kept, workers)


@needs_mpi
def test_on_ranks() -> None:
    for ends, kept in (("", Every(1)), ("sr", Every(2))):
        on_ranks(2, is_the_chain_of_its_steps, 3, ends, kept, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_taylors_test(kind: Callable[[int], Checkpoints]) -> None:
    taylors_rest_is_of_second_order(linop.backends.get("reference"), kind(2))
    on_threads(3, taylors_rest_is_of_second_order, kind(2))


@needs_mpi
def test_taylors_test_on_ranks() -> None:
    on_ranks(2, taylors_rest_is_of_second_order, Every(2))


def test_solvers_find_a_parameter() -> None:
    is_fitted(linop.backends.get("reference"))
    on_threads(2, is_fitted)


def test_a_derivative_needs_a_value() -> None:
    run = logistic(1, 2)[1].compile(linop.backends.get("threads"))
    x = {"x@0": np.ones(6), "r@0": np.ones(6)}
    for product in (run.jvp, run.vjp):
        with pytest.raises(BackendError, match="before the loop was evaluated: call the program"):
            product(x if product == run.jvp else np.ones(6))
    assert (run(x) == 1).all()
    assert run.vjp(np.ones(6))["x@0"].tolist() == [4.0] * 6
    assert run.vjp(np.ones(6))["r@0"].tolist() == [3.0] * 6
    assert run.counted.steps == run.predicted.steps * 2


def _wrong(x: Any) -> Callable[[], Any]:
    return lambda: logistic(1, 2)[1].compile(linop.backends.get("threads"))(x)


STEP, SOURCES, _ = waves(2)
BAD: dict[str, tuple[Callable[[], Any], type[LinopError], str]] = {
    "no map": (lambda: evolution(len, 2), ArgumentError,  # type: ignore[arg-type]
               "evolution, step: expected a map or an operator, given "),
    "another state": (lambda: evolution(linop.networks.relu(linop.TensorSpace(3, ONE)), 2),
                      SpaceError, "evolution: the step must return a state like the one that it "),
    "negative": (lambda: evolution(STEP, -2), ArgumentError,
                 "evolution: n is a whole number of steps from 0; given -2"),
    "sources": (lambda: evolution(STEP, 2, SOURCES.H), SpaceError,
                "evolution, sources: its codomain must be the space of states, "),
    "checkpoints": (lambda: evolution(STEP, 2, checkpoints=3), ArgumentError,  # type: ignore[arg-type]
                    "evolution, checkpoints: linop.loops.Every(k) or linop.loops.Optimal(states) "),
    "nothing out": (lambda: evolution(STEP, 2, final=False), ArgumentError,
                    "evolution: its codomain would be empty; give receivers"),
    "names": (lambda: evolution(STEP, 2, SOURCES, initial=True), RegionError,
              "regions of one name, u@0, u@1; give the sources' domain"),
    "every": (lambda: Every(0), ArgumentError, "Every: k is a whole number of steps from 1"),
    "missing": (_wrong({"x@0": np.ones(6)}), RegionError, "no array for region 'r@0'"),
    "bare": (_wrong(np.ones(6)), ArgumentError, "a dict of arrays of 'x@0', 'r@0' expected"),
    "wrt": (lambda: logistic(1, 2)[1].compile(linop.backends.get("threads"), wrt=["q"]),
            RegionError, "derivative with respect to 'q'"),
}  # fmt: skip
ONE = linop.Partition((1,))


@pytest.mark.parametrize("case", BAD)
def test_bad_loops_are_named(case: str) -> None:
    attempt, error, message = BAD[case]
    with pytest.raises(error) as caught:
        attempt()
    assert message in str(caught.value)
