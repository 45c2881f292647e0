"""linop: a backend-agnostic linear-operator algebra for data movement.

Regions of memory on workers, five memory operators on them, and everything composed from these:
collectives, halo exchanges, repartitions, with adjoints that are derived, never written.
"""

import importlib
import pathlib
import typing

if not (pathlib.Path(__path__[0]) / "backends").is_dir():
    # This is a checkout, imported from its root: the other floors lie beside this folder, not in it
    # (setup.cfg maps them into the package when it is installed).
    __path__.append(str(pathlib.Path(__path__[0]).parent))

from linop import errors
from linop.algebra import direct_sum, hstack, identity, vstack, zero
from linop.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce_scatter,
    repartition,
    ring_all_reduce,
    scatter,
    send_recv,
    shift,
    sum_reduce,
)
from linop.cost import Cost
from linop.errors import LinopError
from linop.halo import HaloDim, halo_exchange, halo_geometry
from linop.local import diagonal, fft, from_scipy, local, matrix, restriction
from linop.memory import add, allocate, clear, copy, deallocate, move
from linop.movement import Movement, Transfer
from linop.network import Network
from linop.offloading import offload
from linop.operator import LinearOperator
from linop.padding import pad
from linop.partition import Partition
from linop.plan import Plan
from linop.region import Region, Subset
from linop.simulate import Simulation, simulate
from linop.sliding import convolution
from linop.solvers import cgls
from linop.space import Space, Vector
from linop.tensor import COPIES, REPLICATED, TensorSpace
from linop.traffic import TrafficMatrix, traffic_matrix
from linop.verify import verify

# isort: split
# The floors above the core, which itself never imports them.
from linop import backends, testing
from linop.backends import launch

if typing.TYPE_CHECKING:
    from linop import autograd as autograd
    from linop import layers as layers

__version__ = "0.1.0"

__all__ = [
    "COPIES",
    "REPLICATED",
    "Cost",
    "HaloDim",
    "LinearOperator",
    "LinopError",
    "Movement",
    "Network",
    "Partition",
    "Plan",
    "Region",
    "Simulation",
    "Space",
    "Subset",
    "TensorSpace",
    "TrafficMatrix",
    "Transfer",
    "Vector",
    "add",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "allocate",
    "backends",
    "broadcast",
    "cgls",
    "clear",
    "convolution",
    "copy",
    "deallocate",
    "diagonal",
    "direct_sum",
    "errors",
    "fft",
    "from_scipy",
    "gather",
    "halo_exchange",
    "halo_geometry",
    "hstack",
    "identity",
    "launch",
    "local",
    "matrix",
    "move",
    "offload",
    "pad",
    "reduce_scatter",
    "repartition",
    "restriction",
    "ring_all_reduce",
    "scatter",
    "send_recv",
    "shift",
    "simulate",
    "sum_reduce",
    "testing",
    "traffic_matrix",
    "verify",
    "vstack",
    "zero",
]


def __getattr__(name: str) -> typing.Any:
    """What imports torch, when it is asked for."""
    if name in ("autograd", "layers"):
        return importlib.import_module(f"linop.{name}")
    raise AttributeError(f"module 'linop' has no attribute {name!r}")
