"""Passes: rewrites of an operator's stages before lowering.

Each pass is a pure function from stages to stages; `linop show --passes` prints its name. The
result is proven equal to the operator (`linop.planning.verification`). `linop.planning.passes`
has the passes over plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from linop.errors import expect
from linop.normal_form.maps import Layer
from linop.normal_form.movement import Movement
from linop.normal_form.stages import Stages
from linop.planning.hierarchy import hierarchical
from linop.planning.placement import Placement
from linop.planning.reduce_scatter_sums import split_sums

Pass = Callable[[Stages, Placement | None], Stages]
"""``f(stages, placement)``; the placement is None if all workers are on one machine."""


def factored_products(stages: Stages, placement: Placement | None) -> Stages:
    """Factor movements that have far more transfers than their factors (`Movement.factored`)."""
    del placement
    return _replaced(stages, Movement.factored)


def hierarchy(stages: Stages, placement: Placement | None) -> Stages:
    """Factor movements between machines, or groups of machines, into sums inside each, transfers
    between them, and copies inside each, where that is predicted to be faster
    (`linop.planning.hierarchy`)."""
    if placement is None:
        return stages
    return _replaced(stages, partial(hierarchical, placement=placement))


def reduce_scatter_sums(stages: Stages, placement: Placement | None) -> Stages:
    """Split sums needed by several workers into a reduce-scatter and an all-gather, where that is
    predicted to be faster (`linop.planning.reduce_scatter_sums`)."""
    return _replaced(stages, partial(split_sums, placement=placement))


STAGE_PASSES: tuple[Pass, ...] = (factored_products, hierarchy, reduce_scatter_sums)
"""All passes, in order of application."""


def passed(stages: Stages, placement: Placement | None = None) -> Sequence[tuple[str, Stages]]:
    """(name, stages after it) of each pass that changes the stages; cached with the stages.

    Args:
        placement: of the workers, here and below; by default on one machine.
    """
    if placement is not None:
        spans = expect("placement", placement, Placement).spans(stages.workers)
        placement = placement if spans else None
    key = "passed", placement
    if key not in stages.kept:
        done, before = list[tuple[str, Stages]](), stages
        for one in STAGE_PASSES:
            after = one(before, placement)
            if after is not before:
                done.append((one.__name__, after))
            before = after
        stages.kept[key] = done
    known: list[tuple[str, Stages]] = stages.kept[key]
    return known


def prepared(stages: Stages, placement: Placement | None = None) -> Stages:
    """The stages after all passes, to be lowered; the same object if no pass changes them."""
    done = passed(stages, placement)
    return done[-1][1] if done else stages


def _replaced(stages: Stages, factors: Callable[[Movement], tuple[Movement, ...]]) -> Stages:
    """Stages with each movement replaced by its factors; the same object if none is factored."""
    movements: list[Movement] = []
    layers: list[Layer] = []
    for k, movement in enumerate(stages.movements):
        pieces = factors(movement)
        if len(pieces) > 1 and stages.carried[k]:
            pieces = _apart(pieces, stages)
        movements += pieces
        layers += [()] * (len(pieces) - 1) + list(stages.layers[k : k + 1])
    same = len(movements) == len(stages.movements)
    return stages if same else Stages(tuple(movements), tuple(layers))


def _apart(pieces: Sequence[Movement], stages: Stages) -> tuple[Movement, ...]:
    """Factors of a movement of stages, between which regions have names that no carried one has."""
    spaces = [space for m in stages.movements for space in (m.domain, m.codomain)]
    known = {region.name for space in spaces for region in space}
    between = {region.name for piece in pieces[1:] for region in piece.domain}
    number = 1
    while not known.isdisjoint(f"{name}⟨{number}⟩" for name in between):
        number += 1
    renamed = f"{{}}⟨{number}⟩".format
    return Stages(tuple(pieces), ((),) * (len(pieces) - 1)).renamed(renamed).movements
