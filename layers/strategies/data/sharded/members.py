"""Members of a unit: parameters in blocks of rows, and the operators that gather them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linop.backends.autograd.dtypes import numpy_dtype
from linop.layers.parameters.blocks import plain
from linop.layers.parameters.marks import mark
from linop.operators.collectives import all_gather, repartition
from linop.operators.offloading import offload
from linop.operators.operator import LinearOperator
from linop.spaces.decomposition import COPIES
from linop.spaces.tensor import TensorSpace
from linop.strategies.mesh import Axis


class Member(NamedTuple):
    """A parameter of a unit.

    Attributes:
        name: in the module of the unit.
        places: modules and attributes that have it: several if it is shared.
        space: the whole parameter in blocks of rows; on all workers, if it has no dimensions.
    """

    name: str
    places: Sequence[tuple[Any, str]]
    space: TensorSpace


def gathering(space: TensorSpace, memory: str = "default") -> LinearOperator:
    """G: copies of all rows; of a tensor without dimensions, which is not cut, E. Of rows in
    another memory it is G O.H, and its adjoint O G.H."""
    whole = space.like(space.partition, [COPIES])
    G = all_gather(space) if space.global_shape else repartition(space, whole)
    return G if memory == "default" else G @ offload(space, memory).H


def converted(space: TensorSpace, dtype: Any) -> TensorSpace:
    """The same blocks of another dtype of torch."""
    kind = numpy_dtype(dtype)
    return TensorSpace(space.global_shape, space.partition, kind, space.axes, space.name)


def rows(member: Member, whole: Tensor, axis: Axis) -> Tensor:
    """View of this worker's rows of a whole tensor."""
    found: Tensor = plain(whole)[member.space.slices(axis.index)]
    return found


def shard_marked(shard: Any, name: str, backend: Any) -> None:
    """Let a tensor be known as this worker's block of a parameter."""
    mark(shard, name=name, strategy="shard", backend=backend)


def others_there(members: Sequence[Member], tensors: Sequence[Tensor]) -> list[str]:
    """Names of members in whose places are other tensors than these, one of each."""
    return [
        member.name
        for member, tensor in zip(members, tensors, strict=True)
        for module, name in member.places
        if module._parameters.get(name) is not tensor
    ]


def are_given(members: Sequence[Member], tensors: Sequence[Tensor]) -> bool:
    """True if modules have whole tensors that the user has put there for a call, as
    torch.func.functional_call does: their gradients are the user's, and nothing moves.

    Args:
        tensors: those that were put there last.
    """
    every = [
        (module._parameters.get(name), member.space.global_shape)
        for member in members
        for module, name in member.places
    ]
    return all(
        isinstance(p, Tensor) and not isinstance(p, torch.nn.Parameter) and p.shape == shape
        for p, shape in every
    ) and not any(p is own for p, _ in every for own in tensors)
