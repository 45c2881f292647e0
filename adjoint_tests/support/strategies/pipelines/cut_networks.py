"""The networks of examples/cut_pipelines.py as pipelines of cut stages, beside the same cut without
a schedule, and beside one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from linop import Partition, layers
from linop.backends import use
from linop.backends.engine.base import Backend
from linop.layers import gather_state
from linop.schedules import GENERATORS
from linop.spaces.partition import balanced
from linop.strategies import Pipeline
from support.examples import example
from support.strategies.pipelines.pipelines import fill, squares, values

Tensor = Any
NAMES = {
    "lenet5": [
        (Partition((1, 1, 3, 1), [0, 1, 2]), Partition((1, 1), [3])),
        (Partition((1, 1, 1, 2), [3, 1]), Partition((1, 2), [0, 2])),
    ],
    "unet3d": [
        (Partition((1, 1, 2, 1, 1), [0, 1]), Partition((1,) * 5, [2]), Partition((1,) * 5, [3])),
        (Partition((1,) * 5, [3]), Partition((1,) * 5, [1]), Partition((1, 1, 1, 2, 1), [0, 2])),
        (
            Partition((1, 1, 2, 1, 1), [0, 1]),
            Partition((1, 1, 1, 1, 3), [2, 3, 4]),
            Partition((1, 1, 1, 2, 2), [5, 6, 7, 8]),
        ),
    ],
}
"""Grids of the stages, by network."""
MICRO_BATCHES, ROWS, CLIPPED = 3, 4, 0.5
"""Micro-batches of one and of two rows; the norm of gradients."""


def network(name: str, number: int) -> Any:
    """A network on grids of a number."""
    made = example("cut_pipelines")
    grids = NAMES[name][number]
    if name == "lenet5":
        return made.lenet(grids, size=ROWS)
    return made.unet(grids, size=ROWS, shape=(8, 8, 12))


def workers(name: str, number: int) -> int:
    """Number of workers of the grids."""
    return sum(grid.size for grid in NAMES[name][number])


def sequential(net: Any) -> Any:
    """The network in one process, with values that depend on no generator."""
    whole = net.sequential()
    with torch.no_grad():
        for k, p in enumerate(whole.parameters()):
            drawn = torch.randn(p.shape, generator=torch.Generator().manual_seed(k))
            p.copy_(drawn / max(1, p[0].numel()) ** 0.5)
    return whole


def whole_gradients(stage: Any) -> Mapping[str, Tensor]:
    """Gradients of a cut stage as the sequential one's, by the road of its state."""
    held = copy.deepcopy(stage)
    for p, q in zip(held.parameters(), stage.parameters(), strict=True):
        p.data = q.grad
    return gather_state(held)


def unscheduled(net: Any, stages: Mapping[int, Any], backend: Backend, m: slice) -> None:
    """Add the gradients of some rows, with the same cut: all stages in one graph, in which
    movements between grids lead from one to the next."""
    cut = example("cut_pipelines").block
    images, target = (one[m] for one in net.batch(0))
    me, found, ends = backend.worker, {}, []
    for s, grid in enumerate(net.workers):
        inputs = [cut(images, grid, me)] if s == 0 else []
        for a, k in sorted((a, *(k or [0])) for a, b, *k in net.edges if b == s):
            mine = found[a, k] if (a, k) in found else None
            inputs.append(layers.Repartition(net.workers[a], grid)(mine))
        if me not in grid:
            ends += [x.sum() for x in inputs if x is not None]  # backward is collective
            continue
        outputs = stages[s](*inputs)
        outputs = outputs if isinstance(outputs, tuple) else [outputs]
        found |= {(s, k): y for k, y in enumerate(outputs)}
    if me in net.workers[-1]:
        rows = len(net.batch(0)[0])
        share = len(images) / rows if net.reduction == "mean" else 1
        last = found[len(net.workers) - 1, 0]
        ends.append(net.loss(last, cut(target, net.workers[-1], me)) * share)
    sum(ends).backward()


def gradients_are_those_without_a_schedule(
    backend: Backend, name: str, number: int, schedule: str
) -> None:
    """Bit for bit the gradients of the same cut, micro-batches in order; to rounding those of one
    process, and the loss too."""
    net = network(name, number)
    whole, cut = sequential(net), example("cut_pipelines").block
    pipe = net.pipeline(backend, schedule, MICRO_BATCHES)
    pipe.load_state_dict(whole.state_dict())
    stages = copy.deepcopy(pipe.stages)
    images, target = net.batch(0)
    me, first, *_, last = backend.worker, *net.workers
    loss = pipe.step(cut(images, first, me), cut(target, last, me))
    begin, total = 0, 0
    for size in balanced(ROWS, MICRO_BATCHES):
        rows = slice(begin, begin + size)
        begin += size
        unscheduled(net, stages, backend, rows)
        share = size / ROWS if net.reduction == "mean" else 1
        one = net.loss(net.output(whole, images[rows]), target[rows]) * share
        one.backward()
        total = total + one.detach()
    for s, stage in pipe.stages.items():
        same = stages[s].named_parameters()
        for (key, p), (_, q) in zip(stage.named_parameters(), same, strict=True):
            assert torch.equal(p.grad, q.grad), f"{key} of stage {s} without a schedule"
        with use(pipe._parts[s]):
            grads = whole_gradients(stage)
        for key, q in whole[s].named_parameters():
            close(f"{key} of stage {s}", grads[key], q.grad)
    close("loss", everyones(backend, loss), total)


def everyones(backend: Backend, loss: Tensor) -> Tensor:
    """Sum of the last stage's workers' terms."""
    term = 0.0 if loss is None else loss.item()
    return torch.tensor(sum(backend.transport.gather_all(term)), dtype=torch.float64)  # type: ignore[attr-defined]


def trains_and_goes_on(
    backend: Backend, name: str, number: int, other: int, schedule: str, folder: str
) -> None:
    """Steps of Adam, clipped, with a scheduler, are those of one process. A checkpoint of them is
    the sequential one; a pipeline on other grids goes on from it."""
    net = network(name, number)
    whole, cut = sequential(net), example("cut_pipelines").block
    start, me = copy.deepcopy(whole.state_dict()), backend.worker
    adam, file = partial(torch.optim.Adam, lr=0.01), Path(folder) / "checkpoint.pt"
    optimizer = adam(whole.parameters())
    rate = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def goes_on(net: Any, pipe: Any, steps: Sequence[int]) -> None:
        own = torch.optim.lr_scheduler.StepLR(pipe.optimizer, 1, 0.5)
        for k in steps:
            images, target = net.batch(k)
            first, *_, last = net.workers
            loss = pipe.step(cut(images, first, me), cut(target, last, me))
            close("loss", everyones(backend, loss), step(net, images, target), 1e-9)
            own.step()

    def step(net: Any, images: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        total = 0
        for x, wanted in zip(
            images.tensor_split(MICRO_BATCHES), target.tensor_split(MICRO_BATCHES), strict=True
        ):
            share = len(x) / ROWS if net.reduction == "mean" else 1
            one = net.loss(net.output(whole, x), wanted) * share
            one.backward()
            total = total + one.detach()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), CLIPPED)
        optimizer.step()
        rate.step()
        return total

    pipe = net.pipeline(backend, schedule, MICRO_BATCHES, optimizer=adam, max_norm=CLIPPED)
    pipe.load_state_dict(start)
    goes_on(net, pipe, [0, 1])
    pipe.save(file)
    state = pipe.state_dict()
    for key, value in whole.state_dict().items():
        close(key, state[key].double(), value.double(), 1e-9)
    saved = torch.load(file, weights_only=True)
    for n, kept in optimizer.state_dict()["state"].items():
        for key, value in kept.items():
            close(f"{key} of parameter {n}", saved["optimizer"]["state"][n][key], value, 1e-8)
    optimizer.load_state_dict(saved["optimizer"])  # one process may go on from it
    whole.load_state_dict(saved["model"])
    elsewhere = network(name, other)
    again = elsewhere.pipeline(backend, schedule, MICRO_BATCHES, optimizer=adam, max_norm=CLIPPED)
    again.load(file)
    for key, value in again.state_dict().items():
        assert torch.equal(value, state[key]), key
    goes_on(elsewhere, again, [2, 3])


def convolution(P: Partition | None) -> Any:
    """A stage of float32."""
    kind, where = (torch.nn, ()) if P is None else (layers, (P,))
    return torch.nn.Sequential(kind.Conv2d(*where, 2, 2, 3, padding=1), torch.nn.Tanh())


ONE = (1, 1, 1, 1)
GRIDS = {
    4: [Partition((1, 2, 1, 1), [2, 0]), Partition(ONE, [1]), Partition(ONE, [3])],
    5: [Partition((1, 1, 2, 1), [0, 1]), Partition((1, 2, 1, 1), [2, 3]), Partition(ONE, [4])],
}
"""By number of workers. Grids of (1, 2, 1, 1) cut weights too."""


def convolutions(backend: Backend, **options: Any) -> tuple[Any, Any]:
    """Three convolutions of equal weights, as a pipeline and in one process."""
    whole = torch.nn.Sequential(*[convolution(None) for _ in range(3)])
    for stage in whole:
        fill(stage, 1)
    table = GENERATORS["1f1b"](3, 2)
    if options.get("tied"):  # equal before they are tied
        stages = [_filled(convolution, whole[0].state_dict())] * 3
    else:
        stages = [convolution] * 3
    loss = options.pop("loss", squares)
    pipe = Pipeline(
        stages, table, loss, workers=GRIDS[backend.workers or 0], backend=backend, **options
    )
    pipe.load_state_dict(whole.state_dict())
    return pipe, whole


def _filled(make: Any, state: Any) -> Any:
    def made(P: Partition) -> Any:
        stage = make(P)
        layers.scatter_state(stage, state)
        return stage

    return made


def step_of(pipe: Any, backend: Backend, x: Tensor, target: Tensor) -> Tensor:
    cut, me, grids = example("cut_pipelines").block, backend.worker, GRIDS[backend.workers or 0]
    return pipe.step(cut(x, grids[0], me), cut(target, grids[-1], me))


def ties_weights_of_cut_stages(backend: Backend) -> None:
    """A weight in three grids is one: its gradients are added, and it counts once in the norm."""
    x, target = (values(4, 2, 6, 5, seed=k, dtype=torch.float32) for k in (1, 2))
    tied = [[f"{s}.0.weight" for s in (0, 1, 2)]]
    sgd = partial(torch.optim.SGD, lr=0.01)
    pipe, whole = convolutions(backend, tied=tied)
    trained, _ = convolutions(backend, tied=tied, max_norm=0.5, optimizer=sgd)
    for stage in whole[1:]:
        stage[0].weight = whole[0][0].weight
    step_of(trained, backend, x, target)
    for number in range(2):  # gradients add up
        step_of(pipe, backend, x, target)
        squares(whole(x), target).backward()
        for s, stage in pipe.stages.items():
            with use(pipe._parts[s]):
                grads = whole_gradients(stage)
            for key in ("0.weight", "0.bias"):
                wanted = whole[s].get_parameter(key).grad
                close(f"{number}: {key} of stage {s}", grads[key], wanted, 1e-5)
    whole.zero_grad()
    squares(whole(x), target).backward()
    torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    sgd(whole.parameters()).step()
    state = trained.state_dict()
    for key, value in whole.state_dict().items():
        close(key, state[key], value, 1e-5)
    assert torch.equal(state["0.0.weight"], state["2.0.weight"])


def computes_in_lower_precision(backend: Backend) -> None:
    """Under autocast gradients are those of one process to the precision of bfloat16; a scaler by
    powers of two changes no bit, and an infinite gradient skips the step of all."""
    x, target = (values(4, 2, 6, 5, seed=k, dtype=torch.float32) for k in (1, 2))
    pipe, whole = convolutions(backend)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        step_of(pipe, backend, x, target)
        squares(whole(x).float(), target).backward()
    for s, stage in pipe.stages.items():
        with use(pipe._parts[s]):
            grads = whole_gradients(stage)
        for key, q in whole[s].named_parameters():
            assert grads[key].dtype == torch.float32
            close(f"{key} of stage {s}", grads[key], q.grad, 0.03)
    sgd = partial(torch.optim.SGD, lr=0.01)
    plain, _ = convolutions(backend, optimizer=sgd)
    step_of(plain, backend, x, target)
    scaler = layers.GradScaler("cpu", init_scale=2.0**10)
    scaled, _ = convolutions(backend, loss=lambda y, t: scaler.scale(squares(y, t)))
    optimizer = sgd([{"params": list(scaled.parameters())}])

    def step(batch: Tensor) -> Any:
        step_of(scaled, backend, batch, target)
        scaler.step(optimizer)
        scaler.update()
        scaled.zero_grad()
        return scaled.state_dict()

    state = step(x)
    for key, value in plain.state_dict().items():
        assert torch.equal(state[key], value), key
    with np.errstate(invalid="ignore"):
        again = step(x / 0.0)
    for key, value in state.items():
        assert torch.equal(again[key], value), key
    assert scaler.get_scale() == 2.0**9


def close(what: str, given: Tensor, wanted: Tensor, most: float = 1e-12) -> None:
    """Check that two tensors are equal up to a part of the largest element: sums are taken in
    another order."""
    error = (given - wanted).abs().max().item()
    assert error <= most * wanted.abs().max().item(), f"{what}: {error:.2g}"
