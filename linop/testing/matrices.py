"""Dense matrices of a map and its adjoint, built by unit vectors and compared entry by entry."""

from __future__ import annotations

from functools import reduce

import numpy as np

from linop.spaces.scalars import Array
from linop.spaces.space import Space
from linop.testing.cancellation import noise_of_entries
from linop.testing.localise import unit
from linop.testing.report import Worst, element, plain_number, shown
from linop.testing.tested_maps.tested_map import TestedMap, gathered, widened
from linop.testing.tested_maps.whole import everything


def worst_of_matrices(F: TestedMap, G: TestedMap, tolerance: float) -> tuple[float, Worst]:
    """The largest difference between the matrix of G and the conjugate transpose of that of F, and
    its entry. Collective.

    Args:
        tolerance: 0, or differences are relative to the largest entry of their row and column; and
            if this is exceeded, to their rounding errors (`linop.testing.cancellation`).
    """
    forward, backward = _matrix(F), _matrix(G)
    wanted = forward.conj().T
    if not wanted.size:
        return 0.0, Worst("there is no entry")
    difference = np.abs(widened(backward) - widened(wanted))
    difference[(difference == 0) & (backward != wanted)] = 1.0  # integers that are equal as floats
    if tolerance:
        size = np.maximum(np.abs(widened(backward)), np.abs(widened(wanted)))
        found = _relative(difference, size)
        if found.max() > tolerance:
            # Perhaps since their terms cancel.
            noise = [n.T for n in _noise(F)] + _noise(G)
            found = _relative(difference, reduce(np.maximum, noise, size))
        difference = found
    row, column = (int(k) for k in np.unravel_index(np.argmax(difference), difference.shape))
    given, right = plain_number(backward[row, column]), plain_number(wanted[row, column])
    words = (
        f"row {row}, column {column} of the adjoint, from {_entry_text(G, G.domain, column)} "
        f"to {_entry_text(G, G.codomain, row)}: the adjoint has {shown(given)}, the conjugate "
        f"transpose of F has {shown(right)}"
    )
    source = element(G.domain, column % G.domain.size)
    target = element(G.codomain, row % G.codomain.size)
    worst = Worst(words, source, target, given, right)
    return float(difference[row, column]), worst


def _matrix(F: TestedMap) -> Array:
    """The dense matrix, of `F.shape`. If F is linear over the real numbers only, a complex side has
    twice as many rows or columns: first all real parts, then all imaginary parts."""
    columns = [
        everything(F(unit(F.domain, k, F.backend, value)), F)
        for value in ((1, 1j) if _doubled(F, F.domain) else (1,))
        for k in range(F.domain.size)
    ]
    if _doubled(F, F.codomain):
        columns = [np.concatenate([column.real, column.imag]) for column in columns]
    rows = F.codomain.size * (2 if _doubled(F, F.codomain) else 1)
    return np.array(columns).reshape(len(columns), rows).T


def _relative(difference: Array, size: Array) -> Array:
    scale = np.maximum(size.max(axis=0), size.max(axis=1, keepdims=True))
    found: Array = np.divide(difference, scale, out=difference.copy(), where=scale > 0)
    return found


def _noise(F: TestedMap) -> list[Array]:
    """The noise in the entries of the matrix, as far as each worker knows it. Collective."""
    known = noise_of_entries(F)
    said = np.zeros(0) if known is None else np.ascontiguousarray(known, np.longdouble)
    heard = gathered(F.backend, said.tobytes())
    return [np.frombuffer(data, np.longdouble).reshape(F.shape) for data in heard if data]


def _doubled(F: TestedMap, space: Space) -> bool:
    return F.real and space.dtype.kind == "c"


def _entry_text(F: TestedMap, space: Space, k: int) -> str:
    part = ("the real part of ", "the imaginary part of ")[k // space.size]
    return (part if _doubled(F, space) else "") + str(element(space, k % space.size))
