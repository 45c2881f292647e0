"""Detection of a CUDA-aware MPI library, which accepts pointers to device memory: by query, and by
test messages.

Another library would read them as host addresses, and end the process. So the library is queried
first, and tested only after a positive answer. The query is no proof: Open MPI 5 lists whatever
``mpi_memory_alloc_kinds`` was requested, so that is used only without another query.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from linop.backends.device.device_arrays import DeviceArrays
from linop.backends.mpi.transport import Ranks
from linop.errors import LinopError

_CUDA = 0
"""MPICH's number for CUDA (``MPIX_GPU_SUPPORT_CUDA``)."""
_TAG = 0
"""Tag of the test messages; plans have tags from 2 on."""
_SIZES = (16, 1 << 20)
"""Bytes of the test messages: libraries send short and long ones in different ways."""


class Answer(NamedTuple):
    """An answer, with its reason."""

    yes: bool
    why: str


def asked() -> Answer:
    """Answer of the library's own query, or of its list of memory kinds; without communication."""
    return _query() or _kinds() or Answer(False, "the MPI library does not say whether it could")


def _query() -> Answer | None:
    """Answer of the library's query function: Open MPI's and MVAPICH's, or MPICH's; None if it has
    none."""
    for library in _libraries():
        if hasattr(library, "MPIX_GPU_query_support"):
            flag = ctypes.c_int(0)
            failed = library.MPIX_GPU_query_support(_CUDA, ctypes.byref(flag))
            return _said("MPIX_GPU_query_support", bool(flag.value) and not failed)
        if hasattr(library, "MPIX_Query_cuda_support"):
            return _said("MPIX_Query_cuda_support", bool(library.MPIX_Query_cuda_support()))
    return None


def _said(query: str, yes: bool) -> Answer:
    return Answer(yes, f"{query} says {'yes' if yes else 'no'}")


def _kinds() -> Answer | None:
    """Answer from the library's list of memory kinds (MPI 4.1's side document); None if it has
    none."""
    info = MPI.COMM_WORLD.Get_info()
    if info == MPI.INFO_NULL:
        return None
    kinds = info.Get("mpi_memory_alloc_kinds")
    info.Free()
    if kinds is None:
        return None
    return Answer("cuda" in kinds, f"mpi_memory_alloc_kinds is {kinds!r}")


def _libraries() -> list[ctypes.CDLL]:
    """MPI libraries loaded by this process, from /proc/self/maps."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = dict.fromkeys(line.split()[-1] for line in lines if "/" in line)
    names = ("libmpi.so", "libmpich.so", "libmpi_cray.so")
    return [ctypes.CDLL(path) for path in paths if os.path.basename(path).startswith(names)]


def tried(transport: Ranks, arrays: DeviceArrays) -> Answer:
    """Test: every rank sends messages of `_SIZES` bytes to the next one, from device to device.
    Collective; call it only if the library's query is positive, since a failure may end the
    process."""
    right, left = ((transport.worker + k) % transport.workers for k in (1, -1))
    why = ""
    try:
        for size in _SIZES:  # all sizes, even after a failure: other ranks wait for them
            given = arrays.put(_pattern(transport.worker, size))
            result = arrays.put(np.zeros(size, np.uint8))
            arrays.streams.mark().synchronize()
            pending = [transport.receive(left, _TAG, result), transport.send(right, _TAG, given)]
            transport.wait(pending, lambda: "a few bytes from device to device")
            if not np.array_equal(arrays.fetched(result), _pattern(left, size)):
                why = f"{size} bytes came as others"
    except (MPI.Exception, LinopError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
    failed = [worker for worker, one in enumerate(transport.gather_all(bool(why))) if one]
    if not failed:
        return Answer(True, "messages from device to device were tried, and came right")
    return Answer(False, f"a trial failed on workers {failed}{': ' * bool(why)}{why}")


def _pattern(worker: int, size: int) -> np.ndarray:
    return ((np.arange(size) * 7 + worker * 13 + 1) % 251).astype(np.uint8)
