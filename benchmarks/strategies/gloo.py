"""torch's own process group over gloo, among the ranks of an MPI job: so that torch's strategies
and linop's are measured in one job, in turn."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def gloo(comm: Any) -> Iterator[Any]:
    """torch's default group, of all ranks of a communicator; gives a mesh of one axis of them.
    Collective."""
    with tempfile.TemporaryDirectory() as own:
        store = comm.bcast(own)  # rank 0's
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}/store", rank=comm.rank, world_size=comm.size
        )
        try:
            yield torch.distributed.device_mesh.init_device_mesh("cpu", (comm.size,))
        finally:
            comm.Barrier()
            torch.distributed.destroy_process_group()
