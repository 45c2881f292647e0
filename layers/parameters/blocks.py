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

import torch

from linop.spaces.tensor import TensorSpace

_LAYERS: WeakSet[Any] = WeakSet()
_ADDING = threading.Lock()


def plain(tensor: Any) -> Any:
    """The same memory as one of torch's own tensors, without graph: also of a block that is guarded
    (`linop.strategies.data.sharded.shards`)."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


class Block(NamedTuple):
    """A worker's block of a parameter, which a layer has, or another holder with its attributes:
    `_parameters` and `spaces` by name, `backend`, `worker`, and perhaps `kind`; with
    `shards_blocks` True, it may be a block of another holder's block.
    """

    layer: Any
    name: str

    @property
    def space(self) -> TensorSpace:
        """Space of the global parameter."""
        space: TensorSpace = self.layer.spaces[self.name]
        return space

    @property
    def shards(self) -> bool:
        """True if the holder may have blocks of others' blocks."""
        return getattr(self.layer, "shards_blocks", False)

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


def blocks(among: Iterable[Any] | None = None) -> dict[int, tuple[Block, ...]]:
    """All blocks in this process, or those among some tensors, by the `id` of the tensor: several
    of one that is a block of a block, cut over two groups of workers; the outer one first."""
    with _ADDING:
        layers = list(_LAYERS)
    ids = None if among is None else {id(tensor) for tensor in among}
    every = ((layer, name, p) for layer in layers for name, p in list(layer._parameters.items()))
    found: dict[int, tuple[Block, ...]] = {}
    for layer, name, p in every:
        if p is not None and (ids is None or id(p) in ids) and name in layer.spaces:
            others = [one for one in found.get(id(p), ()) if one.layer.backend != layer.backend]
            mine = [*others, Block(layer, name)]
            found[id(p)] = (*sorted(mine, key=lambda one: one.shards),)
    return found


def first_block(tensors: Iterable[Any]) -> Block | None:
    """The first of some tensors that is a block."""
    if not _LAYERS:
        return None
    given = list(tensors)
    known = blocks(given)
    return next((known[id(t)][0] for t in given if id(t) in known), None)


def block_of_gradients(tensors: Iterable[Any]) -> Block | None:
    """A block whose gradient is one of some tensors."""
    given = {id(t) for t in tensors}
    every = (block for some in blocks().values() for block in some) if _LAYERS else ()
    return next((b for b in every if id(b.layer._parameters[b.name].grad) in given), None)
