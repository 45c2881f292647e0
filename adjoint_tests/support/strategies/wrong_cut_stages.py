"""Stages on several workers that cannot be made: the same error on every worker."""

from __future__ import annotations

from typing import Any

import torch

import linop
from linop import Partition, layers
from linop.backends.base import Backend
from linop.errors import ArgumentError, BackendError
from linop.schedules import gpipe
from linop.strategies import Pipeline
from support.strategies.pipelines import squares
from support.strategies.wrong_pipelines import Wrong

GRIDS = [Partition((1, 2), [0, 1]), Partition((1, 1), [2])]


def made(backend: Backend, stages: list[Any], **options: Any) -> Pipeline:
    return Pipeline(stages, gpipe(2, 2), squares, workers=GRIDS, backend=backend, **options)


def dense(P: Partition) -> Any:
    one = Partition((1, 1), P.workers[:1])
    return layers.Linear(P, one, P, 4, 4, dtype=torch.float64)


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
