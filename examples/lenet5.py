"""LeNet-5 on four workers, as in the paper's appendix C (figure C10, table 1), and its sequential
twin, trained on handwritten digits.

    python examples/lenet5.py                     # four threads
    mpiexec -n 4 python examples/lenet5.py        # four ranks
    python examples/lenet5.py --sequential

The network is given partitions: there is no communication in this file, and no backward code. It
needs the extra `examples`.
"""

from __future__ import annotations

import json
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from rich.progress import Progress
from torch import nn

import linop
from linop import Partition
from linop.layers import Conv2d, Linear, MaxPool2d, Repartition

sys.path.insert(0, str(Path(__file__).parent))
import handwritten

WORKERS = 4
Data = tuple[torch.Tensor, torch.Tensor]
"""Images of shape (n, 1, 28, 28), and their labels."""


def sequential() -> nn.Module:
    """LeNet-5 in torch."""
    layers: dict[str, nn.Module] = {
        "C1": nn.Conv2d(1, 6, 5, padding=2),
        "C1_relu": nn.ReLU(),
        "S2": nn.MaxPool2d(2),
        "C3": nn.Conv2d(6, 16, 5),
        "C3_relu": nn.ReLU(),
        "S4": nn.MaxPool2d(2),
        "flatten": nn.Flatten(),
        "C5": nn.Linear(400, 120),
        "C5_relu": nn.ReLU(),
        "F6": nn.Linear(120, 84),
        "F6_relu": nn.ReLU(),
        "Output": nn.Linear(84, 10),
    }
    return nn.Sequential(OrderedDict(layers))


def distributed() -> nn.Module:
    """LeNet-5 on four workers, its parameters named as those of `sequential`. Worker 0 passes the
    images, (batch, 1, 28, 28), and gets the scores, (batch, 10); the others pass and get
    zero-volume tensors."""
    one = Partition((1, 1))
    image = Partition((1, 1, 2, 2))  # split in height and width
    channels = Partition((1, 2, 1, 1))  # split in channels: in features, when flattened
    x, y = Partition((1, 2), [0, 1]), Partition((1, 2), [0, 2])  # y: the first column of W
    W = Partition((2, 2))
    layers: dict[str, nn.Module] = {
        "scatter": Repartition(Partition((1, 1, 1, 1)), image),
        "C1": Conv2d(image, 1, 6, 5, padding=2),
        "C1_relu": nn.ReLU(),
        "S2": MaxPool2d(image, 2),
        "C3": Conv2d(image, 6, 16, 5),
        "C3_relu": nn.ReLU(),
        "S4": MaxPool2d(image, 2),
        "transpose": Repartition(image, channels),
        "flatten": nn.Flatten(),
        "C5": Linear(x, 400, 120, P_y=y, P_W=W),
        "C5_relu": nn.ReLU(),
        "C5_transpose": Repartition(y, x),
        "F6": Linear(x, 120, 84, P_y=y, P_W=W),
        "F6_relu": nn.ReLU(),
        "F6_transpose": Repartition(y, x),
        "Output": Linear(x, 84, 10, P_y=y, P_W=W),
        "gather": Repartition(y, one),
    }
    return nn.Sequential(OrderedDict(layers))


def digits() -> tuple[Data, Data]:
    """The digits of scikit-learn, enlarged to 24x24 with a margin of 2; two parts."""
    train, test = handwritten.digits()
    return _tensors(train, 3, 2), _tensors(test, 3, 2)


def mnist() -> tuple[Data, Data]:
    """MNIST, for training and for testing."""
    train, test = handwritten.mnist()
    return _tensors(train), _tensors(test)


def _tensors(data: handwritten.Images, enlarged: int = 1, margin: int = 0) -> Data:
    large = np.kron(data.images, np.ones((enlarged, enlarged), np.float32))
    around = (margin, margin)
    images = torch.tensor(np.pad(large, ((0, 0), around, around)))[:, None]
    return images, torch.tensor(data.labels)


def held(data: Data, root: bool, dtype: torch.dtype) -> Data:
    """A worker's share of the data: all images on worker 0, zero-volume images (n, 0) on others."""
    images, labels = data
    return (images if root else images.flatten(1)[:, :0]).to(dtype), labels


def batches(n: int, batch: int, key: tuple[int, ...] | None = None) -> list[np.ndarray]:
    """Indices of the samples of each batch, shuffled by the key, equally on all workers; in order
    without a key. An incomplete last batch is dropped."""
    order = np.arange(n) if key is None else np.random.default_rng(key).permutation(n)
    return np.split(order[: n - n % batch], n // batch)


def steps(model: nn.Module, optimizer: Any, data: Data, order: list[np.ndarray]) -> Iterator[float]:
    """Train on the batches in order; the loss of each, which is 0 on workers without scores."""
    images, labels = data
    for chosen in order:
        optimizer.zero_grad()
        y = model(images[chosen])
        # Workers without output run backward too: its data movement is collective.
        loss = nn.functional.cross_entropy(y, labels[chosen]) if y.numel() else y.sum()
        loss.backward()
        optimizer.step()
        yield loss.item()


@torch.no_grad()
def accuracy(model: nn.Module, data: Data, batch: int) -> float:
    """Fraction of the images whose label has the highest score; 0 on workers without scores."""
    images, labels = data
    right = []
    for chosen in batches(len(labels), batch):
        y = model(images[chosen])
        if y.numel():
            right.append((y.argmax(1) == labels[chosen]).double().mean().item())
    return float(np.mean(right)) if right else 0.0


History = dict[str, list[float]]
"""The loss of each step; the accuracy and the seconds of each epoch."""


def beside(checkpoint: Path) -> Path:
    """Path of the history that belongs to a checkpoint of model and optimizer."""
    return checkpoint.with_suffix(".json")


def draw(history: History, file: Path) -> None:
    """Plot losses and accuracies to a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.semilogy(history["losses"], linewidth=0.8)
    left.set(xlabel="step", ylabel="loss")
    epochs = range(1, len(history["accuracies"]) + 1)
    right.plot(epochs, [100 * a for a in history["accuracies"]], "o-")
    right.set(xlabel="epoch", ylabel="test accuracy in %")
    figure.savefig(file, dpi=150)


def main(
    sequential_: Annotated[bool, typer.Option("--sequential", help="torch alone.")] = False,
    epochs: Annotated[int, typer.Option(help="How often all images are seen.")] = 10,
    batch: Annotated[
        int | None, typer.Option(help="Images in a step: 256 of MNIST, 32 of the digits.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the parameters and the order.")] = 0,
    data: Annotated[Literal["digits", "mnist"], typer.Option()] = "digits",
    dtype: Annotated[Literal["float32", "float64"], typer.Option()] = "float32",
    checkpoint: Annotated[Path | None, typer.Option(help="Written after every epoch.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the checkpoint.")] = False,
    plot: Annotated[Path | None, typer.Option(help="For a picture.")] = None,
    record: Annotated[Path | None, typer.Option(help="For all losses, in JSON.")] = None,
) -> None:
    """Train LeNet-5 on four workers, or sequentially."""
    if resume and checkpoint is None:
        raise typer.BadParameter("--resume goes on from --checkpoint FILE; none is given")
    torch.set_num_threads(1)  # the workers share the cores
    sets, size = (digits(), batch or 32) if data == "digits" else (mnist(), batch or 256)

    def program(root: bool) -> None:
        torch.manual_seed(seed)
        model = (sequential() if sequential_ else distributed()).to(getattr(torch, dtype))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
        train, test = (held(part, root, getattr(torch, dtype)) for part in sets)
        history: History = {"losses": [], "accuracies": [], "seconds": []}
        if resume:
            linop.layers.load(model, checkpoint, optimizer)
            history = json.loads(beside(checkpoint).read_text())
        done = len(history["accuracies"])
        with Progress(disable=not root) as progress:
            bar = progress.add_task("steps", total=(epochs - done) * (len(train[1]) // size))
            for epoch in range(done, epochs):
                start = time.perf_counter()
                order = batches(len(train[1]), size, (seed, epoch))
                for loss in steps(model, optimizer, train, order):
                    history["losses"].append(loss)
                    progress.advance(bar)
                history["seconds"].append(time.perf_counter() - start)
                history["accuracies"].append(accuracy(model, test, size))
                if root:
                    right = history["accuracies"][-1]
                    progress.print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {right:.2%}")
                if checkpoint:
                    linop.layers.save(model, checkpoint, optimizer)
                if root and checkpoint:
                    beside(checkpoint).write_text(json.dumps(history))
        if root and record:
            record.write_text(json.dumps(history))
        if root and plot:
            draw(history, plot)

    if sequential_:
        program(root=True)
    else:
        linop.launch(lambda backend: program(backend.worker == 0), WORKERS)


if __name__ == "__main__":
    typer.run(main)
