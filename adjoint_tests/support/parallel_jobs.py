"""Reports of `check_parallel` on many programs by the ranks of one job: torch is imported once."""

from __future__ import annotations

import importlib.util
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support import preloaded


def reports(file: str, name: str, workers: int) -> dict[str, Any]:
    """Of each program, by its name, the report, or the exception of rank 0.

    Args:
        file, name: the Python file and its dict of programs; each is a dict of arguments of
            `check_parallel`.
    """
    with tempfile.TemporaryDirectory() as folder:
        preloaded.spawn(_rank, (workers, folder, file, name), workers)
        return dict(pickle.loads(Path(folder, "reports").read_bytes()))


def _rank(rank: int, workers: int, folder: str, file: str, name: str) -> None:
    import torch
    import torch.distributed as dist

    from linop.testing import check_parallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                            world_size=workers)  # fmt: skip
    spec = importlib.util.spec_from_file_location("programs", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    programs: Mapping[str, Any] = getattr(module, name)
    found = {}
    for each, arguments in programs.items():
        try:
            found[each] = check_parallel(**arguments)
        except Exception as error:
            found[each] = error
        dist.barrier()
    if rank == 0:
        Path(folder, "reports").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
