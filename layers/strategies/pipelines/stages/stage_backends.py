"""Stages on several workers: the part of the backend that their layers belong to, and modules made
there."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module

from linop.backends import Backend, use
from linop.backends.engine.worker import Worker
from linop.backends.threads import backend as threads
from linop.errors import ArgumentError, LinopError, restated
from linop.layers.agreement.input_agreement import agreement_of
from linop.layers.layer import Layer
from linop.spaces.partition import Partition
from linop.strategies.data.batch_norm import SyncBatchNorm
from linop.strategies.experts.parallel_experts import ParallelExperts
from linop.strategies.mesh import Axis
from linop.strategies.pipelines.construction import Plan
from linop.strategies.pipelines.stages.stage import sharded_units
from linop.strategies.tensor.modules.layer import ParallelLayer

_GENERATED = "linop.backends"
"""Module of generated functions, which have no name."""
_COMMUNICATING = _GENERATED, "linop.layers", "linop.strategies", "linop.autograd"


def parts_of(plan: Plan, backend: Backend) -> dict[int, Backend]:
    """The backend of the workers of each of this worker's stages. Collective."""
    assert isinstance(backend, Worker)
    parts: dict[int, Backend] = {}
    for grid in plan.grids:
        # Of one worker: no other one is needed to make it.
        here = plan.worker in grid
        together = sorted(grid.workers) if here else [plan.worker]
        part = backend.part(together, "pipeline") if grid.size > 1 else None
        if here:
            own = {s: part or threads.alone() for s in plan.mine if plan.grid(s) is grid}
            parts.update(own)
    return parts


def fail(parts: Iterable[Backend], backend: Backend, error: BaseException) -> None:
    """Tell the other workers of this worker's stages that it cannot go on: they may wait for it in
    a layer, where it never comes."""
    mine = restated(error, str(error))
    for part in parts:
        if isinstance(part, Worker) and part is not backend and part.workers > 1:
            part.fail(restated(mine, f"on worker {backend.worker}: {mine}"))


def failure(parts: Iterable[Backend]) -> str:
    """The error that ended one of the parts; empty if there is none."""
    for part in parts:
        if isinstance(part, Worker) and part.failure is not None:
            return str(part.failure)
    return ""


@contextmanager
def within(part: Backend, backend: Backend) -> Iterator[None]:
    """Context of calls of the part, which its workers make together, and some of which may raise on
    one of them alone: a user's error there. Those of linop's collectives are raised on all."""
    try:
        with use(part):
            yield
    except BaseException as error:
        if not _is_of_all(error):
            fail([part], backend, error)
        raise


def _is_of_all(error: BaseException) -> bool:
    """True for an error of linop that all workers raise: of a function that communicates. A user
    may raise others, or call functions of the core, which does not, with arguments that it refuses,
    on one worker alone."""
    found = False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__") or _GENERATED
        if module.startswith(_COMMUNICATING):
            found = isinstance(error, LinopError)
        elif module.partition(".")[0] not in ("linop", "torch"):
            found = False  # a user's function, which linop's may have called
    return found


def local(grid: Partition) -> Partition:
    """The grid with the numbers that its workers have in their part of the backend."""
    order = sorted(grid.workers)
    return Partition(grid.shape, [order.index(worker) for worker in grid.workers])


def made(s: int, given: Any, grid: Partition, part: Backend) -> Module:
    """The module of a stage of this worker: given, or made by a function of a partition.

    Raises:
        ArgumentError: it is none, or its layers are of other workers than the stage.
    """
    module: Module = given
    if not isinstance(given, torch.nn.Module):
        with use(part):
            module = given(local(grid))
    # A worker that makes fewer layers than others is found out here.
    agreement_of(part).gather_objects(None, f"make stage {s}")
    if module is not given:
        if not isinstance(module, torch.nn.Module):
            raise ArgumentError(
                f"stage {s}: a torch.nn.Module expected, its function returns {module!r}"
            )
    for name, layer in module.named_modules():
        # Pipelines of a mesh run side by side, in step: their stages may be parallel across them.
        across = isinstance(layer, ParallelLayer | ParallelExperts)
        backend = layer.backend if isinstance(layer, Layer) and not across else part
        if (backend.workers, backend.worker) != (part.workers, part.worker):
            raise ArgumentError(
                f"stage {s}: layer {name!r} is of {backend.workers} workers, the stage of the "
                f"workers of {grid!r}; give a function of a partition that makes the stage, in "
                f"place of the stage"
            )
    return module


def axes_across(module: Module) -> dict[Axis, bool]:
    """Axes of a mesh whose other workers the forwards of a stage wait for: of sharded
    parameters, of experts and of synchronised norms; and of tensor-parallel modules, which are
    true, since these wait with tensors of one shape."""
    axes = {unit.axis: False for unit in sharded_units(module)}
    axes |= {m._axis: False for m in module.modules() if isinstance(m, SyncBatchNorm)}
    axes |= {m.axis: False for m in module.modules() if isinstance(m, ParallelExperts)}
    axes |= {m.axis: True for m in module.modules() if isinstance(m, ParallelLayer)}
    return {axis: same for axis, same in axes.items() if axis.size > 1}
