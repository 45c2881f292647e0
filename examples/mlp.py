"""A multi-layer perceptron trained in parallel, four ways, in NumPy: parameter server, all-reduce,
ring all-reduce, tensor parallel (Wang and Cao, "Data and Model Parallelism in MPI", 2022).

    python examples/mlp.py --strategy ring                       # four threads
    mpiexec -n 4 python examples/mlp.py --strategy tensor        # four ranks
    torchrun --nproc-per-node 4 examples/mlp.py --strategy server

A strategy is a choice of operators: where parameters are held, and how they come to where they are
used. What is sent for the gradient is the adjoint. It needs the extra `examples`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import DTypeLike

import linop
from linop import COPIES, REPLICATED, LinearOperator, Partition, TensorSpace
from linop.backends import in_mpi_job, in_torch_job
from linop.errors import ArgumentError, LinopError, PartitionError
from linop.networks import Map, bias, chain, linear, sigmoid, softmax_cross_entropy

sys.path.insert(0, str(Path(__file__).parent))
import handwritten

Batch = tuple[np.ndarray, np.ndarray]
"""Rows, (batch, inputs), and targets of 0 and 1, (batch, outputs)."""
Arrays = dict[str, np.ndarray]
"""Arrays of regions that a worker holds, by name."""


class Strategy(StrEnum):
    """Distribution of the parameters and of the batch over the workers."""

    SERVER = "server"
    """Parameters on one worker, which broadcasts them; rows of the batch on all."""
    ALL_REDUCE = "all-reduce"
    """Parameters replicated; rows of the batch on all workers."""
    RING = "ring"
    """Parameters in blocks, gathered around a ring; rows of the batch on all workers. Ring
    all-gather and its adjoint, the ring reduce-scatter, are the ring all-reduce."""
    TENSOR = "tensor"
    """Hidden units on workers, in turn the output of a layer and the input of the next; the whole
    batch on all workers."""


@dataclass(frozen=True)
class MLP:
    """A network with its loss.

    Attributes:
        map: from parameters, rows `x` and targets `t` to the loss, the mean over the batch.
        parameters: W0, b0, W1, … where they are held.
        x, t: rows of the batch, (batch, inputs), and targets of 0 and 1, (batch, outputs).
    """

    map: Map
    parameters: tuple[TensorSpace, ...]
    x: TensorSpace
    t: TensorSpace

    def held(self, arrays: Sequence[np.ndarray], worker: int) -> Arrays:
        """Copies of a worker's blocks of the parameters."""
        return _blocks(self.parameters, arrays, worker)

    def rows(self, x: np.ndarray, t: np.ndarray, worker: int) -> Arrays:
        """A worker's blocks of a batch."""
        return _blocks((self.x, self.t), (x, t), worker)

    @property
    def names(self) -> list[str]:
        """Names of the regions of the parameters, on all workers."""
        return [region.name for space in self.parameters for region in space.regions]


def mlp(
    strategy: str,
    workers: int,
    sizes: Sequence[int],
    batch: int,
    *,
    dtype: DTypeLike = np.float64,
    server: int = 0,
    activation: Any = sigmoid,
    loss: Any = softmax_cross_entropy,
) -> MLP:
    """A perceptron of linear layers with activations between them, on workers.

    Args:
        strategy: a value of `Strategy`.
        sizes: numbers of inputs, of units of each hidden layer, and of outputs.
        batch: rows of all workers together.
        server: the worker that holds the parameters, for the parameter server.

    Raises:
        ArgumentError: there is no such strategy or server, or a size is missing.
        PartitionError: a worker would have no row of the batch, or no hidden unit.
    """
    known = [each.value for each in Strategy]
    if strategy not in known:
        raise ArgumentError(f"strategy: expected one of {', '.join(known)}, given {strategy!r}")
    if workers < 1:
        raise ArgumentError(f"workers: at least 1 expected, given {workers}")
    if len(sizes) < 2 or min(sizes) < 1:
        raise ArgumentError(
            f"sizes: numbers of inputs, hidden units and outputs expected, each at least 1, given "
            f"{tuple(sizes)}"
        )
    if not 0 <= server < workers:
        raise ArgumentError(f"server: expected one of {workers} workers, given {server}")
    if strategy == Strategy.TENSOR:
        if min(sizes[1:-1], default=workers) < workers:
            raise PartitionError(
                f"tensor parallel: hidden layers of {tuple(sizes[1:-1])} units leave some of "
                f"{workers} workers without any; take fewer workers"
            )
        return _tensor_parallel(workers, sizes, batch, dtype, activation, loss)
    if batch < workers:
        raise PartitionError(
            f"{strategy}: a batch of {batch} rows leaves some of {workers} workers without any; "
            f"take larger batches or fewer workers"
        )
    return _data_parallel(
        Strategy(strategy), workers, sizes, batch, dtype, server, activation, loss
    )


def _data_parallel(
    strategy: Strategy,
    workers: int,
    sizes: Sequence[int],
    batch: int,
    dtype: DTypeLike,
    server: int,
    activation: Any,
    loss: Any,
) -> MLP:
    grid = Partition((workers,))
    x = TensorSpace((batch, sizes[0]), grid, dtype, name="x")
    t = TensorSpace((batch, sizes[-1]), grid, dtype, name="t")
    links: list[Map | LinearOperator] = []
    parameters: list[TensorSpace] = []
    y: Any = x
    for k, shape in enumerate(pairwise(sizes)):
        shares = [
            _share(strategy, TensorSpace(s, grid, dtype, [COPIES], name=f"{letter}{k}"), server)
            for letter, s in (("W", shape), ("b", shape[1:]))
        ]
        parameters += [share.domain for share in shares]  # type: ignore[misc]
        layer = linear(y, *(share.codomain for share in shares), name=f"z{k}")  # type: ignore[arg-type]
        links += [linop.direct_sum(*shares), layer]
        y = layer.codomain
        if k < len(sizes) - 2:
            links.append(activation(y, name=f"h{k}"))
            y = links[-1].codomain
    terms = loss(y, t)
    return MLP(chain(*links, terms, _sum(terms.codomain)), tuple(parameters), x, t)


def _share(strategy: Strategy, copies: TensorSpace, server: int) -> LinearOperator:
    """The operator that brings a parameter from where it is held to a copy on every worker. Its
    adjoint adds up the gradient."""
    grid = copies.partition
    if strategy == Strategy.SERVER:
        return linop.broadcast(copies.like(Partition((1,), [server]), [COPIES]), grid)
    if strategy == Strategy.ALL_REDUCE:
        return _sum(copies).H
    longest = int(np.argmax(copies.global_shape))
    return linop.ring_all_gather(copies.like(grid, [longest]))


def _tensor_parallel(
    workers: int, sizes: Sequence[int], batch: int, dtype: DTypeLike, activation: Any, loss: Any
) -> MLP:
    grid = Partition((workers,))

    def tensor(name: str, shape: tuple[int, ...], role: Any) -> TensorSpace:
        return TensorSpace(shape, grid, dtype, [role], name=name)

    x = tensor("x", (batch, sizes[0]), COPIES)
    t = tensor("t", (batch, sizes[-1]), REPLICATED)
    links: list[Map | LinearOperator] = []
    parameters: list[TensorSpace] = []
    y: Any = x
    for k, shape in enumerate(pairwise(sizes)):
        if y.axes == (COPIES,):  # partition the output
            W, b = tensor(f"W{k}", shape, 1), tensor(f"b{k}", shape[1:], 0)
            links.append(linear(y, W, b, name=f"z{k}"))
        else:  # reduce the output
            W, b = tensor(f"W{k}", shape, 0), tensor(f"b{k}", shape[1:], REPLICATED)
            terms = linear(y, W, name=f"p{k}")
            total = _sum(terms.codomain)  # type: ignore[arg-type]
            links += [terms, total, bias(total.codomain, b, name=f"z{k}")]  # type: ignore[arg-type]
        parameters += [W, b]
        y = links[-1].codomain
        if k < len(sizes) - 2:
            links.append(activation(y, name=f"h{k}"))
            y = links[-1].codomain
            if y.axes == (REPLICATED,):
                links.append(linop.repartition(y, y.like(grid, [COPIES])))
                y = links[-1].codomain
    if y.axes != (REPLICATED,):
        links.append(linop.all_gather(y, into=REPLICATED))
        y = links[-1].codomain
    return MLP(chain(*links, loss(y, t)), tuple(parameters), x, t)


def _sum(terms: TensorSpace) -> LinearOperator:
    """The sum of copies, replicated: an all-reduce, whose adjoint sends nothing."""
    total = TensorSpace(
        terms.global_shape, terms.partition, terms.dtype, [REPLICATED], name=f"Σ{terms.name}"
    )
    return linop.repartition(total, terms).H


def _blocks(spaces: Sequence[TensorSpace], arrays: Sequence[np.ndarray], worker: int) -> Arrays:
    found = {}
    for space, array in zip(spaces, arrays, strict=True):
        if worker in space.partition.workers:
            block = array[space.slices(worker)]
            found[space.region(worker).name] = np.array(block, space.dtype, order="C")
    return found


def initial(sizes: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    """Weights from -0.1 to 0.1, and biases of zeros: W0, b0, W1, …"""
    random = np.random.default_rng(seed)
    shapes = pairwise(sizes)
    return [a for s in shapes for a in (random.uniform(-0.1, 0.1, s), np.zeros(s[1]))]


def train(
    backend: Any, model: MLP, theta: Arrays, batches: Iterable[Batch], rate: float
) -> Iterator[float]:
    """Gradient descent: the loss of each batch, before its step. Collective.

    Args:
        theta: this worker's parameters, which change.
        batches: rows and targets of all workers; each takes its own.
    """
    program = model.map.compile(backend, model.names)
    for x, t in batches:
        loss = program(theta | model.rows(x, t, backend.worker))
        for name, slope in program.gradient().items():
            theta[name] -= rate * slope
        yield float(loss[0])


def whole(backend: Any, model: MLP, theta: Arrays) -> list[np.ndarray]:
    """The parameters, whole, on every worker. Collective."""
    found = []
    for space in model.parameters:
        everywhere = space.like(model.x.partition, [REPLICATED])
        with linop.repartition(space, everywhere).compile(backend) as plan:
            here = backend.worker in space.partition.workers
            found.append(plan(theta[space.region(backend.worker).name] if here else None))
    return found


def accuracy(values: Sequence[np.ndarray], x: np.ndarray, labels: np.ndarray) -> float:
    """The share of rows whose label has the highest score."""
    layers = list(zip(values[::2], values[1::2], strict=True))
    for W, b in layers[:-1]:
        x = 0.5 + 0.5 * np.tanh(0.5 * (x @ W + b))
    W, b = layers[-1]
    return float((np.argmax(x @ W + b, 1) == labels).mean())


def batches_of(data: handwritten.Images, batch: int) -> Iterator[Batch]:
    """The batches of one epoch, in the order of the images; a remainder is dropped."""
    x = data.images.reshape(len(data.images), -1)
    if batch > len(x):
        raise ArgumentError(f"batch: at most {len(x)}, the number of images; given {batch}")
    t = np.eye(10, dtype=x.dtype)[data.labels]
    for start in range(0, len(x) - batch + 1, batch):
        yield x[start : start + batch], t[start : start + batch]


def main(
    strategy: Annotated[Strategy, typer.Option(help="How to train in parallel.")] = Strategy.RING,
    workers: Annotated[int | None, typer.Option(help="[4 threads, or all ranks]", min=1)] = None,
    hidden: Annotated[
        list[int] | None, typer.Option(help="Units of a hidden layer; several times. [32]")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of all workers together.")] = 32,
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 0.5,
    epochs: Annotated[int, typer.Option(min=1, help="Times through the images.")] = 20,
    mnist: Annotated[
        bool, typer.Option("--mnist", help="MNIST, not scikit-learn's digits.")
    ] = False,
) -> None:
    """Train, and print losses and the accuracy on the test images."""

    if not 0 < rate < math.inf:
        raise ArgumentError(f"rate: a positive number expected, given {rate}")

    def program(backend: Any) -> None:
        # Here, so that data that one worker lacks is an error on all.
        training, test = handwritten.mnist() if mnist else handwritten.digits()
        sizes = [training.images[0].size, *(hidden or [32]), 10]
        model = mlp(strategy, backend.workers, sizes, batch, dtype=np.float32)
        theta = model.held(initial(sizes), backend.worker)
        for epoch in range(epochs):
            losses = list(train(backend, model, theta, batches_of(training, batch), rate))
            if backend.worker == 0:
                print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}", flush=True)
        values = whole(backend, model, theta)
        if backend.worker == 0:
            x = test.images.reshape(len(test.images), -1)
            print(
                f"{strategy}: {accuracy(values, x, test.labels):.1%} of the test images are right"
            )

    in_job = in_mpi_job() or in_torch_job()
    linop.launch(program, workers or (None if in_job else 4))


if __name__ == "__main__":
    try:
        typer.run(main)
    except LinopError as error:  # one line; a traceback would hide it
        sys.exit(f"{type(error).__name__}: {error}")
