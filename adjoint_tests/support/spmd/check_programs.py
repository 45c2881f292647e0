"""Programs that check hand-written maps, one worker each: on threads, and on the ranks of a job,
which import this module. It must not import MPI when it is imported."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import linop
from linop.backends import Backend
from linop.testing import Element, Pair, Report, pair

if TYPE_CHECKING:
    from mpi4py import MPI

Shift = Callable[[np.ndarray, int], np.ndarray]
"""Gives an array to the worker so many further on a ring, and returns what came."""

COMPLEX = np.array([[1, 2j, 0], [0, 3 - 1j, 4]])


def ring(shift: Shift, worker: int, size: int, fault: str = "") -> Pair:
    """y = 2 x + 1j x of the worker before, and its adjoint, with a fault on worker 1 if there is
    one. Every worker has ``size`` elements, and worker 0 one more, which it keeps."""
    mine = size + (worker == 0)

    def forward(x: np.ndarray) -> np.ndarray:
        y = 2 * x
        y[:size] += 1j * shift(x[:size], 1)
        if worker == 1:
            if fault == "forward changes":
                x[0] = 7
            if fault == "shape":
                return y[:-1]
            if fault == "raises":
                raise ValueError("planted")
            if fault == "not a number":
                y[2] = np.nan
        return y

    def adjoint(y: np.ndarray) -> np.ndarray:
        came = shift(y[:size], -1)
        if worker == 1 and fault == "missing":
            came[2] = 0
        x = 2 * y
        x[:size] += (1j if worker == 1 and fault == "conjugate" else -1j) * came
        return x

    return pair(forward, adjoint, mine, mine, dtype=complex)


FAULTS = {
    "missing": "from x1[2] (worker 1) to y0[2] (worker 0): F has 0+1j, the conjugate transpose of "
    "the adjoint has 0",
    "conjugate": "F has 0+1j, the conjugate transpose of the adjoint has 0-1j",
    "forward changes": "the forward function changed its argument in place: x1[0] (worker 1) was",
    "shape": "the forward function returned shape (2,) for y1 (worker 1); expected (3,)",
    "not a number": "the forward function gives (nan+0j) at y1[2] (worker 1)",
}
"""Words of each report, on two workers with three elements."""


def checked(backend: Backend, op: Any) -> list[Report]:
    """All checks that hold of a ring and its adjoint."""
    checks = linop.testing
    return [
        checks.check_adjoint(op, backend),
        checks.check_dot_exact(op, backend),
        checks.check_exact(op, backend=backend),
        checks.check_linear(op, backend),
        checks.check_equal(op, op, backend),
    ]


def on_threads(workers: int, size: int, fault: str = "") -> list[list[Report]]:
    """Every worker's report of a ring."""
    barrier, box = threading.Barrier(workers), [np.zeros(0)] * workers

    def main(backend: Backend) -> list[Report]:
        me = backend.worker
        assert me is not None

        def shift(x: np.ndarray, by: int) -> np.ndarray:
            box[me] = x.copy()
            barrier.wait()
            came = box[(me - by) % workers]
            barrier.wait()
            return came.copy()

        return checked(backend, ring(shift, me, size, fault))

    reports: list[list[Report]] = linop.launch(main, workers=workers)
    return reports


def on_ranks(comm: MPI.Comm, size: int, fault: str = "") -> None:
    """Raw mpi4py: every rank reports the same, and passes but for a fault."""

    def shift(x: np.ndarray, by: int) -> np.ndarray:
        came = np.empty_like(x)
        to, source = (comm.rank + by) % comm.size, (comm.rank - by) % comm.size
        comm.Sendrecv(np.ascontiguousarray(x), to, 0, came, source, 0)
        return came

    backend = linop.backends.get("mpi", comm=comm)
    op = ring(shift, comm.rank, size, fault)
    reports = [str(report) for report in checked(backend, op)]
    assert comm.allgather(reports) == [reports] * comm.size
    linop.testing.assert_adjoint(op, backend)


def any_wrong_entry(comm: MPI.Comm, seed: int) -> None:
    """A matrix cut over ranks, each with some elements or none, and an adjoint with one wrong
    entry: every rank names that one, with its ranks."""
    rng = np.random.default_rng(seed)
    rows, columns = (rng.integers(0, 4, comm.size) for _ in range(2))
    rows[rng.integers(comm.size)] += 1
    columns[rng.integers(comm.size)] += 1
    A = rng.integers(-3, 4, (rows.sum(), columns.sum())) * (1 + 1j)
    B = A.conj().T.copy()
    row, column = rng.integers(rows.sum()), rng.integers(columns.sum())
    B[column, row] += rng.choice([1, -2, 1j, 1e-6])

    def held(lengths: np.ndarray) -> slice:
        stop = lengths.cumsum()[comm.rank]
        return slice(stop - lengths[comm.rank], stop)

    def apply(matrix: np.ndarray, lengths: np.ndarray, x: np.ndarray | None) -> Any:
        parts = comm.allgather(np.zeros(0, complex) if x is None else x)
        return matrix[held(lengths)] @ np.concatenate(parts) if lengths[comm.rank] else None

    def place(flat: int, lengths: np.ndarray, letter: str) -> Element:
        worker = int(np.searchsorted(lengths.cumsum(), flat, "right"))
        return Element(f"{letter}{worker}", (flat - lengths[:worker].sum(),), (worker,))

    shapes = [int(lengths[comm.rank]) or None for lengths in (columns, rows)]
    forward, right = (lambda x: apply(A, rows, x)), (lambda y: apply(A.conj().T, columns, y))
    backend = linop.backends.get("mpi", comm=comm)
    assert all(checked(backend, pair(forward, right, *shapes, dtype=complex)))
    wrong = pair(forward, lambda y: apply(B, columns, y), *shapes, dtype=complex)
    ends = {place(column, columns, "x"), place(row, rows, "y")}
    for report in (
        linop.testing.check_adjoint(wrong, backend, seed=seed),
        linop.testing.check_exact(wrong, backend=backend),
    ):
        assert report.worst is not None, str(report)
        assert {report.worst.source, report.worst.target} == ends, (str(report), ends)
        assert comm.allgather(report) == [report] * comm.size


def with_matrices(backend: Backend) -> None:
    """linop's plans, and what one process alone has: a matrix, which is the first worker's."""
    assert backend.workers is not None
    X = linop.TensorSpace(7, linop.Partition(backend.workers))
    op = linop.halo_exchange(X, 3, padding=1)
    assert all(checked(backend, op)) and all(checked(backend, op.compile(backend)))
    dense = op.to_matrix().toarray()
    assert all(checked(backend, dense))
    linop.testing.assert_equal(op, dense, backend)
    dense[4, 3] += 1
    report = linop.testing.check_equal(op, dense, backend)
    assert not report
    assert report.worst is not None and report.worst.target is not None
    assert abs(complex(report.worst.found or 0) - complex(report.worst.wanted or 0)) == 1
    assert report.worst.target.workers[0] == op.codomain[report.worst.target.region].workers[0]


def plans_and_matrices(comm: MPI.Comm) -> None:
    """`with_matrices` on ranks."""
    with_matrices(linop.backends.get("mpi", comm=comm))


def pylops_mpi(comm: MPI.Comm) -> None:
    """Operators of PyLops-MPI, with arguments in blocks and broadcast."""
    import pylops
    import pylops_mpi

    backend = linop.backends.get("mpi", comm=comm)
    block = pylops.MatrixMult(np.arange(6.0).reshape(3, 2) + comm.rank)
    many = {"base_comm": comm}
    broadcast = pylops_mpi.DistributedArray(2, partition=pylops_mpi.Partition.BROADCAST, **many)
    stack = pylops_mpi.MPIVStack([block], **many)
    derivative = pylops_mpi.MPIFirstDerivative((4 * comm.size, 3), **many)
    for op in (
        derivative,
        derivative.H @ derivative,
        pylops_mpi.MPIBlockDiag([block], **many),
        pylops_mpi.MPIHStack([block], **many),
        linop.testing.pylops_mpi_operator(stack, broadcast),
    ):
        for check in (linop.testing.assert_adjoint, linop.testing.assert_linear):
            check(op, backend)
    filter = np.array([1, 2j, 3])
    wrong = pylops.signalprocessing.Convolve1D(5, filter, offset=1, dtype="complex128")
    right = wrong if comm.rank == 0 else pylops.MatrixMult(np.eye(5), dtype="complex128")
    report = linop.testing.check_adjoint(pylops_mpi.MPIBlockDiag([right], **many), backend)
    if pylops.__version__.startswith("2.8."):
        assert report.worst is not None
        assert report.worst.source is not None and report.worst.source.workers == (0,)
