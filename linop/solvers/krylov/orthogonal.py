"""Orthogonalisation against a basis, in two reductions whatever its size."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

from linop.solvers.iteration import Ask, Named
from linop.solvers.updates import combined, plus
from linop.spaces.vector import Vector


def orthogonalised(
    w: Vector, basis: list[Vector], name: str
) -> Generator[Ask, list[Any], tuple[Vector, list[Any], float, float]]:
    """A vector made orthogonal to orthonormal ones, by classical Gram-Schmidt done twice, which is
    as good as the modified one (Giraud, Langou & Rozložník, Numer. Math. 101, 2005).

    Returns:
        The vector; its coefficients in the basis; its norm now, which follows from that before the
        second time, since little is subtracted there; and its norm before.
    """
    pairs: list[Named] = [(name, w, w)]
    pairs += [(f"{name} with a vector of the basis", v, w) for v in basis]
    before, *first = yield Ask(pairs)
    w = plus(w, -1.0, combined(first, basis)) if basis else w
    pairs = [(name, w, w)]
    pairs += [(f"{name} with a vector of the basis", v, w) for v in basis]
    square, *second = yield Ask(pairs)
    w = plus(w, -1.0, combined(second, basis)) if basis else w
    rest = square - sum(abs(one) ** 2 for one in second)
    column = [a + b for a, b in zip(first, second, strict=True)]
    return w, column, math.sqrt(max(0.0, rest)), math.sqrt(before)
