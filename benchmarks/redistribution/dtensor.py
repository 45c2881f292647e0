"""Elements that torch's DTensor moves in the same transitions: its own collectives, counted.

    python benchmarks/redistribution/dtensor.py [--plan greedy|graph] [--gloo 12]

`redistribute` runs for worker 0 on torch's process group "fake", which starts no other process and
sends nothing; blocks are alike, so that each of the eight workers gets as much. Every collective is
counted as what its workers get of others at least: (n − 1) blocks in an all-gather, (n − 1)/n of
one in an all-to-all. On CPUs DTensor gathers where it would call an all-to-all on GPUs: that is
counted in both ways. With `--gloo` eight processes run some transitions, in order to see
that the fake group is given the same collectives, and that results are right.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.redistribution.transitions import (
    MESH,
    SHAPE,
    TRANSITIONS,
    WORKERS,
    Placement,
)


class Counted(TorchDispatchMode):
    """Counts elements that a worker gets in the collectives of a block of code."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        name = str(function)
        if "all_gather_into_tensor" in name:
            self.elements += args[0].numel() * (args[1] - 1)
        elif "c10d" in name and not any(k in name for k in ("wait_tensor", "_wrap_tensor")):
            raise RuntimeError(f"a collective that is not counted: {name}")
        return function(*args, **(kwargs or {}))

    def all_to_all(self, block: Any, gathered: int, split: int, mesh: Any, mesh_dim: int) -> Any:
        """In place of DTensor's function, which calls an all-to-all if the tensor is on a GPU:
        counts it, and returns some block of the right shape."""
        n = mesh.size(mesh_dim)
        self.elements += block.numel() * (n - 1) // n
        return torch.cat([block] * n, gathered).chunk(n, split)[0].contiguous()

    @contextmanager
    def on_gpus(self) -> Iterator[None]:
        """DTensor does what it does on GPUs."""
        with mock.patch(
            "torch.distributed.tensor.placement_types.shard_dim_alltoall", self.all_to_all
        ):
            yield


def placed(placement: Placement) -> list[Any]:
    """A placement in DTensor's words."""
    return [Replicate() if d is None else Shard(d) for d in placement]


def counts(some: Sequence[tuple[Placement, Placement]], graph: bool = False) -> list[list[int]]:
    """For each transition the elements that the eight workers get: (on GPUs, on CPUs).

    Args:
        graph: plan by torch's shortest paths, `use_min_cost_redistribution_plan`.
    """
    planner: Any = nullcontext
    if graph:
        from torch.distributed.tensor import _redistribute

        planner = _redistribute.use_min_cost_redistribution_plan
    from torch.testing._internal.distributed.fake_pg import FakeStore

    logging.disable(logging.WARNING)  # a line for each all-to-all
    dist.init_process_group("fake", rank=0, world_size=len(WORKERS), store=FakeStore())
    mesh = init_device_mesh("cpu", MESH)
    found = []
    for before, after in some:
        shape = [n // 2 ** before.count(d) for d, n in enumerate(SHAPE)]
        x = DTensor.from_local(torch.zeros(shape), mesh, placed(before), run_check=False)
        row = []
        for gpu in (True, False):
            counted = Counted()
            with planner(), counted, counted.on_gpus() if gpu else nullcontext():
                x.redistribute(mesh, placed(after))
            row.append(counted.elements * len(WORKERS))
        found.append(row)
    dist.destroy_process_group()
    return found


def _on_gloo(rank: int, port: int, some: Sequence[tuple[Placement, Placement]], queue: Any) -> None:
    from torch.distributed.tensor import distribute_tensor

    logging.disable(logging.WARNING)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=len(WORKERS))
    mesh = init_device_mesh("cpu", MESH)
    whole = torch.arange(float(torch.Size(SHAPE).numel())).reshape(SHAPE)
    for k, (before, after) in enumerate(some):
        x, wanted = (distribute_tensor(whole, mesh, placed(p)) for p in (before, after))
        with Counted() as counted:
            y = x.redistribute(mesh, placed(after))
        right = torch.equal(y.to_local(), wanted.to_local())
        queue.put((k, counted.elements, right))
    dist.barrier()
    dist.destroy_process_group()


def on_gloo(some: Sequence[tuple[Placement, Placement]]) -> list[int]:
    """For each transition the elements that eight processes have got over gloo, by their own
    counts.

    Raises:
        AssertionError: a result is wrong.
    """
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    port = 20000 + os.getpid() % 20000
    # Daemons, which end with this process if a result is wrong or one of them fails.
    workers = [
        context.Process(target=_on_gloo, args=(k, port, some, queue), daemon=True) for k in WORKERS
    ]
    for worker in workers:
        worker.start()
    found = [0] * len(some)
    for _ in range(len(some) * len(workers)):
        k, elements, right = queue.get(timeout=300)
        assert right, some[k]
        found[k] += elements
    for worker in workers:
        worker.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", choices=["greedy", "graph"], default="greedy")
    parser.add_argument("--gloo", type=int, default=0, help="transitions to run on processes")
    given = parser.parse_args()
    found = counts(TRANSITIONS, given.plan == "graph")
    if given.gloo:
        step = len(TRANSITIONS) // given.gloo
        some = range(step // 2, len(TRANSITIONS), step)
        real = on_gloo([TRANSITIONS[k] for k in some])
        assert real == [found[k][1] for k in some], "gloo's counts differ from the fake group's"
    print(json.dumps({"torch": torch.__version__, "elements": found}))


if __name__ == "__main__":
    main()
