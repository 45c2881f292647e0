"""Units of the parameters of one call, by dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from linop.backends.autograd.dtypes import numpy_dtype
from linop.layers.parameters.blocks import enlist
from linop.spaces.decomposition import REPLICATED
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace
from linop.strategies.data.sharded.members import Member
from linop.strategies.data.sharded.unit import Unit
from linop.strategies.mesh import Axis


def units_of(
    name: str,
    parameters: Mapping[str, Tensor],
    places: Mapping[Any, Sequence[tuple[Any, str]]],
    axis: Axis,
    memory: str = "default",
    dtypes: tuple[Any, Any] = (None, None),
) -> list[tuple[Unit, list[Tensor]]]:
    """Units of parameters, one for each dtype, with their parameters; without shards yet.
    Collective.

    Args:
        name: of all, for errors.
        places: by parameter.
        memory: the kind that the shards are in.
        dtypes: of whole parameters and of sums; see `Unit`.
    """
    group, made = Partition((axis.size,)), []
    for dtype in dict.fromkeys(p.dtype for p in parameters.values()):
        some = {key: p for key, p in parameters.items() if p.dtype is dtype}
        members = []
        for key, p in some.items():
            shape = tuple(p.shape)
            cut = [0 if shape else REPLICATED]
            # Not numbered: of tensor-parallel modules some workers lack a bias.
            space = TensorSpace(shape, group, numpy_dtype(dtype), cut, key)
            members.append(Member(key, places.get(p, ()), space))
        unit = Unit(name, members, axis, memory, dtypes)
        enlist(unit)
        made.append((unit, [*some.values()]))
    return made
