"""Stages out of the ordinary in pipelines, beside one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import linop
import linop.strategies
from linop.backends.engine.base import Backend
from linop.errors import BackendError, LinopError
from linop.schedules import GENERATORS, one_forward_one_backward
from linop.strategies import Pipeline
from linop.strategies.pipelines.stages.random_numbers import RandomNumbers
from support.strategies.pipelines.pipelines import block, equal, squares, values

Tensor = Any
Stages = list[Any]
SGD = partial(torch.optim.SGD, lr=2**-6, momentum=0.5)


def beside_one_process(
    backend: Backend,
    make: Callable[[], Stages],
    schedule: str,
    options: dict[str, Any] | None = None,
    between: Callable[[Stages], None] | None = None,
) -> None:
    """Parameters and buffers after three steps are those of one process.

    Args:
        options: of the pipeline; "chunks" is the schedule's.
        between: changes the stages after each step.
    """
    options = dict(options or {})
    chunks = {"chunks": options.pop("chunks")} if "chunks" in options else {}
    stages, alone = make(), make()
    count = len(stages)
    table = GENERATORS[schedule](count, 4, **chunks)
    dtype = next(p.dtype for stage in stages for p in stage.parameters())
    x, target = (values(8, 4, seed=k, dtype=torch.float64).to(dtype) for k in (1, 2))
    pipe = Pipeline(stages, table, _loss, optimizer=SGD, backend=backend, **options)
    optimizer = SGD(torch.nn.ModuleList(alone).parameters())
    clip = options.get("max_norm")
    for _ in range(3):
        pipe.step(x, target)
        optimizer.zero_grad()
        for one, wanted in zip(x.chunk(4), target.chunk(4), strict=True):
            y = one
            for stage in alone:
                y = stage(y)
            _loss(y, wanted).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(torch.nn.ModuleList(alone).parameters(), clip)
        optimizer.step()
        for s, stage in pipe.stages.items():
            for (name, p), q in zip(stage.state_dict().items(), _state(alone[s]), strict=True):
                close = "tied" in options  # sums of a shared weight in another order
                if close:
                    assert torch.allclose(p, q, rtol=1e-11), f"{name} of stage {s}"
                else:
                    equal(f"{name} of stage {s}", p, q)
        if between is not None:
            between([*pipe.stages.values(), *alone])


def _state(module: Any) -> Sequence[Tensor]:
    return list(module.state_dict().values())


def _loss(y: Tensor, target: Tensor) -> Tensor:
    return squares(y, target).abs() if not y.is_complex() else ((y - target).abs() ** 2).sum()


def of_dtype(dtype: Any) -> Callable[[], Stages]:
    """Three stages."""
    return lambda: [block(4, s, dtype) for s in range(3)]


class Hooked(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Hooks of tensors scale the gradients of two layers' outputs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = block(4, seed)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = layer(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 2)
        return x


def hooked() -> Stages:
    return [Hooked(s) for s in range(3)]


class Averaging(torch.nn.Module):  # type: ignore[misc]
    """Its output depends on a buffer that each forward replaces."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = block(4, seed)
        self.register_buffer("mean", torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = (self.mean + x.detach().mean(0)) / 2
        return self.inner(x * self.mean)


def with_buffers() -> Stages:
    norms = [torch.nn.BatchNorm1d(4, dtype=torch.float64) for _ in range(2)]
    return [torch.nn.Sequential(block(4, 0), norms[0]), Averaging(1), norms[1]]


class Repeating(torch.nn.Module):  # type: ignore[misc]
    """A layer and a norm, each used twice.

    Args:
        named: the second use has a name of its own, by which the modules are the same.
    """

    def __init__(self, seed: int, named: bool = True) -> None:
        super().__init__()
        self.layer, self.norm = block(4, seed), torch.nn.BatchNorm1d(4, dtype=torch.float64)
        self.other = torch.nn.Sequential(self.layer, self.norm) if named else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.layer(x))
        return self.other(y) if self.other is not None else self.norm(self.layer(y))


def repeating() -> Stages:
    return [Repeating(s) for s in range(3)]


def names_do_not_matter(backend: Backend, schedule: str) -> None:
    """Stages in which modules have two names are trained as those in which they have one."""
    x, target = (values(8, 4, seed=k) for k in (1, 2))
    found = []
    for named in (True, False):
        stages = [Repeating(s, named) for s in range(3)]
        table = GENERATORS[schedule](3, 4)
        pipe = Pipeline(stages, table, squares, optimizer=SGD, backend=backend)
        for _ in range(2):
            pipe.step(x, target)
        found.append([*pipe.parameters(), *pipe.stages[backend.worker or 0].buffers()])
    for one, other in zip(*found, strict=True):
        equal("parameter or buffer", one, other)


def in_place() -> Stages:
    """Stages that begin or end in place."""
    outer, first, last = (torch.nn.ReLU(inplace=True) for _ in range(3))
    return [
        torch.nn.Sequential(outer, block(4, 0)),
        torch.nn.Sequential(first, block(4, 1)),
        torch.nn.Sequential(block(4, 2), last),
    ]


def partly_frozen() -> Stages:
    """Stages whose first weights are frozen."""
    stages = [block(4, s) for s in range(3)]
    for stage in stages:
        stage[0].weight.requires_grad_(False)
    return stages


def thaw(stages: Stages) -> None:
    """All parameters are trained from now on."""
    for stage in stages:
        stage.requires_grad_(True)


def sharing() -> Stages:
    """Stages 0 and 2 have one weight."""
    stages = [block(4, s) for s in range(4)]
    stages[2][0].weight = stages[0][2].weight
    return stages


SHARED = [("0.2.weight", "2.0.weight")]
"""The names of what `sharing` stages share."""


def sharing_thrice() -> Stages:
    """Stage 0 has the weight of stage 2 twice."""
    stages = sharing()
    stages[0][0].weight = stages[0][2].weight
    return stages


SHARED_THRICE = [("0.0.weight", "0.2.weight", "2.0.weight")]
"""The names of what `sharing_thrice` stages share."""


def casts_as_one_process(backend: Backend) -> None:
    """Gradients with mixed precision, on in every second step, are those of one process."""
    stages, alone = ([block(4, s, torch.float32) for s in range(2)] for _ in range(2))
    table = one_forward_one_backward(2, 2)
    pipe = Pipeline(stages, table, _wide_squares, backend=backend)
    x, target = (values(4, 4, seed=k, dtype=torch.float32) for k in (1, 2))
    for on in (True, False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            pipe.step(x, target)
            for one, wanted in zip(x.chunk(2), target.chunk(2), strict=True):
                loss = _wide_squares(alone[1](alone[0](one)), wanted)
                loss.backward()
        for s, stage in pipe.stages.items():
            for p, q in zip(stage.parameters(), alone[s].parameters(), strict=True):
                equal(f"gradient in stage {s}", p.grad, q.grad)


def _wide_squares(y: Tensor, target: Tensor) -> Tensor:
    return squares(y.float(), target)


class Failing(torch.nn.Module):  # type: ignore[misc]
    """Its last backward of a step raises an error, when the stage after it is done."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.backwards = block(4, 0), 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if y.requires_grad:
            y.register_hook(self._count)
        return y

    def _count(self, gradient: Tensor) -> Tensor:
        self.backwards += 1
        if self.backwards == 4:
            raise ZeroDivisionError("a user's mistake")
        return gradient


def refuses_later_calls(backend: Backend, **options: Any) -> None:
    """All workers refuse calls after one failed on one of them, for whom others did not wait, or
    only in what comes after their messages."""
    stages = [Failing(), block(4, 1), block(4, 0)]
    table = one_forward_one_backward(3, 4)
    pipe = Pipeline(stages, table, squares, optimizer=SGD, backend=backend, **options)
    x = values(8, 4, seed=1)
    try:
        pipe.step(x, x)
    except (ZeroDivisionError, BackendError) as error:
        assert "a user's mistake" in str(error)
    for call in (pipe.step, pipe):
        try:
            call(x, x) if call is not pipe else call(x)
        except BackendError as error:
            assert "an earlier call failed on worker 0: ZeroDivisionError" in str(error)
        else:
            raise AssertionError("no error")
    assert len(pipe.state_dict()) == 12


def refuses_sizes(backend: Backend) -> None:
    """Sizes that are no numbers, on one worker or on all, are an error on all."""
    pipe = Pipeline(
        [block(4, 0), block(4, 1)], one_forward_one_backward(2, 2), squares, backend=backend
    )
    x = values(8, 4, seed=1)
    for sizes, words in (
        ([4, 4] if backend.worker else 3, "other sizes"),
        (3, "sizes 3 of micro-batches given"),
        ([4.0, 4.0], "sizes .4.0, 4.0. of micro-batches given"),
    ):
        try:
            pipe.step(x, x, sizes=sizes)
        except LinopError as error:
            assert re.search(words, str(error)), error
        else:
            raise AssertionError("no error")
    pipe.step(x, x, sizes=torch.tensor([3, 5]))


def refuses_clipping(backend: Backend) -> None:
    """Workers that wait for the norm of all gradients hear of the failure of another."""
    refuses_later_calls(backend, max_norm=1.0)


def refuses_tied(backend: Backend) -> None:
    """Workers that wait for the gradients of tied weights hear of the failure of another."""
    refuses_later_calls(backend, tied=[("0.inner.0.weight", "2.0.weight")])


def dropping() -> Stages:
    """Three stages with dropout, as a module and as a function."""
    first, last = block(4, 0), block(4, 2)
    return [torch.nn.Sequential(first, torch.nn.Dropout(0.4)), Dropping(), last]


class Dropping(torch.nn.Module):  # type: ignore[misc]
    """Dropout as a function, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = block(4, 1), block(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.nn.functional.dropout(self.inner(x), 0.3, self.training))


def drops_the_same(backend: Backend, schedule: str, seed: int) -> list[Tensor]:
    """Gradients of two steps with dropout, with recomputation and without: they are equal, and the
    program's generator is left alone. One process that seeds each forward alike has them too."""
    found = []
    alone = dropping()  # modules draw when they are made: none while another thread computes
    for recompute in (False, True):
        stages, table = dropping(), GENERATORS[schedule](3, 4)
        backend.transport.gather_all(None)  # type: ignore[attr-defined]
        torch.manual_seed(seed)  # threads: all, before one goes on
        backend.transport.gather_all(None)  # type: ignore[attr-defined]
        pipe = Pipeline(stages, table, squares, recompute=recompute, backend=backend)
        x, target = (values(8, 4, seed=k) for k in (1, 2))
        before = torch.get_rng_state()
        backend.transport.gather_all(None)  # type: ignore[attr-defined]
        for _ in range(2):
            pipe.step(x, target)
        pipe.eval()
        y = pipe(x)
        again = pipe(x)
        if y is not None:
            equal("output", again, y)
        backend.transport.gather_all(None)  # type: ignore[attr-defined]
        after = torch.get_rng_state()
        backend.transport.gather_all(None)  # type: ignore[attr-defined]
        equal("generator", after, before)
        found.append([p.grad for p in pipe.parameters()])
    for one, other in zip(*found, strict=True):
        equal("gradient with recomputation", other, one)
    seeds = [RandomNumbers(s, True) for s in range(3)]
    for numbers in seeds:
        numbers.seed = seed
    for step in (1, 2):
        for m, (one, wanted) in enumerate(zip(x.chunk(4), target.chunk(4), strict=True)):
            for numbers, stage in zip(seeds, alone, strict=True):
                numbers.step = step
                one = numbers.run(True, m, partial(stage, one), pure=False)
            squares(one, wanted).backward()
    for s, stage in pipe.stages.items():
        for p, q in zip(stage.parameters(), alone[s].parameters(), strict=True):
            equal(f"gradient in stage {s}", p.grad, q.grad)
    return found[0]


def drops_after_a_change_of_mode(backend: Backend) -> None:
    """Evaluation first, then training: masks of a step are those of another pipeline's."""
    found = []
    both = dropping(), dropping()
    backend.transport.gather_all(None)  # type: ignore[attr-defined]
    for evaluates, stages in enumerate(both):
        pipe = Pipeline(stages, one_forward_one_backward(3, 4), squares, backend=backend)
        x, target = (values(8, 4, seed=k) for k in (1, 2))
        if evaluates:
            pipe.eval()
            pipe(x)
            pipe.train()
        pipe.step(x, target)
        found.append([p.grad for p in pipe.parameters()])
    for one, other in zip(*found, strict=True):
        equal("gradient", other, one)


def drops_at_another_rate(backend: Backend) -> None:
    """A rate of dropout, or the mode of one layer, that changes between steps: gradients with
    recomputation are those without."""
    both = dropping(), dropping()
    backend.transport.gather_all(None)  # type: ignore[attr-defined]
    found = []
    for recompute, stages in enumerate(both):
        drop = stages[0][1]
        table = one_forward_one_backward(3, 4)
        pipe = Pipeline(stages, table, squares, recompute=bool(recompute), backend=backend)
        x, target = (values(8, 4, seed=k) for k in (1, 2))
        for rate, on in ((0.0, True), (0.4, True), (0.4, False), (0.4, True)):
            drop.p = rate
            drop.train(on)
            pipe.step(x, target)
        found.append([p.grad for p in pipe.parameters()])
    for one, other in zip(*found, strict=True):
        equal("gradient", other, one)


def steps_with_another_optimizer(backend: Backend) -> None:
    """An optimizer that is assigned is that of later steps."""
    stages = [block(4, s) if s == backend.worker else None for s in range(2)]
    none = partial(torch.optim.SGD, lr=0.0)
    pipe = Pipeline(stages, GENERATORS["gpipe"](2, 2), squares, optimizer=none)
    before = [p.detach().clone() for p in pipe.parameters()]
    x = values(4, 4, seed=1)
    pipe.step(x, x)
    assert all(map(torch.equal, before, pipe.parameters()))
    pipe.optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    pipe.step(x, x)
    assert not any(map(torch.equal, before, pipe.parameters()))


class Summing(torch.nn.Module):  # type: ignore[misc]
    """A stage that draws, and whose forward sums over workers that have the same stage; or twice
    what it draws, which is that sum."""

    def __init__(self, axis: Any, seed: int) -> None:
        super().__init__()
        self.axis, self.inner, self.drop = axis, block(4, seed), torch.nn.Dropout(0.5)
        grid = linop.Partition((2,))
        space = linop.TensorSpace((4, 4), grid, axes=[linop.COPIES], dtype="float32")
        self.sum = linop.all_reduce(space, (0,))

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.inner(x))
        if self.axis is None:
            return 2 * self.drop(y)
        with linop.backends.use(self.axis.backend):
            y = linop.autograd.apply(self.sum, y)  # others draw while this one waits
        return self.drop(y)


def sums_in_forward(backend: Backend, schedule: str, recompute: bool) -> None:
    """Stages whose own forwards wait for workers of another axis draw what they draw alone, before
    the wait and after it."""
    torch.manual_seed(3)  # of each rank; on threads, before all meet in the mesh
    mesh = linop.strategies.Mesh(backend, dp=2, pp=2)
    x, t = values(8, 4, seed=1).float(), values(8, 4, seed=2).float()
    found = []
    for axis in (mesh["dp"], None):
        stage = Summing(axis, mesh["pp"].index).float()
        stages = [stage if s == mesh["pp"].index else None for s in range(2)]
        table = GENERATORS[schedule](2, 2)
        pipe = Pipeline(stages, table, squares, recompute=recompute, backend=mesh["pp"].backend)
        losses = [pipe.step(x, t) for _ in range(3)]
        found.append([*filter(lambda y: y is not None, losses)])
    assert all(map(torch.equal, *found)) and (mesh["pp"].index == 0 or len(found[0]) == 3)


class Doubling(torch.nn.Module):  # type: ignore[misc]
    """Twice the columns in training."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], 1) if self.training else x


class Halving(torch.nn.Module):  # type: ignore[misc]
    """The first four columns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, :4])


def evaluates_in_inference_mode(backend: Backend) -> None:
    """Evaluation under `torch.inference_mode`, of stages with other shapes than in training, leaves
    the steps around it what they are without."""
    x, target = (values(8, 4, seed=k) for k in (1, 2))
    found, outputs = [], []
    for evaluates in (False, True):
        stages = [torch.nn.Sequential(block(4, 0), Doubling()), Halving()]
        table = one_forward_one_backward(2, 4)
        pipe = Pipeline(stages, table, squares, optimizer=SGD, backend=backend)
        for _ in range(2):
            if evaluates:
                pipe.eval()
                with torch.inference_mode():
                    outputs.append(pipe(x))
                pipe.train()
            pipe.step(x, target)
        found.append(list(pipe.parameters()))
    for one, other in zip(*found, strict=True):
        equal("parameter", other, one)
    if outputs[0] is not None:
        alone = torch.nn.Sequential(block(4, 0), block(4, 1))
        equal("output", outputs[0], torch.cat([alone(one) for one in x.chunk(4)]).detach())
