"""The U-Net of examples/ in float64 beside its sequential twin: relative differences, and the time
of a step.

    python benchmarks/layers/unet.py            # starts 4 ranks; a table in Markdown

A difference is the largest of any element on any rank, over the twin's largest element, both in
absolute value.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout is measured, whatever is installed

from benchmarks.harness.jobs import show  # noqa: E402

EXAMPLE = ROOT / "examples/unet3d.py"
CASES = [((2, 2, 1), (16, 16, 20)), ((1, 1, 4), (16, 16, 20)), ((2, 2, 1), (12, 20, 4))]
CASES += [((1, 1, 4), (8, 4, 12))]
"""Grids, and shapes of an image. In the last two, at the lowest level, the halo is as wide as the
neighbour's block, or a block is empty."""
BATCH = 2
GRADIENTS = "scores", "gradient of the images", "of the parameters"


def main(
    steps: Annotated[int, typer.Option(help="Of Adam.")] = 20,
    rounds: Annotated[int, typer.Option(help="Steps that are timed, of each side.")] = 15,
) -> None:
    """Measure and print."""
    after = f"after {steps} steps: scores", "parameters", "sequential step", "on 4 ranks"
    show(4, ("grid", "image", *GRADIENTS, *after), measure, steps, rounds)


def measure(comm: Any, steps: int, rounds: int) -> Iterator[Sequence[str]]:
    """Program of a rank: rows of the table."""
    import torch

    torch.set_num_threads(1)  # the ranks share the cores
    for grid, shape in CASES:
        cells = [f"{worst:.1e}" for worst in differences(comm, grid, shape, steps)]
        cells += [f"{1000 * t:.0f} ms" for t in step_times(comm, grid, shape, rounds)]
        yield "×".join(map(str, grid)), "×".join(map(str, shape)), *cells


def differences(comm: Any, grid: Any, shape: Any, steps: int) -> Iterator[float]:
    """Differences of scores, and of gradients of images and parameters, before training; of scores,
    and of parameters with buffers, after it. Collective."""
    import torch
    from mpi4py import MPI

    def worst(pairs: list[tuple[Any, Any]]) -> float:
        found = [
            float((ours - whole[here]).detach().abs().max() / whole.detach().abs().max())
            for ours, whole, here in pairs
            if ours.numel()
        ]
        return float(comm.allreduce(max(found, default=0.0), MPI.MAX))

    model, twin, (images, inside), here = networks(grid, shape, comm.rank)
    weights = torch.randn(images.shape, dtype=images.dtype)
    whole, x = images.clone().requires_grad_(), images[here].requires_grad_()
    wanted, y = twin(whole), model(x)
    wanted.backward(weights)
    y.backward(weights[here])
    yield worst([(y, wanted, here)])
    yield worst([(x.grad, whole.grad, here)])
    yield worst([(a.grad, b.grad, at) for a, b, at in state(model, twin) if b.grad is not None])
    voxels = images.numel()
    ours = train(model, images[here], inside[here], voxels)
    theirs = train(twin, images, inside, voxels)
    for _ in range(steps):
        y, wanted = ours(), theirs()
    yield worst([(y, wanted, here)])
    yield worst(state(model, twin))


def step_times(comm: Any, grid: Any, shape: Any, rounds: int) -> list[float]:
    """Median seconds of a sequential step on rank 0, and of a distributed step; they alternate.
    Collective."""
    model, twin, (images, inside), here = networks(grid, shape, comm.rank)
    voxels = images.numel()
    sides = [train(twin, images, inside, voxels), train(model, images[here], inside[here], voxels)]
    if comm.rank:
        sides[0] = lambda: None
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for side, seconds in zip(sides, times, strict=True):
            comm.Barrier()
            begin = time.perf_counter()
            side()
            comm.Barrier()
            seconds.append(time.perf_counter() - begin)
    return [statistics.median(seconds) for seconds in times]


def networks(grid: Any, shape: Any, worker: int) -> tuple[Any, Any, Any, Any]:
    """The network, its twin, (images, masks) as `blobs` gives them, and the slices of this worker's
    block."""
    import torch

    from linop import Partition, TensorSpace

    P_x = Partition((1, 1, *grid))
    made = []
    for where in (P_x, None):
        torch.manual_seed(0)
        made.append(example().UNet(where).double())
    batch = example().blobs(shape, BATCH, 1)
    return *made, batch, TensorSpace(batch[0].shape, P_x).slices(worker)


def train(model: Any, images: Any, inside: Any, voxels: int) -> Callable[[], Any]:
    """Function that trains a model for one step on its block of a batch, and returns its scores.

    Args:
        voxels: number of voxels of the whole batch.
    """
    optimizer = example().optimizer_of(model)
    return lambda: example().step(model, optimizer, images, inside, voxels)[0]


def state(model: Any, twin: Any) -> list[tuple[Any, Any, Any]]:
    """Parameters and buffers: this worker's block, the twin's whole tensor, and the slices of the
    block in it."""
    wholes = dict(twin.named_parameters()) | dict(twin.named_buffers())
    return [
        (getattr(layer, name), wholes[f"{path}.{name}"], space.slices(layer.worker))
        for path, layer in model.named_modules()
        for name, space in getattr(layer, "spaces", {}).items()
        if getattr(layer, name) is not None and f"{path}.{name}" in wholes
    ]


def example() -> Any:
    """The example's script, imported as a module."""
    if "unet3d" not in sys.modules:
        spec = importlib.util.spec_from_file_location("unet3d", EXAMPLE)
        assert spec is not None and spec.loader is not None
        sys.modules["unet3d"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["unet3d"])
    return sys.modules["unet3d"]


if __name__ == "__main__":
    typer.run(main)
