"""A job of torch.distributed whose ranks call `check_parallel`; each writes what it got of it."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from support import preloaded

_RANK = """
import importlib.util, os, sys
import torch, torch.distributed as dist

sys.path.append({tests!r})
torch.set_num_threads(1)
rank, world, folder, file, name = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
spec = importlib.util.spec_from_file_location("programs", file)
module = importlib.util.module_from_spec(spec)
sys.modules["programs"] = module
spec.loader.exec_module(module)
with open(f"{folder}/{rank}", "w") as out:
    out.write(str(getattr(module, name)()))
dist.barrier()
os._exit(0)
"""


@dataclass
class Ended:
    """Results that a job left.

    Attributes:
        said: what the function returned, by rank; empty for a rank that has ended before.
        errors: what ranks wrote to stderr.
        seconds: how long it ran.
    """

    said: dict[int, str]
    errors: dict[int, str]
    seconds: float


def ran(file: str, name: str, workers: int = 2, seconds: float = 120.0) -> Ended:
    """Run a function of a file on all ranks of a job.

    Args:
        name: of a function without arguments.
    """
    begun = time.monotonic()
    code = _RANK.replace("{tests!r}", repr(str(Path(__file__).parents[1])))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                [*preloaded.python(), "-c", code, str(rank), str(workers), folder, file, name],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(workers)
        ]
        errors = {r: one.communicate(timeout=seconds)[1] for r, one in enumerate(started)}
        written = {r: Path(folder, str(r)) for r in range(workers)}
        said = {r: path.read_text() if path.exists() else "" for r, path in written.items()}
    return Ended(said, errors, time.monotonic() - begun)
