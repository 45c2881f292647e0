"""Localisation of errors by bisection: the entry at which two maps differ, without their matrices.

The difference of two inner products, ``d(x, y) = <F x, y> - <x, G y>``, is linear in y and, up to
conjugation, in x (modulo 2**bits in integer dtypes). If it is not zero, it is not zero for one of
the two halves of x, and so on, until one element is left; then y is bisected. Inner products are
sums over all workers, so all workers take the same decisions. Measuring and reporting errors is in
`linop.testing.trials` and `linop.testing.report`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

from linop.backends.engine.arrays.arguments import held
from linop.backends.engine.base import Backend
from linop.spaces.float_formats import machine_epsilon
from linop.spaces.scalars import Array, Scalar
from linop.spaces.space import Space
from linop.spaces.vector import Vector
from linop.testing.report import Worst, element, element_in, shown
from linop.testing.tested_maps.tested_map import TestedMap, gathered, host_vector, widened

Map = Callable[[Vector], Vector]


def regions_held(vector: Vector, backend: Backend) -> Vector:
    """The regions of a complete vector that the backend's worker holds, as a vector whose inner
    products sum over all workers."""
    return host_vector(vector.space, vector, backend)


def inner(F: TestedMap, v: Vector, w: Vector) -> Scalar:
    """<v, w>; its real part, if the map is linear over the real numbers only."""
    value = v.inner(w)
    return value.real if F.real else value


def discrepancy(F: TestedMap, a: Scalar, b: Scalar) -> Scalar:
    """The difference of two inner products. In integer dtypes it is reduced modulo 2**bits of the
    narrower dtype, to the representative nearest to zero: products wrap, so that maps are linear
    over that ring, but inner products are accumulated in 64 bits."""
    dtypes = F.domain.dtype, F.codomain.dtype
    if any(dtype.kind not in "iu" for dtype in dtypes):
        return a - b
    half = 1 << (8 * min(dtype.itemsize for dtype in dtypes) - 1)
    return (int((a - b).real) + half) % (2 * half) - half


def wrong_entry(F: TestedMap, G: TestedMap, x: Vector, y: Vector, other: str) -> Worst:
    """An entry at which F differs from the conjugate transpose of G. Each map is applied about
    ``2 log2(size)`` times. Collective.

    Args:
        x, y: vectors for which <F x, y> and <x, G y> differ.
        other: the name of the conjugate transpose of G, for the report.
    """
    for one in (F, G):
        if moved := not_zero(one):
            return moved
    back = G(y)
    j = _narrowed(
        x, lambda part: discrepancy(F, inner(F, F(part), y), inner(F, part, back)), F.backend
    )
    column = F(_only(x, j, F.backend))
    only = _only(x, j, F.backend)
    i = _narrowed(
        y, lambda part: discrepancy(F, inner(F, column, part), inner(F, only, G(part))), F.backend
    )
    found = max(_entries(F, G, j, i), key=lambda entry: abs(discrepancy(F, entry[0], entry[1])))
    f, g, part = found
    source, target = element(F.domain, j), element(F.codomain, i)
    words = f"from {source} to {target}: F has {part}{shown(f)}, {other} has {part}{shown(g)}"
    eps = max(machine_epsilon(F.domain.dtype), machine_epsilon(F.codomain.dtype))
    if abs(discrepancy(F, f, g)) <= 4 * eps * max(abs(f), abs(g)):
        rounds = ", or rounds more than its dtype explains" if eps else ""
        words = (
            f"no single entry shows it ({words}): one of the two is not linear (check_linear)"
            f"{rounds}"
        )
    return Worst(words, source, target, g, f)


def _entries(F: TestedMap, G: TestedMap, j: int, i: int) -> Iterator[tuple[Scalar, Scalar, str]]:
    """Entry (i, j) of F, that of the conjugate transpose of G, and a label. For a map that is
    linear over the real numbers only, up to four entries: between real and imaginary parts."""
    for u, v in product(_units(F, F.domain), _units(F, F.codomain)):
        e, d = unit(F.domain, j, F.backend, u), unit(F.codomain, i, F.backend, v)
        names = {1: "real", 1j: "imaginary"}
        part = f"({names[u]} to {names[v]}) " if F.real else ""
        # The second is <G d, e>, which is conjugate-linear in G d.
        yield inner(F, d, F(e)), inner(F, G(d), e), part


def _units(F: TestedMap, space: Space) -> tuple[Scalar, ...]:
    """The values of the nonzero element of a unit vector: 1, and also 1j for complex spaces of a
    map that is linear over the real numbers only."""
    return (1, 1j) if F.real and space.dtype.kind == "c" else (1,)


def wrong_column(F: TestedMap, A: Map, B: Map, x: Vector, names: tuple[str, str]) -> Worst:
    """An entry at which two linear maps differ. Collective.

    Args:
        F: gives the backend, and the scalars over which the maps are linear.
        A, B: the two maps.
        x: a vector for which A x and B x differ.
        names: of the two maps, for the report.
    """
    backend = F.backend

    def gap(part: Vector) -> Any:
        return largest(A(part) - B(part), backend)[1]  # a norm may overflow

    j = _narrowed(x, gap, backend)
    units = [unit(x.space, j, backend, value) for value in _units(F, x.space)]
    e = max(units, key=gap)
    part = "" if len(units) == 1 else ("the real part of ", "the imaginary part of ")[e is units[1]]
    a, b = A(e), B(e)
    i = largest(a - b, backend)[0]
    source, target = element(x.space, j), element(a.space, i)
    found, wanted = at(a, i, backend), at(b, i, backend)
    words = f"{names[0]} has {shown(found)}, {names[1]} has {shown(wanted)}"
    return Worst(f"from {part}{source} to {target}: {words}", source, target, found, wanted)


def wrong_value(
    found: Vector, wanted: Vector, flat: int, names: tuple[str, str], backend: Backend
) -> Worst:
    """The worst case that two vectors differ at position `flat`. Collective."""
    target = element(found.space, flat)
    a, b = at(found, flat, backend), at(wanted, flat, backend)
    words = f"at {target}: {names[0]} has {shown(a)}, {names[1]} has {shown(b)}"
    return Worst(words, None, target, a, b)


def whole_numbers(F: TestedMap, result: Vector, scale: float) -> str:
    """The reason why inner products with a map's result may not be exact; empty if they are exact.
    Collective.

    Args:
        result: must hold whole numbers that its dtype represents exactly.
        scale: a bound of the inner products, which must not be above 2**53.
    """
    eps, said = machine_epsilon(F.codomain.dtype), ""
    most = 2.0 / eps if eps else float("inf")
    for region in held(F.codomain, F.backend.worker):
        wide = widened(result[region.name])
        unfit = (wide != np.rint(wide)) | (np.abs(wide) > most)
        if unfit.any() and not said:
            k = int(np.flatnonzero(unfit)[0])
            where = element_in(F.codomain, region.name, k)
            value = shown(wide.flat[k].item())
            said = f"the {F.role} function makes {value} of whole numbers, at {where}"
    if eps and scale > 2.0**53 and not said:
        said = f"inner products may be up to {scale:.3g}, beyond 2**53"
    return next(filter(None, gathered(F.backend, said)), "")


def not_zero(F: TestedMap) -> Worst | None:
    """The largest element of F 0 as a worst case; None if F 0 is zero. Collective."""
    result = F(regions_held(F.domain.zeros(), F.backend))
    i, most = largest(result, F.backend)
    if not most:
        return None
    target, value = element(F.codomain, i), at(result, i, F.backend)
    words = f"the {F.role} function is not linear: of zero it makes {shown(value)} at {target}"
    return Worst(words, None, target, value, 0)


def largest(vector: Vector, backend: Backend) -> tuple[int, Any]:
    """The position of the element of largest modulus, in the order of regions, and its
    modulus; (0, 0.0) if there are no elements. Collective."""
    best = (_ENDS[0], 0.0, 0)
    for region in held(vector.space, backend.worker):
        sizes = np.abs(widened(vector[region.name])).ravel()
        if sizes.size:
            k = int(np.argmax(sizes))
            best = max(best, (*_ordered(sizes[k]), -vector.space.offsets[region.name] - k))
    exponent, significand, where = max(gathered(backend, best))
    return -where, float(significand) if exponent in _ENDS else _scaled(significand, exponent)


_ENDS = (-(2**30), 2**30)
"""Exponents that stand for zero, and for numbers that are not finite."""


def _ordered(size: Any) -> tuple[int, float]:
    """The exponent and the significand of a size, which compare as sizes do. Plain numbers, that
    workers can exchange, also of a long double beyond the range of Python's floats."""
    significand, exponent = np.frexp(size)
    if not size or not np.isfinite(size):
        return _ENDS[1] if size else _ENDS[0], float(size)
    return int(exponent), float(significand)


def _scaled(significand: float, exponent: int) -> Any:
    """significand * 2**exponent; a long double if it is beyond the range of Python's floats."""
    if -1000 < exponent < 1000:
        return math.ldexp(significand, exponent)
    return np.ldexp(np.longdouble(significand), exponent)


def at(vector: Vector, flat: int, backend: Backend) -> Scalar:
    """The value of the element at a position, returned on every worker. Collective."""
    plain = vector.space.euclidean
    one = unit(plain, flat, backend)
    return one.inner(Vector(plain, vector.arrays, vector.shared))


def unit(space: Space, flat: int, backend: Backend, value: Scalar = 1) -> Vector:
    """The multiple `value` of a unit vector: zeros, but for the element at position `flat`."""
    vector = host_vector(space, _held_zeros(space, backend), backend)
    for region in held(space, backend.worker):
        k = flat - space.offsets[region.name]
        if 0 <= k < region.size:
            vector[region.name].reshape(-1)[k] = value
    return vector


def _narrowed(vector: Vector, gap: Callable[[Vector], Scalar], backend: Backend) -> int:
    """Bisection: the position reached by always keeping the half of `vector` with the larger
    absolute value of `gap`."""
    a, b = 0, vector.space.size
    while b - a > 1:
        middle = (a + b) // 2
        left = abs(gap(_between(vector, a, middle, backend)))
        right = abs(gap(_between(vector, middle, b, backend)))
        a, b = (a, middle) if left >= right else (middle, b)
    return a


def _only(vector: Vector, flat: int, backend: Backend) -> Vector:
    return _between(vector, flat, flat + 1, backend)


def _between(vector: Vector, start: int, stop: int, backend: Backend) -> Vector:
    """The vector with zeros outside of positions start:stop."""
    space = vector.space
    arrays = _held_zeros(space, backend)
    for region in held(space, backend.worker):
        first = space.offsets[region.name]
        a, b = (min(max(k - first, 0), region.size) for k in (start, stop))
        arrays[region.name].reshape(-1)[a:b] = vector[region.name].reshape(-1)[a:b]
    return host_vector(space, arrays, backend)


def _held_zeros(space: Space, backend: Backend) -> dict[str, Array]:
    return {r.name: np.zeros(r.shape, space.dtype) for r in held(space, backend.worker)}
