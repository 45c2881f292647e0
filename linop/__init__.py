"""linop: a backend-agnostic linear-operator algebra for data movement.

Regions of memory on workers, memory operators on them, and their compositions: collectives, halo
exchanges and repartitions, whose adjoints are derived. This module holds the public names that
nearly every program uses; others are in `linop.local_operators`, `linop.fourier`, `linop.loops`,
`linop.planning`, `linop.pictures`, `linop.solvers`, `linop.schedules`, `linop.networks`,
`linop.errors`, `linop.backends`, `linop.interop`, `linop.testing`, `linop.autograd`, `linop.layers`
and `linop.strategies`.
"""

import importlib
import importlib.machinery
import importlib.util
import pathlib
import sys
import typing
import warnings

if not (pathlib.Path(__path__[0]) / "backends").is_dir():

    class _Checkout:
        """Meta-path finder of linop.backends, linop.layers and linop.strategies in a checkout
        imported from its root. Their folders are not in this one; in an installation setup.cfg maps
        them into it."""

        folders: typing.ClassVar = {
            "linop.backends": "backends",
            "linop.layers": "layers",
            "linop.strategies": "layers/strategies",
        }

        @staticmethod
        def find_spec(
            name: str, path: object = None, target: object = None
        ) -> importlib.machinery.ModuleSpec | None:
            if name not in _Checkout.folders:
                return None
            folder = pathlib.Path(__path__[0]).parent / _Checkout.folders[name]
            if not folder.is_dir():
                return None
            return importlib.util.spec_from_file_location(
                name, folder / "__init__.py", submodule_search_locations=[str(folder)]
            )

    # The first one: an editable installation of another checkout has a finder of these names, too.
    sys.meta_path.insert(0, _Checkout)

from linop.errors import LinopError
from linop.fourier import fft, irfft, rfft
from linop.local_operators import block, block_diag, kron, local
from linop.local_operators.blocks import hstack, vstack
from linop.loops import repeat, timeloop
from linop.normal_form.movement import Movement
from linop.operators.algebra import direct_sum, identity, in_steps, zero
from linop.operators.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce_scatter,
    repartition,
    scatter,
    send_recv,
    shift,
    sum_reduce,
)
from linop.operators.experts import Routing, combine, dispatch
from linop.operators.halo import HaloDim, halo_exchange, halo_geometry
from linop.operators.memory import add, allocate, clear, copy, deallocate, move
from linop.operators.offloading import offload
from linop.operators.operator import LinearOperator
from linop.operators.padding import pad
from linop.operators.real_linear import conj, imag, real
from linop.operators.riesz import inner_product, riesz
from linop.operators.ring import ring_all_gather, ring_all_reduce
from linop.planning import simulate, verify_plans
from linop.spaces.decomposition import COPIES, REPLICATED
from linop.spaces.partition import Partition
from linop.spaces.region import Region, Subset
from linop.spaces.space import Space
from linop.spaces.tensor import TensorSpace
from linop.spaces.vector import Vector
from linop.stencils import laplacian, stencil

# isort: split
# Layers above the core; the core does not import them.
from linop import backends
from linop.backends import BoundPlan as Plan
from linop.backends import launch

if typing.TYPE_CHECKING:
    from linop import autograd as autograd
    from linop import errors as errors
    from linop import fourier as fourier
    from linop import interop as interop
    from linop import layers as layers
    from linop import local_operators as local_operators
    from linop import loops as loops
    from linop import networks as networks
    from linop import pictures as pictures
    from linop import planning as planning
    from linop import schedules as schedules
    from linop import solvers as solvers
    from linop import strategies as strategies
    from linop import testing as testing

__version__: str

__all__ = [
    "COPIES",
    "REPLICATED",
    "HaloDim",
    "LinearOperator",
    "LinopError",
    "Movement",
    "Partition",
    "Plan",
    "Region",
    "Routing",
    "Space",
    "Subset",
    "TensorSpace",
    "Vector",
    "add",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "allocate",
    "backends",
    "block",
    "block_diag",
    "broadcast",
    "clear",
    "combine",
    "conj",
    "copy",
    "deallocate",
    "direct_sum",
    "dispatch",
    "fft",
    "gather",
    "halo_exchange",
    "halo_geometry",
    "hstack",
    "identity",
    "imag",
    "in_steps",
    "inner_product",
    "irfft",
    "kron",
    "laplacian",
    "launch",
    "local",
    "move",
    "offload",
    "pad",
    "real",
    "reduce_scatter",
    "repartition",
    "repeat",
    "rfft",
    "riesz",
    "ring_all_gather",
    "ring_all_reduce",
    "scatter",
    "send_recv",
    "shift",
    "simulate",
    "stencil",
    "sum_reduce",
    "testing",
    "timeloop",
    "verify_plans",
    "vstack",
    "zero",
]

_MOVED = {
    **dict.fromkeys(
        ("Cost", "Network", "Simulation", "TrafficMatrix", "traffic_matrix"), "linop.planning"
    ),
    **dict.fromkeys(
        ("convolution", "diagonal", "from_scipy", "matrix", "restriction"),
        "linop.local_operators",
    ),
    "Transfer": "linop.normal_form.movement",
    "cgls": "linop.solvers",
}
"""Modules of names that were in this one: deprecated aliases, which warn."""


_MODULES = (
    "autograd",
    "backends",
    "errors",
    "fourier",
    "interop",
    "layers",
    "local_operators",
    "loops",
    "networks",
    "pictures",
    "planning",
    "schedules",
    "solvers",
    "strategies",
    "testing",
)
"""Public modules, those that are heavy imported on first access; all others are the house's."""


def _version() -> str:
    """The version of the installed distribution, which its tag gave it; "0+unknown" in a checkout
    where none is installed."""
    from importlib import metadata  # here, since few programs ask

    try:
        return metadata.version("linop-algebra")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def __getattr__(name: str) -> typing.Any:
    """Import a public module on first access; find the version; resolve deprecated names."""
    if name in _MODULES:
        return importlib.import_module(f"linop.{name}")
    if name == "__version__":
        return _version()
    if name == "verify":
        warnings.warn("linop.verify is linop.verify_plans now", DeprecationWarning, stacklevel=2)
        return verify_plans
    if name in _MOVED:
        module = _MOVED[name]
        warnings.warn(f"linop.{name} is {module}.{name} now", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'linop' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names and modules, which completion shows; nothing is imported."""
    return sorted({*__all__, *_MODULES})
