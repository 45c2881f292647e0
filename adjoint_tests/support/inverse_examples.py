"""Results of the programs of examples/inverse, on any backend."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

import linop
from linop.backends import Backend
from support.contracts.stencils import by_slices
from support.examples import example


def _norm_of_stencil() -> float:
    index = sum(np.ogrid[:60, :48])
    star = [(k, 0) for k in range(-4, 5)] + [(0, k) for k in range(-4, 5) if k]
    taps = {at: np.cos(index + sum(at)) for at in star}
    return float(np.linalg.norm(by_slices(np.ones((60, 48)), taps, ["reflect", "reflect"])))


def _largest_of_elements() -> np.ndarray:
    h, k = 1 / 61, np.arange(58, 61)
    cosines = np.cos(k * np.pi * h)
    return 6 / h**2 * (1 - cosines) / (2 + cosines)


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
    "full_waveform": lambda found: found[0] < 0.06 and found[1] < 0.8,
    "mass_matrix": lambda values: bool(np.allclose(values, _largest_of_elements(), rtol=1e-9)),
    "stretched_grid": lambda error: error < 1e-5,
    "sobolev": lambda iterations: iterations[1] < 20 < 200 < iterations[0],
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


def eigenvalues_are_right(backend: Backend) -> None:
    """The program has the operator whole on every worker, and finds the same; so does Lanczos'
    method on the workers together, of the plan of the same operator."""
    of_lines = [4 * np.sin(np.arange(1, n + 1) * np.pi / 2 / (n + 1)) ** 2 for n in (20, 15)]
    wanted = -np.sort(np.add.outer(*of_lines).ravel())[::-1][:3]
    np.testing.assert_allclose(example("inverse/eigenvalues").values, wanted)
    X = linop.TensorSpace((20, 15), (backend.workers, 1))
    found, _ = linop.solvers.lanczos(linop.laplacian(X).compile(backend), 3)
    np.testing.assert_allclose(found, wanted)


def passes_taylors_test(backend: Backend) -> None:
    """The gradient of full-waveform inversion: the rest of the linear model falls by four when the
    step is halved. On every backend the checkpoints cost what was predicted."""
    misfit = example("inverse/full_waveform").Misfit(backend)
    d = misfit.right - misfit.guess
    value, gradient = misfit(misfit.guess)
    assert misfit.run.counted == misfit.run.predicted
    rests = [
        abs(misfit(misfit.guess + h * d)[0] - value - h * gradient.inner(d))
        for h in (0.1, 0.05, 0.025)
    ]
    assert all(3.9 < a / b < 4.1 for a, b in pairwise(rests)), rests
