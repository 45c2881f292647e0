"""Costs of actions, as a user gives them: of computations by kind or by a function, of messages by
a number, a function, or the operators that move the data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, TypeAlias

from linop.errors import ArgumentError
from linop.operators.operator import LinearOperator
from linop.planning.network import Network
from linop.planning.prediction.simulation import simulate
from linop.schedules.actions import BACKWARDS, COMPUTE, MESSAGES, SENDS, Action, Kind

Number: TypeAlias = int | float | Fraction
"""A time. Whole numbers and fractions make every result exact."""
Costs: TypeAlias = Mapping[Any, Number] | Callable[[Action], Number]
"""Cost of each computation, update and group action: by kind (``"F"``) or (stage, kind), or a
function of the action."""
Edges: TypeAlias = (
    Number
    | LinearOperator
    | Mapping[tuple[int, int], Number | LinearOperator]
    | Callable[[Action], Number]
)
"""Cost of each message: one for all, by the pair of stages between which data go forward, or a
function of the send. Of an operator: its predicted time, and its adjoint's for gradients."""

USUAL: Mapping[Kind, Number] = {
    Kind.FORWARD: 1,
    Kind.BACKWARD: 2,
    Kind.BACKWARD_INPUT: 1,
    Kind.BACKWARD_WEIGHT: 1,
}
"""A backward is as long as two forwards, as for matrices; the unit is a forward."""


_WITH_COST = frozenset(Kind) - MESSAGES


def of_computations(costs: Costs, recompute: bool) -> Callable[[Action], Number]:
    """Function from an action that is no message to its cost.

    Args:
        recompute: a backward repeats its forward first.
    """
    at = costs if callable(costs) else _by_kind(_expect_kinds(costs))

    def cost(action: Action) -> Number:
        own = _checked(at(action), action)
        if recompute and action.kind in BACKWARDS:
            forward = Action(action.stage, Kind.FORWARD, action.micro_batch, action.version)
            return own + _checked(at(forward), forward)
        return own

    return cost


def of_messages(edges: Edges, network: Network | None) -> Callable[[Action], Number]:
    """Function from a send to the time that its message takes."""
    predicted: dict[tuple[LinearOperator, Kind], float] = {}

    def time(cost: Number | LinearOperator, kind: Kind) -> Number:
        if not isinstance(cost, LinearOperator):
            return cost
        if (cost, kind) not in predicted:
            op = cost if kind == Kind.SEND_F else cost.H
            predicted[cost, kind] = simulate(op, network).time
        return predicted[cost, kind]

    def cost(action: Action) -> Number:
        if isinstance(edges, Mapping):
            ends = action.stage, action.other
            pair = ends if action.kind == Kind.SEND_F else ends[::-1]
            if pair not in edges:
                raise ArgumentError(
                    f"edges: {action} sends between stages {pair[0]} and {pair[1]}, of which the "
                    f"mapping has no cost; it has {', '.join(map(str, edges)) or 'none'}"
                )
            return _checked(time(edges[pair], action.kind), action)  # type: ignore[index]
        if callable(edges) and not isinstance(edges, LinearOperator):
            return _checked(edges(action), action)
        return _checked(time(edges, action.kind), action)

    return cost


def _expect_kinds(costs: object) -> Mapping[Any, Number]:
    """Costs by kind, of kinds that have one: a misspelt one would be free."""
    if not isinstance(costs, Mapping):
        raise ArgumentError(f"costs: numbers by kind, or a function, expected, given {costs!r}")
    for key in costs:
        kind = key[1] if isinstance(key, tuple) and len(key) == 2 else key
        if kind not in _WITH_COST:
            raise ArgumentError(
                f"costs: {', '.join(sorted(_WITH_COST))} expected, or (stage, kind), given "
                f"{key!r}; those of messages are in edges"
            )
    return costs


def _by_kind(costs: Mapping[Any, Number]) -> Callable[[Action], Number]:
    def at(action: Action) -> Number:
        stage, kind = action.stage, action.kind
        for key in ((stage, kind), kind):
            if key in costs:
                return costs[key]
        halves = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
        if kind == Kind.BACKWARD and any(key in costs for h in halves for key in (h, (stage, h))):
            return sum(at(Action(stage, half, action.micro_batch)) for half in halves)
        if kind not in COMPUTE:
            return 0  # updates and group actions, unless they are given
        known = ", ".join(map(str, costs)) or "none"
        raise ArgumentError(
            f"costs: none for {action}; expected one of kind {kind} or of ({stage}, {kind}), "
            f"given {known}"
        )

    return at


def _checked(cost: object, action: Action) -> Number:
    """A cost that is a number, finite and not negative."""
    if isinstance(cost, int | float | Fraction) and 0 <= cost <= sys.float_info.max:
        return cost
    what = "edges" if action.kind in SENDS else "costs"
    raise ArgumentError(
        f"{what}: expected a finite number, not negative, for {action}; given {cost!r}"
    )
