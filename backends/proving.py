"""Proofs of plans when they are compiled in debug mode: as planned, and as rewritten."""

from __future__ import annotations

from collections.abc import Callable

from linop.normal_form.stages import Stages
from linop.operators.operator import LinearOperator
from linop.planning.lowering import workers_of
from linop.planning.plan import Plan
from linop.planning.verification.verifier import verify_plans

MOST = 64
"""Workers of a plan up to which it is proven: for an all-to-all of so many, in 0.4 s."""


def prove(
    op: LinearOperator, planned: Callable[[Stages, int], Plan], rewritten: Callable[[Plan], Plan]
) -> None:
    """Prove that the plans of all workers compute an operator, as planned and as rewritten. Without
    communication: every worker makes all plans, and finds the same.

    Args:
        planned: makes the plan of a worker that is to run.

    Raises:
        PlanError: they do not.
    """
    workers = workers_of(op.stages)
    if len(workers) > MOST:
        return
    plans = [planned(op.stages, worker) for worker in workers]
    verify_plans(plans, op)
    others = [rewritten(plan) for plan in plans]
    if others != plans:
        verify_plans(others, op)
