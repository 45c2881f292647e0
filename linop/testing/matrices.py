"""Dense matrices of a map and its adjoint, built by unit vectors and compared entry by entry."""

from __future__ import annotations

from functools import reduce

import numpy as np

from linop.operators.riesz import riesz
from linop.spaces.scalars import Array
from linop.spaces.space import Space
from linop.testing.cancellation import noise_of_entries, size_of_terms
from linop.testing.drawing import random_vector
from linop.testing.localise import largest, regions_held, unit
from linop.testing.report import Worst, element, plain_number, shown
from linop.testing.tested_maps.tested_map import TestedMap, gathered, widened
from linop.testing.tested_maps.whole import everything
from linop.testing.trials import Where, difference


def worst_of_matrices(
    F: TestedMap,
    G: TestedMap,
    forward: Array,
    backward: Array,
    tolerance: float,
    weighed: bool = False,
) -> tuple[float, Worst]:
    """The largest difference between the matrix of G and the conjugate transpose of that of F, and
    its entry. Collective.

    Args:
        forward, backward: the matrices of F and of G.
        tolerance: 0, or differences are relative to the largest entry of their row and column; and
            if this is exceeded, to their rounding errors (`linop.testing.cancellation`).
        weighed: True if an inner product is not the Euclidean one.
    """
    if weighed:
        forward = _weighed(F, forward)
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
        f"transpose of F {'in these inner products ' * weighed}has {shown(right)}"
    )
    source = element(G.domain, column % G.domain.size)
    target = element(G.codomain, row % G.codomain.size)
    worst = Worst(words, source, target, given, right)
    return float(difference[row, column]), worst


def _weighed(F: TestedMap, A: Array) -> Array:
    """G_Y A G_X^-1."""

    def dense(space: Space, inverse: bool) -> Array:
        G = riesz(space, inverse=inverse).to_matrix("regions").toarray()
        return np.kron(np.eye(2), G) if _doubled(F, space) else G

    found: Array = dense(F.codomain, False) @ A @ dense(F.domain, True)
    return found


def unlike_matrix(F: TestedMap, A: Array) -> tuple[float, Where]:
    """Error of F x against the matrix of F times x, for a random x: unit vectors may meet other
    branches of F than vectors without zeros. Collective.

    Args:
        A: the matrix of F.
    """
    x = random_vector(F, F.domain, 6)
    given = everything(x, F)
    if _doubled(F, F.domain):
        given = np.concatenate([given.real, given.imag])
    dtype = F.codomain.dtype
    if dtype.kind in "iu":
        image = A.astype(dtype) @ given.astype(dtype)  # wraps, as F does
    else:
        image = widened(A) @ widened(given)
    if _doubled(F, F.codomain):
        image = image[: F.codomain.size] + 1j * image[F.codomain.size :]
    wanted = F.codomain.unflatten(image.astype(dtype), "regions")
    names = "F x", "the matrix of F times x"
    size = largest(x, F.backend)[1]
    return difference(
        F, F(x), regions_held(wanted, F.backend), names, [], lambda: size_of_terms(F, size)
    )


def matrix_of(F: TestedMap) -> Array:
    """The dense matrix, of `F.shape`, in the order of regions. If F is linear over the real numbers
    only, a complex side has twice as many rows or columns: first all real parts, then all imaginary
    parts."""
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
