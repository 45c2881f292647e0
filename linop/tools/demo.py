"""The work of ``linop demo``: a photograph, blurred and restored on a 2x2 grid of workers, on the
backends reference, threads and mpi.

The blur is ``A = local convolution ∘ halo exchange``. It is proven equal to the blur on one worker,
and its derived adjoint is used to invert it by damped least squares. `linop.tools.cli` prints the
results, and `linop.tools.drawing` draws them. ``python -m linop.tools.demo FOLDER`` is the program
of each rank of the MPI run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse.linalg

import linop
from linop import LinearOperator, Partition, TensorSpace
from linop.backends.engine.base import Backend
from linop.backends.mpi import mpirun
from linop.errors import BackendError, MissingExtraError
from linop.spaces.scalars import Array

GRID = (2, 2)
WIDTH = 13
"""Width of the blur's kernel, in pixels."""
ITERATIONS = 30
DAMP = 0.01
"""Damping factor of the least-squares problem."""
NOISE = 0.002
"""Standard deviation of the noise, in units of white."""
MPI_SECONDS = 100.0
"""Timeout of the MPI run, in seconds."""


def photograph() -> Array:
    """A grey photograph, a 2-d float64 array of values from 0 to 1: Grace Hopper, from Matplotlib's
    sample data.

    Raises:
        MissingExtraError: Matplotlib is not installed.
    """
    try:
        from matplotlib import cbook
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError(
            f"the demo needs Matplotlib: pip install 'linop-algebra[plot]' ({error})"
        ) from None
    path = str(cbook.get_sample_data("grace_hopper.jpg", asfileobj=False))
    return np.asarray(Image.open(path).convert("L"), np.float64) / 255


def gaussian(width: int = WIDTH, sigma: float = 3.0) -> Array:
    """A 2-d Gaussian kernel of shape (width, width) with sum 1; `sigma` is in pixels."""
    t = np.arange(width) - (width - 1) / 2
    bell = np.exp(-(t**2) / (2 * sigma**2))
    bell /= bell.sum()
    return np.outer(bell, bell)


@dataclass(frozen=True)
class Blur:
    """A distributed blur A = C H.

    Attributes:
        X, Y: domain and codomain of A, images in blocks on one grid.
        exchange: H, the halo exchange.
        op: A; C is a direct sum of local convolutions.
    """

    X: TensorSpace
    Y: TensorSpace
    exchange: LinearOperator
    op: LinearOperator


def blur(shape: tuple[int, ...], partition: Partition, kernel: Array) -> Blur:
    """The distributed blur of an image of this shape, padded with zeros to keep the shape."""
    half = tuple(n // 2 for n in kernel.shape)
    X = TensorSpace(shape, partition, name="x")
    Y = TensorSpace(shape, partition, name="y")
    H = linop.halo_exchange(X, kernel.shape, padding=half)
    geometry = linop.halo_geometry(shape, partition, kernel.shape, padding=half)
    local = [
        linop.local_operators.convolution(
            kernel,
            H.codomain.regions[k],
            Y.region(worker),
            padding=[(d.left_padding, d.right_padding) for d in geometry[worker]],
        )
        for k, worker in enumerate(partition.workers)
    ]
    return Blur(X, Y, H, linop.direct_sum(*local, codomain=Y) @ H)


@dataclass(frozen=True)
class Row:
    """One row of the demo's table.

    Attributes:
        what, backend, workers: the task, and on what it ran.
        seconds: duration.
        found: the result as text.
        good: True if the result is as expected.
    """

    what: str
    backend: str
    workers: int
    seconds: float
    found: str
    good: bool


def timed(what: str, backend: str, workers: int, job: Callable[[], tuple[str, bool]]) -> Row:
    """Run and time a task.

    Args:
        job: returns `Row.found` and `Row.good`.
    """
    begun = time.perf_counter()
    found, good = job()
    return Row(what, backend, workers, time.perf_counter() - begun, found, good)


def degraded(photo: Array) -> Array:
    """The photograph blurred on one worker, with noise added: the data of the inverse problem."""
    one = blur(photo.shape, Partition((1, 1)), gaussian())
    blurred = one.Y.gather(one.op(one.X.scatter(photo)))
    return blurred + NOISE * np.random.default_rng(0).standard_normal(photo.shape)


def proofs(shape: tuple[int, ...]) -> Iterator[Row]:
    """Rows of the properties proven or checked before the restoration: adjoint, plans, matrix of
    the adjoint, equality with the blur on one worker.

    Args:
        shape: of the photograph; matrices are built for a smaller image.
    """
    A = blur(shape, Partition(GRID), gaussian())
    H = A.exchange

    def derived() -> tuple[str, bool]:
        good = H.H.movement() == H.movement().adjoint()
        return f"{len(H.movement())} transfers", good

    yield timed("adjoint by rules = by transposition", "none", 4, derived)

    def fits() -> tuple[str, bool]:
        from linop.planning.lowering import lower, workers_of

        for op in (A.op, A.op.H):
            linop.verify_plans([lower(op.stages, worker) for worker in workers_of(op.stages)])
        return f"{A.op.cost().messages} messages forward, {A.op.H.cost().messages} back", True

    yield timed("plans of all workers fit together", "none", 4, fits)

    small = (26, 22)
    four = blur(small, Partition(GRID), gaussian())
    one = blur(small, Partition((1, 1)), gaussian())

    def exact() -> tuple[str, bool]:
        report = linop.testing.check_exact(four.op)
        return f"26x22 pixels: {report.error:.1e}", bool(report)

    yield timed("matrix of A* = transpose of A's", "reference", 4, exact)

    def same() -> tuple[str, bool]:
        spread, collect = linop.repartition(one.X, four.X), linop.repartition(four.Y, one.Y)
        return "26x22 pixels, entry by entry", (collect @ four.op @ spread).equals(one.op)

    yield timed("A on 4 workers = A on 1, as matrices", "none", 4, same)


def restore(op: Blur, data: Array, backend: Backend) -> tuple[Any, bool]:
    """The SPMD program: restore the image by damped least squares (CGLS).

    Returns:
        The image as a vector, of this worker or of all; and True if the adjoint passed the
        dot-product test on the backend.
    """
    good = bool(linop.testing.check_adjoint(op.op, backend))
    plan = op.op.compile(backend)
    y = backend.vector(op.Y, op.Y.scatter(data))
    return linop.solvers.cgls(plan, y, niter=ITERATIONS, damp=DAMP, tol=0)[0], good


def restored_here(name: str, op: Blur, data: Array) -> tuple[Array, bool]:
    """The image restored in this process, on a backend that holds all workers; and True if the
    adjoint passed its test."""
    x, good = restore(op, data, linop.backends.get(name))
    return op.X.gather(x), good


def restored_by_scipy(op: Blur, data: Array) -> Array:
    """The image restored by SciPy's LSQR, on flat vectors (`LinearOperator.to_scipy`)."""
    flat = op.Y.flatten(op.Y.scatter(data))
    solution = scipy.sparse.linalg.lsqr(
        op.op.to_scipy(), flat, damp=DAMP, iter_lim=ITERATIONS, atol=0, btol=0, conlim=0
    )
    return op.X.gather(op.X.unflatten(solution[0]))


def restored_by_mpi(data: Array, folder: Path) -> tuple[Array, bool]:
    """The image restored by four ranks under ``mpiexec``; and True if the adjoint passed its test.

    Args:
        folder: an empty folder for the files of the run.

    Raises:
        BackendError: the run fails or exceeds `MPI_SECONDS`.
    """
    np.save(folder / "data.npy", data)
    arguments = [sys.executable, "-m", "linop.tools.demo", str(folder)]
    job = mpirun.mpiexec(4, arguments, timeout=MPI_SECONDS)
    if job.returncode != 0:
        raise BackendError(f"the MPI part ended with status {job.returncode}:\n{job.stderr}")
    return np.load(folder / "restored.npy"), (folder / "adjoint").read_text() == "True"


def rank_main(backend: Backend, folder: Path) -> None:
    """The program of each rank for `restored_by_mpi`: restore its block, gather the image on worker
    0, and save it in the folder."""
    data = np.load(folder / "data.npy")
    op = blur(data.shape, Partition(GRID), gaussian())
    x, good = restore(op, data, backend)
    whole = linop.gather(op.X).compile(backend)(x.arrays)
    if backend.worker == 0:
        np.save(folder / "restored.npy", whole)
        (folder / "adjoint").write_text(str(good))


if __name__ == "__main__":
    linop.launch(lambda backend: rank_main(backend, Path(sys.argv[1])), workers=4)
