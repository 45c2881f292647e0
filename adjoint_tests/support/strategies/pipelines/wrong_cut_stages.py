"""Stages on several workers that cannot be made: the same error on every worker."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import linop
from linop import Partition, layers
from linop.backends.engine.base import Backend
from linop.errors import ArgumentError, BackendError
from linop.schedules import gpipe
from linop.strategies import Pipeline
from support.strategies.pipelines.pipelines import squares
from support.strategies.pipelines.wrong_pipelines import Wrong

GRIDS = [Partition((1, 2), [0, 1]), Partition((1, 1), [2])]


def made(backend: Backend, stages: list[Any], **options: Any) -> Pipeline:
    return Pipeline(stages, gpipe(2, 2), squares, workers=GRIDS, backend=backend, **options)


def dense(P: Partition) -> Any:
    one = Partition((1, 1), P.workers[:1])
    return layers.Linear(P, 4, 4, P_y=one, P_W=P, dtype=torch.float64)


def layers_of_all(backend: Backend) -> None:
    with linop.backends.use(backend):
        stage = dense(GRIDS[0])
    made(backend, [stage, dense])


def no_module(backend: Backend) -> None:
    made(backend, [dense, lambda P: P])


def function_that_raises(backend: Backend) -> None:
    def stage(P: Partition) -> Any:
        raise ZeroDivisionError(f"a user's mistake on {P.size}")

    made(backend, [stage, dense])


class Failing(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """It raises in a given call, or in the backward of it."""

    def __init__(self, at: int, back: bool = False) -> None:
        super().__init__()
        self.calls, self.at, self.back = 0, at, back

    def forward(self, x: Any) -> Any:
        self.calls += 1
        if self.calls == self.at and not self.back:
            raise ZeroDivisionError("a user's mistake")
        y = x * 1
        if self.calls == self.at:
            y.register_hook(lambda grad: 1 / 0)
        return y


def between(backend: Backend, worker: int, *given: Any) -> Any:
    """A stage of two layers, with a module between that fails on a worker."""

    def stage(P: Partition) -> Any:
        middle = Failing(*given) if backend.worker == worker else torch.nn.Identity()
        return torch.nn.Sequential(dense(P), middle, dense(P))

    return stage


def block_of(backend: Backend) -> Any:
    return torch.ones(4, 2 if backend.worker in (0, 1) else 4, dtype=torch.float64)


def failing_probe(backend: Backend) -> None:
    pipe = made(backend, [between(backend, 1, 1), dense])
    pipe.step(block_of(backend), block_of(backend))


class Refusing(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """It raises an error of linop by hand, or by a function of linop that refuses its arguments."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand

    def forward(self, x: Any) -> Any:
        if self.by_hand:
            raise ArgumentError("a user's refusal")
        return Partition((2,), [0])


def refuse(backend: Backend, by_hand: bool) -> None:
    def stage(P: Partition) -> Any:
        here = Refusing(by_hand) if backend.worker == 1 else torch.nn.Identity()
        return torch.nn.Sequential(dense(P), here, dense(P))

    made(backend, [stage, dense]).step(block_of(backend), block_of(backend))


def refused_by_hand_in_a_probe(backend: Backend) -> None:
    refuse(backend, True)


def refused_in_a_probe(backend: Backend) -> None:
    refuse(backend, False)


class Named(torch.nn.Module):  # type: ignore[misc]
    """It raises an error of linop where its modules are listed, once it is `armed`."""

    armed = False

    def forward(self, x: Any) -> Any:
        return x * 1

    def named_modules(self, *given: Any, **options: Any) -> Any:
        if self.armed:
            raise ArgumentError("a user's refusal")
        return super().named_modules(*given, **options)


def refused_while_a_state_loads(backend: Backend) -> None:
    pipe = made(backend, [lambda P: torch.nn.Sequential(dense(P), Named()), dense])
    state = pipe.state_dict()
    if backend.worker == 1:
        pipe.stages[0][1].armed = True
    pipe.load_state_dict(state)


def wrong_width_in_a_probe(backend: Backend) -> None:
    """An error of all workers in a cut stage leaves the pipeline as it was."""
    pipe = made(backend, [dense, dense])
    pipe.step(block_of(backend), block_of(backend))
    try:
        pipe.step(block_of(backend)[:, :1], block_of(backend))
    except linop.errors.LinopError as error:
        pipe.step(block_of(backend), block_of(backend))
        raise error


def function_that_raises_on_one(backend: Backend) -> None:
    def stage(P: Partition) -> Any:
        if backend.worker == 1:
            raise ZeroDivisionError("a user's mistake")
        return dense(P)

    made(backend, [stage, dense])


def fewer_layers_on_one(backend: Backend) -> None:
    def stage(P: Partition) -> Any:
        return torch.nn.Identity() if backend.worker == 1 else dense(P)

    made(backend, [stage, dense])


def fewer_calls_on_one(backend: Backend) -> None:
    class Skipping(torch.nn.Sequential):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return x if backend.worker == 1 else super().forward(x)

    pipe = made(backend, [lambda P: Skipping(dense(P)), dense])
    pipe.step(block_of(backend), block_of(backend))


def optimizer_without_state(backend: Backend) -> None:
    sgd = partial(torch.optim.SGD, lr=0.1)
    pipe = made(backend, [dense, dense], optimizer=sgd)
    if backend.worker == 0:
        pipe.optimizer.state = None
    pipe.save("never")


def fails_in_a_step(backend: Backend, worker: int, at: int, back: bool) -> None:
    """A user's error in a cut stage, on one of its workers, ends the others' waits; and another
    pipeline of the same workers trains."""
    pipe = made(backend, [between(backend, worker, at, back), dense])
    x, errors = block_of(backend), []
    for _ in range(2):  # in the first, some workers may have received and sent all before
        try:
            pipe.step(x, x)
        except (ZeroDivisionError, BackendError) as error:
            assert isinstance(error, ZeroDivisionError) or "ZeroDivisionError" in str(error), error
            errors.append(error)
    assert isinstance(errors[0], ZeroDivisionError) == (backend.worker == worker), errors
    assert "an earlier call failed" in str(errors[-1]), errors
    again = made(backend, [dense, dense])
    again.step(x, x)
    assert all(p.grad is not None for p in again.parameters())


def states_that_differ(backend: Backend) -> None:
    def stage(P: Partition) -> Any:
        plain = torch.nn.PReLU(init=backend.worker or 0.5)
        return torch.nn.Sequential(dense(P), plain)

    made(backend, [stage, dense]).state_dict()


def other_shape(backend: Backend) -> None:
    pipe = made(backend, [dense, dense])
    state = pipe.state_dict()
    pipe.load_state_dict(state | {"0.weight": torch.zeros(4, 2)})


def no_checkpoint(backend: Backend) -> None:
    made(backend, [dense, dense]).load("no/such/file")


def tied_and_whole(backend: Backend) -> None:
    def stage(P: Partition) -> Any:
        return torch.nn.Sequential(dense(P), torch.nn.PReLU())

    made(backend, [stage, stage], tied=[["0.1.weight", "1.1.weight"]])


WRONG: list[Wrong] = [
    (layers_of_all, ArgumentError, "on worker 0: stage 0: layer '' is of 3 workers, the stage", 3),
    (failing_probe, BackendError, r"on worker 1: stage 0, input of shape .* ZeroDivisionError", 3),
    (refused_by_hand_in_a_probe, ArgumentError, "on worker 1: stage 0, input .* a user's ref", 3),
    (refused_in_a_probe, linop.errors.PartitionError, "on worker 1: stage 0, input of shape", 3),
    (refused_while_a_state_loads, ArgumentError, "on worker 1: a user's refusal", 3),
    (wrong_width_in_a_probe, linop.errors.LinopError, "stage 0, input of shape", 3),
    (function_that_raises_on_one, BackendError, "Pipeline: on worker 1: ZeroDivisionError", 3),
    (fewer_layers_on_one, BackendError, "worker 0: construct Linear; worker 1: make stage 0", 3),
    (fewer_calls_on_one, BackendError, "things: worker 0: .*; worker 1: trace stage 0", 3),
    (optimizer_without_state, BackendError, "save: on worker 0: .*Error: ", 3),
    (no_module, ArgumentError, "on worker 2: stage 1: a torch.nn.Module expected, its function", 3),
    (
        function_that_raises,
        BackendError,
        "on worker 0: ZeroDivisionError: a user.s mistake",
        3,
    ),
    (states_that_differ, BackendError, "'1.weight', of which each worker has the whole, diff", 3),
    (other_shape, linop.errors.ShapeError, r"'0.weight' has shape \(4, 2\); \(4, 4\) expected", 3),
    (no_checkpoint, BackendError, "load: on worker 0: FileNotFoundError", 3),
    (tied_and_whole, ArgumentError, "'0.1.weight' is held whole by each of the workers", 3),
]
