"""Passes: rewrites of an operator's stages before lowering.

Each pass is a pure function from stages to stages; `linop show --passes` prints its name. The
result is proven equal to the operator (`linop.planning.verification`). `linop.planning.pipeline`
has the passes over plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from linop.normal_form.maps import Layer
from linop.normal_form.movement import Movement
from linop.normal_form.stages import Stages
from linop.planning.reduce_scatter_sums import split_sums

Pass = Callable[[Stages], Stages]


def factored_products(stages: Stages) -> Stages:
    """Factor movements that have far more transfers than their factors (`Movement.factored`)."""
    return _replaced(stages, Movement.factored)


def reduce_scatter_sums(stages: Stages) -> Stages:
    """Split sums needed by several workers into a reduce-scatter and an all-gather, where that is
    predicted to be faster (`linop.planning.reduce_scatter_sums`)."""
    return _replaced(stages, split_sums)


PASSES: tuple[Pass, ...] = (factored_products, reduce_scatter_sums)
"""All passes, in order of application."""


def passed(stages: Stages) -> Sequence[tuple[str, Stages]]:
    """(name, stages after it) of each pass that changes the stages; cached with the stages."""
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
    """The stages after all passes, to be lowered; the same object if no pass changes them."""
    done = passed(stages)
    return done[-1][1] if done else stages


def _replaced(stages: Stages, factors: Callable[[Movement], tuple[Movement, ...]]) -> Stages:
    """Stages with each movement replaced by its factors; the same object if none is factored."""
    movements: list[Movement] = []
    layers: list[Layer] = []
    for movement, layer in zip(stages.movements, (*stages.layers, None), strict=True):
        pieces = factors(movement)
        movements += pieces
        layers += [()] * (len(pieces) - 1) + ([] if layer is None else [layer])
    same = len(movements) == len(stages.movements)
    return stages if same else Stages(tuple(movements), tuple(layers))
