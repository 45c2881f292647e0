"""Rivals by PyLops-MPI and torch.distributed (gloo), for cases whose operation they have.

Each function adds rivals to the case that it is registered for. A peer that is not installed is
reported as missing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
from mpi4py import MPI

from benchmarks.harness.sides import Rival
from benchmarks.movement.cases import Case

PYLOPS, TORCH = "PyLops-MPI", "torch gloo"
Add = Callable[[MPI.Intracomm, Case], None]
PEERS: dict[str, list[tuple[str, Add]]] = {}


def peer(name: str, case: str) -> Callable[[Add], Add]:
    """Register a function that adds a peer's rivals to a case."""

    def register(add: Add) -> Add:
        PEERS.setdefault(case, []).append((name, add))
        return add

    return register


def available(comm: MPI.Intracomm) -> dict[str, str]:
    """Version of each peer, or the reason why it is missing, by name. Collective; initialises
    torch.distributed."""
    found = {}
    for name, package, load in ((PYLOPS, "pylops-mpi", _pylops), (TORCH, "torch", start_torch)):
        try:
            load(comm)
            found[name] = version(package)
        except ImportError as error:
            found[name] = f"missing: {error}"
    return found


def _pylops(comm: MPI.Intracomm) -> None:
    import pylops_mpi  # noqa: F401


def start_torch(comm: MPI.Intracomm) -> None:
    """Initialise torch.distributed on these ranks, over gloo; by default on the loopback interface.
    Collective."""
    import torch.distributed

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = comm.bcast(probe.getsockname()[1])
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=comm.rank, world_size=comm.size
    )


def _in_place(collective: Callable[[Any], Any], given: Any, like: Any, root: bool = False) -> Rival:
    """A collective in place. Sums grow from call to call, which costs no time.

    Args:
        given: this rank's argument; None if it has none, and passes a copy of `like`.
        root: only rank 0 has a result.
    """
    import torch

    tensor = torch.from_numpy(np.array(like if given is None else given))

    def run() -> Any:
        collective(tensor)
        return tensor

    mine = not root or MPI.COMM_WORLD.rank == 0
    return Rival(run, value=lambda t: t.numpy() if mine else None)


def _into(collective: Callable[[Any, Any], Any], given: Any, like: Any) -> Rival:
    import torch

    tensor, out = torch.from_numpy(given.copy()), torch.from_numpy(np.empty_like(like))

    def run() -> Any:
        collective(out, tensor)
        return out

    return Rival(run, value=lambda t: t.numpy())


@peer(TORCH, "broadcast")
def torch_broadcast(comm: MPI.Intracomm, case: Case) -> None:
    import torch.distributed as dist

    case.forward[TORCH] = _in_place(partial(dist.broadcast, src=0), case.x, case.y)
    case.adjoint[TORCH] = _in_place(partial(dist.reduce, dst=0), case.y, case.y, root=True)


@peer(TORCH, "sum-reduce")
def torch_reduce(comm: MPI.Intracomm, case: Case) -> None:
    import torch.distributed as dist

    case.forward[TORCH] = _in_place(partial(dist.reduce, dst=0), case.x, case.x, root=True)
    case.adjoint[TORCH] = _in_place(partial(dist.broadcast, src=0), case.y, case.x)


@peer(TORCH, "all-reduce")
def torch_all_reduce(comm: MPI.Intracomm, case: Case) -> None:
    import torch.distributed as dist

    case.forward[TORCH] = _in_place(dist.all_reduce, case.x, case.x)


@peer(TORCH, "all-gather")
def torch_all_gather(comm: MPI.Intracomm, case: Case) -> None:
    import torch.distributed as dist

    case.forward[TORCH] = _into(dist.all_gather_into_tensor, case.x, case.y)
    case.adjoint[TORCH] = _into(dist.reduce_scatter_tensor, case.y, case.x)


@peer(TORCH, "reduce-scatter")
def torch_reduce_scatter(comm: MPI.Intracomm, case: Case) -> None:
    import torch.distributed as dist

    case.forward[TORCH] = _into(dist.reduce_scatter_tensor, case.x, case.y)
    case.adjoint[TORCH] = _into(dist.all_gather_into_tensor, case.y, case.x)


def _distributed(array: Any, **options: Any) -> Any:
    """PyLops-MPI's array with this rank's block; flat unless a global shape is given."""
    import pylops_mpi

    if "global_shape" not in options:
        sizes = MPI.COMM_WORLD.allgather(array.size)
        options |= {"global_shape": sum(sizes), "local_shapes": [(n,) for n in sizes]}
        array = array.ravel()
    result = pylops_mpi.DistributedArray(dtype=array.dtype, **options)
    result[:] = array
    return result


def _part(result: Any) -> Any:
    return result.local_array


@peer(PYLOPS, "broadcast")
def pylops_broadcast(comm: MPI.Intracomm, case: Case) -> None:
    """Writing to an array in its BROADCAST partition."""
    import pylops_mpi

    assert case.y is not None
    array = pylops_mpi.DistributedArray(
        case.y.shape, partition=pylops_mpi.Partition.BROADCAST, dtype=case.y.dtype
    )
    given = case.y if case.x is None else case.x

    def run() -> Any:
        array[:] = given
        return array

    case.forward[PYLOPS] = Rival(run, value=_part)


@peer(PYLOPS, "all-gather")
def pylops_all_gather(comm: MPI.Intracomm, case: Case) -> None:
    case.forward[PYLOPS] = Rival(_distributed(case.x).asarray)


@peer(PYLOPS, "repartition P×1 → 1×P")
def pylops_redistribute(comm: MPI.Intracomm, case: Case) -> None:
    shape = case.op.domain.global_shape  # type: ignore[attr-defined]
    rows = _distributed(case.x, global_shape=shape, axis=0)
    columns = _distributed(case.y, global_shape=shape, axis=1)
    case.forward[PYLOPS] = Rival(partial(rows.redistribute, 1), value=_part)
    case.adjoint[PYLOPS] = Rival(partial(columns.redistribute, 0), value=_part)


@peer(PYLOPS, "halo 2-D")
@peer(PYLOPS, "halo 3-D")
def pylops_halo(comm: MPI.Intracomm, case: Case) -> None:
    from pylops_mpi.basicoperators.Halo import MPIHalo

    X: Any = case.op.domain
    op = MPIHalo(X.global_shape, 1, X.partition.shape, comm, X.dtype)
    _add_operator(case, op)


@peer(PYLOPS, "first derivative")
def pylops_derivative(comm: MPI.Intracomm, case: Case) -> None:
    _add_operator(case, _derivative(case))


@peer(PYLOPS, "CGLS, 10 iterations")
def pylops_cgls(comm: MPI.Intracomm, case: Case) -> None:
    from pylops_mpi import cgls

    op, data = _derivative(case), _distributed(case.y)

    def solve(iterations: int) -> Rival:
        run = partial(cgls, op, data, _distributed(0 * case.x), niter=iterations, tol=0)  # type: ignore[operator]
        return Rival(run, tolerance=1e-9, value=lambda result: result[0].local_array)

    case.solvers[PYLOPS] = solve


def _derivative(case: Case) -> Any:
    import pylops_mpi

    return pylops_mpi.MPIFirstDerivative(case.op.shape[1], kind="centered")


def _add_operator(case: Case, op: Any) -> None:
    x, y = _distributed(case.x), _distributed(case.y)
    case.forward[PYLOPS] = Rival(partial(op.matvec, x), value=_part)
    case.adjoint[PYLOPS] = Rival(partial(op.rmatvec, y), value=_part)
