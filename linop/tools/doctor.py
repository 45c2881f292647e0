"""The work of ``linop doctor``: finds the packages, programs and GPUs that linop can use. Tables
are printed by `linop.tools.cli`."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import linop
from linop.backends import in_torch_job
from linop.backends.mpi import mpirun
from linop.errors import LinopError, MissingExtraError


@dataclass(frozen=True)
class Component:
    """A package, program or device that linop can use.

    Attributes:
        name: as printed.
        present: True if it was found.
        found: its version, or the reason why it is missing.
        purpose: the features of linop that need it.
    """

    name: str
    present: bool
    found: str
    purpose: str


def examine() -> list[Component]:
    """Everything that linop can use, found or missing, in the usual order of installation. Packages
    are imported."""
    components = [
        Component(
            "linop", True, f"{linop.__version__}, Python {platform.python_version()}", "the algebra"
        )
    ]
    components += [_package(name, "", "the algebra") for name in ("numpy", "scipy")]
    components += [
        _package("mpi4py", "mpi", "backend mpi: workers are ranks"),
        _mpi_library(),
        _mpiexec(),
        _cuda_aware(),
        _package("torch", "torch", "operators in autograd, layers"),
        _process_groups(),
        _package("cupy", "cupy", "backend cupy: arrays on GPUs"),
        _gpus(),
        _nccl(),
        _package("hypothesis", "testing", "property-based tests"),
        _package("matplotlib", "plot", "pictures, the demo"),
    ]
    return components


def _package(name: str, extra: str, purpose: str) -> Component:
    try:
        module = importlib.import_module(name)
    except ImportError:
        return Component(name, False, f"missing: pip install 'linop-algebra[{extra}]'", purpose)
    return Component(name, True, str(getattr(module, "__version__", "present")), purpose)


def _asked(name: str, question: Callable[[Any], str], purpose: str) -> Component:
    """The component whose text the MPI library gives, which is imported and started.

    Args:
        question: maps the module `MPI` to the text found.
    """
    try:
        from mpi4py import MPI

        return Component(name, True, question(MPI), purpose)
    except (ImportError, RuntimeError) as error:
        return Component(name, False, f"no MPI library: {error}".splitlines()[0], purpose)


def _mpi_library() -> Component:
    def version(MPI: Any) -> str:
        first = MPI.Get_library_version().strip().splitlines()[0].strip("\0, ")
        return f"{first[:60]} (MPI {'.'.join(map(str, MPI.Get_version()))})"

    return _asked("MPI library", version, "messages between ranks")


def _cuda_aware() -> Component:
    def said(MPI: Any) -> str:
        from linop.backends.mpi.device.cuda_aware import asked

        # The library's own statement; the backend also tests it by a transfer.
        answer = asked()
        return f"{'yes' if answer.yes else 'no: messages are staged'} ({answer.why})"

    return _asked("CUDA-aware MPI", said, "messages between GPUs without staging")


def _process_groups() -> Component:
    """The backends of torch.distributed, and whether this process is one of a job."""
    name, purpose = "torch.distributed", "backend torch: workers are processes of torchrun"
    try:
        import torch.distributed as dist
    except ImportError:
        return Component(name, False, "torch is missing", purpose)
    if not (dist.is_available() and dist.is_gloo_available()):
        return Component(name, False, "this torch is built without gloo", purpose)
    others = ", NCCL, which linop does not use" if dist.is_nccl_available() else ""
    job = f"; this is one of {os.environ.get('WORLD_SIZE')} processes" if in_torch_job() else ""
    return Component(name, True, f"gloo{others}{job}", purpose)


def _gpus() -> Component:
    """The names of the GPUs that CuPy finds."""
    from linop.backends.device.device_arrays import cupy_arrays

    purpose = "where plans of backend cupy run"
    try:
        cuda = cupy_arrays().module.cuda.runtime
        names = [cuda.getDeviceProperties(k)["name"].decode() for k in range(cuda.getDeviceCount())]
    except LinopError as error:
        return Component("GPU", False, str(error).splitlines()[0], purpose)
    return Component("GPU", True, ", ".join(names), purpose)


def _nccl() -> Component:
    """NCCL's version, if CuPy is installed and finds it."""
    purpose = "messages of backend cupy with way='nccl'"
    try:
        import cupy
    except ImportError:
        return Component("NCCL", False, "CuPy is missing", purpose)
    from linop.backends.mpi.device.nccl import missing, version

    why = missing(cupy.cuda)
    return Component("NCCL", not why, why or version(cupy.cuda), purpose)


def _mpiexec() -> Component:
    try:
        return Component(
            "mpiexec", True, mpirun.command(1, [])[0].rsplit("/", 1)[-1], "starts MPI jobs"
        )
    except MissingExtraError as error:
        return Component("mpiexec", False, str(error), "starts MPI jobs")
