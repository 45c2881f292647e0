"""A byte-level language model trained as a pipeline, under several schedules, or by one process: a
transformer of about a million parameters, on the sources of Python's standard library.

    python examples/language_model.py --schedule 1f1b            # two threads
    mpiexec -n 4 python examples/language_model.py --schedule gpipe
    python examples/language_model.py --schedule pipedream --steps 100

It needs the extra `examples`.
"""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from torch.nn import functional

import linop
from linop import schedules
from linop.backends import in_mpi_job, in_torch_job
from linop.errors import ArgumentError
from linop.strategies import Pipeline, split

BYTES, LENGTH, WIDTH, HEADS, BLOCKS = 256, 64, 144, 4, 4
CUTS = {1: [], 2: ["3"], 3: ["2", "4"], 4: ["2", "3", "4"]}
"""By number of stages: the submodules that stages after the first begin with."""
UPDATES = 10
"""Updates in a run of a schedule without flush."""


class Embedding(nn.Module):
    """Bytes (batch, length) to vectors (batch, length, width), with their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.bytes(text) + self.positions.weight[: text.shape[1]]
        return x


class Block(nn.Module):
    """Attention to what comes before, and a perceptron, each added to its normalised argument."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.before_perceptron = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.before_attention(x)).view(batch, length, 3, HEADS, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))
        z: torch.Tensor = x + self.down(functional.gelu(self.up(self.before_perceptron(x))))
        return z


def blocks(seed: int = 0) -> nn.Sequential:
    """The network: an embedding, blocks, and a linear layer that scores the next byte."""
    torch.manual_seed(seed)
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES))
    return nn.Sequential(Embedding(), *(Block() for _ in range(BLOCKS)), head)


def loss(scores: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """The mean over bytes of minus the logarithm of their probability."""
    return functional.cross_entropy(scores.flatten(0, 1), text.flatten())


def text(seed: int = 0) -> torch.Tensor:
    """The modules of Python's standard library, in an order drawn by a seed, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(seed).shuffle(files)
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def batches(
    source: torch.Tensor, batch: int, steps: int, seed: int = 0, length: int = LENGTH
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Windows of the text, (batch, length), and the bytes that follow each of theirs."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        at = torch.randint(len(source) - length - 1, (batch,), generator=draw).tolist()
        window = torch.stack([source[k : k + length + 1] for k in at]).long()
        yield window[:, :-1], window[:, 1:]


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def schedule(name: str, workers: int, micro_batches: int) -> tuple[schedules.Schedule, int]:
    """A schedule of one stage a worker, two if interleaved, and the number of updates in
    a run of it. Each is of `micro_batches` micro-batches, but in PipeDream, of one."""
    if name == "pipedream":
        return schedules.pipedream(workers, UPDATES), UPDATES
    if name == "pipedream-2bw":
        return schedules.pipedream_2bw(workers, micro_batches, UPDATES), UPDATES
    stages = 2 * workers if name == "interleaved-1f1b" else workers
    return schedules.GENERATORS[name](stages, micro_batches), 1


def alone(net: nn.Sequential, batch: int, updates: int, micro_batches: int) -> Iterator[Any]:
    """Losses of one worker that adds the gradients of micro-batches in order."""
    adam = optimizer(net.parameters())
    for x, t in batches(text(), batch, updates):
        adam.zero_grad()
        total: Any = 0
        for part, target in zip(x.chunk(micro_batches), t.chunk(micro_batches), strict=True):
            value = loss(net(part), target) * (len(part) / batch)
            value.backward()
            total = total + value.detach()
        adam.step()
        yield total


def in_pipeline(
    backend: Any, net: nn.Sequential, name: str, batch: int, updates: int, micro_batches: int
) -> Iterator[Any]:
    """Losses of each run of the schedule, on the last worker; None on others. Collective."""
    table, once = schedule(name, backend.workers, micro_batches)
    if table.stages not in CUTS:
        raise ArgumentError(f"{name}: at most {max(CUTS)} stages expected, given {table.stages}")
    pipe = Pipeline(
        split(net, CUTS[table.stages]),
        table,
        loss,
        reduction="mean",
        optimizer=optimizer,
        backend=backend,
    )
    for x, t in batches(text(), batch * once, updates // once):
        yield pipe.step(x, t)


def main(
    name: Annotated[str, typer.Option("--schedule", help="Or 'alone': one process.")] = "1f1b",
    workers: Annotated[int | None, typer.Option(help="[2 threads, or all ranks]", min=1)] = None,
    steps: Annotated[int, typer.Option(min=1, help="Updates.")] = 300,
    batch: Annotated[int, typer.Option(min=1, help="Rows of an update.")] = 16,
    micro_batches: Annotated[int, typer.Option(min=1, help="Of an update.")] = 4,
    losses: Annotated[Path | None, typer.Option(help="A file for all losses.")] = None,
) -> None:
    """Train, and print losses."""
    if name not in (known := ["alone", *schedules.GENERATORS]):
        raise ArgumentError(f"schedule: expected one of {', '.join(known)}, given {name!r}")

    net = blocks()  # once for all threads: they share torch's generator

    def program(backend: Any) -> None:
        found: list[float] = []
        runs = (
            alone(net, batch, steps, micro_batches)
            if name == "alone"
            else in_pipeline(backend, net, name, batch, steps, micro_batches)
        )
        for run in runs:
            if backend.worker == backend.workers - 1:
                before = len(found) // 20
                found += run.detach().reshape(-1).tolist()
                if len(found) // 20 > before:
                    recent = sum(found[-20:]) / 20
                    print(f"{name}: {len(found)} updates, loss {recent:.4f}", flush=True)
        if losses is not None and found:
            losses.write_text(json.dumps(found))

    in_job = in_mpi_job() or in_torch_job()
    linop.launch(program, workers or (None if in_job else 1 if name == "alone" else 2))


if __name__ == "__main__":
    typer.run(main)
