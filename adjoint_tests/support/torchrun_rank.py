"""The program of a process of a job of `support.torchrun`: contracts, until its connection ends."""

from __future__ import annotations

import contextlib
import pickle
import sys
import traceback
from multiprocessing.connection import Client
from typing import Any


def serve(address: str) -> None:
    """Run contracts, and tell how they end. Those of the same options have the same backend, but
    for those that want a new one."""
    with Client(address) as link:
        import torch
        import torch._dynamo  # the first optimizer or layer would, in seconds that count
        import torch.distributed as dist

        torch.set_num_threads(1)  # ranks share the cores
        dist.init_process_group("gloo")
        link.send(dist.get_rank())
        sys.path[:] = link.recv()

        from linop.backends import use

        backends: dict[Any, Any] = {}
        with contextlib.suppress(EOFError):
            while True:
                data, said = link.recv_bytes(), None
                try:
                    contract, workers, arguments, options, new = pickle.loads(data)
                    key = workers, *sorted(options.items())
                    if new or key not in backends:
                        backends[key] = made(workers, options)
                    if dist.get_rank() < workers:
                        with use(backends[key]):
                            contract(backends[key], *arguments)
                except BaseException:
                    said = traceback.format_exc()
                link.send(said)


def made(workers: int, options: dict[str, Any]) -> Any:
    """A backend of its own of so many processes; None in the others. Collective."""
    import torch.distributed as dist

    from linop.backends.torchrun import backend as process_group

    group = None
    if workers < dist.get_world_size():
        group = dist.new_group(range(workers), backend="gloo")
    backend = process_group.get(group, **options) if dist.get_rank() < workers else None
    process_group._KEPT.clear()
    return backend


serve(sys.argv[1])
