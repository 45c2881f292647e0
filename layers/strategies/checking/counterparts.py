"""Parameters of a parallel model on this worker, and the parts of the sequential model's that they
are; the axes of meshes that its strategies take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linop.layers.parameters.packing import Packing
from linop.strategies.data.data_parallel import DataParallel
from linop.strategies.data.sharded.members import Member, rows
from linop.strategies.mesh import Axis
from linop.strategies.pipelines.model.stage_states import prefix_of
from linop.strategies.pipelines.pipeline import Pipeline


class Counterpart(NamedTuple):
    """A parameter, and where it is in the sequential model.

    Attributes:
        name: in the sequential model.
        parameter: this worker's: whole, a block, a shard, or a shard of a block.
        slices: of the block in the whole, or None.
        member: of the shard in the block, or None, and the axis that it is sharded over.
        packing: the order of rows that the slices are of, if it is another one.
    """

    name: str
    parameter: Tensor
    slices: tuple[slice, ...] | None
    member: Member | None
    axis: Axis | None
    packing: Packing | None = None

    def part(self, whole: Tensor) -> Tensor:
        """The part of a tensor of the sequential parameter's shape that this worker has."""
        if self.packing is not None:
            whole = self.packing.packed(whole)
        block = whole if self.slices is None else whole[self.slices]
        if self.member is None:
            return block
        assert self.axis is not None
        return rows(self.member, block, self.axis)

    def position(self, at: tuple[int, ...]) -> tuple[int, ...]:
        """The index in the whole of an element of the part."""
        starts = [0] * len(at) if self.slices is None else [s.start or 0 for s in self.slices]
        if self.member is not None and self.axis is not None:
            cut = self.member.space.slices(self.axis.index)
            starts = [a + (s.start or 0) for a, s in zip(starts, cut, strict=False)]
        found = [a + b for a, b in zip(starts, at, strict=False)]
        if self.packing is not None:
            found[self.packing.dim] = self.packing.row(found[self.packing.dim])
        return tuple(found)


def modules_of(model: Any) -> dict[str, Any]:
    """The modules of this worker, by the prefix of their names in the sequential model."""
    if isinstance(model, Pipeline):
        return {prefix_of(s, module): module for s, module in model.stages.items()}
    return {"": model}


def replicas(model: Any) -> list[DataParallel]:
    """The data-parallel modules in a model."""
    roots = modules_of(model).values()
    return [one for root in roots for one in root.modules() if isinstance(one, DataParallel)]


def counterparts(model: Any) -> list[Counterpart]:
    """Parameters of this worker, once under each name."""
    found = []
    for prefix, root in modules_of(model).items():
        shards = {
            id(shard): (member, unit.axis)
            for owner in root.modules()
            for unit in getattr(owner, "_linop_units", ())
            for shard, member in zip(unit.shards, unit.members, strict=True)
        }
        for name, owner, attribute in _places(root, prefix):
            p = owner._parameters[attribute]
            spaces: Mapping[str, Any] = getattr(owner, "spaces", {})
            slices = spaces[attribute].slices(owner.worker) if attribute in spaces else None
            order = getattr(owner, "packings", {}).get(attribute)
            found.append(Counterpart(name, p, slices, *shards.get(id(p), (None, None)), order))
    return found


def _places(module: Any, prefix: str) -> Iterator[tuple[str, Any, str]]:
    """Names of parameters in the sequential model, with the modules and attributes that have
    them."""
    if isinstance(module, DataParallel):
        yield from _places(module.module, prefix)
        return
    for name, p in module._parameters.items():
        if p is not None:
            yield prefix + name, module, name
    for name, child in module._modules.items():
        if child is not None:
            yield from _places(child, f"{prefix}{name}.")


def axes_of(model: Any) -> tuple[list[Axis], list[Axis]]:
    """The axes that strategies of a model take: all of them; and those along which workers have
    different rows of the batch."""
    every: dict[tuple[int, ...], Axis] = {}
    data: dict[tuple[int, ...], Axis] = {}
    for root in modules_of(model).values():
        for module in root.modules():
            units = [unit.axis for unit in getattr(module, "_linop_units", ())]
            if isinstance(module, DataParallel):
                units.append(module.axis)
            own = getattr(module, "axis", None)
            for axis in [*units, *([own] if isinstance(own, Axis) else [])]:
                every.setdefault(axis.workers, axis)
            data.update((axis.workers, axis) for axis in units if axis.size > 1)
    # Experts have copies along some of the axes that the model has.
    outer = [axis for axis in data.values() if not any({*axis.workers} < {*o} for o in data)]
    return [*every.values()], outer


def checked(model: Any) -> bool:
    """True for a model that can be compared."""
    return isinstance(model, torch.nn.Module | Pipeline)
