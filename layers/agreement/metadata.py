"""Metadata of a call's tensors, and the global tensors that they make up. Nothing is sent here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from linop.backends.autograd.dtypes import numpy_dtype
from linop.backends.engine.arrays.interface import Arrays
from linop.errors import ArgumentError, DTypeError, ShapeError
from linop.spaces.decomposition import Axis
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace

Meta = tuple[Any, ...] | None
"""Metadata of an argument: of a tensor, shape, dtype, layout, device and `requires_grad`; of
another object, the name of its type alone; None for None."""


class CallMetadata(NamedTuple):
    """Metadata of one worker's call of a layer."""

    tensors: tuple[Meta, ...]
    modes: tuple[bool, bool, bool]
    """True if gradients are enabled, the layer is in training mode, autocast (CPU) is enabled."""
    own: tuple[Any, ...]
    """Name, shape, dtype and device of each of the worker's parameters."""
    wrong: str
    """Description of invalid values in the worker's tensors; empty if there are none."""
    options: tuple[int, ...] = ()
    """Numbers that the call got beside tensors; the same on all workers."""

    def wants(self, number: int) -> bool:
        """True if the gradient of an input is wanted."""
        meta = self.tensors[number]
        return meta is not None and len(meta) > 1 and bool(meta[-1])


def call_metadata(
    tensors: Sequence[Any],
    training: bool,
    own: tuple[Any, ...],
    wrong: str = "",
    options: tuple[int, ...] = (),
) -> CallMetadata:
    """Metadata of this worker's call of a layer.

    Args:
        own: name, shape, dtype and device of each parameter.
    """
    modes = torch.is_grad_enabled(), training, torch.is_autocast_enabled("cpu")
    return CallMetadata(metas_of(tensors), modes, own, wrong, options)


def metas_of(arguments: Sequence[Any]) -> tuple[Meta, ...]:
    """Metadata of arguments."""
    metas: list[Meta] = []
    for x in arguments:
        if isinstance(x, torch.Tensor):
            metas.append((x.shape, x.dtype, x.layout, x.device, x.requires_grad))
        else:
            metas.append(None if x is None else (type(x).__name__,))
    return tuple(metas)


def space_of(
    name: str,
    partition: Partition,
    tensors: Sequence[Meta],
    axes: Callable[[int], Sequence[Axis]],
    arrays: Arrays,
) -> TensorSpace:
    """Space of the global tensor that consists of all workers' blocks, balanced or not.

    Args:
        name: of the layer, for errors.
        partition: of the tensor.
        tensors: metadata of the blocks, by worker.
        axes: gives the roles of the grid axes for a number of dimensions.
        arrays: of the backend.

    Raises:
        ArgumentError: a block is missing, superfluous, not dense or on another device.
        DTypeError, ShapeError: the blocks do not make up a tensor. All on every worker.
    """
    blocks = {}
    for worker, meta in enumerate(tensors):
        if worker in partition:
            blocks[worker] = _checked(name, worker, partition, meta, arrays)
        elif meta is not None and (len(meta) == 1 or meta[0].numel()):
            raise ArgumentError(
                f"{name}: worker {worker} is not in {partition!r}; pass None or a zero-volume "
                f"tensor there, not {_words(meta)}"
            )
    first = partition.workers[0]
    shape, dtype, *_ = blocks[first]
    for worker, (other, kind, *_) in blocks.items():
        if kind != dtype:
            raise DTypeError(
                f"{name}: worker {worker} passes {kind}, worker {first} {dtype}; one dtype "
                f"expected on all"
            )
        if len(other) != len(shape):
            raise ShapeError(
                f"{name}: worker {worker} passes a block of shape {tuple(other)}, worker "
                f"{first} one of shape {tuple(shape)}; equally many dimensions expected"
            )
    roles = tuple(axes(len(shape)))
    shapes = {worker: tuple(block[0]) for worker, block in blocks.items()}
    sizes = {d: _lengths(name, partition, shapes, d, roles) for d in range(len(shape))}
    whole = tuple(map(sum, sizes.values()))
    cut = {d: lengths for d, lengths in sizes.items() if d in roles}
    return TensorSpace(whole, partition, numpy_dtype(dtype), roles, sizes=cut)


def _lengths(
    name: str,
    partition: Partition,
    shapes: Mapping[int, tuple[int, ...]],
    d: int,
    roles: Sequence[Axis],
) -> list[int]:
    """Lengths of the blocks along dimension d, in order of their coordinates on its grid axis."""
    holders: dict[int, int] = {}
    for worker, shape in shapes.items():
        k = partition.coordinates(worker)[roles.index(d)] if d in roles else 0
        other = holders.setdefault(k, worker)
        if shapes[other][d] != shape[d]:
            raise ShapeError(
                f"{name}: blocks of shapes {shape} on worker {worker} and {shapes[other]} on "
                f"worker {other} do not make up one tensor on {partition!r}: they differ "
                f"in dimension {d}"
            )
    return [shapes[holders[k]][d] for k in sorted(holders)]


def _checked(
    name: str, worker: int, partition: Partition, meta: Meta, arrays: Arrays
) -> tuple[Any, ...]:
    if meta is None or len(meta) == 1:
        raise ArgumentError(
            f"{name}: worker {worker} holds a block on {partition!r}; a torch.Tensor expected, "
            f"{_words(meta)} given"
        )
    if meta[2] is not torch.strided:
        raise ArgumentError(
            f"{name}: worker {worker} passes a tensor of layout {meta[2]}; torch.strided expected: "
            f"convert it with .to_dense()"
        )
    if meta[3].type != arrays.device:
        raise ArgumentError(
            f"{name}: worker {worker} passes a tensor on device {meta[3]}; plans work in "
            f"{arrays.memory}: move it with .to({arrays.device!r})"
        )
    return meta


def _words(meta: Meta) -> str:
    if meta is None:
        return "None"
    return meta[0] if len(meta) == 1 else f"a tensor of shape {tuple(meta[0])}"


def dtypes_of(
    name: str, spaces: Mapping[str, TensorSpace], everybodys: Sequence[CallMetadata], wanted: Any
) -> dict[str, Any]:
    """torch dtypes of a layer's parameters, by name, as all workers gave them.

    Args:
        name: of the layer, for errors.
        spaces: of distributed parameters.
        wanted: the dtype of all of them; None if each may have its own.

    Raises:
        ShapeError: a parameter has not the shape of its block. DTypeError: its dtype is not
            `wanted`, or differs between workers. Both on every worker.
    """
    dtypes: dict[str, Any] = {}
    for worker, given in enumerate(everybodys):
        for key, shape, dtype, _ in given.own:
            block = spaces[key].local_shape(worker) if key in spaces else shape
            if tuple(shape) != block:
                raise ShapeError(
                    f"{name}: parameter {key!r} of worker {worker} has shape {tuple(shape)}; "
                    f"{block} expected"
                )
            expected = wanted or dtypes.setdefault(key, dtype)
            if dtype != expected:
                raise DTypeError(
                    f"{name}: parameter {key!r} of worker {worker} is of {dtype}; {expected} "
                    f"expected, as that of the input: convert one of them"
                )
            dtypes[key] = dtype
    return dtypes
