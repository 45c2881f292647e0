"""The passes, in order: from an operator's stages to the plan of one worker that is bound.

    stages -> factored_products -> hierarchy -> reduce_scatter_sums -> lower
        -> in_collectives -> added_inside -> sums_fused -> stored_in_results -> applied_inside
        -> plan

Passes over stages (`linop.planning.stage_passes`) concern all workers, and come before `lower`;
passes over plans rewrite one worker's steps. The verifier accepts the plans of all workers after
each. Nothing else rewrites a plan. ``linop show --passes`` prints the plan after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from linop.normal_form.stages import Stages
from linop.planning import fusion
from linop.planning.collective_selection import collected
from linop.planning.lowering import lower_without_passes
from linop.planning.patterns import Pattern
from linop.planning.placement import Placement
from linop.planning.plan import LoweredPlan
from linop.planning.stage_passes import STAGE_PASSES, passed


def _no_collectives(plan: LoweredPlan) -> Mapping[int, Pattern]:
    del plan
    return {}


@dataclass(frozen=True)
class Options:
    """Properties of an executor on which the passes over plans depend."""

    collectives: Callable[[LoweredPlan], Mapping[int, Pattern]] = _no_collectives
    """The patterns, by stage, that run as collectives of the message-passing library."""
    small: int = 0
    """Bytes of results up to which they are allocated in every run."""
    inside: bool = True
    """True if local maps may overwrite their arguments, and sums those of the plan that are
    `LoweredPlan.scratch`."""


def in_collectives(plan: LoweredPlan, options: Options) -> LoweredPlan:
    """Replace the messages of stages by collectives (`linop.planning.collective_selection`)."""
    return collected(plan, options.collectives(plan))


def added_inside(plan: LoweredPlan, options: Options) -> LoweredPlan:
    """Add to arguments in their own memory, if it may be overwritten (`linop.planning.fusion`)."""
    return fusion.added_inside(plan) if options.inside else plan


def sums_fused(plan: LoweredPlan, options: Options) -> LoweredPlan:
    """Form sums of two terms in one pass over memory (`linop.planning.fusion`)."""
    del options
    return fusion.sums_fused(plan)


def stored_in_results(plan: LoweredPlan, options: Options) -> LoweredPlan:
    """Form sums where the next stage would copy them to (`linop.planning.fusion`)."""
    return fusion.stored_in_results(plan, options.small)


def applied_inside(plan: LoweredPlan, options: Options) -> LoweredPlan:
    """Let local maps overwrite their arguments (`linop.planning.fusion`)."""
    return fusion.applied_inside(plan) if options.inside else plan


PLAN_PASSES = (in_collectives, added_inside, sums_fused, stored_in_results, applied_inside)
"""All passes over plans, in order of application."""


def rewritten(plan: LoweredPlan, options: Options) -> Iterator[tuple[str, LoweredPlan]]:
    """(name, plan after it) of each pass over plans."""
    for each in PLAN_PASSES:
        plan = each(plan, options)
        yield each.__name__, plan


def bound_plan(plan: LoweredPlan, options: Options) -> LoweredPlan:
    """The plan after all passes over plans."""
    return [after for _, after in rewritten(plan, options)][-1]


def shown(
    stages: Stages, worker: int, options: Options, placement: Placement | None = None
) -> Iterator[tuple[str, LoweredPlan]]:
    """(name, plan after it) of every step of the pipeline, passes over stages included."""
    plan = lower_without_passes(stages, worker, placement)
    yield "before any pass", plan
    changed = dict(passed(stages, placement))
    for each in STAGE_PASSES:
        if each.__name__ in changed:
            plan = lower_without_passes(changed[each.__name__], worker, placement)
        yield f"after {each.__name__}", plan
    for name, after in rewritten(plan, options):
        yield f"after {name}", after
