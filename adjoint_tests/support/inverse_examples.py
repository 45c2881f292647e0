"""Results of the programs of examples/inverse, on any backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from linop.backends import Backend
from support.contracts.stencils import by_slices
from support.examples import example


def _norm_of_stencil() -> float:
    index = sum(np.ogrid[:60, :48])
    star = [(k, 0) for k in range(-4, 5)] + [(0, k) for k in range(-4, 5) if k]
    taps = {at: np.cos(index + sum(at)) for at in star}
    return float(np.linalg.norm(by_slices(np.ones((60, 48)), taps, ["reflect", "reflect"])))


RIGHT: dict[str, Callable[[Any], bool]] = {
    "poisson": lambda found: found[1] < 1e-7,
    "least_squares": lambda error: error < 1e-10,
    "heat_source": lambda errors: errors[0] < 1e-4 and errors[1] < 1e-6,
    "helmholtz": lambda residual: residual < 1e-7,
    "lasso": lambda found: found[0] == 5 and found[1] < 0.05,
    "blocks": lambda error: error < 1e-6,
    "tomography": lambda error: error < 0.25,
    "deconvolution": lambda found: abs(found[0] - 0.115) < 0.001 and abs(found[1] - 0.058) < 0.001,
    "stencil": lambda norm: abs(norm - _norm_of_stencil()) < 1e-9,
    "poststack": lambda errors: all(
        found < 0.9 * errors["start"] for form, found in errors.items() if form != "start"
    ),
    "reflectivity": lambda error: error < 0.02,
    "migration": lambda errors: errors[0] < 0.85 and errors[1] < 0.05,
    "mdd": lambda errors: errors[0] < 0.85 and errors[1] < 0.03,
    "waves": lambda norm: abs(norm - 0.13863398563719) < 1e-9,
}
"""By name: if the result of its `main` is right."""


def is_right(backend: Backend, name: str) -> None:
    found = example(f"inverse/{name}").main(backend)
    assert RIGHT[name](found), found
