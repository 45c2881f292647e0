"""The static verifier, `linop.verify_plans`: runs all checks of plans in order.

It checks the plans of all workers against each other and against their operator. Errors are those
of `linop.planning.verification.plan_errors`. The cost grows with the number of steps, not with the
number of elements. The checks themselves are in the other modules of this folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce

import numpy as np

from linop.errors import ArgumentError, expect
from linop.normal_form.maps import Layer
from linop.normal_form.movement import Movement
from linop.normal_form.stages import HasStages, Stages
from linop.planning.lowering import lower_all
from linop.planning.placement import Placement
from linop.planning.plan import LoweredPlan
from linop.planning.stage_passes import passed, prepared
from linop.planning.verification.correspondence import match_collectives, match_messages, no_cycle
from linop.planning.verification.plan_errors import (
    DTypeMismatchError,
    FactorError,
    WorkerError,
    WrongRegionError,
)
from linop.planning.verification.plan_stages import PlanStage, read
from linop.planning.verification.translation import same_as_operator
from linop.planning.verification.writes import check_writes

LARGEST_PRODUCT = 2**18
"""Largest product, in transfers, that is evaluated to compare it with its factors."""


def verify_plans(
    plans: HasStages | Iterable[LoweredPlan],
    op: HasStages | Stages | None = None,
    placement: Placement | None = None,
) -> None:
    """Check the plans of all workers against each other, and prove that they compute an operator.

    Products that a pass has factored are compared with their factors if they have at most
    `LARGEST_PRODUCT` transfers; larger ones are accepted as composed.

    Args:
        plans: of all workers; or the operator, to check the plans that `lower` makes.
        op: the operator, or its stages; without it, plans are checked against each other only.
        placement: of the workers, for which the plans were made; by default on one machine.

    Raises:
        ArgumentError: neither an operator nor plans are given.
        PlanError: of the subclass of the fault (`linop.planning.verification.plan_errors`); the
            message names worker, stage and step, the expected and the given.

    Example:
        >>> X = linop.TensorSpace((64,), linop.Partition(64))
        >>> linop.verify_plans(linop.all_gather(X))  # raises where a plan is wrong
        >>> from linop.planning.lowering import lower_all
        >>> linop.verify_plans(lower_all(linop.shift(X, 1).stages), linop.shift(X, 2))
        Traceback (most recent call last):
            ...
        linop.planning.verification.plan_errors.WrongTransferError: worker 0, stage 0, x@0: ...
    """
    if isinstance(plans, HasStages):
        op, plans = plans, lower_all(plans.stages, placement)
    elif not isinstance(plans, Iterable):
        raise ArgumentError(f"verify_plans: expected an operator or plans, given {plans!r}")
    by_worker: dict[int, LoweredPlan] = {}
    for plan in plans:
        expect("verify_plans", plan, LoweredPlan)
        if plan.worker in by_worker:
            raise WorkerError(f"two plans for worker {plan.worker}")
        by_worker[plan.worker] = plan
    stages = {worker: read(plan) for worker, plan in by_worker.items()}
    match_messages(by_worker, stages)
    match_collectives(stages)
    no_cycle(stages)
    for same in _by_number(stages.values()):
        check_writes(same)
    if op is not None:
        of = op.stages if isinstance(op, HasStages) else op
        _same_ends(of, by_worker)
        same_as_operator(prepared(of, placement), stages)
        before = of
        for name, after in passed(of, placement):
            factors_fit(before, after, name)
            before = after


def _by_number(plans: Iterable[tuple[PlanStage, ...]]) -> Iterator[list[PlanStage]]:
    found: dict[int, list[PlanStage]] = {}
    for own in plans:
        for stage in own:
            found.setdefault(stage.number, []).append(stage)
    return iter(found.values())


def _same_ends(stages: Stages, plans: dict[int, LoweredPlan]) -> None:
    """Check that plans have the operator's workers, dtype, arguments and results."""
    for worker in stages.workers:
        if worker not in plans:
            raise WorkerError(f"the operator needs worker {worker}, which has no plan")
    for worker, plan in plans.items():
        if plan.dtype != stages.domain.dtype:
            raise DTypeMismatchError(
                f"worker {worker}: a plan of {plan.dtype}, and {stages.domain.dtype} expected"
            )
        for what, given, space in (
            ("takes", plan.inputs, stages.domain),
            ("gives", plan.outputs, stages.codomain),
        ):
            if given != space.on(worker):
                raise WrongRegionError(
                    f"worker {worker} {what} {list(given)}, and {list(space.on(worker))} expected"
                )


def factors_fit(before: Stages, after: Stages, name: str) -> None:
    """Check that the stages after a pass have the layers of those before it, and movements of equal
    products between layers. Products of more than `LARGEST_PRODUCT` transfers are not compared.

    Args:
        name: of the pass, for messages.

    Raises:
        FactorError: layers or products differ.
    """
    whole, factored = _joined(before.spread), _joined(after.spread)
    if [layer for _, layer in whole] != [layer for _, layer in factored]:
        raise FactorError(f"after {name}, the layers are not the operator's")
    for k, ((one, _), (many, _)) in enumerate(zip(whole, factored, strict=True)):
        if _paths(one) <= LARGEST_PRODUCT and _product(one) != _product(many):
            raise FactorError(f"after {name}, the product of movement {k}'s factors is another one")


def _joined(stages: Stages) -> list[tuple[list[Movement], Layer]]:
    """(movements, the layer after them), for each layer with local maps and for the end."""
    found: list[tuple[list[Movement], Layer]] = [([], ())]
    for movement, layer in zip(stages.movements, (*stages.layers, ()), strict=True):
        found[-1][0].append(movement)
        if layer:
            found[-1] = found[-1][0], layer
            found.append(([], ()))
    return found


def _product(movements: Sequence[Movement]) -> Movement:
    return reduce(lambda first, then: then @ first, movements)


def _paths(movements: Sequence[Movement]) -> int:
    """Upper bound on the transfers of a product: paths through the factors' tables. Counting stops
    above `LARGEST_PRODUCT`."""
    parts = [part for movement in movements for part in movement.factors]
    ways = dict.fromkeys((region.name for region in parts[0].domain), 1)
    for part in parts:
        t, coming = part.table, np.array([ways[r.name] for r in part.domain], np.int64)
        counts = np.zeros(len(part.codomain), np.int64)
        np.add.at(counts, t.dst, coming[t.src])
        names = (region.name for region in part.codomain)
        ways = dict(zip(names, counts.tolist(), strict=True))
        if sum(ways.values()) > LARGEST_PRODUCT:
            break
    return sum(ways.values())
