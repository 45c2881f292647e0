"""Requirements of tests."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from linop.backends.device.device_arrays import cupy_arrays
from linop.errors import LinopError
from linop.testing.workers.jobs import missing_mpi


def missing_gpu() -> str:
    """Why there is no GPU here for CuPy; empty if there is one."""
    try:
        cupy_arrays()
    except LinopError as error:
        return str(error)
    return ""


def _missing_nccl() -> str:
    if _gpu:
        return _gpu
    from linop.backends.mpi.device.nccl import missing

    return missing(cupy_arrays().module.cuda)


def _torch_without_gpu() -> str:
    if find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else "torch finds no GPU"


needs_mpi = pytest.mark.skipif(bool(missing_mpi()), reason=missing_mpi() or "MPI is there")
_gpu = missing_gpu()
needs_gpu = pytest.mark.skipif(bool(_gpu), reason=_gpu or "a GPU is there")
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
_torch = _gpu or _torch_without_gpu()
needs_torch_on_gpu = pytest.mark.skipif(bool(_torch), reason=_torch or "torch has a GPU")
_nccl = _missing_nccl()
needs_nccl = pytest.mark.skipif(bool(_nccl), reason=_nccl or "NCCL is there")
