"""One worker's side of `linop.strategies.check`: a step of the model and of its twin, and what is
found of each parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from linop.backends import Backend
from linop.errors import ArgumentError
from linop.layers.agreement.arguments import digest
from linop.layers.parameters.blocks import plain
from linop.strategies.checking.counterparts import (
    Counterpart,
    axes_of,
    checked,
    counterparts,
    replicas,
)
from linop.strategies.checking.diagnosis import Finding
from linop.strategies.data.replicas import SERVER
from linop.strategies.data.virtual_shards import VirtualShards
from linop.strategies.mesh import Axis, Mesh
from linop.strategies.pipelines.pipeline import Pipeline

Loss = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[Any, Sequence[Tensor]], Any]
_FLOOR = 1e-3
"""Differences are relative to the largest gradient of their parameter, or to this part of the
largest of all, whichever is larger: a gradient that is zero but for rounding has no scale."""


class Place(NamedTuple):
    """A worker's coordinates."""

    along: dict[str, tuple[tuple[int, ...], int]]
    """By name of an axis: the workers of the group, and the position in it."""

    def words(self, worker: int) -> str:
        at = ", ".join(f"{name} {k}" for name, (_, k) in self.along.items())
        return f"worker {worker}" + (f" ({at})" if at else "")


class Losses(NamedTuple):
    """Loss of a worker's rows; which rows they are; and the twin's of all."""

    own: float | None
    rows: tuple[int, ...]
    twins: float | None


class Found(NamedTuple):
    findings: dict[str, Finding]
    losses: Losses


class Said(NamedTuple):
    """Names of parameters in model and twin, digests of the batch, and names of the arguments that
    are given, to be compared."""

    models: list[str]
    twins: list[str]
    batch: list[str]
    given: list[str]


class Comparison:
    """One worker's side of `check`."""

    def __init__(
        self,
        model: Any,
        twin: Any,
        batch: Any,
        loss: Loss | None,
        step: Step | None,
        mesh: Any,
        exact: bool = False,
    ) -> None:
        if not checked(model):
            raise ArgumentError(f"a module or a Pipeline expected, given {model!r}")
        if not isinstance(twin, torch.nn.Module):
            raise ArgumentError(f"twin: a torch.nn.Module expected, given {twin!r}")
        if isinstance(model, Pipeline) and model.optimizer is not None:
            raise ArgumentError("a Pipeline without optimizer expected, whose gradients stay")
        if mesh is not None and not isinstance(mesh, Mesh):
            raise ArgumentError(f"mesh: a linop.strategies.Mesh expected, given {mesh!r}")
        if exact and step is None and isinstance(model, Pipeline):
            raise ArgumentError("exact=True of a Pipeline: step= expected, a step of equal shapes")
        self.model, self.loss, self.step = model, loss, step
        self._in_shards = exact and step is None
        self.twin = copy.deepcopy(twin)  # threads may share it
        self.batch = _tensors(batch, "batch")
        self.pairs = counterparts(model)
        self.wholes = dict(self.twin.named_parameters(remove_duplicate=False))
        options = {"loss": loss, "step": step, "mesh": mesh, "exact": exact or None}
        given = [name for name, one in options.items() if one is not None]
        names = [p.name for p in self.pairs], [*self.wholes]
        self.said = Said(*names, [*map(digest, self.batch)], given)
        parameters = *self.twin.parameters(), *(one.parameter for one in self.pairs)
        dtypes = [p.dtype for p in parameters if p.is_floating_point() or p.is_complex()]
        self.dtype = max(dtypes, key=lambda d: torch.finfo(d).eps, default=torch.float64)

    def put(
        self, axes: Sequence[Axis], data: Sequence[str] | None, mine: Any, backend: Backend
    ) -> None:
        """Find this worker's place, and its part of the batch.

        Args:
            axes: of the mesh, if there is one.
        """
        every, along = axes_of(self.model)
        every = [*axes] or every
        if data is not None:
            named = {axis.name: axis for axis in every}
            if not {*data} <= {*named}:
                raise ArgumentError(f"data={data!r}: some of the axes {[*named]} expected")
            along = [named[name] for name in data]
        _check_places(every, backend)
        self.place = Place({a.name: (a.workers, a.index) for a in every if a.size > 1})
        self.rows = tuple(axis.index for axis in along)
        if self._in_shards:
            if len(along) > 1:
                names = ", ".join(axis.name for axis in along)
                raise ArgumentError(
                    f"exact=True: rows of one axis expected, given {names}: give step="
                )
            self._axis, self.rows = (along[0] if along else None), ()  # all have the whole loss
        self.mine = self._cut(along) if mine is None else _tensors(mine, "mine")

    def _cut(self, along: Sequence[Axis]) -> list[Tensor]:
        """This worker's rows."""
        parts, index = prod(axis.size for axis in along), 0
        for axis in along:
            index = index * axis.size + axis.index
        if any(not x.ndim or len(x) < parts for x in self.batch):
            shapes = [tuple(x.shape) for x in self.batch]
            raise ArgumentError(f"batch: at least {parts} rows expected, given shapes {shapes}")
        return [x.tensor_split(parts)[index] for x in self.batch]

    def run(self) -> Found:
        """A step of model and twin, and what is found of each parameter."""
        for one in self.pairs:
            one.parameter.grad = None
        self.twin.zero_grad(set_to_none=True)
        own: float | None
        twins: float | None
        if self._in_shards:
            own, twins = (
                self._step_of_shards(net, axis)
                for net, axis in ((self.model, self._axis), (self.twin, None))
            )
        else:
            own = self._stepped(self.model, self.mine)
            twins = self._stepped(self.twin, self.batch)
        scale = max((_largest(p.grad) for p in self.wholes.values()), default=0.0)
        findings = {one.name: self._finding(one, scale) for one in self.pairs if _counts(one)}
        for one in self.pairs:
            one.parameter.grad = None
        return Found(findings, Losses(own, self.rows, twins))

    def _step_of_shards(self, net: Any, axis: Axis | None) -> float:
        """The whole loss of a step of virtual shards; of one for all rows, if none are cut."""
        shards = VirtualShards(axis) if self._axis is not None else VirtualShards(None, 1)
        return float(shards.step(net, self._loss_of, *self.batch))

    def _loss_of(self, net: Any, *batch: Tensor) -> Tensor:
        loss = self.model._loss if isinstance(self.model, Pipeline) else self.loss
        if loss is None:
            value = net(*batch)
        else:
            *inputs, target = batch
            value = loss(net(*inputs), target)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise ArgumentError(f"a loss with one element expected, given {value!r}")
        return value

    def _stepped(self, net: Any, batch: Sequence[Tensor]) -> float | None:
        if self.step is not None:
            value = self.step(net, batch)
        elif isinstance(net, Pipeline):
            value = _pipelined(net, batch)
        else:
            value = self._loss_of(net, *batch)
            value.backward()
        return float(value.detach()) if isinstance(value, torch.Tensor) else value

    def compare_values(self) -> None:
        """Check that this worker's parameters are parts of the twin's."""
        for one in self.pairs:
            self._compare(one)

    def _compare(self, one: Counterpart) -> None:
        p, whole = plain(one.parameter), self.wholes[one.name].detach()
        try:
            wanted = one.part(whole)
        except (IndexError, RuntimeError, ValueError):
            wanted = whole
        if p.shape != wanted.shape:
            raise ArgumentError(
                f"parameter {one.name!r}: shape {tuple(p.shape)}; {tuple(wanted.shape)} expected, "
                f"of the twin's {tuple(whole.shape)}"
            )
        if not torch.allclose(
            p.double(), wanted.double(), rtol=torch.finfo(self.dtype).eps, atol=0
        ):
            raise ArgumentError(
                f"parameter {one.name!r} has other values than the twin's; load the same state in "
                f"both"
            )

    def _finding(self, one: Counterpart, largest: float) -> Finding:
        whole = self.wholes[one.name]
        wanted_whole = torch.zeros_like(whole) if whole.grad is None else whole.grad
        wanted = _real(one.part(wanted_whole))
        given = one.parameter.grad
        found = torch.zeros_like(wanted) if given is None else _real(given)
        scale = max(_largest(wanted_whole), _FLOOR * largest)
        return _compared(one, found, wanted, scale or 1.0, given is None)


def _compared(
    one: Counterpart, found: Tensor, wanted: Tensor, scale: float, absent: bool
) -> Finding:
    """Numbers of a gradient and the twin's."""
    off = (found - wanted).abs() / scale
    at: tuple[int, ...] = ()
    difference, pair = 0.0, (0.0, 0.0)
    if off.numel():
        most = int(off.nan_to_num(nan=torch.inf).argmax())
        difference = float(off.reshape(-1)[most])
        at = one.position(tuple(map(int, np.unravel_index(most, off.shape))))
        pair = float(found.reshape(-1)[most]), float(wanted.reshape(-1)[most])
    square = float((wanted * wanted).sum())
    ratio = float((found * wanted).sum()) / square if square else None
    rest = difference if ratio is None else _largest(found - ratio * wanted) / scale
    draw = torch.Generator().manual_seed(0)
    numbers = torch.rand(wanted.shape, generator=draw, dtype=torch.float64)
    own, twins = (float((x * numbers).sum()) / scale for x in (found, wanted))
    return Finding(difference, at, pair, ratio, rest, own, twins, absent)


def _pipelined(pipe: Pipeline, batch: Sequence[Tensor]) -> Any:
    """A step of a pipeline, whose stages may be data parallel."""
    if len(batch) != 2:
        raise ArgumentError(f"batch: two tensors for a Pipeline expected, given {len(batch)}")
    x, target = batch
    copies = replicas(pipe)
    with ExitStack() as stack:
        for one in copies:
            stack.enter_context(one.no_sync())
        value = pipe.step(x, target)
    for one in copies:
        one.reduce_gradients()
    return value


def _counts(one: Counterpart) -> bool:
    """False for copies of which a server has the gradients."""
    served = getattr(one.parameter, "_linop_strategy", "") == SERVER
    return not (served and one.parameter.grad is None)


def _real(x: Tensor) -> Tensor:
    """In float64; the last dimension is that of real and imaginary part."""
    x = x.detach()
    return (torch.view_as_real(x) if x.is_complex() else x).double()


def _largest(x: Tensor | None) -> float:
    return 0.0 if x is None or not x.numel() else float(x.detach().abs().max())


def _tensors(given: Any, what: str) -> list[Tensor]:
    found = [*given] if isinstance(given, list | tuple) else [given]
    if not found or not all(isinstance(x, torch.Tensor) for x in found):
        raise ArgumentError(f"{what}: a tensor, or several, expected; given {given!r}")
    return found


def _check_places(axes: Sequence[Axis], backend: Backend) -> None:
    """Check that axes are of the workers that are compared."""
    for axis in axes:
        if axis.workers[axis.index] != backend.worker:
            raise ArgumentError(
                f"axis {axis.name!r} numbers workers of another mesh; give mesh=, the one that has "
                f"all workers"
            )
