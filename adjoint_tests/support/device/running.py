"""The two ways to run a contract of a device, ``contract(backend, arrays, *arguments)``: on threads
and under MPI. This module must not import MPI when it is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import linop
from linop.backends import Backend
from linop.backends.device.device_arrays import DeviceArrays
from support.workers import in_job

if TYPE_CHECKING:
    from mpi4py import MPI

Contract = Callable[..., None]


def simulated_arrays() -> DeviceArrays:
    from support.device.simulated import ARRAYS

    return ARRAYS


def cupy_arrays() -> DeviceArrays:
    from linop.backends.device.device_arrays import cupy_arrays

    return cupy_arrays()


ARRAYS: dict[str, Callable[[], DeviceArrays]] = {
    "simulated": simulated_arrays,
    "cupy": cupy_arrays,
}


@contextmanager
def shown(arrays: DeviceArrays, to_mpi: bool) -> Iterator[None]:
    """Inside, whether the simulated device shows its arrays to MPI."""
    if arrays.name == "cupy":
        yield
        return
    from support.device.simulated import Counts

    Counts.visible = to_mpi
    try:
        yield
    finally:
        Counts.visible = True


def on_ranks(ranks: int, kind: str, way: str, contract: Contract, *arguments: Any) -> None:
    """A contract under MPI. What is staged is never shown to MPI, and a real device's memory is
    staged for an MPI library that does not take it."""
    in_job(ranks, _on_rank, kind, way, contract, *arguments)


def _on_rank(comm: MPI.Comm, kind: str, way: str, contract: Contract, *arguments: Any) -> None:
    arrays = ARRAYS[kind]()
    if kind == "cupy" and way == "aware":
        from linop.backends.mpi.device.cuda_aware import asked

        way = "aware" if asked().yes else "staged"
    backend = linop.backends.get("cupy", comm=comm, way=way, wait_limit=10, arrays=arrays)
    with shown(arrays, to_mpi=way == "aware"):
        contract(backend, arrays, *arguments)


def on_threads(workers: int, kind: str, contract: Contract, *arguments: Any) -> None:
    """The same on threads, which need no MPI."""
    arrays = ARRAYS[kind]()
    with shown(arrays, to_mpi=False):
        linop.launch(
            lambda backend: contract(backend, arrays, *arguments), workers, "threads", arrays=arrays
        )


def in_every_case(
    backend: Backend, arrays: DeviceArrays, contract: Contract, cases: list[tuple[Any, ...]]
) -> None:
    """A contract, with all of its arguments."""
    for arguments in cases:
        contract(backend, arrays, *arguments)
