"""What is installed here, and what each missing extra would enable: ``linop doctor``."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import linop
from linop.backends.jobs import mpirun
from linop.errors import LinopError, MissingExtraError


@dataclass(frozen=True)
class Part:
    """A package or a program, found or not."""

    name: str
    present: bool
    found: str
    purpose: str


def examine() -> list[Part]:
    """Every part that linop can use, in the order in which one would install them."""
    parts = [
        Part(
            "linop", True, f"{linop.__version__}, Python {platform.python_version()}", "the algebra"
        )
    ]
    parts += [_package(name, "", "the algebra") for name in ("numpy", "scipy")]
    parts += [
        _package("mpi4py", "mpi", "backend mpi: workers are ranks"),
        _mpi_library(),
        _mpiexec(),
        _cuda_aware(),
        _package("torch", "torch", "operators in autograd, layers"),
        _package("cupy", "cupy", "backend cupy: arrays on GPUs"),
        _gpus(),
        _package("hypothesis", "test", "property-based tests"),
        _package("matplotlib", "plot", "pictures, the demo"),
    ]
    return parts


def _package(name: str, extra: str, purpose: str) -> Part:
    try:
        module = importlib.import_module(name)
    except ImportError:
        return Part(name, False, f"missing: pip install 'linop-algebra[{extra}]'", purpose)
    return Part(name, True, str(getattr(module, "__version__", "present")), purpose)


def _asked(name: str, question: Callable[[Any], str], purpose: str) -> Part:
    """An answer of the MPI library."""
    try:
        from mpi4py import MPI

        return Part(name, True, question(MPI), purpose)
    except (ImportError, RuntimeError) as error:
        return Part(name, False, f"no MPI library: {error}".splitlines()[0], purpose)


def _mpi_library() -> Part:
    def version(MPI: Any) -> str:
        first = MPI.Get_library_version().strip().splitlines()[0].strip("\0, ")
        return f"{first[:60]} (MPI {'.'.join(map(str, MPI.Get_version()))})"

    return _asked("MPI library", version, "messages between ranks")


def _cuda_aware() -> Part:
    def said(MPI: Any) -> str:
        from linop.backends.device.cuda_aware import asked

        # What the library says of itself; the backend tries a transfer, too.
        answer = asked()
        return f"{'yes' if answer.yes else 'no: messages are staged'} ({answer.why})"

    return _asked("CUDA-aware MPI", said, "messages between GPUs without staging")


def _gpus() -> Part:
    """The GPUs that CuPy finds."""
    from linop.backends.device.device_arrays import cupy_arrays

    purpose = "where plans of backend cupy run"
    try:
        cuda = cupy_arrays().module.cuda.runtime
        names = [cuda.getDeviceProperties(k)["name"].decode() for k in range(cuda.getDeviceCount())]
    except LinopError as error:
        return Part("GPU", False, str(error).splitlines()[0], purpose)
    return Part("GPU", True, ", ".join(names), purpose)


def _mpiexec() -> Part:
    try:
        return Part("mpiexec", True, mpirun.command(1, [])[0].rsplit("/", 1)[-1], "starts MPI jobs")
    except MissingExtraError as error:
        return Part("mpiexec", False, str(error), "starts MPI jobs")
