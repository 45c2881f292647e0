"""Registry of the parameters that are blocks of a distributed one. torch's functions take them for
whole tensors; `linop.layers.parameters.torch_guards` guards those whose results would be wrong.

Blocks are plain torch parameters, found through their layers, so that a replaced parameter is found
too. A subclass of Parameter makes a step of SGD 2.0 times as long, of AdamW 1.35 times (measured, 4
parameters of 20×20); a tensor with a weak reference to it cannot be swapped for another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import WeakSet

from linop.backends import Backend
from linop.errors import ArgumentError
from linop.spaces.tensor import TensorSpace

_LAYERS: WeakSet[Any] = WeakSet()
_ADDING = threading.Lock()


class Block(NamedTuple):
    """A worker's block of a parameter, which a layer has, or another holder with its attributes:
    `_parameters` and `spaces` by name, `backend`, `worker`, and perhaps `kind`.

    Attributes:
        nested: a block of a block, which two holders have: cut over two groups of workers.
    """

    layer: Any
    name: str
    nested: bool = False

    @property
    def space(self) -> TensorSpace:
        """Space of the global parameter."""
        space: TensorSpace = self.layer.spaces[self.name]
        return space

    @property
    def kind(self) -> str:
        """Name of the class of the layer, or of the module that another holder shards."""
        return getattr(self.layer, "kind", type(self.layer).__name__)

    @property
    def cut(self) -> bool:
        """True if the parameter has other blocks."""
        return len(self.space.regions) > 1

    @property
    def counts(self) -> bool:
        """True if this worker counts it in sums over workers: of a replicated block, the first
        holder does."""
        me: int = self.layer.worker
        return self.space.region(me).workers[0] == me


def enlist(layer: Any) -> None:
    """Register a layer, or another holder; without effect in a program of one worker."""
    if layer.backend.workers != 1:
        with _ADDING:
            _LAYERS.add(layer)


def blocks() -> dict[int, Block]:
    """All blocks in this process, by the `id` of the tensor."""
    with _ADDING:
        layers = list(_LAYERS)
    every = ((layer, name, p) for layer in layers for name, p in list(layer._parameters.items()))
    found: dict[int, Block] = {}
    for layer, name, p in every:
        if p is not None and name in layer.spaces:
            other = found.get(id(p))
            nested = other is not None and other.layer.backend is not layer.backend
            found[id(p)] = Block(layer, name, nested)
    return found


def first_block(tensors: Iterable[Any]) -> Block | None:
    """The first of some tensors that is a block."""
    known = blocks() if _LAYERS else {}
    return next((known[id(t)] for t in tensors if id(t) in known), None) if known else None


def block_of_gradients(tensors: Iterable[Any]) -> Block | None:
    """A block whose gradient is one of some tensors."""
    given = {id(t) for t in tensors}
    every = blocks().values() if _LAYERS else ()
    return next((b for b in every if id(b.layer._parameters[b.name].grad) in given), None)


def backend_of(tensors: Iterable[Any]) -> Backend | None:
    """The backend whose workers have the blocks among some tensors; None without blocks.

    Raises:
        ArgumentError: they are of several, or one is cut over two groups of workers.
    """
    known = blocks() if _LAYERS else {}
    cut = [known[id(t)] for t in tensors if id(t) in known]
    if any(block.nested for block in cut):
        raise ArgumentError(
            "parameters that are cut over one axis of a mesh, and sharded over another: norms and "
            "states of such are not supported; shard modules that are not tensor parallel, or "
            "take DataParallel in place of fully_shard"
        )
    found = {block.layer.backend: None for block in cut}
    if len(found) > 1:
        raise ArgumentError(
            "parameters that are cut over different groups of workers; those of one group expected"
        )
    return next(iter(found), None)
