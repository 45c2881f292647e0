"""One process of a checked program (``python -m``, this module). It joins the process group,
records one step, and writes what it found to a file, in linop's own format."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

from linop.backends.together.messages import decoded, encoded
from linop.errors import LinopError
from linop.testing.parallel.recording.programs import Program, of_file

STACKS = signal.SIGUSR1
"""The signal at which a process writes the stacks of its threads."""
PROBES = "probes"
"""The file that says which functions are looked at alone."""


def _ends_with_its_parent(parent: int) -> None:
    """Nobody reads what a rank finds once the process that started it is gone."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def take_part(
    program: Any, rank: int, world: int, folder: str, dtype: str, seconds: float, trace: bool
) -> None:
    """Record a step of a program as one rank of several, and write the records to ``folder``.

    Args:
        program: a `Program`, or the target of one in a file.
        dtype: the name of a dtype of torch's.
        seconds: the longest time; `STACKS` makes the process write its stacks.
    """
    place = Path(folder)
    threading.Thread(target=_ends_with_its_parent, args=(os.getppid(),), daemon=True).start()
    # Not `faulthandler.dump_traceback_later`, whose thread a fork does not have.
    stacks = (place / f"{rank}.stack").open("w")
    faulthandler.register(STACKS, file=stacks, all_threads=True)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # What torchrun tells its processes, and programs ask for.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    try:
        on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= world
        if on_gpus:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl" if on_gpus else "gloo",
            init_method=(place / "store").resolve().as_uri(),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=seconds + 30),
        )
        from linop.testing.parallel.recording import steps, tensors

        kind = getattr(torch, dtype)
        torch.set_default_dtype(kind)
        if not isinstance(program, Program):
            tensors.own_file(__file__)
            program = of_file(program)
        probes = decoded((place / PROBES).read_bytes())
        found = steps.recorded(program, kind, trace, probes=probes)
        (place / f"{rank}.part").write_bytes(encoded(found))
        (place / f"{rank}.part").rename(place / f"{rank}.record")
        dist.barrier()
    except BaseException as error:
        told = isinstance(error, LinopError)
        text = str(error) if told else traceback.format_exc()
        (place / f"{rank}.error").write_text(text)
        sys.stderr.flush()
        raise SystemExit(1) from None


if __name__ == "__main__":
    target, *rest = sys.argv[1:]
    rank, world, folder, dtype, seconds, trace = rest
    take_part(target, int(rank), int(world), folder, dtype, float(seconds), trace == "True")
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads of gloo
