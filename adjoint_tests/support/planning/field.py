"""Operators on numbers modulo a prime, with unknown functions for local maps."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from linop.normal_form.stages import Stages
from linop.spaces.exact import Gaussian, exact

PRIME = 2**31 - 19
_ROOT = next(
    r for g in range(2, 99) if (r := pow(g, (PRIME - 1) // 4, PRIME)) * r % PRIME == PRIME - 1
)
"""A square root of -1."""


def modulo(number: Any) -> int:
    """A rational or Gaussian number."""
    found = exact(number)
    if isinstance(found, Gaussian):
        return (modulo(found.real) + _ROOT * modulo(found.imag)) % PRIME
    fraction = Fraction(found)
    return fraction.numerator * pow(fraction.denominator, -1, PRIME) % PRIME


def unknown(number: int, sources: Sequence[np.ndarray], k: int, shape: Any) -> np.ndarray:
    """Result k of an unknown function."""
    text = hashlib.sha256(f"{number} {k} {shape}".encode())
    for source in sources:
        text.update(f"{source.shape}".encode())
        text.update(np.ascontiguousarray(source).tobytes())
    seed = int.from_bytes(text.digest()[:8], "little")
    drawn: np.ndarray = np.random.default_rng(seed).integers(0, PRIME, shape)
    return drawn


def applied(stages: Stages, x: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The results of an operator, by region, with unknown functions for its local maps."""
    stages = stages.spread
    numbers: dict[int, int] = {}
    for k, call in reversed([*enumerate(stages.calls)]):
        numbers[id(call.map)] = k
    values = dict(x)
    for k, movement in enumerate(stages.movements):
        after = {r.name: np.zeros(r.shape, np.int64) for r in movement.codomain.regions}
        for row in movement:
            source = values[row.source.region.name][row.source.index]
            into = after[row.target.region.name]
            into[row.target.index] += source * modulo(row.coefficient) % PRIME
            into %= PRIME
        values = after
        for call in stages.layers[k] if k < len(stages.layers) else ():
            of = [values.pop(name) for name in call.inputs]
            number, regions = numbers[id(call.map)], call.map.codomain.regions
            for one, name in enumerate(call.outputs):
                values[name] = unknown(number, of, one, regions[one].shape)
    return values
