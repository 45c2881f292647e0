"""How large the terms are whose sums are an operator's results.

Rounding errors are relative to these. Where the terms cancel, as in a product of operators that is
zero (the divergence of a curl), the results are rounding errors alone, and a check that divided by
them would call a right operator wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy

from linop.normal_form.movement import Movement
from linop.operators.expressions import Compound
from linop.operators.flow import SOURCE, TARGET, in_order
from linop.operators.operator import LinearOperator
from linop.spaces.scalars import Array
from linop.testing.tested_maps.tested_map import TestedMap, gathered

MOST = 2**24
"""Elements of the domain times those of the codomain up to which matrices are built."""


def magnitudes(F: TestedMap) -> scipy.sparse.csr_array | None:
    """The matrix of an operator of linop with the absolute value of every matrix in its expression,
    so that nothing cancels; None for other maps, for data movement, for large operators, and beyond
    the range of float64."""
    if F.op is None or F.exact or F.real or F.domain.size * F.codomain.size > MOST:
        return None
    try:
        found = _magnitudes(F.op)
    except Exception:  # of a user's function, which another worker's data may be meant for
        return None
    return found if np.isfinite(found.data).all() else None


def _magnitudes(op: LinearOperator) -> scipy.sparse.csr_array:
    if not isinstance(op, Compound):
        return abs(op.to_matrix()).astype(np.float64)
    incoming = op.flow.incoming()
    made = {SOURCE: scipy.sparse.eye_array(op.domain.size, format="csr")}
    for wire in in_order(incoming):
        space = op.flow.spaces[wire]
        total = made.get(wire, scipy.sparse.csr_array((space.size, op.domain.size)))
        for edge in incoming[wire]:
            step = edge.step
            if step is None:
                step = Movement.between(op.flow.spaces[edge.source], space)
            size = math.hypot(edge.scalar.real, edge.scalar.imag)
            total = total + size * (abs(step.to_matrix()).astype(np.float64) @ made[edge.source])
        made[wire] = total
    return made[TARGET]


def size_of_terms(F: TestedMap, x: Any) -> Any:
    """Size of the largest sum of terms, with random signs, in the image of a vector whose largest
    element is x; 0 if it is not known. Collective."""
    return x * _known(F, lambda squares: squares.sum(axis=1).max(initial=0))


def size_of_products(F: TestedMap, x: Any, y: Any) -> Any:
    """As `size_of_terms`, of <F x, y>, for the largest elements of both vectors. Collective."""
    return x * y * _known(F, lambda squares: squares.sum())


def _known(F: TestedMap, total: Callable[[Array], Any]) -> float:
    """The root of a sum of the squared magnitudes, the largest that a worker knows."""
    matrix, found = magnitudes(F), 0.0
    if matrix is not None and (most := matrix.data.max(initial=0)):
        found = float(most * np.sqrt(total((matrix / most).power(2))))
    return max(gathered(F.backend, found))
