"""Members of a unit: parameters in blocks of rows, and the operators that gather them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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
