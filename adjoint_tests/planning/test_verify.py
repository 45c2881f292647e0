"""The verifier of plans rejects plans that were broken on purpose, each for its own reason.

That it accepts the plans of all operators, `test_lowering` and `test_catalogue` say; faults drawn
at random are in `test_translation`.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import linop
from linop import COPIES, Partition, Region, Space, TensorSpace
from linop.errors import ArgumentError, PlanError
from linop.normal_form.stages import Stages
from linop.planning.lowering import lower
from linop.planning.plan import (
    Advance,
    Alias,
    Collective,
    LoweredPlan,
    Put,
    Send,
)
from linop.planning.verification.plan_errors import (
    CycleError,
    DTypeMismatchError,
    FactorError,
    FusedSumError,
    SizeMismatchError,
    StorageError,
    UnknownRegionError,
    WorkerError,
    WrongRegionError,
    WrongTransferError,
)
from linop.planning.verification.verifier import factors_fit
from support.operators.properties import plans_of, together
from support.planning.plan_faults import (
    COLLECTIVE,
    FAULTS,
    NEW,
    OTHERWISE,
    A,
    Fault,
    Q,
    applied,
    edited,
    gathered,
    kept,
    on,
    scattered,
    summed,
    swapped,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_broken_plan_is_rejected(fault: Fault) -> None:
    plans = plans_of(fault.op())
    linop.verify_plans(plans)
    broken = edited(plans, fault.worker, fault.edit)
    assert broken != plans
    with pytest.raises(PlanError) as raised:
        linop.verify_plans(broken)
    assert type(raised.value) is fault.error
    assert re.search(fault.text, str(raised.value))


@pytest.mark.parametrize("fault", OTHERWISE, ids=lambda fault: fault.name)
def test_plans_that_fit_and_compute_something_else_are_rejected(fault: Fault) -> None:
    op = fault.op()
    linop.verify_plans(op)
    plans = edited(plans_of(op), fault.worker, fault.edit)
    linop.verify_plans(plans)
    with pytest.raises(PlanError) as raised:
        linop.verify_plans(plans, op)
    assert type(raised.value) is fault.error
    assert re.search(fault.text, str(raised.value))


def test_every_kind_of_error_is_tried() -> None:
    elsewhere = {DTypeMismatchError, CycleError, FactorError}
    elsewhere |= {FusedSumError, StorageError}  # in test_plan_passes.py
    tried = {fault.error for fault in (*FAULTS, *OTHERWISE, *COLLECTIVE)} | elsewhere
    assert set(PlanError.__subclasses__()) == tried


def test_a_dtype_that_differs_between_workers_is_rejected() -> None:
    first, second = plans_of(gathered())
    other = replace(second, dtype=np.dtype(np.float32))
    with pytest.raises(DTypeMismatchError, match="worker 0 has a plan of float64, worker 1 one of"):
        linop.verify_plans([first, other])
    both = [replace(first, dtype=other.dtype), other]
    linop.verify_plans(both)
    with pytest.raises(DTypeMismatchError, match="a plan of float32, and float64 expected"):
        linop.verify_plans(both, gathered())


def late(plan: LoweredPlan) -> LoweredPlan:
    """The same plan, sending at the end of the stage what it sent at its beginning."""
    rest = [step for step in plan.steps if not isinstance(step, Send | Advance)]
    sends = [step for step in plan.steps if isinstance(step, Send)]
    return replace(plan, steps=(*rest, *sends, plan.steps[-1]))


def test_workers_that_wait_for_each_other_are_rejected() -> None:
    first, second = plans_of(swapped())
    linop.verify_plans([late(first), second], swapped())
    with pytest.raises(CycleError, match=r"worker 0 waits for \[1\]; worker 1 waits for \[0\]"):
        linop.verify_plans([late(first), late(second)])


def test_the_result_of_an_operator_is_none() -> None:
    X = TensorSpace((4,), Partition((2,)))
    result = X.scatter(np.ones(4))
    with pytest.raises(ArgumentError, match="simulate: expected an operator, given <Vector of 4"):
        linop.simulate(result)
    with pytest.raises(ArgumentError, match="verify_plans: expected an operator or plans, given <"):
        linop.verify_plans(result)
    with pytest.raises(ArgumentError, match="verify_plans: expected a LoweredPlan, given 1"):
        linop.verify_plans([1])


def test_workers_may_wait_in_turn() -> None:
    """Each but the last waits for the one after it, and some for several rounds."""
    space = Space([Region(f"x{w}", 2, w) for w in range(4)])
    op = linop.identity(space)
    for w in reversed(range(3)):
        scaled = [linop.local_operators.diagonal(np.ones(2), Space(region)) for region in space]
        op = linop.copy(space, space[f"x{w + 1}"], space[f"x{w}"]) @ linop.direct_sum(*scaled) @ op
    linop.verify_plans(op)


def test_a_set_of_plans_without_one_of_the_workers_is_rejected() -> None:
    first, second = plans_of(gathered())
    with pytest.raises(WorkerError, match="two plans for worker 0"):
        linop.verify_plans([first, second, first])
    with pytest.raises(WorkerError, match=r"receive 2 elements from 1\): worker 1 has no plan"):
        linop.verify_plans([first])
    with pytest.raises(WorkerError, match="the operator needs worker 0, which has no plan"):
        linop.verify_plans([], gathered())


def test_other_arguments_and_results_are_rejected() -> None:
    (plan,) = plans_of(kept())
    for end, verb in (("inputs", "takes"), ("outputs", "gives")):
        other = replace(plan, **{end: getattr(plan, end)[::-1]})
        linop.verify_plans([other])
        with pytest.raises(WrongRegionError, match=f"worker 0 {verb} .* expected"):
            linop.verify_plans([other], kept())
    with pytest.raises(WorkerError, match="not its own, or twice"):
        linop.verify_plans([replace(plan, inputs=(Region("p", 2, 1), Q))])
    with pytest.raises(UnknownRegionError, match=r"the result: no region .*'z'"):
        linop.verify_plans([replace(plan, outputs=(Region("z", 2),))])


def test_a_region_kept_in_another_shape_is_rejected() -> None:
    keep = LoweredPlan(0, np.dtype(float), (A,), (NEW,), (Alias(A, NEW), Advance(0)))
    with pytest.raises(SizeMismatchError, match="shapes"):
        linop.verify_plans([keep])


def test_sums_may_be_added_twice_where_nobody_says_of_what() -> None:
    """Plans alone must not be rejected for what may be right: additions in any number."""
    twice = on(Put, lambda put: [put, put] if put.accumulate else [put])
    linop.verify_plans(edited(plans_of(summed()), 0, twice))
    linop.verify_plans([])


@pytest.mark.parametrize("fault", COLLECTIVE, ids=lambda fault: fault.name)
def test_broken_collectives_are_rejected(fault: Fault) -> None:
    op = fault.op()
    plans = together(plans_of(op))
    linop.verify_plans(plans, op)
    broken = edited(plans, fault.worker, fault.edit)
    assert broken != plans
    with pytest.raises(PlanError) as raised:
        linop.verify_plans(broken)
    assert type(raised.value) is fault.error
    assert re.search(fault.text, str(raised.value))


def test_contributions_in_another_order_are_rejected() -> None:
    op = scattered()
    backwards = on(Collective, lambda s: [replace(s, parts=s.parts[::-1])])
    plans = edited(together(plans_of(op)), 1, backwards)
    linop.verify_plans(plans)
    with pytest.raises(WrongTransferError, match=r"x@1\[0:1\] .* expected, .* x@1\[2:3\]"):
        linop.verify_plans(plans, op)


def test_stages_that_are_lowered_are_compared_with_the_operator() -> None:
    stages = linop.all_reduce(TensorSpace((4,), Partition((2,)), axes=(COPIES,))).stages
    (movement,) = stages.movements
    back = movement.adjoint()
    stages.kept["passed", None] = [("one", Stages((movement, back), ((),)))]
    with pytest.raises(FactorError, match="after one, the product of movement 0's factors is anot"):
        linop.verify_plans([lower(stages, w) for w in stages.workers], stages)
    stages = applied().stages
    (layer,) = stages.layers
    with pytest.raises(FactorError, match="after two, the layers"):
        factors_fit(stages, Stages(stages.movements, ((*layer, *layer),)), "two")


def test_the_cost_does_not_depend_on_the_number_of_elements() -> None:
    """10^16 of them: nothing could be held for each."""
    space = TensorSpace((10**8, 10**8), Partition((2, 2)))
    for op in (linop.halo_exchange(space, 3, padding=1), linop.gather(space),
               linop.repartition(space, Partition((4, 1)))):  # fmt: skip
        linop.verify_plans(op)
        linop.verify_plans(op.H)


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "complex128", "complex64", "int64", "uint8"]
)
def test_coefficients_are_compared_as_plans_have_them(dtype: str) -> None:
    """Rounded once, which the operator's are not: a third is no number of a dtype."""
    r, q = Region("r", 4), Region("q", 4, 1)
    space = Space([r, q], dtype)
    one, add = linop.identity(space), linop.add(space, r, q)
    ops = [3 * one, one + 2 * add, (one + add) ** 5]
    if space.dtype.kind in "fc":
        ops += [one / 3, 0.1 * add, one / 49 / 7, (one + 0.1 * add) @ (one + 0.1 * add)]
    for op in ops:
        for each in (op, op.H):
            linop.verify_plans(each)
