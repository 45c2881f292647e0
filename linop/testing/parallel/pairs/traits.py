"""The common trait of the wrong entries of a backward movement, in words."""

from __future__ import annotations

import numpy as np

from linop import Movement, Space
from linop.normal_form.boxes import Ints
from linop.testing.parallel.lifting.places import entries, workers_of


def trait(found: Movement, wanted: Movement, gap: Movement) -> str:
    """A sentence about all wrong entries; empty if they have nothing in common that is known.

    Args:
        found, wanted: the backward, and the adjoint of the forward.
        gap: their difference.
    """
    rows, columns, _ = entries(gap)
    width = max(1, gap.domain.size)
    has, right = (np.isin(rows * width + columns, _keys(one, width)) for one in (found, wanted))
    if not len(rows) or has.any() or not right.all():
        return ""
    own = _ranks(gap.codomain)[rows] == _ranks(gap.domain)[columns]
    if own.all():
        return (
            "only the rank's own terms are lost: what arrives from others has to be added to them, "
            "and replaces them"
        )
    if not own.any():
        return "only terms of other ranks are lost: they have to be sent back, and added"
    return ""


def _keys(made: Movement, width: int) -> Ints:
    rows, columns, _ = entries(made)
    return rows * width + columns


def _ranks(space: Space) -> Ints:
    """The first rank of each element."""
    return np.repeat(workers_of(space), [region.size for region in space.regions])
