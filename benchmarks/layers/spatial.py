"""`linop.strategies.spatial` counted and measured: settings that equal one process, memory and time
of a step, and torch's DTensor beside it.

    python benchmarks/layers/spatial.py settings 10000   # draw as many networks of operations
    python benchmarks/layers/spatial.py memory           # peak of a step, of 1, 2 and 4 ranks
    python benchmarks/layers/spatial.py time             # a step on 2 ranks beside one process
    python benchmarks/layers/spatial.py dtensor          # convolutions cut in space, 2 ranks

Ranks have one thread each. `settings` draws by a generator of
random numbers, the same networks for the same numbers, and prints each that differs.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "adjoint_tests"))

ALLOCATORS = {
    "default": {},
    # Large arrays have pages of their own, which are given back: so that peaks are those of a step.
    "gives back": {"MALLOC_MMAP_THRESHOLD_": "65536"},
    # No page is given back: else a step of one process, with larger arrays, spends more time in the
    # kernel, which clears their pages again.
    "keeps": {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)},
}
"""Settings of the C library's memory."""

CASES = {
    "2-D U-Net, 512²": {"ndim": 2, "size": 512, "width": 16, "depth": 3, "batch": 2},
    "3-D U-Net, 64³": {"ndim": 3, "size": 64, "width": 16, "depth": 2, "batch": 2},
    "ResNet-18, 512²": {"ndim": 2, "size": 512, "batch": 2},
}


# Settings


def drawn(number: int) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    """A network as data, the extents of a grid, and the dimensions that it cuts."""
    from support.strategies.spatial_networks import Randomly, draw

    c = Randomly(number)
    while True:
        try:
            description = draw(c)
        except (RuntimeError, ValueError):  # torch refuses the setting
            continue
        break
    ndim = len(description[0]) - 2
    while True:
        extents = tuple(c.of([1, 1, 2, 2, 3, 4]) for _ in range(ndim))
        if math.prod(extents) <= 8:
            break
    dims = tuple(range(2, ndim + 2))
    if ndim < 3 and math.prod(extents) <= 4 and c.of([False, False, False, True]):
        return description, (2, *extents), (0, *dims)
    return description, extents, dims


def settings(first: int, count: int) -> None:
    """Draw networks, compare each with one process, and print the counts."""
    import linop
    from linop.strategies.space import halos
    from support.strategies.spatial import TOLERANCE, compared
    from support.strategies.spatial_networks import build

    warnings.simplefilter("ignore")
    operations: Counter[str] = Counter()
    grids: Counter[int] = Counter()
    wrong, worst, begin = [], 0.0, time.perf_counter()
    for number in range(first, first + count):
        description, extents, dims = drawn(number)
        halos.LARGE = 0 if number % 2 else 1 << 15  # both ways of halos
        net, inputs = build(description)
        workers = math.prod(extents)
        try:
            found = linop.launch(
                lambda b, n=net, x=inputs, e=extents, d=dims: compared(b, n, x, e, d), workers
            )
            error, what = max(found)
        except Exception as problem:
            error, what = math.inf, f"{type(problem).__name__}: {problem}"[:300]
        operations.update(name for name, _ in description[2])
        grids[workers] += 1
        worst = max(worst, error)
        if not error <= TOLERANCE:
            wrong.append(number)
            print(f"{number}: {error:.1e} {what}; {extents} {dims} {description}", flush=True)
    took = time.perf_counter() - begin
    print(
        f"settings {first}..{first + count - 1}: {count} drawn, {count - len(wrong)} equal one "
        f"process to {TOLERANCE:g} of the largest entry, {len(wrong)} not: {wrong}; the largest "
        f"difference {worst:.1e}; {took:.0f} s"
    )
    print(f"operations: {dict(operations.most_common())}")
    print(f"workers: {dict(sorted(grids.items()))}")


# Ranks


def ranks(count: int, task: str, case: str, allocator: str = "default") -> list[Any]:
    """The output of the ranks of a job, of one thread each, by rank."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ALLOCATORS[allocator]
    command = ["mpiexec", "-n", str(count), sys.executable, __file__, "rank", task, "--case", case]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [json.loads(x[5:]) for x in done.stdout.splitlines() if x.startswith("@rank")]
    if len(lines) != count:
        raise SystemExit(f"{task} on {count} ranks failed:\n{done.stderr[-3000:]}")
    return [value for _, value in sorted(lines)]


def on_rank(task: str, case: str, repeats: int = 5) -> None:
    """The task of one rank of a job."""
    from linop.backends import get, use
    from linop.strategies import Mesh, spatial

    torch.set_num_threads(1)
    net, x = _network(case)
    backend = get("mpi")
    with use(backend):
        if task == "halves":
            x = x.chunk(2, 2)[0].clone()
        elif (backend.workers or 1) > 1:
            net = spatial(net, Mesh(backend, x=backend.workers)["x"], (2,))
            x = net.cut(net.take(x).block.clone(), x.shape)
        found = _peak(net, x) if task == "memory" else _times(net, x, repeats)
    print(f"@rank{json.dumps([backend.worker, found])}", flush=True)


def _step(net: Any, x: Any) -> None:
    net(x).square().mean().backward()


def _times(net: Any, x: Any, repeats: int) -> list[float]:
    took = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        _step(net, x)
        took.append(time.perf_counter() - begin)
        for p in net.parameters():
            p.grad = None
    return took[1:]


def processor(case: str, repeats: int = 4) -> float:
    """Seconds of its processor that a step takes each of two workers that are threads, over those
    of one process; the smallest of some steps. What other programs take does not count."""
    import linop
    from linop.strategies import Mesh, spatial

    net, x = _network(case)

    def main(backend: Any) -> float:
        mine: Any = net
        if backend.workers == 2:
            mine = spatial(copy.deepcopy(net), Mesh(backend, x=2)["x"], (2,))
        took = []
        for _ in range(repeats + 1):
            begin = time.thread_time()
            _step(mine, x)
            took.append(time.thread_time() - begin)
        return min(took[1:])

    (alone,) = linop.launch(main, 1)
    return max(linop.launch(main, 2)) / alone


def _network(case: str) -> tuple[Any, Any]:
    from support.models.unets import UNet

    c = CASES[case]
    torch.manual_seed(0)
    if "width" not in c:
        from support.models.packages import torchvision

        torchvision()
        from torchvision.models import resnet18

        return resnet18(), torch.randn(c["batch"], 3, c["size"], c["size"])
    net = UNet(c["ndim"], 3, 2, c["width"], c["depth"])
    return net, torch.randn(c["batch"], 3, *[c["size"]] * c["ndim"])


def _peak(net: Any, x: Any) -> float:
    """Bytes of memory that a step takes beyond what the process has before it."""
    for _ in range(2):
        _step(net, x)
    gc.collect()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    _step(net, x)
    return _status("VmHWM") - before


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * float(line.split()[1]) for line in lines if line.startswith(key))


def memory() -> None:
    """Print the table of peaks."""
    print("| step of | one process | 2 workers | 1/2 | 4 workers | 1/4 |")
    print("| --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        one = ranks(1, "memory", case, "gives back")[0]
        row = [f"{one / 2**20:.0f} MiB"]
        for count in (2, 4):
            most = max(ranks(count, "memory", case, "gives back"))
            row += [f"{most / 2**20:.0f} MiB", f"{most / one:.3f}"]
        print(f"| {case} | {' | '.join(row)} |", flush=True)


def times() -> None:
    """Print the table of times. Runs of one process, of two ranks, and of two processes with half
    an image each and no message, the machine's floor, take turns."""
    print(f"load: {os.getloadavg()}")
    print("| step of | memory | one process, s | 2 ranks | ratio | floor | processor's |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        for allocator in ("default", "keeps"):
            alone: list[float] = []
            both: list[float] = []
            halves: list[float] = []
            for _ in range(2):
                alone += ranks(1, "time", case, allocator)[0]
                for task, found in (("time", both), ("halves", halves)):
                    found += map(max, zip(*ranks(2, task, case, allocator), strict=True))
            one, two, half = map(statistics.median, (alone, both, halves))
            cells = [
                case,
                allocator,
                *(f"{min(t):.3f}, {statistics.median(t):.3f}, {max(t):.3f}" for t in (alone, both)),
                f"{two / one:.2f}",
                f"{half / one:.2f}",
                f"{processor(case):.2f}" if allocator == "default" else "",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


# DTensor

CONVOLUTIONS: list[dict[str, Any]] = [
    {"padding": 1},
    {"padding": 0},
    {"padding": 1, "stride": 2},
    {"padding": 2, "dilation": 2},
    {"padding": 1, "groups": 2},
    {"padding": "same"},
    {"padding": 1, "padding_mode": "circular"},
    {"padding": 1, "padding_mode": "reflect"},
]


def _outcomes() -> Iterator[tuple[int, Any, torch.Tensor]]:
    for k, options in enumerate(CONVOLUTIONS):
        torch.manual_seed(k)
        net = torch.nn.Conv2d(4, 4, 3, **options, dtype=torch.float64)
        yield k, net, torch.randn(2, 4, 8, 8, dtype=torch.float64)


def _dtensor(rank: int, port: int, queue: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))
    for k, net, x in _outcomes():
        expected = net(x)
        try:
            made = distribute_module(copy.deepcopy(net), mesh)
            y: Any = made(distribute_tensor(x, mesh, [Shard(2)]))
            assert isinstance(y, DTensor)
            whole = y.full_tensor()
            if whole.shape != expected.shape:
                said = f"wrong: shape {tuple(whole.shape)}, {tuple(expected.shape)} expected"
            else:
                error = float((whole - expected).abs().max())
                said = "right" if error < 1e-12 else f"wrong by {error:.1e}"
            said += f"; labelled {y.placements[0]}" * (said != "right")
        except Exception as problem:
            said = f"raises {type(problem).__name__}: {str(problem).splitlines()[0][:90]}"
        if rank == 0:
            queue.put((k, said))
    dist.barrier()
    dist.destroy_process_group()


def dtensor() -> None:
    """Print what DTensor and spatial make of convolutions of images whose rows are cut."""
    import linop
    from support.strategies.spatial import compared

    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    port = 20000 + os.getpid() % 20000
    workers = [context.Process(target=_dtensor, args=(k, port, queue)) for k in range(2)]
    for worker in workers:
        worker.start()
    found = dict(queue.get(timeout=120) for _ in CONVOLUTIONS)
    for worker in workers:
        worker.join()
    print("| Conv2d(4, 4, 3, …), rows cut in two | DTensor | spatial |")
    print("| --- | --- | --- |")
    for k, net, x in _outcomes():
        error, _ = max(linop.launch(lambda b, n=net, x=x: compared(b, n, [x], (2,), (2,)), 2))
        options = ", ".join(f"{key}={value!r}" for key, value in CONVOLUTIONS[k].items())
        print(f"| `{options}` | {found[k]} | output and gradients within {error:.0e} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["settings", "memory", "time", "dtensor", "rank"])
    parser.add_argument("argument", nargs="?", default="1000")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", default="")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "settings":
        settings(given.first, int(given.argument))
    elif given.what == "rank":
        on_rank(given.argument, given.case)
    else:
        {"memory": memory, "time": times, "dtensor": dtensor}[given.what]()


if __name__ == "__main__":
    main()
