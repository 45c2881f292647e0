"""State of a distributed model in the form of the sequential one's: scattered to the workers'
blocks and gathered from them, bit for bit.

Elements of every dtype travel as integers of the same size, so that none is rounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from linop.backends.autograd.dtypes import numpy_dtype
from linop.backends.autograd.functions import apply
from linop.errors import ArgumentError
from linop.layers.layer import Tensor
from linop.layers.state.parts import Part, fit
from linop.layers.state.workers import CARRIERS, Workers, as_carrier
from linop.operators.collectives import repartition
from linop.spaces.partition import Partition
from linop.spaces.tensor import COPIES, TensorSpace


def scatter_state(model: Any, state: Mapping[str, Tensor] | None) -> None:
    """Load the state of a sequential model into the distributed one, as its `load_state_dict` does.
    Collective.

    Args:
        model: the module of this worker: layers of linop.layers, and others, which are taken as
            replicated on all workers.
        state: the sequential `state_dict`, on all workers, each of which takes its blocks; or on
            some, with None on others: then the first of them sends.

    Raises:
        ArgumentError: names are missing, or not those of the model; a value is no tensor.
        ShapeError: a tensor has another shape. BackendError: workers have different models, or
        none has the state. All on every worker.
    """
    workers = Workers("scatter_state", model)
    parts = list(workers.parts.values())
    source = source_of(workers, parts, state)
    workers.materialise()
    spread(workers, parts, state, source)


def gather_state(model: Any, worker: int | None = None) -> OrderedDict[str, Tensor] | None:
    """The state of the whole model, as the sequential one's `state_dict`. Collective.

    Args:
        model: the module of this worker.
        worker: which one gets it; by default all.

    Returns:
        New tensors by name; None on workers that do not get them.

    Raises:
        BackendError: workers have different models, or different values of tensors that each holds
            whole; on every worker.
    """
    workers = Workers("gather_state", model)
    workers.need_memory()
    return collect(workers, list(workers.parts.values()), worker)


def collect(
    workers: Workers, parts: Sequence[Part], worker: int | None
) -> OrderedDict[str, Tensor] | None:
    """Global tensors of some parts, by key, on one worker or on all; None on others. Collective."""
    if worker is not None and worker not in range(workers.meeting.workers):
        there = workers.meeting.workers
        raise ArgumentError(f"{workers.what}: worker {worker!r}; there are {there} workers")
    workers.same(parts)
    state: OrderedDict[str, Tensor] = OrderedDict()
    for part in parts:
        state[part.key] = _gathered(workers, part, worker)
    return state if worker in (None, workers.worker) else None


class Source(NamedTuple):
    """Origin of a state that is scattered.

    Args:
        root: the worker that sends; None if all hold the state, and each takes its blocks.
        dtypes: of the state's tensors, by key.
    """

    root: int | None
    dtypes: dict[str, Any]


def source_of(
    workers: Workers, parts: Sequence[Part], state: Mapping[str, Tensor] | None
) -> Source:
    """Find the workers that hold the state, and check that it fits the parts. Collective; no tensor
    is sent yet.

    Args:
        state: this worker's, or None.

    Raises:
        ArgumentError, ShapeError: the state does not fit. BackendError: no worker has one. All on
            every worker.
    """
    said = workers.told(workers.each(lambda: None if state is None else _kinds(state)))
    kinds = next((one for one in said if one is not None), None)
    if kinds is None:
        workers.refuse("no worker has the state; pass it on one of them, or on all")
    fit(workers.what, parts, {key: shape for key, (shape, _) in kinds.items()})
    for part in parts:
        if kinds[part.key][1] is None:
            name = kinds[part.key][0]
            raise ArgumentError(f"{workers.what}: {part.key!r} is a {name}; a tensor expected")
    root = None if all(other == kinds for other in said) else said.index(kinds)
    return Source(root, {key: kind for key, (_, kind) in kinds.items()})


def spread(
    workers: Workers, parts: Sequence[Part], state: Mapping[str, Tensor] | None, source: Source
) -> None:
    """Copy the tensors of a state into the blocks of parts. Collective, if a root sends."""
    if source.root is None:
        for part in parts:
            if part.block is not None and state is not None:
                part.block.detach().copy_(state[part.key][part.of(workers.worker)])
        return
    for part in parts:
        whole = state[part.key] if state is not None and workers.worker == source.root else None
        _scatter(workers, part, whole, source.dtypes[part.key], source.root)


def _kinds(state: Any) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        raise ArgumentError(f"{type(state).__name__} given; a state_dict expected")
    return {key: _kind(value) for key, value in state.items()}


def _kind(value: Any) -> tuple[Any, Any]:
    """Shape and dtype of a tensor; the name of its type and None for another value."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    return type(value).__name__, None


def _carried(space: TensorSpace, dtype: Any) -> TensorSpace:
    """The space with the dtype that elements of a given dtype travel as."""
    carrier = numpy_dtype(CARRIERS.get(dtype.itemsize, dtype))
    bounds = dict(enumerate(space.bounds))
    return TensorSpace(
        space.global_shape, space.partition, carrier, space.axes, space.name, bounds=bounds
    )


def _gathered(workers: Workers, part: Part, worker: int | None) -> Tensor | None:
    """The global tensor, on one worker or on all; None on others. Collective."""
    mine = worker in (None, workers.worker)
    if part.space is None:
        return part.block.detach().clone() if mine else None
    X = _carried(part.space, part.dtype)
    moved = _moved(workers, X, _whole(workers, X, worker), part.block)
    return moved.view(part.dtype) if mine else None


def _scatter(workers: Workers, part: Part, whole: Tensor | None, dtype: Any, root: int) -> None:
    """Copy the global tensor, which the root holds, into all blocks. Collective.

    Args:
        dtype: of the global tensor.
    """
    space = part.space
    if space is None:
        one = TensorSpace(part.shape, Partition((1,)), axes=[COPIES])
        space = _whole(workers, one, None)
    Y = _carried(space, dtype)
    moved = _moved(workers, _whole(workers, Y, root), Y, whole)
    if part.block is not None:
        part.block.detach().copy_(moved.view(dtype))


def _moved(workers: Workers, X: TensorSpace, Y: TensorSpace, block: Tensor | None) -> Tensor:
    """This worker's block of Y, from its block of X; elements as integers."""
    backend = workers.backend
    x = None if block is None else as_carrier(block, backend.arrays.device)
    with torch.no_grad():
        return apply(repartition(X, Y), x, backend)


def _whole(workers: Workers, X: TensorSpace, worker: int | None) -> TensorSpace:
    """Space of the global tensor on one worker, or of copies on all."""
    holders = range(workers.meeting.workers) if worker is None else [worker]
    return X.like(Partition((len(holders),), holders), [COPIES])
