"""ResNet-18 (He et al. 2016) with images cut in rows and columns, beside data parallel: on a mesh
of dp × rows × columns workers; and its sequential twin. It learns handwritten digits.

    python examples/resnet18.py                            # four threads: a grid of 2 × 2
    python examples/resnet18.py --dp 2                     # eight
    mpiexec -n 4 python examples/resnet18.py --width 64    # four ranks, as wide as the paper's
    python examples/resnet18.py --sequential

All are one class, in whose code there is no communication: layers of linop.layers take a partition
as first argument, and are torch.nn's otherwise. The names of parameters are torchvision's. It needs
the extra `examples`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from torch import nn
from torch.nn import functional

import linop
from linop import Partition, TensorSpace
from linop.backends import use
from linop.strategies import DataParallel, Mesh

sys.path.insert(0, str(Path(__file__).parent))
import handwritten


class Block(nn.Module):
    """Two convolutions of 3 × 3, added to the input; it is convolved by 1 × 1 where shapes
    differ."""

    def __init__(self, kind: Any, where: Any, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = kind.Conv2d(*where, inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = kind.BatchNorm2d(*where, outputs)
        self.conv2 = kind.Conv2d(*where, outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = kind.BatchNorm2d(*where, outputs)
        self.downsample = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                kind.Conv2d(*where, inputs, outputs, 1, stride, bias=False),
                kind.BatchNorm2d(*where, outputs),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    """From square images (batch, channels, size, size) to scores (batch, classes).

    Args:
        P: the partition of the images: batch, channels (1), rows, columns. Its first worker gets
            the scores, others zero-volume tensors. None makes the sequential network.
        width: channels of the first stage; 64 in the paper.
        size: rows and columns of an image.
    """

    def __init__(
        self,
        P: Partition | None = None,
        width: int = 64,
        channels: int = 1,
        classes: int = 10,
        size: int = 64,
    ) -> None:
        super().__init__()
        kind, where = (nn, ()) if P is None else (linop.layers, (P,))
        self.conv1 = kind.Conv2d(*where, channels, width, 7, 2, 3, bias=False)
        self.bn1 = kind.BatchNorm2d(*where, width)
        self.maxpool = kind.MaxPool2d(*where, 3, 2, 1)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        for k, (inputs, outputs) in enumerate(itertools.pairwise(widths), start=1):
            first = Block(kind, where, inputs, outputs, 1 if k == 1 else 2)
            setattr(
                self, f"layer{k}", nn.Sequential(first, Block(kind, where, outputs, outputs, 1))
            )
        self.avgpool = kind.AvgPool2d(
            *where, -(-size // 32)
        )  # one pixel, on the grid's first worker
        if P is not None:
            # Features are where the pixel is, of each part of the batch; scores on one worker.
            pixel, one = P[:, :, 0, 0], P[:1, :, 0, 0]
            self.fc = kind.Linear(pixel, 8 * width, classes, P_y=one, P_W=one)
        else:
            self.fc = kind.Linear(8 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(functional.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        scores: torch.Tensor = self.fc(self.avgpool(x).flatten(1))
        return scores


def on_mesh(
    mesh: Mesh, replicas: bool = False, dtype: torch.dtype = torch.float32, **options: Any
) -> nn.Module:
    """The network on a mesh of axes dp, rows and columns. Collective.

    Args:
        replicas: False: one network, whose batch is cut as rows and columns are; batch norms are of
            the global batch. True: `DataParallel` copies of a network that is cut in space; batch
            norms are of their copy's part of the batch, as in torch.
        options: of `ResNet18`.
    """
    dp, space = mesh["dp"], mesh["rows", "columns"]
    samples, rows, columns = mesh.partition.shape
    if not replicas:
        return ResNet18(Partition((samples, 1, rows, columns)), **options).to(dtype)
    with use(space.backend):
        net = ResNet18(Partition((1, 1, rows, columns)), **options).to(dtype)
    # A copy's first worker holds its parameters. Running means are of each copy.
    return DataParallel(net, dp, broadcast_buffers=False) if space.index == 0 else net


def part(images: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """This worker's block of a batch of images."""
    samples, rows, columns = mesh.partition.shape
    P = Partition((samples, 1, rows, columns))
    return images[TensorSpace(images.shape, P).slices(mesh.backend.worker or 0)]


def labels_of(scores: torch.Tensor, labels: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Labels of the samples whose scores this worker has: of all, or of its copy's."""
    rows = TensorSpace((len(labels),), mesh["dp"].partition).slices(mesh["dp"].index)
    return labels[rows] if len(scores) < len(labels) else labels


def loss_of(scores: torch.Tensor, labels: torch.Tensor, samples: int) -> torch.Tensor:
    """A worker's term of the mean over a batch of `samples`. The loss is the sum of the terms, and
    backward from each gives its gradient; those without scores run it, too."""
    if not scores.numel():
        return scores.sum()
    return functional.cross_entropy(scores, labels, reduction="sum") / samples


def step(
    net: nn.Module, images: torch.Tensor, labels: torch.Tensor, mesh: Mesh | None = None
) -> torch.Tensor:
    """A worker's term of the loss of a batch, after backward."""
    scores = net(images if mesh is None else part(images, mesh))
    mine = labels if mesh is None else labels_of(scores, labels, mesh)
    loss = loss_of(scores, mine, len(labels))
    loss.backward()
    return loss.detach()


def batches(batch: int, steps: int, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Handwritten digits, enlarged."""
    images, labels = handwritten.digits()[0]
    whole = functional.interpolate(torch.tensor(images)[:, None], size=size, mode="bilinear")
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(len(labels), (batch,), generator=draw)
        yield whole[chosen], torch.tensor(labels)[chosen]


def main(
    dp: Annotated[int, typer.Option(min=1, help="Parts of the batch.")] = 1,
    grid: Annotated[tuple[int, int], typer.Option(help="Parts of rows and of columns.")] = (2, 2),
    replicas: Annotated[bool, typer.Option(help="Batch norms of each part of the batch.")] = False,
    sequential: Annotated[bool, typer.Option("--sequential", help="torch alone.")] = False,
    width: Annotated[int, typer.Option(min=1, help="Channels of the first stage.")] = 8,
    size: Annotated[int, typer.Option(min=1, help="Rows and columns of an image.")] = 64,
    steps: Annotated[int, typer.Option(min=1)] = 60,
    batch: Annotated[int, typer.Option(min=1)] = 16,
) -> None:
    """Train the network."""
    torch.set_num_threads(1)  # the workers share the cores

    def program(backend: Any) -> None:
        mesh = None if sequential else Mesh(backend, dp=dp, rows=grid[0], columns=grid[1])
        with linop.layers.seeded(0):
            net = (
                ResNet18(width=width, size=size)
                if mesh is None
                else on_mesh(mesh, replicas, width=width, size=size)
            )
        # In a group, since most workers hold no parameters.
        adam = torch.optim.Adam([{"params": net.parameters()}], lr=1e-3)
        with Progress(disable=backend.worker > 0) as progress:
            for k, (images, labels) in enumerate(batches(batch, steps, size), start=1):
                adam.zero_grad()
                loss = step(net, images, labels, mesh)
                adam.step()
                if backend.worker == 0 and k % 10 == 0:
                    what = "of the first part" if replicas else ""
                    progress.print(f"step {k}: loss {what}{loss:.4f}")

    linop.launch(program, 1 if sequential else dp * grid[0] * grid[1])


if __name__ == "__main__":
    typer.run(main)
