"""What a worker has of the tensors that make up the state of a distributed model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from linop.errors import ArgumentError, ShapeError
from linop.layers.layer import Layer, Tensor
from linop.spaces.tensor import TensorSpace

MODEL, OPTIMIZER = "model", "optimizer"
"""Names in a checkpoint that has an optimizer's state, too."""


@dataclass
class Part:
    """What a worker has of one tensor of the state.

    Args:
        key: the tensor's name in the sequential state.
        space: of the global tensor; None where all workers hold the whole.
        block: this worker's, or None.
        dtype: on all workers; None where it is not known yet.
        trained: whether it is a parameter.
    """

    key: str
    space: TensorSpace | None
    block: Tensor
    dtype: Any = None
    trained: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(self.block.shape) if self.space is None else self.space.global_shape

    def of(self, worker: int) -> tuple[slice, ...]:
        """Where a worker's block lies in the global tensor."""
        return (slice(None),) * len(self.shape) if self.space is None else self.space.slices(worker)

    def materialise(self, device: Any) -> None:
        """Give a block on the meta device memory elsewhere. It stays the same object, which an
        optimizer may have, or another module."""
        block = self.block
        if block is None or not block.is_meta:
            return
        memory = torch.empty_like(block, device=device)
        if isinstance(block, torch.nn.Parameter):
            memory = torch.nn.Parameter(memory, block.requires_grad)
        memory.__class__ = block.__class__
        memory.__dict__.update(block.__dict__)
        torch.utils.swap_tensors(block, memory)


def parts_of(model: Any) -> Iterator[Part]:
    """What this worker has of a model's state, in the order of `state_dict`."""

    def walk(module: Any, prefix: str) -> Iterator[Part]:
        spaces = module.spaces if isinstance(module, Layer) else {}
        kept = {
            n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set
        }
        for tensors, trained in ((module._parameters, True), (kept, False)):
            for name, tensor in tensors.items():
                if name in spaces or tensor is not None:
                    yield Part(prefix + name, spaces.get(name), tensor, None, trained)
        for name, child in module._modules.items():
            if child is not None:
                yield from walk(child, f"{prefix}{name}.")

    return walk(model, "")


def lost_on_meta(model: Any) -> list[str]:
    """Names of buffers on the meta device that no state has."""
    return [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name, tensor in module._buffers.items()
        if name in module._non_persistent_buffers_set and tensor is not None and tensor.is_meta
    ]


def fit(what: str, parts: Sequence[Part], shapes: Mapping[str, Any]) -> None:
    """See that there is a tensor of its shape for every part, and no other.

    Raises:
        ArgumentError, ShapeError: not so.
    """
    wanted = {part.key: part.shape for part in parts}
    missing = [key for key in wanted if key not in shapes]
    unexpected = [key for key in shapes if key not in wanted]
    if missing or unexpected:
        raise ArgumentError(
            f"{what}: the state does not fit the model: missing {missing}, unexpected {unexpected}"
        )
    for key, shape in wanted.items():
        if not isinstance(shapes[key], str) and tuple(shapes[key]) != shape:
            raise ShapeError(
                f"{what}: {key!r} has shape {tuple(shapes[key])} in the state; {shape} expected"
            )
