"""Passes over plans: what they change, that they say nothing else, and that broken ones are
rejected. All operators of the catalogue are verified after every pass in `plans_fit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

import linop
from linop import COPIES, LinearOperator, Partition, TensorSpace
from linop.planning.fusion import overwritten
from linop.planning.passes import Options, rewritten
from linop.planning.plan import Alias, Apply, LoweredPlan, Make, Put, Step, Sum, puts_of
from linop.planning.verification.plan_errors import FusedSumError, PlanError, StorageError
from support.operators.properties import plans_of

Edit = Callable[[Step], Step]


def total(workers: int, size: int) -> LinearOperator:
    return linop.all_reduce(TensorSpace((size,), Partition((workers,)), axes=(COPIES,)))


def passed(op: LinearOperator, small: int = 0) -> dict[str, list[LoweredPlan]]:
    """The plans of all workers after each pass, by its name."""
    found: dict[str, list[LoweredPlan]] = {}
    for plan in plans_of(op):
        for name, after in rewritten(plan, Options(small=small)):
            found.setdefault(name, []).append(after)
    return found


def edited(plans: Sequence[LoweredPlan], edit: Edit) -> list[LoweredPlan]:
    """The plans, with the steps of the last one changed."""
    *others, last = plans
    return [*others, replace(last, steps=tuple(map(edit, last.steps)))]


def test_a_sum_of_two_terms_takes_one_step() -> None:
    op = total(2, 5)
    after = passed(op)
    for lowered, plan in zip(plans_of(op), after["sums_fused"], strict=True):
        (fused,) = (step for step in plan.steps if isinstance(step, Sum))
        assert puts_of(plan.steps) == puts_of(lowered.steps)
        assert str(fused) == f"{fused.first} + {fused.second.source}"
        assert len(plan.steps) == len(lowered.steps) - 1


def test_of_three_terms_the_first_two_take_one_step() -> None:
    for plan in passed(total(3, 5))["sums_fused"]:
        assert sum(isinstance(step, Sum) for step in plan.steps) == 1
        assert sum(isinstance(step, Put) and step.accumulate for step in plan.steps) == 1


def test_a_scaled_term_is_not_fused() -> None:
    op = total(2, 5) @ (3 * linop.identity(total(2, 5).domain))
    assert not any(isinstance(s, Sum) for plan in passed(op)["sums_fused"] for s in plan.steps)


def test_a_share_of_a_sum_is_made_within_the_result() -> None:
    op = total(2, 200_000)
    for plan in passed(op)["stored_in_results"]:
        (within,) = (s.within for s in plan.steps if isinstance(s, Make) and s.within is not None)
        (stored,) = (put for put in puts_of(plan.steps) if put.stored)
        assert stored.target == within
        assert within.region == plan.outputs[0]
        assert within.size == 100_000


def test_small_results_have_nothing_made_within_them() -> None:
    op = total(2, 200_000)
    plans = passed(op, small=200_000 * 8)["stored_in_results"]
    assert not any(put.stored for plan in plans for put in puts_of(plan.steps))
    plans = passed(op, small=200_000 * 8 - 1)["stored_in_results"]
    assert all(any(put.stored for put in puts_of(plan.steps)) for plan in plans)


def transform() -> LinearOperator:
    return linop.fft(TensorSpace((4, 6), Partition((2,)), complex))


def test_transforms_overwrite_arrays_that_the_plan_made() -> None:
    """The first one a copy of the argument, the second one what messages brought."""
    after = passed(transform())
    for before, plan in zip(after["stored_in_results"], after["applied_inside"], strict=True):
        applied = [step for step in plan.steps if isinstance(step, Apply)]
        assert len(applied) == 2 and all(step.inside for step in applied)
        assert str(applied[0]).endswith(", inside its argument")
        (kept,) = (step for step in before.steps if isinstance(step, Alias))
        (made, copied) = plan.steps[:2]
        assert made == Make(kept.target, zeroed=False)
        assert isinstance(copied, Put) and copied.is_copy
        assert (copied.source, copied.target) == (kept.source[...], kept.target[...])
    for plan in plans_of(transform()):
        *_, (_, last) = rewritten(plan, Options(inside=False))
        assert not any(isinstance(step, Apply) and step.inside for step in last.steps)


def test_maps_that_return_new_arrays_get_no_copy() -> None:
    op = linop.local_operators.diagonal([1.0, 2.0, 3.0], linop.Region("x", (3,)))
    assert passed(op)["applied_inside"] == passed(op)["stored_in_results"]


def test_only_arrays_that_were_made_are_overwritten() -> None:
    op = transform()
    plans = passed(op)["stored_in_results"]
    linop.verify_plans(passed(op)["applied_inside"], op)
    broken = edited(plans, lambda s: replace(s, inside=True) if isinstance(s, Apply) else s)
    with pytest.raises(StorageError, match="the array that it overwrites was not made"):
        linop.verify_plans(broken, op)


X, Y = linop.Region("x", 4), linop.Region("y", 2)
BOTH = linop.Space([X, Y])


def added(op: LinearOperator, *scratch: str, **options: bool) -> LoweredPlan:
    """The plan of the only worker after all passes; it is that of the operator."""
    (plan,) = plans_of(op)
    *_, (_, after) = rewritten(replace(plan, scratch=frozenset(scratch)), Options(**options))
    linop.verify_plans([after], op)
    return after


def test_sums_are_formed_in_arguments_that_may_be_overwritten() -> None:
    op = linop.add(BOTH, Y, X[1:3])
    plan = added(op, "x", "y")
    assert overwritten(plan) == {"x"}
    (make,) = (step for step in plan.steps if isinstance(step, Make))
    assert str(make) == "make x[4] inside of the argument"
    kept, added_to = puts_of(plan.steps)
    assert kept.stored and kept.keeps and added_to.accumulate and not added_to.stored
    for other in (added(op), added(op, "y"), added(op, "x", inside=False)):
        assert not overwritten(other)


@pytest.mark.parametrize(
    "op",
    [
        linop.add(BOTH, X[:1], X[1:2]),  # read for another purpose
        linop.add(linop.allocate(BOTH, linop.Region("z", 4)).codomain, Y, X[1:3])
        @ linop.copy(BOTH, X, linop.Region("z", 4)),
        linop.clear(BOTH, X[:1]),  # nothing is added
        2 * linop.add(BOTH, Y, X[1:3]),  # not as it was
        linop.identity(BOTH),
    ],
)
def test_arguments_that_are_needed_are_not_overwritten(op: LinearOperator) -> None:
    assert not overwritten(added(op, "x", "y"))


@pytest.mark.parametrize(
    "edit",
    [
        lambda s: replace(s, zeroed=True) if isinstance(s, Make) else s,
        lambda s: replace(s, stored=False) if isinstance(s, Put) else s,
        lambda s: Alias(X, X) if isinstance(s, Alias) else s,
    ],
)
def test_broken_sums_in_arguments_are_rejected(edit: Edit) -> None:
    op = linop.add(BOTH, Y, X[1:3])
    plan = added(op, "x")
    with pytest.raises(PlanError):
        linop.verify_plans(edited([plan], edit), op)
    with pytest.raises(StorageError, match="the argument's memory has another use"):
        linop.verify_plans([replace(plan, scratch=frozenset())], op)


def test_a_plan_overwrites_what_it_was_given() -> None:
    """And results are memory of their own nevertheless."""
    op = linop.add(BOTH, Y, X[1:3])

    def main(backend: linop.backends.Backend) -> None:
        plan = op.compile(backend)
        assert plan.give_up(["x", "y"]) == {"x"}
        for _ in range(3):
            x, y = np.arange(4.0), np.array([10.0, 20.0])
            found = plan({"x": x, "y": y})
            assert found["x"].tolist() == x.tolist() == [0, 11, 22, 3]
            assert not np.may_share_memory(found["x"], x) and y.tolist() == [10, 20]
        kept = plan.H({"x": x, "y": y})
        assert kept["y"].tolist() == [21, 42] and x.tolist() == [0, 11, 22, 3]

    linop.launch(main, 1)


def other_target(step: Step) -> Step:
    if isinstance(step, Make) and step.within is not None:
        return replace(step, within=step.within.region[:100_000])
    return step


def zeroed(step: Step) -> Step:
    return replace(step, zeroed=True) if isinstance(step, Make) else step


def not_stored(step: Step) -> Step:
    return replace(step, stored=False) if isinstance(step, Put) else step


def not_within(step: Step) -> Step:
    return replace(step, within=None) if isinstance(step, Make) else step


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (other_target, "the next stage does not copy the region to|was not made within"),
        (zeroed, "has another use"),
        (not_stored, "the next stage does not copy the region to"),
        (not_within, "its source was not made within its target"),
    ],
)
def test_storage_that_is_wrong_is_rejected(edit: Edit, text: str) -> None:
    op = total(2, 200_000)
    plans = passed(op)["stored_in_results"]
    linop.verify_plans(plans, op)
    broken = edited(plans, edit)
    assert broken != plans
    with pytest.raises(StorageError, match=text):
        linop.verify_plans(broken, op)


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        (lambda s: Sum(s.second, s.first), FusedSumError),
        (lambda s: replace(s, first=replace(s.first, coefficient=2)), FusedSumError),
        (lambda s: replace(s, second=replace(s.second, accumulate=False)), FusedSumError),
        (
            lambda s: replace(s, second=replace(s.second, target=s.first.target.region[1:])),
            PlanError,
        ),
        (lambda s: replace(s, second=s.first), FusedSumError),
    ],
)
def test_sums_that_are_wrong_are_rejected(
    edit: Callable[[Sum], Step], error: type[PlanError]
) -> None:
    op = total(2, 5)
    plans = passed(op)["sums_fused"]
    linop.verify_plans(plans, op)
    broken = edited(plans, lambda step: edit(step) if isinstance(step, Sum) else step)
    with pytest.raises(error):
        linop.verify_plans(broken, op)
