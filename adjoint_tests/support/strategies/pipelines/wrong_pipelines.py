"""Pipelines that cannot run: the same error on every worker, before a message."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from linop.backends.engine.base import Backend
from linop.errors import ArgumentError, BackendError, LinopError, ShapeError
from linop.schedules import Schedule, gpipe, one_forward_one_backward, pipedream
from linop.schedules.schedule_errors import ScheduleDeadlockError
from linop.strategies import Pipeline, split
from support.strategies.pipelines.pipelines import block, squares, values

Tensor = Any


class Two(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Its second output cannot be sent."""

    def forward(self, x: Tensor) -> tuple[Tensor, set[int]]:
        return x, {2}


class Turning(torch.nn.Module):  # type: ignore[misc]
    """Its output has one more column at each call, from a given one on."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.calls, self.at = 0, at

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls < self.at else torch.cat([x, x[:, :1]], 1)


class Failing(torch.nn.Module):  # type: ignore[misc]
    """It raises in a given call."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.calls, self.at = 0, at

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise ZeroDivisionError("a user's mistake")
        return x * 1


def run(
    backend: Backend, stages: list[Any], table: Schedule, rows: int = 8, **options: Any
) -> None:
    pipe = Pipeline(stages, table, squares, backend=backend, **options)
    x = values(rows, 4, seed=1)
    pipe.step(x, x)


def blocks(count: int) -> list[Any]:
    return [block(4, s) for s in range(count)]


def few_rows(backend: Backend) -> None:
    run(backend, blocks(2), gpipe(2, 4), rows=3)


def wrong_sizes(backend: Backend) -> None:
    pipe = Pipeline(blocks(2), gpipe(2, 2), squares, backend=backend)
    pipe.step(values(8, 4, seed=1), values(8, 4, seed=1), sizes=[4, 5])


def short_target(backend: Backend) -> None:
    pipe = Pipeline(blocks(2), gpipe(2, 2), squares, backend=backend)
    pipe.step(values(8, 4, seed=1), values(7, 4, seed=1))


def no_input(backend: Backend) -> None:
    pipe = Pipeline(blocks(2), gpipe(2, 2), squares, backend=backend)
    pipe.step(None, values(7, 4, seed=1))


def stage_without_workers(backend: Backend) -> None:
    run(backend, blocks(3), gpipe(3, 2))


def stages_of_another_number(backend: Backend) -> None:
    run(backend, blocks(3), gpipe(2, 2))


def stage_missing(backend: Backend) -> None:
    run(backend, [block(4, 0), None], gpipe(2, 2))


def unknown_name(backend: Backend) -> None:
    run(backend, split(torch.nn.Sequential(*blocks(3)), ["7"]), gpipe(2, 2))


def no_tensor(backend: Backend) -> None:
    run(backend, [Two(), block(4, 0)], gpipe(2, 2))


def other_shapes(backend: Backend) -> None:
    run(backend, [Turning(2), block(4, 0)], gpipe(2, 2))


def other_widths(backend: Backend) -> None:
    run(backend, [block(4, 0), block(5, 0)], gpipe(2, 2))


def other_schedule(backend: Backend) -> None:
    make = gpipe if backend.worker else one_forward_one_backward
    run(backend, blocks(2), make(2, 4))


def other_steps(backend: Backend) -> None:
    pipe = Pipeline(blocks(2), gpipe(2, 2), squares, backend=backend)
    x = values(8, 4, seed=1)
    _ = pipe.step(x, x) if backend.worker else pipe(x)


def without_gradients_on_one(backend: Backend) -> None:
    pipe = Pipeline(blocks(2), gpipe(2, 2), squares, backend=backend)
    x = values(8, 4, seed=1)
    with torch.set_grad_enabled(not backend.worker):
        pipe.step(x, x)


def step_of_forwards(backend: Backend) -> None:
    pipe = Pipeline(blocks(2), Schedule.from_csv("0F0,0F1\n1F0,1F1\n"), squares, backend=backend)
    x = values(8, 4, seed=1)
    y = pipe(x)
    if y is not None:
        assert torch.equal(y, torch.nn.Sequential(*blocks(2))(x).detach())
    pipe.step(x, x)


def in_inference_mode(backend: Backend) -> None:
    with torch.inference_mode():
        run(backend, blocks(2), gpipe(2, 2))


def refused_schedule(backend: Backend) -> None:
    rows = "0F0,0RECV_B0,0B0,0SEND_F0", "1RECV_F0,1F0,1B0,1SEND_B0"
    run(backend, blocks(2), Schedule.from_csv("\n".join(rows)))


def group_actions(backend: Backend) -> None:
    table = Schedule.from_csv("0RESHARD,0UNSHARD,0F0,0B0\n1F0,1B0\n")
    run(backend, blocks(2), table)


def no_slots(backend: Backend) -> None:
    run(backend, blocks(2), gpipe(2, 2), slots=0)


def unknown_tie(backend: Backend) -> None:
    run(backend, blocks(2), gpipe(2, 2), tied=[("0.0.weight", "1.7.weight")])


def different_tie(backend: Backend) -> None:
    run(backend, blocks(2), gpipe(2, 2), tied=[("0.0.weight", "1.0.weight")])


def output_lacking(backend: Backend) -> None:
    run(backend, blocks(2), gpipe(2, 2), edges=[(0, 1, 1)])


def edge_twice(backend: Backend) -> None:
    run(backend, blocks(2), gpipe(2, 2), edges=[(0, 1), (0, 1, 0)])


def edge_back(backend: Backend) -> None:
    run(backend, blocks(2), gpipe(2, 2), edges=[(1, 0)])


def nowhere(backend: Backend) -> None:
    run(backend, blocks(3), gpipe(3, 2), edges=[(0, 2)], workers=[0, 1, 2])


def norm_too_early(backend: Backend) -> None:
    run(backend, blocks(2), pipedream(2, 2), max_norm=1.0)


def no_stages_on_one(backend: Backend) -> None:
    run(backend, [] if backend.worker == 0 else None, gpipe(2, 2))  # type: ignore[arg-type]


def no_list_of_edges_on_one(backend: Backend) -> None:
    run(backend, blocks(2), gpipe(2, 2), edges=3 if backend.worker else None)


def other_reduction(backend: Backend) -> None:
    run(backend, blocks(2), gpipe(2, 2), reduction="average")


def optimizer_that_fails(backend: Backend) -> None:
    def make(parameters: list[Tensor]) -> Any:
        if backend.worker == 1:
            raise ZeroDivisionError("no rate")
        return torch.optim.SGD(parameters, lr=0.1)

    run(backend, blocks(2), gpipe(2, 2), optimizer=make)


def optimizer_that_linop_refuses(backend: Backend) -> None:
    def make(parameters: list[Tensor]) -> Any:
        if backend.worker == 0:
            raise ArgumentError("no rate")
        return torch.optim.SGD(parameters, lr=0.1)

    run(backend, blocks(3), gpipe(3, 2), optimizer=make, max_norm=1.0)


class Unlisted(torch.nn.Module):  # type: ignore[misc]
    """Its parameters cannot be listed."""

    def parameters(self, recurse: bool = True) -> Any:
        raise ZeroDivisionError("no parameters")


def parameters_that_fail(backend: Backend) -> None:
    run(backend, [block(4, 0), Unlisted()], gpipe(2, 2))


class Sizes:
    """It cannot be iterated over."""

    def __iter__(self) -> Any:
        raise ZeroDivisionError("no sizes")

    def __repr__(self) -> str:
        return "Sizes()"


def sizes_that_fail(backend: Backend) -> None:
    pipe = Pipeline(blocks(2), gpipe(2, 2), squares, backend=backend)
    x = values(8, 4, seed=1)
    pipe.step(x, x, sizes=Sizes() if backend.worker else None)  # type: ignore[arg-type]


def failing_loss(backend: Backend) -> None:
    def loss(y: Tensor, target: Tensor) -> Tensor:
        raise ZeroDivisionError("a user's mistake")

    pipe = Pipeline(blocks(3), one_forward_one_backward(3, 4), loss, backend=backend)
    x = values(8, 4, seed=1)
    pipe.step(x, x)


def loss_of_rows(backend: Backend) -> None:
    table = one_forward_one_backward(3, 4)
    pipe = Pipeline(blocks(3), table, lambda y, target: y - target, backend=backend)
    x = values(8, 4, seed=1)
    pipe.step(x, x)


def detached_loss(backend: Backend) -> None:
    table = one_forward_one_backward(3, 4)
    pipe = Pipeline(blocks(3), table, lambda y, t: squares(y.detach(), t), backend=backend)
    x = values(8, 4, seed=1)
    pipe.step(x, x)


class Forgetting(torch.nn.Module):  # type: ignore[misc]
    """Its parameters cannot be listed once it is `armed`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.armed = block(4, 0), False

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def named_parameters(self, *given: Any, **options: Any) -> Any:
        if self.armed:
            raise ZeroDivisionError("a user's mistake")
        return super().named_parameters(*given, **options)


def failing_begin(backend: Backend) -> None:
    stages = [block(4, 0), Forgetting(), block(4, 1)]
    sgd = partial(torch.optim.SGD, lr=0.1)
    pipe = Pipeline(stages, pipedream(3, 4), squares, optimizer=sgd, backend=backend)
    x = values(8, 4, seed=1)
    pipe.step(x, x)
    stages[1].armed = True
    pipe.step(x, x)


def shapes_that_change_later(backend: Backend) -> None:
    run(backend, [Turning(5), block(4, 0)], gpipe(2, 4))


def failing_forward(backend: Backend) -> None:
    run(backend, [block(4, 0), Failing(5), block(4, 1)], gpipe(3, 4))


class Sealed:
    """It cannot be sent to other workers."""

    def __reduce__(self) -> Any:
        raise TypeError("no pickle")

    def __repr__(self) -> str:
        return "Sealed()"


def sealed_option(backend: Backend, name: str) -> None:
    run(backend, blocks(2), gpipe(2, 2), **({name: Sealed()} if backend.worker else {}))


def no_loss_on_one(backend: Backend) -> None:
    Pipeline(blocks(2), gpipe(2, 2), 3 if backend.worker else squares, backend=backend)  # type: ignore[arg-type]


def no_optimizer(backend: Backend) -> None:
    run(backend, blocks(2), gpipe(2, 2), optimizer=lambda ps: ps if backend.worker else None)


def whole_pipeline(backend: Backend) -> Pipeline:
    return Pipeline(blocks(2), gpipe(2, 2), squares, backend=backend)


def steps_of_two_pipelines(backend: Backend) -> None:
    pipes = whole_pipeline(backend), whole_pipeline(backend)
    x = values(8, 4, seed=1)
    pipes[backend.worker == 1].step(x, x)


def no_state_on_one(backend: Backend) -> None:
    pipe = whole_pipeline(backend)
    state = pipe.state_dict()
    pipe.load_state_dict(None if backend.worker else state)  # type: ignore[arg-type]


def no_values_on_one(backend: Backend) -> None:
    pipe = whole_pipeline(backend)
    state = pipe.state_dict()
    pipe.load_state_dict({k: 3 if backend.worker else t for k, t in state.items()})


def unknown_key_on_one(backend: Backend) -> None:
    pipe = whole_pipeline(backend)
    pipe.load_state_dict(pipe.state_dict() | ({"more": torch.ones(1)} if backend.worker else {}))


def module_that_does_not_load(backend: Backend) -> None:
    pipe = whole_pipeline(backend)
    state = pipe.state_dict()
    if backend.worker == 1:
        pipe.stages[1].register_load_state_dict_pre_hook(lambda *given: 1 / 0)
    pipe.load_state_dict(state)


def no_path_to_save(backend: Backend) -> None:
    whole_pipeline(backend).save("here" if backend.worker else None)  # type: ignore[arg-type]


def no_path_to_load(backend: Backend) -> None:
    whole_pipeline(backend).load("here" if backend.worker else None)  # type: ignore[arg-type]


def another_norm_on_one(backend: Backend) -> None:
    whole_pipeline(backend).clip_grad_norm_(1.0 + (backend.worker or 0))


def no_norm_on_one(backend: Backend) -> None:
    whole_pipeline(backend).clip_grad_norm_("1" if backend.worker else 1.0)  # type: ignore[arg-type]


Wrong = tuple[Callable[[Backend], None], type[BaseException], str, int]
BEFORE: list[Wrong] = [
    (group_actions, ArgumentError, "stage 0: 0RESHARD before any 0UNSHARD; a step begins with", 2),
    (few_rows, ArgumentError, "a batch of 3 rows cannot be split into the 4 micro-batches", 2),
    (wrong_sizes, ArgumentError, r"sizes \[4, 5\] of micro-batches given; 2 positive numbers", 2),
    (short_target, ArgumentError, r"target on worker 1: a tensor of shape \(7, 4\) given", 2),
    (no_input, ArgumentError, "worker 0 holds a block", 2),
    (stage_without_workers, BackendError, r"stages of workers \[2\] without workers", 2),
    (stages_of_another_number, ArgumentError, "3 stages given; the schedule has 2", 2),
    (stage_missing, ArgumentError, "on worker 1: stage 1: a torch.nn.Module expected", 2),
    (unknown_name, ArgumentError, "there is no submodule '7' to cut at", 2),
    (no_tensor, ArgumentError, "stage 0.* returns what cannot be sent: 1 is <class 'set'>", 2),
    (other_shapes, ArgumentError, r"stage 0.*\(4, 4\).*, then one of .*\(4, 5\)", 2),
    (other_widths, BackendError, r"on worker 1: stage 1, input of shape \(4, 4\): Run", 2),
    (other_schedule, BackendError, "worker 1 has another schedule, edges or options", 2),
    (other_steps, BackendError, r"step on some, and evaluation on workers \[1\]", 2),
    (without_gradients_on_one, ArgumentError, r"step on workers \[1\] under torch.no_grad or", 2),
    (step_of_forwards, ArgumentError, "forwards alone, and step needs backwards; call the", 2),
    (in_inference_mode, ArgumentError, r"step on workers \[0, 1\] under torch.no_grad or", 2),
    (refused_schedule, ScheduleDeadlockError, "0RECV_B0", 2),
    (unknown_tie, ArgumentError, "tied: '1.7.weight' is no parameter of a stage", 2),
    (different_tie, ArgumentError, "'1.0.weight' and '0.0.weight' are to be equal", 2),
    (output_lacking, ArgumentError, "stage 0: its module returns no output 1", 2),
    (edge_twice, ArgumentError, r"edge \(0, 1, 0\): each output of a stage once", 2),
    (edge_back, ArgumentError, r"edge \(1, 0\): two of the stages 0 to 1 expected", 2),
    (nowhere, ArgumentError, r"the last stage alone has the output; stages \[1\] lead nowhere", 3),
    (norm_too_early, ArgumentError, "updates come last in the schedule; those of 'pipedream'", 2),
    (other_reduction, ArgumentError, "'sum' or 'mean' expected, given 'average'", 2),
    (no_stages_on_one, ArgumentError, "on worker 0: 0 stages given; the schedule has 2", 2),
    (no_list_of_edges_on_one, BackendError, "on worker 1: TypeError: 'int' object is not", 2),
    (optimizer_that_fails, BackendError, "on worker 1: ZeroDivisionError: no rate", 2),
    (optimizer_that_linop_refuses, ArgumentError, "on worker 0: no rate", 3),
    (parameters_that_fail, BackendError, "on worker 1: ZeroDivisionError: no parameters", 2),
    (sizes_that_fail, BackendError, r"other sizes on workers \[1\]", 2),
    (no_slots, ArgumentError, "slots: at least 1 expected, given 0", 2),
    (partial(sealed_option, name="reduction"), ArgumentError, r"given Sealed\(\)", 2),
    (partial(sealed_option, name="recompute"), ArgumentError, r"given Sealed\(\)", 2),
    (partial(sealed_option, name="max_norm"), ArgumentError, r"from 0 expected, given Sealed", 2),
    (no_loss_on_one, ArgumentError, "on worker 1: loss: a function or None expected, given 3", 2),
    (no_optimizer, ArgumentError, "on worker 0: optimizer: it makes None; a torch optimizer", 2),
    (steps_of_two_pipelines, BackendError, r"another pipeline on workers \[1\]", 2),
    (no_state_on_one, ArgumentError, "load_state_dict: on worker 1: a mapping from names", 2),
    (no_values_on_one, ArgumentError, "a tensor with values expected, given 3", 2),
    (unknown_key_on_one, ArgumentError, r"on worker 1: the model has no \['more'\]", 2),
    (module_that_does_not_load, BackendError, "on worker 1: ZeroDivisionError", 2),
    (no_path_to_save, ArgumentError, "save: on worker 0: expected str, bytes or os.PathLike", 2),
    (no_path_to_load, ArgumentError, "load: on worker 0: expected str, bytes or os.PathLike", 2),
    (another_norm_on_one, BackendError, r"max_norm \[1.0, 2.0\] given by the workers", 2),
    (no_norm_on_one, ArgumentError, "on worker 1: max_norm: a number from 0 expected", 2),
]
"""Programs, the error of each, and the number of workers."""
LATER: list[Wrong] = [
    (shapes_that_change_later, ShapeError, r"\(2, 5\)", 2),
    (failing_forward, BackendError, "a user's mistake", 3),
    (failing_loss, BackendError, "a user's mistake", 3),
    (loss_of_rows, ArgumentError, "a real loss with one element expected", 3),
    (detached_loss, ArgumentError, "a loss that depends on the output expected", 3),
    (failing_begin, BackendError, "a user's mistake", 3),
]
"""Programs whose error is found in a step."""


def all_raise(backend: Backend, wrong: Wrong, same: bool) -> None:
    """Every worker raises the error; with the same text, if it is before a message."""
    program, kind, _, _ = wrong
    text = ""
    try:
        program(backend)
    except (LinopError, ZeroDivisionError) as error:
        assert isinstance(error, (kind, ZeroDivisionError)), repr(error)
        text = str(error)
    assert text, "no error"
    assert re.search(wrong[2], text), text
    if same:
        said = backend.transport.gather_all(text)  # type: ignore[attr-defined]
        assert len(set(said)) == 1, said
