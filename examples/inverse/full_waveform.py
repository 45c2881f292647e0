"""Velocities from waves that were heard: acoustic full-waveform inversion in 2-D, by L-BFGS, with
gradients by the adjoint of a time loop. `mpiexec -n 4 python` runs it on 2 x 2 ranks."""

from typing import Any

import numpy as np

import linop
from linop import Partition, TensorSpace, hstack, repartition, vstack, zero
from linop.networks import chain, multiply

SHAPE, STEPS, COLUMNS = (16, 18), 44, (4, 13)
CROSS = {(0, 0): -4, (1, 0): 1, (-1, 0): 1, (0, 1): 1, (0, -1): 1}


def waves(M: TensorSpace) -> linop.loops.Evolution:
    """u ← 2 u - b + m L u, b ← u, for m = (velocity · time step / grid spacing)²: the map of m, and
    of signals below the surface, to what is heard at the bottom."""
    U, B, W, V, P = (TensorSpace(SHAPE, M.partition, name=name) for name in "ubwvp")
    apart = vstack(
        hstack(repartition(U, W) @ linop.stencil(U, CROSS), zero(B, W)),
        hstack(2 * repartition(U, V), -repartition(B, V)),
        hstack(repartition(U, B), zero(B, B)),
    )
    step = chain(apart, multiply(W, M, "p"), hstack(repartition(V, U), repartition(P, U)))
    above = linop.pad(U, [(-1, 2 - SHAPE[0]), (0, 0)])
    below = linop.pad(U, [(2 - SHAPE[0], -1), (0, 0)])
    sources = vstack(above.H, zero(above.codomain, B))
    receivers = hstack(below, zero(B, below.codomain))
    return linop.loops.evolution(step, STEPS, sources, receivers, checkpoints=linop.loops.Every(7))


class Misfit:
    """Half the squared difference from what was heard, and its gradient, as a function of m."""

    def __init__(self, backend: Any) -> None:
        rows = 2 if backend.workers == 4 else 1
        M = TensorSpace(SHAPE, Partition((rows, (backend.workers or 1) // rows)), name="m")
        self.map = waves(M)
        self.run, self.backend = self.map.compile(backend, wrt=M), backend
        i, j = np.ogrid[: SHAPE[0], : SHAPE[1]]
        bump = np.exp(-((i - 8) ** 2 + (j - 9) ** 2) / 8)
        self.guess, self.right = (
            backend.vector(M, M.scatter(0.2 + height * bump)) for height in (0, 0.06)
        )
        self.shots = [self.shot(column) for column in COLUMNS]
        self.heard = [self.hear(self.right, shot) for shot in self.shots]

    def shot(self, column: int) -> Any:
        signals = self.map.domain.parts[-1]
        t = np.arange(STEPS)[:, None] / 5 - 2
        wavelet = (1 - 2 * t**2) * np.exp(-(t**2))
        return signals.scatter((wavelet * (np.arange(SHAPE[1]) == column))[:, None]).arrays

    def hear(self, m: Any, shot: Any) -> Any:
        return self.run(self.backend.vector(self.map.domain, {**m.arrays, **shot}))

    def __call__(self, m: Any) -> tuple[float, Any]:
        value, gradient = 0.0, 0 * m
        for shot, heard in zip(self.shots, self.heard, strict=True):
            rest = self.hear(m, shot) - heard
            value += rest.inner(rest) / 2
            gradient = gradient + self.run.vjp(rest)
        return value, gradient


def main(backend: Any) -> tuple[float, float]:
    """The misfit and the error of m that are left, as shares of those of the first guess."""
    misfit = Misfit(backend)
    found = linop.solvers.lbfgs(misfit, misfit.guess, maxiter=4)
    errors = [(m - misfit.right).norm() for m in (found.x, misfit.guess)]
    return found.fun / misfit(misfit.guess)[0], errors[0] / errors[1]


if __name__ == "__main__":
    linop.launch(lambda b: print(f"worker {b.worker}: shares of misfit and error left:", main(b)))
