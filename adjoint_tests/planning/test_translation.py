"""Translation validation: no plan passes that was changed, and computes something else since.

An interpreter that shares nothing with the verifier decides what a changed plan computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import linop
from linop import COPIES, REPLICATED, LinearOperator, Partition, TensorSpace
from linop.errors import PlanError
from linop.planning.plan import LoweredPlan
from support.operators.catalogue import NAMES, operators
from support.operators.properties import (
    COLLECTIVES,
    MESSAGES,
    after_passes,
    plans_of,
    stays_exact,
)
from support.planning.broken_plans import changed_ends, changed_plans
from support.planning.interpreter import Arrays, Broken, interpret

DRAWS = 3
"""Vectors of whole numbers that plans are compared on."""


def results(op: LinearOperator, plans: Sequence[LoweredPlan]) -> list[dict[int, Arrays]]:
    """Results of plans, of some vectors."""
    found = []
    for seed in range(DRAWS):
        x = op.domain.integers(seed)
        on = {p.worker: {r.name: x[r.name] for r in p.inputs if r.name in x} for p in plans}
        found.append(interpret(plans, on))
    return found


def same_results(a: list[dict[int, Arrays]], b: list[dict[int, Arrays]]) -> bool:
    return all(
        one.keys() == other.keys()
        and all(
            list(one[w]) == list(other[w])
            and all(np.array_equal(one[w][name], other[w][name]) for name in one[w])
            for w in one
        )
        for one, other in zip(a, b, strict=True)
    )


def computes(
    op: LinearOperator, plans: Sequence[LoweredPlan], wanted: list[dict[int, Arrays]]
) -> bool:
    """True if plans compute what is wanted of some vectors."""
    try:
        return same_results(results(op, plans), wanted)
    except Broken:
        return False


def accepted(op: LinearOperator, plans: Sequence[LoweredPlan]) -> bool:
    try:
        linop.verify_plans(plans, op)
    except PlanError:
        return False
    return True


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_a_changed_plan_is_rejected_or_computes_the_same(name: str, data: st.DataObject) -> None:
    op = data.draw(operators(name))
    assume(stays_exact(op))
    op = op.H if data.draw(st.booleans(), label="adjoint") else op
    plans = plans_of(op)
    assume(plans)
    options = data.draw(st.sampled_from([MESSAGES, COLLECTIVES]), label="options")
    plans = data.draw(st.sampled_from([plans, *after_passes(plans, options)]), label="pass")
    wanted = results(op, plans)
    k = data.draw(st.integers(0, len(plans) - 1), label="plan")
    at = data.draw(st.integers(-1, len(plans[k].steps) - 1), label="step")
    changes = list(changed_ends(plans[k]) if at < 0 else changed_plans(plans[k], at))
    for changed in data.draw(st.lists(st.sampled_from(changes), max_size=3), label="changed"):
        broken = [*plans[:k], changed, *plans[k + 1 :]]
        assert not accepted(op, broken) or computes(op, broken, wanted)


def few() -> Iterator[tuple[LinearOperator, list[LoweredPlan]]]:
    """Operators of two workers and three, in messages and in collectives."""
    for n in (2, 3):
        split = TensorSpace((2 * n,), Partition((n,)))
        copies = TensorSpace((n,), Partition((n,)), axes=(COPIES,))
        scaled = [linop.local_operators.matrix(np.arange(4.0).reshape(2, 2), r, r) for r in split]
        for op in (
            linop.halo_exchange(split, 3, padding=1),
            linop.all_gather(split),
            linop.reduce_scatter(copies),
            linop.all_to_all(TensorSpace((n, n), Partition((n,))), 0, 1),
            linop.all_reduce(copies),
            linop.sum_reduce(copies, Partition((1,))),
            linop.all_gather(split, into=REPLICATED),
            linop.shift(split, 1) @ linop.direct_sum(*scaled),
        ):
            for one in (op, op.H):
                plans = plans_of(one)
                yield one, plans
                yield from ((one, after) for after in after_passes(plans, MESSAGES)[1:])
                yield from ((one, after) for after in after_passes(plans, COLLECTIVES))


@pytest.mark.slow
def test_every_change_of_small_plans_is_rejected_or_computes_the_same() -> None:
    rejected = same = 0
    for op, plans in few():
        wanted = results(op, plans)
        plan = plans[-1]
        changes = [c for at in range(len(plan.steps)) for c in changed_plans(plan, at)]
        for changed in changes:
            broken = [*plans[:-1], changed]
            if not accepted(op, broken):
                rejected += 1
            else:
                same += 1
                assert computes(op, broken, wanted)
    assert rejected > 2 * same > 100
