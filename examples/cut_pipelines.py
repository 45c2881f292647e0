"""LeNet-5 and a small 3-D U-Net as pipelines whose stages are cut over several workers, beside one
process.

    python examples/cut_pipelines.py unet3d                     # four threads
    mpiexec -n 4 python examples/cut_pipelines.py lenet5 --schedule gpipe
    python examples/cut_pipelines.py unet3d --alone

A stage is a function of the partition of its workers, and the edges between stages are operators
between their partitions: there is no communication in this file, and no backward code. LeNet-5
learns handwritten digits, and the U-Net, whose skip connections are edges too, to segment balls in
noise. It needs the extra `examples`.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import typer
from torch import nn
from torch.nn import functional

import linop
from linop import Partition, TensorSpace, layers, schedules
from linop.strategies import Pipeline

sys.path.insert(0, str(Path(__file__).parent))
import lenet5
import unet3d

Tensor = torch.Tensor
Stage = Callable[[Partition | None], nn.Module]
"""Makes a stage for the partition of its workers; for None, the sequential one."""


class Network(NamedTuple):
    """A network in stages.

    Args:
        edges: of the pipeline: the stages that each output goes to.
        workers: of each stage.
        loss: of a block of the output; the loss is the sum of all blocks'.
        reduction: as in `Pipeline`.
        batch: images and targets, by number of the step.
    """

    stages: Sequence[Stage]
    edges: Sequence[tuple[int, ...]]
    workers: Sequence[Partition]
    loss: Callable[[Tensor, Tensor], Tensor]
    reduction: str
    batch: Callable[[int], tuple[Tensor, Tensor]]

    def sequential(self) -> nn.ModuleList:
        """The stages in one process; the keys of its state are those of the pipeline's."""
        return nn.ModuleList([stage(None) for stage in self.stages])

    def pipeline(self, backend: Any, schedule: str, micro_batches: int, **options: Any) -> Pipeline:
        """The stages on their workers."""
        return Pipeline(
            self.stages,
            schedules.GENERATORS[schedule](len(self.stages), micro_batches),
            self.loss,
            reduction=self.reduction,
            edges=self.edges,
            workers=self.workers,
            backend=backend,
            **options,
        )

    def output(self, stages: nn.ModuleList, x: Tensor) -> Tensor:
        """Output of one process: each stage called with the outputs of those before it."""
        found: list[Any] = []
        for s, stage in enumerate(stages):
            given = sorted((a, *k) for a, b, *k in self.edges if b == s)
            inputs = [found[a][k[0]] if k else found[a] for a, *k in given]
            found.append(stage(*inputs or [x]))
        return found[-1]


# LeNet-5: convolutions cut in space, dense layers in features


def features(P: Partition | None) -> nn.Module:
    """Convolutions and pooling, from images (batch, 1, 28, 28) to (batch, 16, 5, 5)."""
    kind, where = (nn, ()) if P is None else (layers, (P,))
    named: dict[str, nn.Module] = {
        "C1": kind.Conv2d(*where, 1, 6, 5, padding=2),
        "C1_relu": nn.ReLU(),
        "S2": kind.MaxPool2d(*where, 2),
        "C3": kind.Conv2d(*where, 6, 16, 5),
        "C3_relu": nn.ReLU(),
        "S4": kind.MaxPool2d(*where, 2),
    }
    return nn.Sequential(OrderedDict(named)).double()


def classifier(P: Partition | None) -> nn.Module:
    """Dense layers, whose weights are cut by input, then by output features. Channels on the second
    axis of the partition are features, when flattened. The first worker gets the scores."""
    if P is not None:
        cut, one = Partition(P.shape[:2], P.workers), Partition((1, 1), P.workers[:1])
        by_input, by_output = (cut, one, cut), (one, cut, cut.T)
    named: dict[str, nn.Module] = {"flatten": nn.Flatten()}
    for name, ins, outs in (("C5", 400, 120), ("F6", 120, 84), ("Output", 84, 10)):
        where = () if P is None else by_output if name == "F6" else by_input
        kind = nn.Linear if P is None else layers.Linear
        named |= {name: kind(*where, ins, outs), f"{name}_relu": nn.ReLU()}
    del named["Output_relu"]
    return nn.Sequential(OrderedDict(named)).double()


def cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Mean over rows, where the scores are."""
    if scores.numel():
        return functional.cross_entropy(scores, labels)
    return scores.sum()


def digits(size: int, k: int) -> tuple[Tensor, Tensor]:
    """A batch of handwritten digits, and their labels."""
    images, labels = lenet5.digits()[0]
    chosen = [n % len(images) for n in range(k * size, (k + 1) * size)]
    return images[chosen].double(), labels[chosen]


# U-Net: the stages of unet3d.UNet, cut in space


class Encoder(nn.Module):
    """First and second level down; returns the input of the bottom, and what each level skips."""

    def __init__(self, P: Partition | None, width: int = 4) -> None:
        super().__init__()
        kind, where = (nn, ()) if P is None else (layers, (P,))
        self.first = unet3d.Block(kind, where, 1, width)
        self.second = unet3d.Block(kind, where, width, 2 * width)
        self.down = kind.MaxPool3d(*where, 2)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = self.first(x)
        second = self.second(self.down(first))
        return self.down(second), second, first


class Bottom(unet3d.Block):
    """The lowest level."""

    def __init__(self, P: Partition | None, width: int = 4) -> None:
        kind, where = (nn, ()) if P is None else (layers, (P,))
        super().__init__(kind, where, 2 * width, 2 * width)
        self.double()


class Decoder(nn.Module):
    """Second and first level up; takes what the encoder skips, and the bottom's output."""

    def __init__(self, P: Partition | None, width: int = 4) -> None:
        super().__init__()
        kind, where = (nn, ()) if P is None else (layers, (P,))
        self.up = kind.Upsample(*where, scale_factor=2, mode="trilinear")
        self.second_up = unet3d.Block(kind, where, 4 * width, width)
        self.first_up = unet3d.Block(kind, where, 2 * width, width)
        self.scores = kind.Conv3d(*where, width, 1, 1)
        self.double()

    def forward(self, second: Tensor, first: Tensor, y: Tensor) -> Tensor:
        y = self.second_up(torch.cat([second, self.up(y)], dim=1))
        y = self.first_up(torch.cat([first, self.up(y)], dim=1))
        return self.scores(y)


def voxels(scores: Tensor, inside: Tensor) -> Tensor:
    """Cross entropy, summed over a worker's voxels."""
    return functional.binary_cross_entropy_with_logits(scores, inside, reduction="sum")


def balls(size: int, shape: unet3d.Shape, k: int) -> tuple[Tensor, Tensor]:
    """A batch of noisy images, and their masks."""
    return unet3d.blobs(shape, size, k)


def lenet(workers: Sequence[Partition] | None = None, size: int = 16) -> Network:
    """LeNet-5 on four workers: three hold the convolutions, one the dense layers."""
    grids = workers or (Partition((1, 1, 3, 1), [0, 1, 2]), Partition((1, 1), [3]))
    return Network(
        [features, classifier], [(0, 1)], grids, cross_entropy, "mean", partial(digits, size)
    )


def unet(
    workers: Sequence[Partition] | None = None, size: int = 4, shape: unet3d.Shape = (16, 16, 20)
) -> Network:
    """The U-Net on four workers: two hold the levels down, one the bottom, one the levels up. The
    edges with numbers are those of the encoder's outputs."""
    ways = Partition((1, 1, 2, 1, 1), [0, 1]), Partition((1,) * 5, [2]), Partition((1,) * 5, [3])
    edges = [(0, 1, 0), (0, 2, 1), (0, 2, 2), (1, 2)]
    stages = [Encoder, Bottom, Decoder]
    return Network(stages, edges, workers or ways, voxels, "sum", partial(balls, size, shape))


def block(whole: Tensor, P: Partition, worker: int) -> Tensor | None:
    """A worker's block of images, or of their targets; None on other workers. Labels are whole on
    all."""
    if worker not in P:
        return None
    return whole if whole.ndim < P.ndim else whole[TensorSpace(whole.shape, P).slices(worker)]


def in_pipeline(
    backend: Any, network: Network, start: Any, schedule: str, micro_batches: int, steps: int
) -> Iterator[Tensor]:
    """Train as a pipeline; a worker's term of the loss of each step, on those of the last stage.

    Args:
        start: state of the sequential network.
    """
    adam = partial(torch.optim.Adam, lr=0.003)
    pipe = network.pipeline(backend, schedule, micro_batches, optimizer=adam)
    pipe.load_state_dict(start)
    first, *_, last = network.workers
    for k in range(steps):
        images, target = network.batch(k)
        yield pipe.step(block(images, first, backend.worker), block(target, last, backend.worker))


def alone(network: Network, net: nn.ModuleList, micro_batches: int, steps: int) -> Iterator[Tensor]:
    """Train in this process, adding the gradients of the micro-batches; the loss of each step."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
    for k in range(steps):
        images, target = network.batch(k)
        total = torch.zeros((), dtype=torch.float64)
        optimizer.zero_grad()
        for x, wanted in zip(
            images.tensor_split(micro_batches), target.tensor_split(micro_batches), strict=True
        ):
            share = len(x) / len(images) if network.reduction == "mean" else 1
            loss = network.loss(network.output(net, x), wanted) * share
            loss.backward()
            total += loss.detach()
        optimizer.step()
        yield total


def main(
    name: Annotated[Literal["lenet5", "unet3d"], typer.Argument()],
    schedule: Annotated[str, typer.Option(help="Of linop.schedules.GENERATORS.")] = "1f1b",
    alone_: Annotated[bool, typer.Option("--alone", help="One process.")] = False,
    steps: Annotated[int, typer.Option(min=1)] = 40,
    micro_batches: Annotated[int, typer.Option(min=1)] = 4,
) -> None:
    """Train, and print losses."""
    torch.set_num_threads(1)  # the workers share the cores
    torch.manual_seed(0)
    network = lenet() if name == "lenet5" else unet()
    net = network.sequential()  # once for all threads: they share torch's generator
    count = network.batch(0)[1].numel()

    def program(backend: Any) -> None:
        if alone_:
            losses = alone(network, net, micro_batches, steps)
        else:
            losses = in_pipeline(backend, network, net.state_dict(), schedule, micro_batches, steps)
        for k, loss in enumerate(losses, 1):
            if backend.worker == backend.workers - 1 and k % 10 == 0:
                each = loss if network.reduction == "mean" else loss / count
                print(f"step {k}: loss {each:.4f}", flush=True)

    linop.launch(program, 1 if alone_ else 4)


if __name__ == "__main__":
    typer.run(main)
