"""State of a distributed model in the form of the sequential one's: scattered to the workers'
blocks and gathered from them, bit for bit.

Elements of every dtype travel as integers of the same size, so that none is rounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linop.backends import Backend
from linop.backends.autograd.dtypes import numpy_dtype
from linop.backends.autograd.functions import apply
from linop.errors import ArgumentError
from linop.layers.parameters.blocks import plain
from linop.layers.state.state_tensors import StateTensor, check_kinds, check_range, fit
from linop.layers.state.workers import CARRIERS, Workers, as_carrier
from linop.operators.collectives import repartition
from linop.spaces.decomposition import COPIES
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace


def scatter_state(model: Any, state: Mapping[str, Tensor] | None) -> None:
    """Load the state of a sequential model into the distributed one, as its `load_state_dict` does.
    Collective.

    Args:
        model: the module of this worker: layers of linop.layers, and others, which are taken as
            replicated on all workers.
        state: the sequential `state_dict`, on all workers, each of which takes its blocks; or on
            some, with None on others: then the first of them sends.

    Raises:
        ArgumentError: names are missing, or not those of the model; a value is no tensor; workers
            have states of different names, shapes or dtypes. ShapeError: a tensor has another
            shape. BackendError: workers have different models, or none has the state. All on every
            worker.

    Example:
        >>> P, whole = linop.Partition((1, 2)), {"weight": torch.tensor([[1.0, 2.0, 3.0, 4.0]])}
        >>> def main(backend):
        ...     linear = layers.Linear(P, 4, 1, bias=False)
        ...     layers.scatter_state(linear, whole)
        ...     return linear.weight.tolist()
        >>> linop.launch(main, workers=2)
        [[[1.0, 2.0]], [[3.0, 4.0]]]
    """
    workers = Workers("scatter_state", model)
    items = list(workers.tensors.values())
    source = source_of(workers, items, state)
    workers.materialise()
    spread(workers, items, state, source)


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

    Example:
        >>> P = linop.Partition((1, 2))
        >>> def main(backend):
        ...     linear = layers.Linear(P, 4, 1, bias=False)
        ...     layers.initialize(linear, "weight", torch.nn.init.ones_)
        ...     return linear.weight.tolist(), layers.gather_state(linear, worker=0)
        >>> (half, state), (other, nothing) = linop.launch(main, workers=2)
        >>> half, other, state["weight"].tolist(), nothing
        ([[1.0, 1.0]], [[1.0, 1.0]], [[1.0, 1.0, 1.0, 1.0]], None)
    """
    workers = Workers("gather_state", model)
    workers.need_memory()
    return collect(workers, list(workers.tensors.values()), worker)


def collect(
    workers: Workers, items: Sequence[StateTensor], worker: int | None
) -> OrderedDict[str, Tensor] | None:
    """Global tensors of some items, by key, on one worker or on all; None on others. Collective."""
    if worker is not None and worker not in range(workers.groups.workers):
        there = workers.groups.workers
        raise ArgumentError(f"{workers.what}: worker {worker!r}; there are {there} workers")
    workers.same(items)
    state: OrderedDict[str, Tensor] = OrderedDict()
    for item in items:
        whole = gathered(workers, item, worker)
        if whole is not None:
            state[item.key] = whole
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
    workers: Workers, items: Sequence[StateTensor], state: Mapping[str, Tensor] | None
) -> Source:
    """Find the workers that hold the state, and check that it fits the items. Collective; no tensor
    is sent yet.

    Args:
        state: this worker's, or None.

    Raises:
        ArgumentError, ShapeError: the state does not fit. BackendError: no worker has one. All on
            every worker.
    """
    said = workers.gather_objects(workers.each(lambda: None if state is None else _kinds(state)))
    kinds = next((one for one in said if one is not None), None)
    if kinds is None:
        workers.refuse("no worker has the state; pass it on one of them, or on all")
    for worker, other in enumerate(said):
        if other is not None and other != kinds:
            key = next(k for k in [*kinds, *other] if kinds.get(k) != other.get(k))
            raise ArgumentError(
                f"{workers.what}: workers {said.index(kinds)} and {worker} have different states, "
                f"in {key!r}; the same on both, or None on one, expected"
            )
    fit(workers.what, items, {key: shape for key, (shape, _) in kinds.items()})
    for item in items:
        if kinds[item.key][1] is None:
            name = kinds[item.key][0]
            raise ArgumentError(f"{workers.what}: {item.key!r} is a {name}; a tensor expected")
    dtypes = {key: kind for key, (_, kind) in kinds.items()}
    check_kinds(workers.what, items, dtypes)
    others = [item for item in items if dtypes[item.key] != item.dtype]
    if others:
        held = {} if state is None else state

        def check() -> None:
            for item in others if held else ():
                check_range(workers.what, item.key, held[item.key], item.dtype)

        workers.each(check)
    root = None if all(other == kinds for other in said) else said.index(kinds)
    return Source(root, dtypes)


def spread(
    workers: Workers,
    items: Sequence[StateTensor],
    state: Mapping[str, Tensor] | None,
    source: Source,
) -> None:
    """Copy the tensors of a state into the blocks of items. Collective, if a root sends."""
    if source.root is None:
        for item in items:
            if item.block is not None and state is not None:
                for there, here in item.pieces:
                    plain(item.block)[here].copy_(state[item.key][there])
        return
    for item in items:
        whole = state[item.key] if state is not None and workers.worker == source.root else None
        _scatter(workers, item, whole, source.dtypes[item.key], source.root)


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


def gathered(workers: Workers, item: StateTensor, worker: int | None) -> Tensor | None:
    """The global tensor, on one worker or on all; None on others. Collective.

    Blocks of blocks are put together first, by the workers that have those.
    """
    groups, block, moved = workers.groups, item.block, False
    cut = [backend for backend in item.spaces if backend in groups.backends]
    if worker is not None and not groups.differ_in(cut, worker):
        return None  # others have the same blocks, and are on the way there
    for backend in reversed(cut):
        root = None if worker is None else groups.at(backend, worker)
        X = _carried(item.spaces[backend], item.dtype)
        block, moved = _moved(backend, X, _whole(backend, X, root), block), True
        if root not in (None, backend.worker or 0):
            return None
    assert block is not None
    whole: Tensor = block.view(item.dtype) if moved else plain(block).clone()
    return whole if item.packing is None else item.packing.unpacked(whole)


def _scatter(
    workers: Workers, item: StateTensor, whole: Tensor | None, dtype: Any, root: int
) -> None:
    """Copy the global tensor, which the root holds, into all blocks. Collective.

    Blocks travel, if the groups have no axes in common. Else the whole does, of which each worker
    takes its block: as of experts, where the other parameters are cut over two axes together.

    Args:
        dtype: of the global tensor.
    """
    groups, ways = workers.groups, workers.groups.ways
    in_blocks = groups.are_apart
    if in_blocks and whole is not None and item.packing is not None:
        whole = item.packing.packed(whole)
    for k, backend in enumerate(ways):
        if not groups.differ_in(ways[: k + 1], root):
            continue  # it comes to this worker from those that differ in the next ones
        space = item.spaces.get(backend) if in_blocks else None
        if space is None:
            if in_blocks and item.block is None and not any(one in item.spaces for one in ways[k:]):
                return  # no worker of the group has a block of its block
            shape = item.shape_within(ways[k:]) if in_blocks else item.shape
            space = _whole(backend, TensorSpace(shape, Partition((1,)), axes=[COPIES]), None)
        Y = _carried(space, dtype)
        whole = _moved(backend, _whole(backend, Y, groups.at(backend, root)), Y, whole)
    if item.block is None or whole is None:
        return
    pieces = [((), ())] if in_blocks else item.pieces
    for there, here in pieces:
        plain(item.block)[here].copy_(whole.view(dtype)[there])


def _moved(backend: Backend, X: TensorSpace, Y: TensorSpace, block: Tensor | None) -> Tensor:
    """This worker's block of Y, from its block of X; elements as integers."""
    x = None if block is None else as_carrier(block, backend.arrays.device)
    with torch.no_grad():
        moved: Tensor = apply(repartition(X, Y), x, backend)
    return moved


def _whole(backend: Backend, X: TensorSpace, worker: int | None) -> TensorSpace:
    """Space of the global tensor on one worker of a group, or of copies on all."""
    holders = range(backend.workers or 1) if worker is None else [worker]
    return X.like(Partition((len(holders),), holders), [COPIES])
