"""A pair of functions ``forward(x, comm)`` and ``adjoint(y, comm)`` on the ranks of an MPI job, as
operators on the arrays of all ranks. Collective.

They are lifted from their calls of mpi4py, and from what NumPy does between these
(`linop.testing.parallel.lifting`), at any size. Where something between them is not followed, the
functions are applied to all unit vectors, if these are few: their matrices, as operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from linop import Space
from linop.operators.named_movement import NamedMovement
from linop.testing.parallel.lifting.comparing import normal
from linop.testing.parallel.lifting.functions import function
from linop.testing.parallel.lifting.places import (
    UndecidedError,
    applied,
    exactly,
    local,
    space_of,
)
from linop.testing.parallel.mpi.functions import Fault, Pair
from linop.testing.parallel.recording.records import Record

LARGEST = 600
"""Elements of domain and codomain together of a pair whose matrices are made."""
_NAMES = "forward", "adjoint"
_UNFOLLOWED = "real and complex arrays are not followed"


@dataclass(frozen=True)
class Both:
    """Forward and adjoint.

    Attributes:
        evidence: what of them is compared.
        allowed: the share of their largest entry that is taken for rounding; 0 if there is none.
    """

    forward: NamedMovement
    adjoint: NamedMovement
    evidence: str
    allowed: float


def both(pair: Pair, follow: bool) -> Both | None:
    """The operators of a pair; None if they are neither followed nor small.

    Args:
        follow: True to look at what the functions do.

    Raises:
        Fault: a function is not linear.
    """
    found = _followed(pair) if follow and not pair.mixed else _UNFOLLOWED
    if isinstance(found, Both):
        return found
    if sum(pair.sizes(0)) + sum(pair.sizes(1)) > LARGEST:
        return None
    return _of_matrices(pair, found)


def _spaces(pair: Pair, dtype: npt.DTypeLike) -> tuple[Space, Space]:
    x, y = (
        space_of(letter, {r: [n] for r, n in enumerate(pair.sizes(side))}, dtype)
        for side, letter in enumerate("xy")
    )
    return x, y


def _evidence(pair: Pair, what: str, how: str, allowed: float) -> str:
    m, n = sum(pair.sizes(1)), sum(pair.sizes(0))
    sure = f"up to rounding ({allowed:.1e})" if allowed else "exactly"
    return f"the {what} of both, {m} by {n} numbers, {sure}: {how}"


# Followed


def _followed(pair: Pair) -> Both | str:
    """The operators that are lifted; or why they are not."""
    x, y = _spaces(pair, np.float64)  # what is followed has real factors, of complex arrays too
    ops: list[NamedMovement] = []
    is_exact = True
    for side, (domain, codomain) in enumerate(((x, y), (y, x))):
        vector = _numbers(pair, side, 5, 1000)
        result, parts = pair.follow(side, vector)
        ranks = {rank: Record(rank, 0.0, [], [], heard, {}) for rank, (_, heard) in parts.items()}
        runs = {rank: one for rank, (one, _) in parts.items()}
        counts = [[list(range(len(n))) for n in (one.given, one.made)] for one in runs.values()]
        try:
            made = function(ranks, runs, [each[0] for each in counts],
                            [each[1] for each in counts], domain, codomain)  # fmt: skip
        except UndecidedError as error:
            return f"{_NAMES[side]}() is not followed, since {error}"
        is_exact &= made.exact
        op = normal(made.operator)
        other = _numbers(pair, side, 6, 1000)
        for numbers, is_made in ((vector, result), (other, pair.apply(side, other))):
            gap = np.abs(applied(op.given, numbers) - is_made).max(initial=0.0)
            size = applied(op.given, numbers, magnitudes=True).max(initial=0.0)
            if gap > (0.0 if made.exact else 2.0**-40 * size) and gap > 2.0**-44 * size:
                return f"{_NAMES[side]}() does something that is not looked at"
        ops.append(op)
    allowed = 0.0 if is_exact else 2.0**-40
    text = _evidence(pair, "operators", "lifted from the calls that ran", allowed)
    return Both(ops[0], ops[1], text, allowed)


def _numbers(pair: Pair, side: int, seed: int, largest: int) -> np.ndarray:
    """A vector of whole numbers."""
    random, count = np.random.default_rng(seed), sum(pair.sizes(side))
    numbers: Any = random.integers(-largest, largest, count).astype(float)
    if pair.is_complex(side):
        numbers = numbers + 1j * random.integers(-largest, largest, count)
    return np.asarray(numbers)


# Matrices


def _of_matrices(pair: Pair, why: str) -> Both:
    F, A = pair.matrix(0), pair.matrix(1)
    if pair.mixed:
        _check_imaginary(pair, F, A)
        F, A = F.real, A.real
    whole = all(np.array_equal(M, np.rint(M)) for M in (F, A))
    size = float(np.abs(F).max(initial=0.0))
    rounding = 0.0 if whole else 64 * float(np.finfo(float).eps) * max(size, 1.0)
    x, y = _spaces(pair, F.dtype)
    text = _evidence(pair, "matrices", f"of all unit vectors, since {why}", rounding)
    return Both(_map(F, x, y), _map(A, y, x), text, rounding / size if size else 0.0)


def _map(M: np.ndarray, domain: Space, codomain: Space) -> NamedMovement:
    rows, columns = M.nonzero()
    return normal(local("M", domain, codomain, rows, columns, exactly(M[rows, columns])[0]))


def _check_imaginary(pair: Pair, F: np.ndarray, A: np.ndarray) -> None:
    """Check what the function of the complex side makes of imaginary numbers, of which the other
    one's matrix tells; on arrays of each rank's own. Collective.

    Raises:
        Fault: it is something else, and right for real numbers.
    """
    side = 0 if pair.is_complex(0) else 1
    ours, theirs = (F, A) if side == 0 else (A, F)
    if not np.array_equal(ours.real, theirs.real.T):
        return  # which the matrices show
    numbers: Any = 1j * np.random.default_rng(0).integers(-9, 10, ours.shape[1])
    wanted = (theirs.conj().T @ numbers).real
    if np.abs(pair.apply(side, numbers) - wanted).max(initial=0.0) > 1e-9 * np.abs(wanted).sum():
        raise Fault(f"{_NAMES[side]}() is adjoint for real numbers, and not for imaginary ones")
