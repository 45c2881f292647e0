"""Random vectors and scalars of the checks: what a trial applies maps to."""

from __future__ import annotations

from functools import partial

import numpy as np

from linop.spaces.scalars import Array, Scalar
from linop.spaces.space import Space
from linop.spaces.vector import Vector
from linop.testing.localise import regions_held
from linop.testing.tested_maps.tested_map import TestedMap


def random_vector(
    F: TestedMap,
    space: Space,
    seed: int,
    nth: int = 0,
    whole: bool = False,
    even: bool | None = None,
) -> Vector:
    """The nth random vector of a trial, without zeros, which would test nothing: normally
    distributed, or whole numbers in integer dtypes, of all lengths up to that of the dtype:
    operators that saturate, or compute in a shorter dtype, show it on large ones alone.

    Whole numbers are odd: units modulo 2**bits, so that no single wrong entry vanishes. But in one
    trial of three the first vector also has even ones, and in another the second: otherwise two
    entries of a row or column, both wrong by 2**(bits - 1), would always cancel.

    Args:
        F: the map, whose backend's worker holds the vector.
        space: of the vector.
        seed: of the trial.
        nth: 0 for the vector x of the trial, 1 for y.
        whole: draw whole numbers in floating point, too: from -9 to 9, whose sums do not round.
        even: draw even ones, too, or odd ones only; None: as said above.
    """
    if even is None:
        even = seed // 2 % 3 == nth + 1
    bits = bits_of(F, space)
    if bits:
        vector = space._fill(seed + nth, partial(_whole, bits, space.dtype.kind == "i", even))
    elif space.dtype.kind in "iu" or whole:
        least = 0 if space.dtype.kind == "u" else -9
        numbers = [n for n in range(least, 10) if n % 2 or (even and n)]
        vector = space._fill(seed + nth, lambda rng, shape: rng.choice(numbers, shape))
    else:
        vector = space.random(seed + nth)
    return regions_held(vector, F.backend)


def of_any_parity(F: TestedMap, space: Space, seed: int, nth: int = 0) -> list[Vector]:
    """More random vectors of a trial, of even and odd whole numbers; none if F is no map between
    spaces of integers."""
    if not bits_of(F, space):
        return []
    seeds = (seed + APART * k for k in range(1, 1 + _PARITIES))
    return [random_vector(F, space, one, nth, even=True) for one in seeds]


_PARITIES = 6
"""Vectors of any parity in a trial."""
APART = 1000
"""Seeds between the vectors of one trial, so that the next trial draws others."""


def bits_of(F: TestedMap, space: Space) -> int:
    """Length of the largest whole numbers of a random vector of the space; 0 if F is no map between
    spaces of integers, which wrap."""
    dtypes = F.domain.dtype, F.codomain.dtype
    if any(dtype.kind not in "iu" for dtype in dtypes):
        return 0
    own = space.dtype.itemsize
    # In the narrower dtype 3 x + y may not wrap: the wider one would show that.
    narrower = own < max(dtype.itemsize for dtype in dtypes)
    return 8 * own - (space.dtype.kind == "i") - 2 * narrower


def _whole(
    bits: int, signed: bool, even: bool, rng: np.random.Generator, shape: tuple[int, ...]
) -> Array:
    """Whole numbers that are not 0, as int64, or wrapped to it: half of them drawn from all of up
    to so many bits, the others shorter, of any length.

    Args:
        signed: negative ones, too.
        even: even ones, too.
    """
    drop = 64 - bits + np.where(rng.random(shape) < 0.5, 0, rng.integers(0, bits, shape))
    full = rng.integers(0, 2**64 - 1, shape, np.uint64, endpoint=True)
    values = full >> drop.astype(np.uint64)
    values |= (values == 0).astype(np.uint64) if even else np.uint64(1)
    found = values.view(np.int64)
    return np.where(rng.random(shape) < 0.5, -found, found) if signed else found


def random_scalar(F: TestedMap, seed: int) -> Scalar:
    """A random scalar over which F is linear: complex, real, or 3 in integer dtypes."""
    rng = np.random.default_rng(seed)
    kinds = {F.domain.dtype.kind, F.codomain.dtype.kind}
    if not kinds.isdisjoint("iu"):
        return 3
    value = float(rng.standard_normal())
    return complex(value, rng.standard_normal()) if kinds == {"c"} and not F.real else value
