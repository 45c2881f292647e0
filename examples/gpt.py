"""A byte-level GPT of about five million parameters under strategies of data, tensor and sequence
parallel training, and of memory, beside one process; on the sources of Python's standard library.

    python examples/gpt.py                                # one process
    python examples/gpt.py --strategy tp                  # four threads: dp 2 × tp 2
    mpiexec -n 4 python examples/gpt.py --strategy zero3 --steps 500

All strategies but `reversible` train one network, and their losses are those of one process;
`reversible` trains another, whose twin that stores everything is `stored`. `accumulated` is one
process that adds the gradients of four micro-batches: in the order of `dp` and `zero3`, of which it
is the twin to the last bit.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import nn
from torch.nn import functional

import linop
from linop import COPIES, REPLICATED
from linop.backends import in_mpi_job, in_torch_job, use
from linop.errors import ArgumentError
from linop.strategies import (
    ColwiseParallel,
    CrossEntropyLoss,
    DataParallel,
    Mesh,
    PrepareModuleInput,
    Reversible,
    RowwiseParallel,
    SequenceParallel,
    checkpoint,
    fully_shard,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).parent))
import language_model
from language_model import BYTES


@dataclass(frozen=True)
class Size:
    """Of the network: features, heads of attention, blocks, and bytes of a text."""

    width: int = 256
    heads: int = 8
    blocks: int = 6
    length: int = 64


# The network


class Attention(nn.Module):
    """Causal self-attention. It knows the width of a head, and not how many there are."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = size.width // size.heads
        self.q, self.k, self.v, self.o = (nn.Linear(size.width, size.width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        z: torch.Tensor = self.o(y.transpose(1, 2).flatten(2))
        return z


class Perceptron(nn.Module):
    """Four times as wide inside."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(functional.gelu(self.up(x)))
        return y


class Block(nn.Module):
    """Attention f and a perceptron g, each of its normalised argument, and added to it."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f, self.g = f, g

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.f(x)
        y: torch.Tensor = x + self.g(x)
        return y


class Stored(Block):
    """The result of `Reversible`, with all that autograd keeps."""

    def forward(self, pair: Any) -> Any:
        y = pair[0] + self.f(pair[1])
        return y, pair[1] + self.g(y)


class GPT(nn.Module):
    """Bytes (batch, length) to scores of the next byte (batch, length, BYTES). The embedding is the
    last layer's weight, too.

    Args:
        kind: of the blocks: `Block`, or, of pairs, `Stored` or `Reversible`.
    """

    def __init__(self, size: Size = Size(), kind: Callable[..., nn.Module] = Block) -> None:
        super().__init__()
        self.words = nn.Embedding(BYTES, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.start = nn.Identity()
        self.blocks = nn.Sequential(
            *(
                kind(
                    *(
                        nn.Sequential(OrderedDict(norm=nn.LayerNorm(size.width), inner=inner(size)))
                        for inner in (Attention, Perceptron)
                    )
                )
                for _ in range(size.blocks)
            )
        )
        self.pairs = kind is not Block
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, BYTES, bias=False)
        for embedding in (self.words, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.words.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.start(self.words(text) + self.positions(torch.arange(text.shape[1])))
        if self.pairs:
            x = sum(self.blocks((x, x)))
        else:
            x = self.blocks(x)
        y: torch.Tensor = self.head(self.norm(x))
        return y


# Strategies


class Run(NamedTuple):
    """A network on this worker, and its part of a batch.

    Attributes:
        net: called with rows of text.
        loss: mean over the rows, of scores and the bytes that follow.
        total: the sum over the workers of the axis of data.
        part, parts: this worker's of the rows' parts.
    """

    net: nn.Module
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    total: Callable[[torch.Tensor], torch.Tensor]
    part: int = 0
    parts: int = 1

    def step(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Loss of the whole batch, after backward. Each worker's term of it is the mean over
        its rows, times their share."""
        rows, wanted = (one.tensor_split(self.parts)[self.part] for one in (x, target))
        term = self.loss(self.net(rows), wanted) * (len(rows) / len(x))
        term.backward()
        return self.total(term.detach())


class Accumulated(Run):
    """All parts of the rows, as micro-batches one after the other."""

    def step(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        first, *others = (Run(*self[:3], k, self.parts).step(x, target) for k in range(self.parts))
        return sum(others, first)


def plan(size: Size) -> dict[str, Any]:
    """Megatron's, with the sequence split between blocks."""
    heads = {"heads": size.heads}
    return {
        "words": RowwiseParallel(),
        "start": SequenceParallel(input_layouts=REPLICATED),
        "blocks.*.[fg].norm": SequenceParallel(),
        "blocks.*.f.inner": PrepareModuleInput(1, COPIES),
        "blocks.*.f.inner.[qkv]": ColwiseParallel(COPIES, **heads),
        "blocks.*.f.inner.o": RowwiseParallel(output_layouts=1, **heads),
        "blocks.*.g.inner.up": ColwiseParallel(1),
        "blocks.*.g.inner.down": RowwiseParallel(output_layouts=1),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(1),
    }


STRATEGIES = {
    "sequential": 1,
    "accumulated": 1,
    "dp": 4,
    "zero3": 4,
    "tp": 4,
    "checkpoint": 1,
    "stored": 1,
    "reversible": 1,
}
"""Workers of each by default."""


def made(strategy: str, backend: Any, net: GPT, size: Size) -> Run:
    """A network under a strategy. Collective."""
    mean = language_model.loss
    if strategy in ("dp", "zero3"):
        axis = Mesh(backend, dp=-1)["dp"]
        if strategy == "dp":
            return Run(DataParallel(net, axis), mean, total(axis), axis.index, axis.size)
        for block in net.blocks:
            fully_shard(block, axis)
        return Run(fully_shard(net, axis), mean, total(axis), axis.index, axis.size)
    if strategy == "tp":
        mesh = Mesh(backend, dp=-1, tp=2)
        axis, tp = mesh["dp"], mesh["tp"]
        copies = DataParallel(parallelize_module(net, tp, plan(size)), axis)
        entropy = CrossEntropyLoss(tp)

        def loss(scores: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            value: torch.Tensor = entropy(scores.flatten(0, 1), text.flatten())
            return value

        return Run(copies, loss, total(axis), axis.index, axis.size)
    if strategy == "accumulated":
        return Accumulated(net, mean, lambda value: value, parts=4)
    if strategy == "checkpoint":
        net.blocks = checkpoint(net.blocks)
    return Run(net, mean, lambda value: value)


def total(axis: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The sum over the workers of an axis. Collective."""
    with use(axis.backend):
        add = linop.layers.AllReduce(axis.partition)
    return lambda value: add(value.reshape(1))[0]


def network(strategy: str, size: Size, dtype: torch.dtype, seed: int = 0) -> GPT:
    """The network of a strategy, the same for all but two."""
    kinds: dict[str, Any] = {"stored": Stored, "reversible": Reversible}
    with linop.layers.seeded(seed):
        return GPT(size, kinds.get(strategy, Block)).to(dtype)


def train(
    strategy: str,
    backend: Any,
    size: Size,
    steps: int,
    batch: int,
    dtype: torch.dtype,
    begin: Callable[[Run, torch.optim.Optimizer], int] = lambda run, adam: 0,
) -> Iterator[tuple[Run, torch.optim.Optimizer, float]]:
    """Losses of steps of AdamW, with the run and its optimizer. Collective.

    Args:
        begin: called first; gives the number of steps that were made before.
    """
    run = made(strategy, backend, network(strategy, size, dtype), size)
    adam = language_model.optimizer(run.net.parameters())
    source, done = language_model.text(), begin(run, adam)
    batches = language_model.batches(source, batch, steps, length=size.length)
    for x, target in islice(batches, done, None):
        adam.zero_grad()
        loss = run.step(x, target)
        adam.step()
        yield run, adam, loss.item()


def main(
    strategy: Annotated[str, typer.Option(help=f"One of {', '.join(STRATEGIES)}.")] = "sequential",
    workers: Annotated[int | None, typer.Option(help="[by strategy, or all ranks]", min=1)] = None,
    steps: Annotated[int, typer.Option(min=1)] = 100,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 16,
    double: Annotated[bool, typer.Option("--double", help="In float64.")] = False,
    losses: Annotated[Path | None, typer.Option(help="A file for all losses, in JSON.")] = None,
) -> None:
    """Train, and print losses."""
    if strategy not in STRATEGIES:
        raise ArgumentError(f"strategy: one of {', '.join(STRATEGIES)} expected, not {strategy!r}")
    torch.set_num_threads(1)  # the workers share the cores

    def program(backend: Any) -> None:
        found: list[float] = []
        dtype = torch.float64 if double else torch.float32
        for *_, loss in train(strategy, backend, Size(), steps, batch, dtype):
            found.append(loss)
            if backend.worker == 0 and len(found) % 20 == 0:
                recent = sum(found[-20:]) / 20
                print(f"{strategy}: {len(found)} steps, loss {recent:.4f}", flush=True)
        if losses is not None and backend.worker == 0:
            losses.write_text(json.dumps(found))

    in_job = in_mpi_job() or in_torch_job()
    linop.launch(program, workers or (None if in_job else STRATEGIES[strategy]))


if __name__ == "__main__":
    typer.run(main)
