"""`check`: losses and gradients of a parallel model beside those of its sequential twin."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import isclose, prod
from typing import Any, NamedTuple

import numpy as np
import torch

from linop.backends import Backend
from linop.errors import ArgumentError
from linop.layers.agreement.input_agreement import agreement_of, program_backend
from linop.strategies.checking.counterparts import (
    Counterpart,
    axes_of,
    checked,
    counterparts,
    replicas,
)
from linop.strategies.checking.diagnosis import Everyone, Finding, GradientError, multiple
from linop.strategies.data.replicas import SERVER
from linop.strategies.mesh import Axis, Mesh
from linop.strategies.pipelines.pipeline import Pipeline

Tensor = Any
"""torch is not typed here."""
Loss = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[Any, Sequence[Tensor]], Any]
_FLOOR = 1e-3
"""Differences are relative to the largest gradient of their parameter, or to this part of the
largest of all, whichever is larger: a gradient that is zero but for rounding has no scale."""


def check(
    model: Any,
    twin: Any,
    batch: Any,
    loss: Loss | None = None,
    *,
    step: Step | None = None,
    mine: Any = None,
    mesh: Mesh | None = None,
    data: Sequence[str] | None = None,
    tolerance: float | None = None,
) -> float:
    """Compare the loss and all gradients of a parallel model with those of its sequential twin, in
    one step. Collective.

    Where they differ, the error names the parameters and, in the words of the mesh, the fault:
    gradients that are a multiple of the twin's, and the axis that has as many workers; gradients
    that are terms of the twin's, and the axis over which they were not summed; or the largest
    difference, and the worker. Gradients of the model are discarded, before and after. Modules
    that draw random numbers, such as dropout, cannot be compared: use ``eval()``.

    Args:
        model: a module, with any strategies of linop; or a `Pipeline` without optimizer.
        twin: the sequential module, of the same parameters and values; it is not changed.
        batch: the whole batch, on all workers: a tensor, or several, of which the last is the
            target.
        loss: ``loss(output, target)``, of a batch of any size; a `Pipeline` has its own. None: the
            output of a batch without a target is the loss.
        step: ``step(model, batch)``, a forward and backward of yours, such as with micro-batches,
            for model and twin; gives the loss, or None, and losses are not compared.
        mine: this worker's part of the batch; by default its share of the rows, along the axes of
            `data`.
        mesh: names axes that no strategy in the model takes.
        data: names of the axes along which workers have different rows; by default those of
            `DataParallel` and `fully_shard` in the model.
        tolerance: of differences, relative to the largest gradient of a parameter; by default the
            power 3/4 of the dtype's precision: 1.8e-12 in float64.

    Returns:
        The largest relative difference of a gradient, on any worker: 0 if all are equal.

    Raises:
        GradientError: losses or gradients differ. ArgumentError: an argument is of the wrong kind;
            parameters of model and twin differ in names, shapes or values; the batch has too few
            rows. All on every worker.
    """
    backend = program_backend() if mesh is None else mesh.backend
    agreement = agreement_of(backend)
    what = "linop.strategies.check"

    def prepared() -> _Comparison:
        return _Comparison(model, twin, batch, loss, step, mine, mesh, data, backend)

    one = agreement.each(prepared, "check", f"call {what}")
    one.agree_on_names([*agreement.gather_objects(one.names, f"call {what}")])
    agreement.each(one.compare_values, "check", f"compare values, {what}")
    found = agreement.each(one.run, "check", f"compare gradients, {what}")
    said = agreement.gather_objects((found, one.place), f"compare gradients, {what}")
    if tolerance is None:
        tolerance = torch.finfo(one.dtype).eps ** 0.75
    everyone = _everyone(said, tolerance)
    faults = [*_losses([found.losses for found, _ in said], everyone), *everyone.faults()]
    if faults:
        raise GradientError("check: " + "; ".join(faults))
    return everyone.largest()


class _Place(NamedTuple):
    """A worker's coordinates."""

    along: dict[str, tuple[tuple[int, ...], int]]
    """By name of an axis: the workers of the group, and the position in it."""

    def words(self, worker: int) -> str:
        at = ", ".join(f"{name} {k}" for name, (_, k) in self.along.items())
        return f"worker {worker}" + (f" ({at})" if at else "")


class _Losses(NamedTuple):
    """Loss of a worker's rows; which rows they are; and the twin's of all."""

    own: float | None
    rows: tuple[int, ...]
    twins: float | None


class _Found(NamedTuple):
    findings: dict[str, Finding]
    losses: _Losses


class _Comparison:
    """One worker's side of `check`."""

    def __init__(
        self,
        model: Any,
        twin: Any,
        batch: Any,
        loss: Loss | None,
        step: Step | None,
        mine: Any,
        mesh: Mesh | None,
        data: Sequence[str] | None,
        backend: Backend,
    ) -> None:
        if not checked(model):
            raise ArgumentError(f"a module or a Pipeline expected, given {model!r}")
        if not isinstance(twin, torch.nn.Module):
            raise ArgumentError(f"twin: a torch.nn.Module expected, given {twin!r}")
        if isinstance(model, Pipeline) and model.optimizer is not None:
            raise ArgumentError("a Pipeline without optimizer expected, whose gradients stay")
        self.model, self.loss, self.step = model, loss, step
        self.twin = copy.deepcopy(twin)  # threads may share it
        self.batch = _tensors(batch, "batch")
        every, along = axes_of(model)
        if mesh is not None:
            every = [mesh[name] for name in mesh.names]
        if data is not None:
            named = {axis.name: axis for axis in every}
            if not {*data} <= {*named}:
                raise ArgumentError(f"data={data!r}: some of the axes {[*named]} expected")
            along = [named[name] for name in data]
        _check_places(every, backend)
        self.place = _Place({a.name: (a.workers, a.index) for a in every if a.size > 1})
        self.rows = tuple(axis.index for axis in along)
        self.mine = self._cut(along) if mine is None else _tensors(mine, "mine")
        self.pairs = counterparts(model)
        self.wholes = dict(self.twin.named_parameters(remove_duplicate=False))
        self.names = [one.name for one in self.pairs], [*self.wholes]
        dtypes = [p.dtype for p in (*self.twin.parameters(), *(c.parameter for c in self.pairs))]
        self.dtype = max(dtypes, key=lambda d: torch.finfo(d).eps, default=torch.float64)

    def _cut(self, along: Sequence[Axis]) -> list[Tensor]:
        """This worker's rows."""
        parts, index = prod(axis.size for axis in along), 0
        for axis in along:
            index = index * axis.size + axis.index
        if any(not x.ndim or len(x) < parts for x in self.batch):
            shapes = [tuple(x.shape) for x in self.batch]
            raise ArgumentError(f"batch: at least {parts} rows expected, given shapes {shapes}")
        return [x.tensor_split(parts)[index] for x in self.batch]

    def agree_on_names(self, said: Sequence[tuple[list[str], list[str]]]) -> None:
        """Check that model and twin have the same parameters.

        Raises:
            ArgumentError: they have not; on every worker.
        """
        models = {name: None for own, _ in said for name in own}
        for worker, (own, twins) in enumerate(said):
            if more := [name for name in own if name not in twins]:
                raise ArgumentError(
                    f"check: the twin has no parameter {more[0]!r}, as the model has on worker "
                    f"{worker}; it has {', '.join(twins)}"
                )
        if missing := [name for name in said[0][1] if name not in models]:
            raise ArgumentError(
                f"check: the model has no parameter {missing[0]!r}, as the twin has, on any worker"
            )

    def run(self) -> _Found:
        """A step of model and twin, and what is found of each parameter."""
        for one in self.pairs:
            one.parameter.grad = None
        self.twin.zero_grad(set_to_none=True)
        own = self._stepped(self.model, self.mine)
        twins = self._stepped(self.twin, self.batch)
        scale = max((_largest(p.grad) for p in self.wholes.values()), default=0.0)
        findings = {one.name: self._finding(one, scale) for one in self.pairs if _counts(one)}
        for one in self.pairs:
            one.parameter.grad = None
        return _Found(findings, _Losses(own, self.rows, twins))

    def _stepped(self, net: Any, batch: Sequence[Tensor]) -> float | None:
        if self.step is not None:
            value = self.step(net, batch)
        elif isinstance(net, Pipeline):
            value = _pipelined(net, batch)
        else:
            loss = self.model._loss if isinstance(self.model, Pipeline) else self.loss
            *inputs, target = batch if loss is not None else (*batch, None)
            value = net(*inputs)
            value = value if loss is None else loss(value, target)
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                raise ArgumentError(f"a loss with one element expected, given {value!r}")
            value.backward()
        return float(value.detach()) if isinstance(value, torch.Tensor) else value

    def compare_values(self) -> None:
        """Check that this worker's parameters are parts of the twin's."""
        for one in self.pairs:
            self._compare(one)

    def _compare(self, one: Counterpart) -> None:
        p, whole = one.parameter.detach(), self.wholes[one.name].detach()
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


def _everyone(said: Sequence[tuple[_Found, _Place]], tolerance: float) -> Everyone:
    axes: dict[str, int] = {}
    groups: dict[str, dict[tuple[int, ...], None]] = {}
    for _, place in said:
        for name, (workers, _) in place.along.items():
            axes[name] = len(workers)
            groups.setdefault(name, {})[workers] = None
    found: dict[str, dict[int, Finding]] = {}
    for worker, (one, _) in enumerate(said):
        for name, finding in one.findings.items():
            found.setdefault(name, {})[worker] = finding
    places = [place.words(worker) for worker, (_, place) in enumerate(said)]
    return Everyone(axes, {n: [*g] for n, g in groups.items()}, places, tolerance, found)


def _losses(said: Sequence[_Losses], everyone: Everyone) -> list[str]:
    """Sentence of a loss that is not the twin's: the sum over different rows."""
    first: dict[tuple[int, ...], tuple[int, float]] = {}
    level = 10 * everyone.tolerance
    for worker, one in enumerate(said):
        if one.own is None:
            continue
        other, value = first.setdefault(one.rows, (worker, one.own))
        if not isclose(value, one.own, rel_tol=level):
            return [
                f"the loss is {one.own:.9g} on {everyone.places[worker]}, and {value:.9g} on "
                f"{everyone.places[other]}, of the same rows"
            ]
    wanted = said[0].twins
    if not first or wanted is None:
        return []
    total = sum(value for _, value in first.values())
    if isclose(total, wanted, rel_tol=level, abs_tol=level):
        return []
    if wanted and len(said) > 1:
        why = multiple(total / wanted, everyone.axes, level)
        return [f"the loss is {why}"]
    return [f"the loss is {total:.9g}, the twin's {wanted:.9g}"]


def _pipelined(pipe: Pipeline, batch: Sequence[Tensor]) -> Any:
    """A step of a pipeline, whose stages may be data parallel."""
    if len(batch) != 2:
        raise ArgumentError(f"batch: two tensors for a Pipeline expected, given {len(batch)}")
    copies = replicas(pipe)
    with ExitStack() as stack:
        for one in copies:
            stack.enter_context(one.no_sync())
        value = pipe.step(*batch)
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


def _largest(x: Tensor) -> float:
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
