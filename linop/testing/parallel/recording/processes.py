"""Processes of a checked program: started here, or those of the job that this one belongs to."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from linop.backends.together.messages import allow, decoded, encoded
from linop.errors import ArgumentError
from linop.testing.parallel.recording import records
from linop.testing.parallel.recording.failures import failure
from linop.testing.parallel.recording.forks import Fork
from linop.testing.parallel.recording.programs import Program
from linop.testing.parallel.recording.rank import PROBES, STACKS, take_part
from linop.testing.parallel.recording.records import Lifted, Moved

allow(Lifted, Moved)
allow(records.Tensor, records.Call, records.Placed, records.Collective, records.Declared)
allow(records.Parameter, records.Record, records.Probe, records.Probed)

Records = tuple[list[records.Record], records.Record]
"""Of all ranks, and of the twin."""
_GRACE = 5.0
"""Seconds that other processes have to end once one has failed."""


def run(
    program: Program | str,
    workers: int,
    dtype: str,
    seconds: float,
    trace: bool,
    forks: bool = False,
    probes: Sequence[records.Probe] = (),
) -> Records:
    """Start processes, each of which records one step, and wait for them.

    Args:
        program: functions, which forks of this process call; or a file, which forks of a new one
            run.
        seconds: the longest time.
        forks: forks of this process run the file, too. That is quicker, and safe where torch has
            computed nothing yet.
        probes: functions that are looked at alone after the step.

    Raises:
        ArgumentError: the program's parts do not fit. BackendError: a process failed, or waits for
            others that do not come; with the stacks of all.
    """
    if workers < 1:
        raise ArgumentError(f"workers: {workers} given, 1 or more expected")
    with tempfile.TemporaryDirectory(prefix="linop-") as folder:
        (Path(folder) / PROBES).write_bytes(encoded(list(probes)))
        given = [(program, r, workers, folder, dtype, seconds, trace) for r in range(workers)]
        started: Sequence[Any]
        if isinstance(program, str) and not forks:
            started = [Fork(*one) for one in given]
        else:
            # The first optimizer imports it: here once, instead of for seconds in each fork.
            importlib.import_module("torch._dynamo")
            fork = multiprocessing.get_context("fork")
            started = [fork.Process(target=in_fork, args=one, daemon=True) for one in given]
        for one in started:
            one.start()
        try:
            _wait(started, seconds, Path(folder))
            ended = {rank: one.exitcode for rank, one in enumerate(started)}
        finally:
            for one in started:
                if one.is_alive():
                    one.kill()
            for one in started:
                one.join()
        return _read(Path(folder), workers, seconds, ended)


def in_fork(*args: Any) -> None:
    """Take part, as a fork, and end."""
    status = 1
    try:
        take_part(*args)
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


def _wait(started: Sequence[Any], seconds: float, folder: Path) -> None:
    """Wait until all have ended, or the time is over, or one has failed and others do not end.
    These write their stacks then, if they have said that they can: `STACKS` ends others."""
    end = time.monotonic() + seconds
    while any(one.is_alive() for one in started) and time.monotonic() < end:
        if any(one.exitcode not in (None, 0) for one in started):
            end = min(end, time.monotonic() + _GRACE)
        time.sleep(0.02)
    late = [one for rank, one in enumerate(started)
            if one.is_alive() and (folder / f"{rank}.stack").exists()]  # fmt: skip
    for one in late:
        os.kill(one.pid, STACKS)
    if late:
        time.sleep(1.0)


def _read(folder: Path, workers: int, seconds: float, ended: dict[int, int | None]) -> Records:
    """The records.

    Args:
        ended: the processes' statuses, before those that waited for others were ended.

    Raises:
        ArgumentError, BackendError: some process has written none.
    """
    paths = [folder / f"{rank}.record" for rank in range(workers)]
    if not all(path.exists() for path in paths):
        raise failure(folder, workers, seconds, ended)
    found = [decoded(path.read_bytes()) for path in paths]
    return [one for one, _ in found], found[0][1]


@contextmanager
def ending_after(seconds: float) -> Iterator[None]:
    """Context that ends this process, a rank of a job that is running, after a time: with its
    stacks, since others may not come."""

    def end() -> None:
        sys.stderr.write(f"linop: the program did not end within {seconds:g} s; this rank is at\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(2, all_threads=True)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def gathered(mine: tuple[records.Record, records.Record | None]) -> Records | None:
    """The records of all processes of a job that is running, on rank 0; None on others.
    Collective."""
    import torch
    import torch.distributed as dist

    data = encoded(mine)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device))
    longest = int(max(sizes))
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    parts = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    if dist.get_rank():
        return None
    found = [
        decoded(part[: int(n)].cpu().numpy().tobytes())
        for part, n in zip(parts, sizes, strict=True)
    ]
    return [one for one, _ in found], found[0][1]
