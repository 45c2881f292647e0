"""Proofs about plans, found without running them.

`verify` checks the plans of all workers against each other, and against their operator: one error
class of `linop.planning.verification.plan_errors` for each way in which plans can be wrong. Its
cost grows with the steps of plans, and does not depend on the number of elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Protocol, runtime_checkable

import numpy as np

from linop.normal_form.maps import Layer
from linop.normal_form.movement import Movement
from linop.normal_form.stages import Stages
from linop.planning.lowering import lower
from linop.planning.passes import passed, prepared
from linop.planning.plan import Plan
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

MOST = 2**18
"""Transfers of a product up to which factors are multiplied to be compared with it."""


@runtime_checkable
class Staged(Protocol):
    """An operator, as far as it is asked here."""

    @property
    def stages(self) -> Stages:
        """Its normal form."""


def verify_plans(plans: Staged | Iterable[Plan], op: Staged | Stages | None = None) -> None:
    """Check the plans of all workers against each other, and prove that they compute an operator.

    That an operator's stages are the product of what is lowered is proven where the product has
    at most `MOST` transfers; else they are its factors as composed.

    Args:
        plans: of all workers; or the operator, to check the plans that `lower` makes.
        op: the operator, or its stages; without it, plans are checked against each other alone.

    Raises:
        PlanError: the subclass says what is wrong; the message says which worker, stage and step,
            what was expected and what is there.
    """
    if isinstance(plans, Staged):
        op, plans = plans, [lower(plans.stages, worker) for worker in plans.stages.workers]
    by_worker: dict[int, Plan] = {}
    for plan in plans:
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
        of = op.stages if isinstance(op, Staged) else op
        _same_ends(of, by_worker)
        same_as_operator(prepared(of), stages)
        before = of
        for name, after in passed(of):
            factors_fit(before, after, name)
            before = after


def _by_number(plans: Iterable[tuple[PlanStage, ...]]) -> Iterator[list[PlanStage]]:
    found: dict[int, list[PlanStage]] = {}
    for own in plans:
        for stage in own:
            found.setdefault(stage.number, []).append(stage)
    return iter(found.values())


def _same_ends(stages: Stages, plans: dict[int, Plan]) -> None:
    """Check that plans have their operator's workers, dtype, arguments and results."""
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
    """Check that the stages after a pass are those before it, in other factors.

    Args:
        name: of the pass.

    Raises:
        FactorError: they are not.
    """
    whole, factored = _joined(before), _joined(after)
    if [layer for _, layer in whole] != [layer for _, layer in factored]:
        raise FactorError(f"after {name}, the layers are not the operator's")
    for k, ((one, _), (many, _)) in enumerate(zip(whole, factored, strict=True)):
        if _paths(one) <= MOST and _product(one) != _product(many):
            raise FactorError(f"after {name}, the product of movement {k}'s factors is another one")


def _joined(stages: Stages) -> list[tuple[list[Movement], Layer]]:
    """Movements between layers that hold local maps, first applied first."""
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
    """At most so many transfers has the product of movements: the ways through their parts."""
    parts = [part for movement in movements for part in movement.parts]
    ways = dict.fromkeys((region.name for region in parts[0].domain), 1)
    for part in parts:
        t, coming = part.table, np.array([ways[r.name] for r in part.domain], np.int64)
        counts = np.zeros(len(part.codomain), np.int64)
        np.add.at(counts, t.dst, coming[t.src])
        names = (region.name for region in part.codomain)
        ways = dict(zip(names, counts.tolist(), strict=True))
        if sum(ways.values()) > MOST:
            break
    return sum(ways.values())
