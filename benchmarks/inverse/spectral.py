"""Spectral convolutions of real fields: by half of the frequencies, by all of them, and torch's.

    python -m benchmarks.inverse.spectral [--size 256] [--modes 32] [--ranks 2] [--seconds 10]

A batch of real fields of several channels, cut along the first dimension of space over the ranks,
goes through the layer of a Fourier neural operator and back (the adjoint: the gradient of the
field). "real" is `linop.fourier.spectral_convolution` of the real space, "complex" that of the
complex one, of the same field with imaginary parts of zero: what real fields needed before. "torch"
is the sequential layer (rfftn, einsum of each corner, irfftn) of this rank's share of the batch,
without messages: the floor, of other transforms (MKL's or pocketfft's) and with torch's autograd.
All on one thread a rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

import linop
from benchmarks.harness.jobs import show
from benchmarks.harness.measure import interleaved
from benchmarks.inverse.fourier import processor_ms

HEADER = (
    *("points", "modes", "result", "side", "min, median, max ms", "of the complex one"),
    *("processor ms", "of the complex one", "MiB sent"),
)
BATCH, CHANNELS = 4, 8


def torchs(x: Any, weight: Any, modes: int) -> Any:
    """The layer, with corners of positive and negative frequencies."""
    z = torch.fft.rfftn(x, dim=(2, 3), norm="ortho")
    spread = torch.zeros_like(z)
    half, products = modes // 2, "bixy,ioxy->boxy"
    for rows, own in ((slice(half), slice(half)), (slice(-half, None), slice(half, None))):
        low = z[:, :, rows, : half + 1]
        spread[:, :, rows, : half + 1] = torch.einsum(products, low, weight[:, :, own])
    return torch.fft.irfftn(spread, s=x.shape[2:], dim=(2, 3), norm="ortho")


def compared(comm: MPI.Intracomm, n: int, modes: int, seconds: float) -> Iterator[tuple[str, ...]]:
    """Rows of one size. Collective."""
    torch.set_num_threads(1)
    backend = linop.backends.get("mpi", comm=comm)
    X = linop.TensorSpace((BATCH, CHANNELS, n, n), linop.Partition((1, 1, comm.size, 1)))
    half = modes // 2 + 1
    rng = np.random.default_rng(0)
    w = rng.normal(size=(2, CHANNELS, CHANNELS, modes, half))
    weights = w[0] + 1j * w[1]
    x = rng.normal(size=X.global_shape)
    mine = x[X.slices(comm.rank)].copy()
    ops = {"real": linop.fourier.spectral_convolution(X, weights, channels=1)}
    full = rng.normal(size=(CHANNELS, CHANNELS, modes, modes)) + 0j
    ops["complex"] = linop.fourier.spectral_convolution(X.with_dtype(complex), full, channels=1)
    plans = {side: op.compile(backend) for side, op in ops.items()}
    share = torch.from_numpy(x[: BATCH // comm.size].copy())
    weight = torch.from_numpy(weights)
    wanted = torchs(torch.from_numpy(x), weight, modes).numpy()
    assert np.allclose(plans["real"](mine), wanted[X.slices(comm.rank)])
    field = share.clone().requires_grad_()
    image = torchs(field, weight, modes)

    def backward() -> None:
        torch.autograd.grad(image, field, share, retain_graph=True)

    def there() -> None:
        with torch.no_grad():
            torchs(share, weight, modes)

    given = {"real": mine, "complex": mine + 0j}
    for result in ("layer", "adjoint"):
        sides: dict[str, Callable[[], Any]] = {
            side: partial(plan if result == "layer" else plan.H, given[side])
            for side, plan in plans.items()
        }
        sides["torch"] = there if result == "layer" else backward
        times, processor = interleaved(comm, sides, seconds).times, processor_ms(comm, sides)
        for side, time in times.items():
            sent = ops[side].cost().bytes if side in ops else 0
            yield (
                *(f"{BATCH} × {CHANNELS} × {n}²", f"{modes}²", result, side),
                ", ".join(f"{t / 1e3:.1f}" for t in time),
                f"{time.median / times['complex'].median:.2f}",
                f"{processor[side]:.0f}",
                f"{processor[side] / processor['complex']:.2f}",
                f"{sent / 2**20:.1f}",
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--modes", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    show(options.ranks, HEADER, compared, options.size, options.modes, options.seconds)
