"""`check`: losses and gradients of a parallel model beside those of its sequential twin."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import isclose
from typing import Any

import torch

from linop.errors import ArgumentError
from linop.layers.agreement.input_agreement import agreement_of, program_backend
from linop.strategies.checking.comparison import (
    Comparison,
    Found,
    Loss,
    Losses,
    Place,
    Said,
    Step,
)
from linop.strategies.checking.diagnosis import Everyone, Finding, GradientError, multiple
from linop.strategies.mesh import Mesh


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
    exact: bool = False,
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
        exact: every number must be the twin's, to the last bit. Without `step`, model and twin make
            a step of `VirtualShards`, and losses are terms of a sum. The twin of a tensor-parallel
            net of shards is the same net over an axis of one worker (docs/exact_sums.md).

    Returns:
        The largest relative difference of a gradient, on any worker: 0 if all are equal.

    Raises:
        GradientError: losses or gradients differ. ArgumentError: an argument is of the wrong kind;
            parameters of model and twin differ in names, shapes or values; the batch has too few
            rows. All on every worker.

    Example:
        >>> import copy
        >>> twin, batch = torch.nn.Linear(2, 1), (torch.ones(4, 2), torch.zeros(4, 1))
        >>> squares = torch.nn.MSELoss(reduction="sum")
        >>> def program(backend):
        ...     model = strategies.DataParallel(copy.deepcopy(twin))
        ...     return strategies.check(model, twin, batch, squares) < 1e-5
        >>> linop.launch(program, workers=2)
        [True, True]
    """
    backend = mesh.backend if isinstance(mesh, Mesh) else program_backend()
    agreement = agreement_of(backend)
    what = "linop.strategies.check"
    if exact and (mine is not None or tolerance is not None):
        raise ArgumentError("check: exact=True has no tolerance=, and takes no mine=")
    made = partial(Comparison, model, twin, batch, loss, step, mesh, exact)
    one = agreement.each(made, "check", f"call {what}")
    _agree(agreement.gather_objects(one.said, f"call {what}"))
    axes = [] if mesh is None else [mesh[name] for name in mesh.names]
    agreement.each(partial(one.put, axes, data, mine, backend), "check", f"call {what}")
    agreement.each(one.compare_values, "check", f"compare values, {what}")
    found = agreement.each(one.run, "check", f"compare gradients, {what}")
    said = agreement.gather_objects((found, one.place), f"compare gradients, {what}")
    if tolerance is None:
        tolerance = torch.finfo(one.dtype).eps ** 0.75
    everyone = _everyone(said, tolerance, exact)
    faults = [*_losses([found.losses for found, _ in said], everyone), *everyone.faults()]
    if faults:
        raise GradientError("check: " + "; ".join(faults))
    return everyone.largest()


def _agree(said: Sequence[Said]) -> None:
    """Check that model and twin have the same parameters, and all workers the same batch.

    Raises:
        ArgumentError: they have not; on every worker.
    """
    models = {name: None for one in said for name in one.models}
    for worker, one in enumerate(said):
        if more := [name for name in one.models if name not in one.twins]:
            raise ArgumentError(
                f"check: the twin has no parameter {more[0]!r}, as the model has on worker "
                f"{worker}; it has {', '.join(one.twins)}"
            )
        if one.batch != said[0].batch:
            raise ArgumentError(
                f"check: workers 0 and {worker} have different batches; the whole one expected on "
                f"all workers: mine= takes a worker's part"
            )
        if one.given != said[0].given:
            raise ArgumentError(
                f"check: worker {worker} gives {one.given}, worker 0 {said[0].given}; the same of "
                f"loss=, step= and mesh= expected on all workers"
            )
    if missing := [name for name in said[0].twins if name not in models]:
        raise ArgumentError(
            f"check: the model has no parameter {missing[0]!r}, as the twin has, on any worker"
        )


def _everyone(
    said: Sequence[tuple[Found, Place]], tolerance: float, exact: bool = False
) -> Everyone:
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
    by_name = {name: [*group] for name, group in groups.items()}
    return Everyone(axes, by_name, places, tolerance, found, exact)


def _losses(said: Sequence[Losses], everyone: Everyone) -> list[str]:
    """Sentence of a loss that is not the twin's: the sum over different rows."""
    first: dict[tuple[int, ...], tuple[int, float]] = {}
    level = 10 * everyone.tolerance
    near = 0.0 if everyone.exact else level
    for worker, one in enumerate(said):
        if one.own is None:
            continue
        other, value = first.setdefault(one.rows, (worker, one.own))
        if not isclose(value, one.own, rel_tol=near):
            digits = everyone.digits
            return [
                f"the loss is {one.own:.{digits + 3}g} on {everyone.places[worker]}, and "
                f"{value:.{digits + 3}g} on "
                f"{everyone.places[other]}, of the same rows"
            ]
    wanted = said[0].twins
    if not first or wanted is None:
        return []
    total = sum(value for _, value in first.values())
    if isclose(total, wanted, rel_tol=near, abs_tol=near):
        return []
    if wanted and len(said) > 1 and not isclose(total, wanted, rel_tol=level, abs_tol=level):
        why = multiple(total / wanted, everyone.axes, level)
        return [f"the loss is {why}"]
    digits = everyone.digits + 3
    return [f"the loss is {total:.{digits}g}, the twin's {wanted:.{digits}g}"]
