"""Distributed Fourier transforms beside mpi4py-fft's, with the same serial transform, SciPy's.

    python benchmarks/inverse/fourier.py [--sizes 128 256] [--ranks 2] [--seconds 60]

A cube of complex numbers is cut along its first dimension, and transformed along all. The result
stays in slabs of the second dimension ("transposed"; mpi4py-fft leaves it in slabs of the last), or
returns to those of the argument ("same"); "adjoint" is the inverse of "transposed". "real" and
"real, inverse" are `linop.rfft` and `linop.irfft` of a cube of real numbers. Beside linop:
mpi4py-fft, if it is installed; its method in raw mpi4py, which transforms without the copies into
and out of the plan's arrays that mpi4py-fft makes around SciPy: ``Alltoallw`` between datatypes of
subarrays (`Transfer` in its ``pencil.py``); and the serial transforms of the ranks' blocks alone,
without messages: the floor.

mpi4py-fft's Python runs without FFTW here: its compiled module, which the transform of SciPy does
not need, is replaced by NumPy's `empty`.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import scipy.fft
from mpi4py import MPI

import linop
from benchmarks.harness.jobs import show
from benchmarks.harness.measure import Run, interleaved
from linop.spaces.partition import balanced
from linop.spaces.scalars import Array

HEADER = (
    *("points", "result", "side", "min, median, max ms", "of the floor", "linop's of it"),
    *("processor ms", "linop's of it", "MiB sent"),
)


class Slabs:
    """mpi4py-fft's method by hand: blocks of dimension 0, then of dimension 1; of real numbers with
    half of the frequencies of the last."""

    def __init__(self, comm: MPI.Intracomm, n: int, real: bool) -> None:
        self.comm, self.real = comm, real
        rows = balanced(n, comm.size)
        m = n // 2 + 1 if real else n
        self.lines = (n, n)
        self.a, self.b = (rows[comm.rank], n, m), (n, rows[comm.rank], m)
        starts = np.cumsum([0, *rows])[:-1].tolist()
        self.types_a = [_box(self.a, 1, low, m) for low, m in zip(starts, rows, strict=True)]
        self.types_b = [_box(self.b, 0, low, m) for low, m in zip(starts, rows, strict=True)]
        self.counts = [1] * comm.size, [0] * comm.size
        self.middle, self.back = np.empty(self.b, complex), np.empty(self.a, complex)
        others = [k for k in range(comm.size) if k != comm.rank]
        self.sent = comm.allreduce(sum(self.types_a[k].Get_size() for k in others))
        """Bytes that all ranks send in one repartition."""

    def transposed(self, x: Array) -> Array:
        y = self.planes(x)
        self.comm.Alltoallw(
            [y, self.counts, self.types_a], [self.middle, self.counts, self.types_b]
        )
        return scipy.fft.fft(self.middle, axis=0, norm="ortho", overwrite_x=True)

    def same(self, x: Array) -> Array:
        y = self.transposed(x)
        self.comm.Alltoallw([y, self.counts, self.types_b], [self.back, self.counts, self.types_a])
        return self.back

    def adjoint(self, y: Array) -> Array:
        z = scipy.fft.ifft(y, axis=0, norm="ortho")
        self.comm.Alltoallw([z, self.counts, self.types_b], [self.back, self.counts, self.types_a])
        if self.real:
            made: Array = scipy.fft.irfftn(self.back, self.lines, (1, 2), norm="ortho")
            return made
        return scipy.fft.ifftn(self.back, axes=(1, 2), norm="ortho", overwrite_x=True)

    def planes(self, x: Array) -> Array:
        """The transforms of the first step."""
        transform = scipy.fft.rfftn if self.real else scipy.fft.fftn
        made: Array = transform(x, axes=(1, 2), norm="ortho")
        return made


def _box(shape: tuple[int, ...], axis: int, low: int, length: int) -> MPI.Datatype:
    sizes, starts = list(shape), [0] * len(shape)
    sizes[axis], starts[axis] = length, low
    return MPI.C_DOUBLE_COMPLEX.Create_subarray(list(shape), sizes, starts).Commit()


def peer(comm: MPI.Intracomm, n: int, real: bool) -> dict[str, Callable[[Array], Array]]:
    """mpi4py-fft's transform, with SciPy's as serial one, and its inverse; empty if it is not
    installed."""
    if "mpi4py_fft.fftw" not in sys.modules:
        fftw: Any = ModuleType("mpi4py_fft.fftw")
        fftw.aligned = lambda shape, dtype, **_: np.empty(shape, dtype)
        fftw.aligned_like = np.empty_like
        fftw.fftlib = {}
        sys.modules["mpi4py_fft.fftw"] = fftw
    try:
        from mpi4py_fft import PFFT
    except ImportError:
        return {}

    def there(x: Array, shape: Any, axes: Any) -> Array:
        return scipy.fft.fftn(x, shape, axes)

    def back(x: Array, shape: Any, axes: Any) -> Array:
        return scipy.fft.ifftn(x, shape, axes)

    def there_real(x: Array, shape: Any, axes: Any) -> Array:
        return scipy.fft.rfftn(x, shape, axes)

    def back_real(x: Array, shape: Any, axes: Any) -> Array:
        return scipy.fft.irfftn(x, shape, axes)

    dtype = float if real else complex
    how: Any = {"grid": (-1,), "backend": "scipy", "dtype": dtype}
    how["transforms"] = dict.fromkeys(((1, 2), (0,)), (there, back))
    if real:
        how["transforms"][1, 2] = there_real, back_real
    plan = PFFT(comm, (n,) * 3, axes=((0,), (1, 2)), **how)
    made = np.empty(plan.forward.output_array.shape, complex)
    back_made = np.empty(plan.forward.input_array.shape, dtype)
    return {
        "transposed": lambda x: plan.forward(x, made, normalize=False),
        "adjoint": lambda y: plan.backward(y, back_made, normalize=False),
    }


def compared(comm: MPI.Intracomm, n: int, seconds: float, real: bool) -> Iterator[tuple[str, ...]]:
    """Rows of one size. Collective."""
    backend = linop.backends.get("mpi", comm=comm)
    X = linop.TensorSpace((n,) * 3, linop.Partition((comm.size,)), float if real else complex)
    random = np.random.default_rng(comm.rank)
    hand = Slabs(comm, n, real)
    x = random.normal(size=X.local_shape(comm.rank)).astype(X.dtype)
    if not real:
        x += 1j * random.normal(size=hand.a)
    middle = random.normal(size=hand.b) + 0j
    if real:  # frequencies of real numbers
        middle = hand.transposed(x).copy()
    theirs = peer(comm, n, real)

    def floor() -> None:
        hand.planes(x)
        scipy.fft.fft(middle, axis=0, norm="ortho")

    def transform(result: str, **options: Any) -> linop.LinearOperator:
        if not real:
            F = linop.fft(X, **options)
            return F.H if result == "adjoint" else F
        if result == "transposed":
            return linop.rfft(X, **options)
        return linop.irfft(X, **{"domain" if k == "codomain" else k: v for k, v in options.items()})

    m = n // 2 + 1 if real else n
    last = linop.TensorSpace((n, n, m), X.partition, complex, axes=(2,))
    for result in ("transposed", "adjoint") if real else ("transposed", "adjoint", "same"):
        op = transform(result, out="same" if result == "same" else "transposed")
        given = middle if result == "adjoint" else x
        plan, by_hand = op.compile(backend), getattr(hand, result)
        assert np.allclose(plan(given), by_hand(given))
        sides: dict[str, Run] = {"linop": partial(plan, given), "by hand": partial(by_hand, given)}
        if result in theirs:
            like = x
            if result == "adjoint":
                like = random.normal(size=last.local_shape(comm.rank)) + 0j
            checked = transform(result, norm="backward", codomain=last).compile(backend)
            scale = n**3 if real and result == "adjoint" else 1  # irfft is an inverse, no adjoint
            assert np.allclose(theirs[result](like), scale * checked(like))
            checked.release()
            sides["mpi4py-fft"] = partial(theirs[result], like)
        sides["serial alone"] = floor
        times_sent = 2 if result == "same" else 1
        sent = {"linop": op.cost().bytes, "serial alone": 0}
        times = interleaved(comm, sides, seconds).times
        processor = processor_ms(comm, sides)
        for side, time in times.items():
            spread = ", ".join(f"{t / 1e3:.1f}" for t in time)
            floor_of, of_it = times["serial alone"].median, times["linop"].median
            ratios = f"{time.median / floor_of:.2f}", f"{of_it / time.median:.2f}"
            own = processor[side]
            yield (
                *(f"{n}³", _named(result, real), side, spread, *ratios),
                *(f"{own:.0f}", f"{processor['linop'] / max(own, 1e-3):.2f}"),
                f"{sent.get(side, times_sent * hand.sent) / 2**20:.0f}",
            )
        plan.release()


def _named(result: str, real: bool) -> str:
    return result if not real else "real" if result == "transposed" else "real, inverse"


def processor_ms(comm: MPI.Intracomm, sides: dict[str, Run]) -> dict[str, float]:
    """Milliseconds of the processor that a call takes in this program, without the system's: the
    least of eight calls, of the rank that takes most. It does not depend on what else runs on the
    machine as much as the time of the clock does. Collective."""
    least = dict.fromkeys(sides, float("inf"))
    for _ in range(8):
        for side, run in sides.items():
            comm.Barrier()
            begun = resource.getrusage(resource.RUSAGE_SELF).ru_utime
            run()
            took = 1e3 * (resource.getrusage(resource.RUSAGE_SELF).ru_utime - begun)
            least[side] = min(least[side], took)
    return {side: comm.allreduce(took, MPI.MAX) for side, took in least.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60)
    given = parser.parse_args()
    for n in given.sizes:
        for real in (False, True):
            show(given.ranks, HEADER, compared, n, given.seconds, real)
