"""Planning time of the first step of a network: a ResNet-18 split in space over 2 × 2 workers.

    python benchmarks/planning/first_step.py [--repeats N] [--size PIXELS]

prints minimum, median and maximum CPU seconds a worker, in Markdown: of the first step (forward and
backward) of each kind, less the median of the same step repeated.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import typer

import linop
from linop import Partition
from linop.backends import Backend
from linop.layers import BatchNorm2d, Conv2d, Linear, MaxPool2d, Repartition

GRID = Partition((1, 1, 2, 2))
WORKERS = 4
AGAIN = 3


class Block(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Two 3 × 3 convolutions with a residual connection."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = Conv2d(GRID, before, after, 3, stride, 1, bias=False)
        self.bn1 = BatchNorm2d(GRID, after)
        self.conv2 = Conv2d(GRID, after, after, 3, 1, 1, bias=False)
        self.bn2 = BatchNorm2d(GRID, after)
        self.past = torch.nn.Sequential()
        if stride != 1 or before != after:
            self.past.append(Conv2d(GRID, before, after, 1, stride, bias=False))
            self.past.append(BatchNorm2d(GRID, after))

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.past(x))


def resnet18(width: int, classes: int = 10) -> Any:
    """He et al., "Deep Residual Learning" (2016), table 1, over channels of `width` and multiples;
    the pooled features, and the scores, are on worker 0."""
    one, alone = Partition((1, 1, 1, 1)), Partition((1, 1))
    blocks: list[Any] = []
    before = width
    for k, after in enumerate((width, 2 * width, 4 * width, 8 * width)):
        blocks += [Block(before, after, 1 + (k > 0)), Block(after, after, 1)]
        before = after
    return torch.nn.Sequential(
        Conv2d(GRID, 3, width, 7, 2, 3, bias=False),
        BatchNorm2d(GRID, width),
        torch.nn.ReLU(),
        MaxPool2d(GRID, 3, 2, 1),
        *blocks,
        Repartition(GRID, one),
        _Pooled(),
        Linear(alone, before, classes, P_W=alone),
    )


class _Pooled(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Mean over space on the worker that holds the tensor; the identity on others."""

    def forward(self, x: Any) -> Any:
        return x.mean((2, 3)) if x.ndim == 4 else x


def step(model: Any, batch: int, size: int, grad: bool) -> None:
    """One forward, and with `grad` one backward, on random images."""
    x = torch.randn(batch, 3, size // 2, size // 2)
    with torch.set_grad_enabled(grad):
        y = model(x)
        if grad:
            y.sum().backward()


def kinds() -> Iterator[tuple[str, int, bool, bool]]:
    """Kinds of steps, in order: name, batch size, True with gradients, True in training mode."""
    yield "first step", 4, True, True
    yield "another batch size", 3, True, True
    yield "under no_grad", 4, False, True
    yield "evaluated under no_grad", 4, False, False
    yield "another batch size, under no_grad", 5, False, False


def planning(backend: Backend, size: int) -> dict[str, float]:
    """CPU seconds that planning takes this worker's thread, by kind of step."""
    torch.manual_seed(1)
    model = resnet18(8)
    found = {}
    for name, batch, grad, training in kinds():
        model.train(training)
        times = []
        for _ in range(1 + AGAIN):
            begun = time.thread_time()
            step(model, batch, size, grad)
            times.append(time.thread_time() - begun)
        found[name] = times[0] - statistics.median(times[1:])
    return found


def main(repeats: Annotated[int, typer.Option(min=1)] = 3, size: int = 64) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {}
    for _ in range(repeats):
        for worker in linop.launch(lambda backend: planning(backend, size), WORKERS, "threads"):
            for name, found in worker.items():
                seconds.setdefault(name, []).append(found)
    print("| step | min s | median s | max s |\n| --- | --- | --- | --- |")
    for name, times in seconds.items():
        numbers = min(times), statistics.median(times), max(times)
        print(f"| {name} | " + " | ".join(f"{t:.3f}" for t in numbers) + " |")


if __name__ == "__main__":
    typer.run(main)
