"""Passes: how the stages of an operator become those that are lowered, and a plan the one that
runs.

Each is a pure function with a name, which `linop show --passes` prints. What comes of them is
proven to be the operator (`linop.planning.verification`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from linop.normal_form.maps import Layer
from linop.normal_form.movement import Movement
from linop.normal_form.stages import Stages
from linop.planning.shares import in_shares

Pass = Callable[[Stages], Stages]


def products_apart(stages: Stages) -> Stages:
    """Take products apart that have far more transfers than their factors."""
    return _replaced(stages, Movement.factored)


def sums_in_shares(stages: Stages) -> Stages:
    """Do sums that several workers want in shares, where that is predicted to be faster: a
    reduce-scatter, then an all-gather."""
    return _replaced(stages, in_shares)


PASSES: tuple[Pass, ...] = (products_apart, sums_in_shares)
"""In the order in which they are done."""


def passed(stages: Stages) -> Sequence[tuple[str, Stages]]:
    """The name of each pass that changes something, and the stages after it."""
    if "passed" not in stages.kept:
        done, before = list[tuple[str, Stages]](), stages
        for one in PASSES:
            after = one(before)
            if after is not before:
                done.append((one.__name__, after))
            before = after
        stages.kept["passed"] = done
    known: list[tuple[str, Stages]] = stages.kept["passed"]
    return known


def prepared(stages: Stages) -> Stages:
    """The stages that are lowered: after all passes. The same object where these change nothing."""
    done = passed(stages)
    return done[-1][1] if done else stages


def _replaced(stages: Stages, parts: Callable[[Movement], tuple[Movement, ...]]) -> Stages:
    """Stages with each movement replaced by those whose product it is."""
    movements: list[Movement] = []
    layers: list[Layer] = []
    for movement, layer in zip(stages.movements, (*stages.layers, None), strict=True):
        pieces = parts(movement)
        movements += pieces
        layers += [()] * (len(pieces) - 1) + ([] if layer is None else [layer])
    same = len(movements) == len(stages.movements)
    return stages if same else Stages(tuple(movements), tuple(layers))
