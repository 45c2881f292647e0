"""A small 3-D U-Net whose tensors are split in space over four workers, and its sequential twin. It
learns to segment balls in noise.

    python examples/unet3d.py                          # four threads, a grid of 2x2x1
    python examples/unet3d.py --grid 1 1 4
    mpiexec -n 4 python examples/unet3d.py             # four ranks
    python examples/unet3d.py --sequential

Both are one class: layers of linop.layers take a partition as first argument, and are torch.nn's
otherwise. The network's code need not treat halos of different widths, blocks that are shorter than
a halo or empty, or skip connections.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import Progress
from torch import nn

import linop
from linop import Partition, TensorSpace
from linop.layers import AllReduce

Shape = tuple[int, int, int]


class Block(nn.Sequential):
    """Convolution, normalisation, ReLU."""

    def __init__(self, kind: Any, where: tuple[Partition, ...], inputs: int, outputs: int) -> None:
        super().__init__(
            kind.Conv3d(*where, inputs, outputs, 3, padding=1, bias=False),
            kind.BatchNorm3d(*where, outputs),
            nn.ReLU(),
        )


class UNet(nn.Module):
    """U-Net with two levels of down- and upsampling, from images (batch, 1, *shape) to a score for
    each voxel, of the same shape. The extents of `shape` are multiples of 4.

    Args:
        P_x: the partition of input and output; None makes the sequential network.
        width: channels of the first level.
    """

    def __init__(self, P_x: Partition | None = None, width: int = 4) -> None:
        super().__init__()
        kind, where = (nn, ()) if P_x is None else (linop.layers, (P_x,))
        self.down = kind.MaxPool3d(*where, 2)
        self.up = kind.Upsample(*where, scale_factor=2, mode="trilinear")
        self.first = Block(kind, where, 1, width)
        self.second = Block(kind, where, width, 2 * width)
        self.bottom = Block(kind, where, 2 * width, 2 * width)
        self.second_up = Block(kind, where, 4 * width, width)
        self.first_up = Block(kind, where, 2 * width, width)
        self.scores = kind.Conv3d(*where, width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        second = self.second(self.down(first))
        y = self.bottom(self.down(second))
        # Both are in balanced blocks on one grid, so concatenation is local.
        y = self.second_up(torch.cat([second, self.up(y)], dim=1))
        y = self.first_up(torch.cat([first, self.up(y)], dim=1))
        return self.scores(y)


def blobs(shape: Shape, batch: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy images with three balls each, and masks of the voxels in balls (1, else 0); both
    float64, (batch, 1, *shape)."""
    rng = np.random.default_rng(seed)
    at = np.indices(shape)
    inside = np.zeros((batch, 1, *shape))
    for image in inside:
        for _ in range(3):
            centre = rng.uniform(0, shape)[:, None, None, None]
            image[0][((at - centre) ** 2).sum(0) < rng.uniform(3, 6) ** 2] = 1
    return torch.tensor(inside + 0.5 * rng.standard_normal(inside.shape)), torch.tensor(inside)


def part(whole: torch.Tensor, P_x: Partition | None, worker: int) -> torch.Tensor:
    """A worker's block of a tensor; the whole tensor without a partition."""
    return whole if P_x is None else whole[TensorSpace(whole.shape, P_x).slices(worker)]


def loss_of(scores: torch.Tensor, wanted: torch.Tensor, voxels: int) -> torch.Tensor:
    """A worker's term of the mean cross entropy over `voxels` voxels. The loss is the sum of all
    workers' terms; backward from each term gives its gradient, without an all-reduce."""
    total = nn.functional.binary_cross_entropy_with_logits(scores, wanted, reduction="sum")
    return total / voxels


def step(
    model: nn.Module, optimizer: Any, images: torch.Tensor, inside: torch.Tensor, voxels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Train on one batch: a worker's scores, and its term of the loss."""
    optimizer.zero_grad()
    scores = model(images)
    loss = loss_of(scores, inside, voxels)
    loss.backward()
    optimizer.step()
    return scores.detach(), loss.detach()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Adam. Worker 0 holds all parameters, because they are split in no dimension; torch accepts an
    empty list of them on the others if it is in a group."""
    return torch.optim.Adam([{"params": model.parameters()}], lr=0.01)


def main(
    grid: Annotated[tuple[int, int, int], typer.Option(help="Workers along each axis.")] = (
        2,
        2,
        1,
    ),
    sequential: Annotated[bool, typer.Option("--sequential", help="torch alone.")] = False,
    shape: Annotated[tuple[int, int, int], typer.Option(help="Of an image.")] = (16, 16, 20),
    steps: Annotated[int, typer.Option()] = 60,
    batch: Annotated[int, typer.Option(help="Images in a step.")] = 2,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Train the network on new images at every step."""
    torch.set_num_threads(1)  # the workers share the cores

    def program(worker: int, P_x: Partition | None) -> None:
        torch.manual_seed(seed)
        model = UNet(P_x).double()
        total = nn.Identity() if P_x is None else AllReduce(P_x)
        optimizer = optimizer_of(model)
        with Progress(disable=worker > 0) as progress:
            for k in progress.track(range(steps), description="steps"):
                images, inside = (part(t, P_x, worker) for t in blobs(shape, batch, k))
                scores, loss = step(model, optimizer, images, inside, batch * int(np.prod(shape)))
                counts = torch.stack([(scores > 0) * inside, (scores > 0) + inside])
                loss, both, all_ = total(torch.stack([loss, *counts.sum((1, 2, 3, 4, 5))]))
                if worker == 0 and k % 10 == 9:
                    dice = 2 * both / all_
                    progress.print(f"step {k + 1}: loss {loss:.4f}, overlap {dice:.3f}")

    if sequential:
        program(0, None)
    else:
        P_x = Partition((1, 1, *grid))
        linop.launch(lambda backend: program(backend.worker, P_x), len(P_x.workers))


if __name__ == "__main__":
    typer.run(main)
