"""Debug mode: static verification of all workers' plans at compile time, as lowered and after every
pass over plans."""

from __future__ import annotations

from collections.abc import Callable

from linop.normal_form.stages import Stages
from linop.operators.operator import LinearOperator
from linop.planning.lowering import workers_of
from linop.planning.passes import Options, rewritten
from linop.planning.placement import Placement
from linop.planning.plan import LoweredPlan
from linop.planning.verification.verifier import verify_plans

MOST = 64
"""Largest number of workers for which plans are verified: an all-to-all of 64 takes 0.4 s."""


def prove(
    op: LinearOperator,
    planned: Callable[[Stages, int], LoweredPlan],
    options: Options,
    placement: Placement | None = None,
) -> None:
    """Verify that the plans of all workers together compute an operator, after every step of the
    pipeline. Without communication: every worker builds all plans, with the same outcome.
    Operators of more than `MOST` workers are skipped.

    Args:
        planned: ``f(stages, worker)``: the lowered plan of a worker.
        options: those of the passes over plans.
        placement: of the workers; by default on one machine.

    Raises:
        PlanError: the plans do not compute the operator.
    """
    workers = workers_of(op.stages)
    if len(workers) > MOST:
        return
    plans = [planned(op.stages, worker) for worker in workers]
    verify_plans(plans, op, placement)
    for each in zip(*(rewritten(plan, options) for plan in plans), strict=True):
        others = [plan for _, plan in each]
        if others != plans:
            verify_plans(others, op, placement)
        plans = others
