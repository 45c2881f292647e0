"""Program of each rank of a GPU job: ``python -m benchmarks.gpu.rank JSON``, as
`benchmarks.movement.rank`.

One rank measures movement on the device, several ranks the messages between them. Rank 0 prints a
line of JSON for each comparison. Every side ends by synchronising with the device.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from mpi4py import MPI

import linop
from benchmarks.harness.measure import interleaved
from benchmarks.harness.sides import emit, software
from benchmarks.harness.task import KIB, MIB, Task
from linop import COPIES, Partition, Region, Space, TensorSpace
from linop.backends.device.device_arrays import DeviceArrays
from linop.backends.engine.arrays.interface import arrays_named

ARRAYS = "LINOP_BENCH_ARRAYS"
"""Environment variable that names the device arrays: "cupy", or ``module:name`` of simulated
ones."""
COPY = "copy"
"""Side with which movement on the device is compared."""
LOCAL_SIZES = (MIB, 16 * MIB, 64 * MIB, 256 * MIB)
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB)
CALLS = 20
"""Calls between two events, whose time is one sample."""
FLOAT = np.dtype(np.float32)

Run = Callable[[], Any]
Timed = Callable[[int], float]
"""Mean seconds a call, over a number of calls, by the device's clock."""


def main(task: Task) -> None:
    """Go through the tables. Collective."""
    comm = MPI.COMM_WORLD.Dup()
    arrays = given_arrays()
    backend: Any = linop.backends.get("cupy", comm=comm, arrays=arrays)
    facts = software(comm) | {"GPU": gpu(arrays), arrays.name: arrays.module.__version__}
    emit(comm, {"machine": facts | {f"messages, {comm.size} ranks": backend.way()}})
    if comm.size == 1:
        local_table(comm, arrays, task)
    else:
        ranks_table(comm, arrays, backend, task)
    if find_spec("torch") is not None:
        step_table(comm, arrays, backend, task)


def given_arrays() -> DeviceArrays:
    """Device arrays that the environment names; CuPy's by default."""
    name = os.environ.get(ARRAYS, "cupy")
    module, _, attribute = name.partition(":")
    found: Any = getattr(import_module(module), attribute) if attribute else arrays_named(name)
    assert isinstance(found, DeviceArrays), found
    return found


def gpu(arrays: DeviceArrays) -> str:
    """Name of the device, with driver and runtime."""
    runtime = arrays.module.cuda.runtime
    if not hasattr(runtime, "getDeviceProperties"):
        return "none: simulated"
    name: str = runtime.getDeviceProperties(arrays.module.cuda.Device().id)["name"].decode()
    return f"{name}, driver {runtime.driverGetVersion()}, runtime {runtime.runtimeGetVersion()}"


# Movement on the device


def local_table(comm: MPI.Intracomm, arrays: DeviceArrays, task: Task) -> None:
    """Packing, adding and repartitioning, beside copies of as many bytes, by the device's clock."""
    for size in chosen(LOCAL_SIZES, task):
        for name, (run, moved) in local_cases(arrays, size).items():
            if task.only and not any(part in name for part in task.only):
                continue
            source = arrays.zeros((moved // 2,), np.dtype(np.uint8))
            target = arrays.empty(source.shape, source.dtype)
            copy = repeated(arrays, partial(arrays.copyto, target, source))
            sides = {COPY: copy, "linop": run}
            times = by_events(sides, task.seconds)
            emit(comm, {"table": "local", "name": name, "size": size, "bytes": moved} | times)


def local_cases(arrays: DeviceArrays, size: int) -> dict[str, tuple[Timed, int]]:
    """By name: a timer, and the bytes that a call reads and writes.

    Args:
        size: bytes of a region.
    """
    side = int((size // FLOAT.itemsize) ** 0.5)
    n = size // FLOAT.itemsize
    x, y = Region("x", (n,)), Region("y", (n,))
    whole, sums = Space([x], FLOAT), Space([x, y], FLOAT)
    square = Space([Region("x", (side, side))], FLOAT)
    half = Region("y", (side, side // 2))
    columns = square.regions[0][:, side // 4 : side // 4 + side // 2]
    pack = linop.deallocate(
        Space([square.regions[0], half], FLOAT), square.regions[0]
    ) @ linop.copy(square, columns, half)
    rows = TensorSpace((side, side), Partition((4, 1)), FLOAT)
    turned = linop.repartition(rows, Partition((1, 4)))
    block = side * side * FLOAT.itemsize
    return {
        "copy of a region": (one_worker(arrays, 1 * linop.identity(whole)), 2 * size),
        "pack of half the columns": (one_worker(arrays, pack), 2 * half.size * FLOAT.itemsize),
        "its adjoint, unpack": (one_worker(arrays, pack.H), 2 * half.size * 4 + block),
        "add of two regions": (one_worker(arrays, linop.add(sums, x, y)), 5 * size),
        "repartition, 4 workers on the GPU": (on_threads(arrays, turned), 2 * block),
    }


def one_worker(arrays: DeviceArrays, op: linop.LinearOperator) -> Timed:
    """Timer of a plan on one worker, with its argument and its result buffers."""
    (backend,) = linop.launch(lambda backend: backend, 1, "threads", arrays=arrays)
    plan = op.compile(backend)

    def zeros(space: Space) -> Any:
        made = {r.name: arrays.zeros(r.shape, space.dtype) for r in space}
        return made if len(made) > 1 else next(iter(made.values()))

    return repeated(arrays, partial(plan, zeros(op.domain), out=zeros(op.codomain)))


def on_threads(arrays: DeviceArrays, op: linop.LinearOperator) -> Timed:
    """Timer of a plan on several workers: threads, which queue their work on one stream."""
    workers = op.domain.workers
    cuda = arrays.module.cuda

    def timed(calls: int) -> float:
        before, after = cuda.Event(), cuda.Event()
        together = threading.Barrier(len(workers))

        def main(backend: Any) -> None:
            plan = op.compile(backend)
            (region,) = op.domain.on(backend.worker)
            x = arrays.zeros(region.shape, FLOAT)
            plan(x)
            for event in (before, after):
                together.wait()
                if backend.worker == 0:
                    event.record()
                together.wait()
                for _ in range(calls if event is before else 0):
                    plan(x)

        linop.launch(main, len(workers), "threads", arrays=arrays)
        after.synchronize()
        return between(arrays, before, after) / calls

    return timed


def by_events(sides: dict[str, Timed], seconds: float) -> dict[str, Any]:
    """Minimum, median and maximum microseconds a call, by side, over rounds of all sides."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for timed in sides.values():
        timed(2)
    once = sum(timed(CALLS) for timed in sides.values()) * CALLS
    for _ in range(min(max(int(seconds / once), 5), 50)):
        for name, timed in sides.items():
            samples[name].append(timed(CALLS) * 1e6)
    times = {k: (min(v), float(np.median(v)), max(v)) for k, v in samples.items()}
    return {"times": times, "ranks": 1}


def repeated(arrays: DeviceArrays, run: Run) -> Timed:
    """Timer of a function that this thread calls."""
    cuda = arrays.module.cuda

    def timed(calls: int) -> float:
        before, after = cuda.Event(), cuda.Event()
        before.record()
        for _ in range(calls):
            run()
        after.record()
        after.synchronize()
        return between(arrays, before, after) / calls

    return timed


def between(arrays: DeviceArrays, before: Any, after: Any) -> float:
    """Seconds between two events."""
    milliseconds: float = arrays.module.cuda.get_elapsed_time(before, after)
    return milliseconds / 1e3


# Ranks that share the device


def ranks_table(comm: MPI.Intracomm, arrays: DeviceArrays, backend: Any, task: Task) -> None:
    """Messages between ranks: linop and raw mpi4py, each staged and, if possible, CUDA-aware."""
    staged = linop.backends.get("cupy", comm=comm.Dup(), way="staged", arrays=arrays)
    backends = {"linop staged": staged} | ({"linop aware": backend} if backend.aware.yes else {})
    for size in chosen(SIZES, task):
        for name, op, raw in exchanges(comm, arrays, size, backend.aware.yes):
            if task.only and not any(part in name for part in task.only):
                continue
            sides: dict[str, Run] = dict(raw)
            for side, one in backends.items():
                plan = op.compile(one)
                x = arrays.zeros(op.domain.on(comm.rank)[0].shape, FLOAT)
                sides[side] = finished(arrays, partial(plan, x))
            found = interleaved(comm, sides, task.seconds)
            times = {name: tuple(t) for name, t in found.times.items()}
            what = {"table": "ranks", "name": name, "size": size, "ranks": comm.size}
            emit(comm, what | {"times": times})


def exchanges(
    comm: MPI.Intracomm, arrays: DeviceArrays, size: int, aware: bool
) -> Iterator[tuple[str, linop.LinearOperator, dict[str, Run]]]:
    """Operators on blocks of `size` bytes, with raw mpi4py's sides: (name, operator, sides)."""
    n, ranks = size // FLOAT.itemsize, comm.size
    split = TensorSpace((n * ranks,), Partition((ranks,)), FLOAT)
    right, left = (comm.rank + 1) % ranks, (comm.rank - 1) % ranks
    x, y = arrays.zeros((n,), FLOAT), arrays.zeros((n,), FLOAT)
    below, above = arrays.host.empty((n,), FLOAT), arrays.host.empty((n,), FLOAT)
    wait = arrays.streams.mark

    def ring_aware() -> None:
        wait().synchronize()
        requests = [comm.Irecv(y, left), comm.Isend(x, right)]
        MPI.Request.Waitall(requests)

    def ring_staged() -> None:
        arrays.host.down(x, below).synchronize()
        requests = [comm.Irecv(above, left), comm.Isend(below, right)]
        MPI.Request.Waitall(requests)
        arrays.host.up(above, y)

    def sum_aware() -> None:
        wait().synchronize()
        comm.Allreduce(x, y)

    def sum_staged() -> None:
        arrays.host.down(x, below).synchronize()
        comm.Allreduce(below, above)
        arrays.host.up(above, y)

    copies = TensorSpace((n,), Partition((ranks,)), FLOAT, axes=(COPIES,))
    for name, op, by_hand in (
        ("ring of blocks", linop.shift(split, 1), (ring_staged, ring_aware)),
        ("all-reduce", linop.all_reduce(copies), (sum_staged, sum_aware)),
    ):
        raw = {"raw staged": finished(arrays, by_hand[0])}
        if aware:
            raw["raw aware"] = finished(arrays, by_hand[1])
        yield name, op, raw


def finished(arrays: DeviceArrays, run: Run) -> Run:
    """A side that synchronises with the device at its end."""

    def whole() -> Any:
        result = run()
        arrays.streams.mark().synchronize()
        return result

    return whole


# A layer


def step_table(comm: MPI.Intracomm, arrays: DeviceArrays, backend: Any, task: Task) -> None:
    """Forward and backward of a convolution on blocks of rows, beside torch on the whole image."""
    import torch

    from linop.layers import Conv2d, fixed_shapes

    rows, device = 256, arrays.device
    with linop.backends.use(backend):
        layer = Conv2d(Partition((1, 1, comm.size, 1)), 16, 16, 3, padding=1, device=device)
    alone = torch.nn.Conv2d(16, 16, 3, padding=1, device=device)
    mine = torch.randn(4, 16, rows // comm.size, rows, device=device, requires_grad=True)
    whole = torch.randn(4, 16, rows, rows, device=device, requires_grad=True)

    def step(module: Any, x: Any) -> None:
        module(x).sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()

    with fixed_shapes():
        sides = {"torch, whole": partial(step, alone, whole), "linop": partial(step, layer, mine)}
        found = interleaved(comm, sides, task.seconds)
    times = {name: tuple(t) for name, t in found.times.items()}
    size = whole.numel() * whole.element_size()
    what = {"table": "step", "name": "Conv2d step", "size": size, "ranks": comm.size}
    emit(comm, what | {"times": times})


def chosen(sizes: tuple[int, ...], task: Task) -> list[int]:
    return [s for s in task.sizes or sizes if s <= task.largest]


if __name__ == "__main__":
    main(Task.parse(sys.argv[1]))
