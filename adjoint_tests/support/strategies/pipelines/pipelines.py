"""Pipelines beside one process: contracts for threads and ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from linop.backends.engine.base import Backend
from linop.schedules import GENERATORS, Schedule
from linop.schedules.actions import COMPUTE
from linop.spaces.partition import balanced
from linop.strategies import Pipeline, checkpoint, split

Tensor = Any
RATE = 0.125


def squares(y: Tensor, target: Tensor) -> Tensor:
    """Sum of squared differences."""
    return ((y - target) ** 2).sum()


def values(*shape: int, seed: int, dtype: Any = torch.float64) -> Tensor:
    """Random numbers, without torch's generator, which threads share."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def block(width: int, seed: int, dtype: Any = torch.float64) -> Any:
    """A stage of two layers: gradients of the first depend on the weights of the second."""
    layers = (torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, width))
    module = torch.nn.Sequential(*layers).to(dtype)
    fill(module, seed)
    return module


def fill(module: Any, seed: int) -> None:
    """Give a module's parameters values."""
    with torch.no_grad():
        for k, p in enumerate(module.parameters()):
            p.copy_(values(*p.shape, seed=100 * seed + k, dtype=p.dtype) / 3)


@dataclass(frozen=True)
class Case:
    """A pipeline and its batch.

    Args:
        schedule: name of its generator, with the arguments `stages`, `micro_batches` and `options`.
        rows: of the batch; None for three a micro-batch.
        recompute, reduction: as in `Pipeline`.
        skips: edges beside those of the chain.
        tied: in each stage one weight is used twice.
        autocast: compute in bfloat16.
        bare: the schedule has no updates.
    """

    schedule: str
    stages: int
    micro_batches: int
    options: tuple[tuple[str, Any], ...] = ()
    dtype: str = "float64"
    rows: int | None = None
    width: int = 5
    recompute: bool = False
    reduction: str = "sum"
    skips: tuple[tuple[int, int], ...] = ()
    tied: bool = False
    autocast: bool = False
    bare: bool = False

    @property
    def table(self) -> Schedule:
        table = GENERATORS[self.schedule](self.stages, self.micro_batches, **dict(self.options))
        return table.only(COMPUTE) if self.bare else table

    @property
    def workers(self) -> int:
        return len(self.table.workers)

    @property
    def sizes(self) -> Sequence[int]:
        count = self.table.micro_batches
        return balanced(3 * count if self.rows is None else self.rows, count)

    @property
    def edges(self) -> list[tuple[int, int]]:
        return [(s, s + 1) for s in range(self.stages - 1)] + list(self.skips)

    def model(self) -> list[Any]:
        """The stages."""
        kind = getattr(torch, self.dtype)
        stages = [block(self.width, s, kind) for s in range(self.stages)]
        for s, stage in enumerate(stages):
            if any(b == s for _, b in self.skips):
                stages[s] = Sum(stage)
            if self.tied:
                stage[2].weight = stage[0].weight
        return stages

    def batch(self) -> tuple[Tensor, Tensor]:
        kind, rows = getattr(torch, self.dtype), sum(self.sizes)
        return tuple(values(rows, self.width, seed=k, dtype=kind) for k in (7, 8))

    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        return torch.nn.functional.mse_loss if self.reduction == "mean" else squares

    def pipeline(self, backend: Backend, stages: Sequence[Any], **options: Any) -> Pipeline:
        return Pipeline(
            stages,
            self.table,
            self.loss(),
            edges=self.edges,
            recompute=self.recompute,
            reduction=self.reduction,
            backend=backend,
            **options,
        )

    def output(self, stages: Sequence[Any], x: Tensor) -> Tensor:
        """Output of one process."""
        outputs: list[Tensor] = []
        for s, stage in enumerate(stages):
            sources = sorted(a for a, b in self.edges if b == s)
            outputs.append(stage(*([outputs[a] for a in sources] or [x])))
        return outputs[-1]

    def gradients(self, stages: Sequence[Any], x: Tensor, target: Tensor) -> Tensor:
        """Loss of one process, which adds the gradients of all micro-batches, in order."""
        total, count = 0, sum(self.sizes)
        pieces = zip(x.split(list(self.sizes)), target.split(list(self.sizes)), strict=True)
        for one, wanted in pieces:
            loss = self.loss()(self.output(stages, one), wanted)
            if self.reduction == "mean":
                loss = loss * (len(one) / count)
            loss.backward()
            total = total + loss.detach()
        return total


class Sum(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A stage of several inputs."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor) -> Tensor:
        total = inputs[0]
        for x in inputs[1:]:
            total = total * x
        return self.inner(total)


def equal(what: object, given: Tensor, wanted: Tensor) -> None:
    """Check that two tensors are equal, bit for bit."""
    assert torch.equal(given, wanted), f"{what}: {given} given, {wanted} wanted"


def is_one_process(backend: Backend, case: Case) -> None:
    """Gradients, losses, outputs and parameters after updates are those of one process."""
    # Without the cache of converted weights, which would outlive updates inside of the context.
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast, cache_enabled=False):
        _is_one_process(backend, case)


def _is_one_process(backend: Backend, case: Case) -> None:
    stages = case.model()
    alone = copy.deepcopy(stages)
    x, target = case.batch()
    pipe = case.pipeline(backend, stages)
    for _ in range(2):  # gradients add up; slots are used again
        loss = pipe.step(x, target)
        wanted = case.gradients(alone, x, target)
        for s, stage in pipe.stages.items():
            for p, q in zip(stage.parameters(), alone[s].parameters(), strict=True):
                equal(f"gradient in stage {s}", p.grad, q.grad)
    y = pipe(x)
    if case.stages - 1 in pipe.stages:
        equal("loss", loss, wanted)
        with torch.no_grad():
            each = [case.output(alone, one) for one in x.split(list(case.sizes))]
        equal("output", y, torch.cat(each))
    few = pipe(x[:2])
    if case.stages - 1 in pipe.stages:
        with torch.no_grad():
            pieces = x[:2].tensor_split(min(2, len(case.sizes)))
            equal("few rows", few, torch.cat([case.output(alone, one) for one in pieces]))
    trains_as_one_process(backend, case)


def trains_as_one_process(backend: Backend, case: Case) -> None:
    """Three steps of Adam, whose rate a scheduler changes, leave the parameters of one process."""
    stages = case.model()
    alone = copy.deepcopy(stages)
    x, target = case.batch()
    pipe = case.pipeline(backend, stages, optimizer=partial(torch.optim.Adam, lr=RATE))
    optimizer = torch.optim.Adam([p for stage in alone for p in stage.parameters()], lr=RATE)
    rates = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (pipe.optimizer, optimizer)]
    for _ in range(3):
        pipe.step(x, target)
        optimizer.zero_grad()
        case.gradients(alone, x, target)
        optimizer.step()
        for rate in rates:
            rate.step()
    for s, stage in pipe.stages.items():
        for p, q in zip(stage.parameters(), alone[s].parameters(), strict=True):
            equal(f"parameters of stage {s}", p, q)


def is_the_delayed_loop(backend: Backend, case: Case) -> None:
    """PipeDream and 2BW are their formulas, bit for bit: gradients at older versions; also where
    stages compute them again, of checkpoints."""
    x, target = case.batch()
    versions = delayed(case, case.model(), x, target)
    for stages in case.model(), [checkpoint(stage, every=2) for stage in case.model()]:
        pipe = case.pipeline(backend, stages, optimizer=partial(torch.optim.SGD, lr=RATE))
        pipe.step(x, target)
        for s, stage in pipe.stages.items():
            for name, p in stage.named_parameters():
                equal(f"{name} of stage {s}", p, versions[s][-1][name])


def delayed(case: Case, stages: Sequence[Any], x: Tensor, target: Tensor) -> list[list[Any]]:
    """All versions of all stages, from the formulas of PipeDream and of 2BW."""
    p, each = case.stages, 1 if case.schedule == "pipedream" else case.micro_batches
    versions = [[{n: w.detach() for n, w in stage.named_parameters()}] for stage in stages]
    sums: list[Any] = [{} for _ in stages]
    pieces = zip(x.split(list(case.sizes)), target.split(list(case.sizes)), strict=True)
    for m, (y, wanted) in enumerate(pieces):
        leaves = []
        for s, stage in enumerate(stages):
            late = max(0, m - p + 1 + s) if each == 1 else max(0, m // each - 1)
            read = {n: w.clone().requires_grad_() for n, w in versions[s][late].items()}
            leaves.append(read)
            y = torch.func.functional_call(stage, read, (y,))
        squares(y, wanted).backward()
        for s, read in enumerate(leaves):
            for name, w in read.items():
                sums[s][name] = sums[s][name] + w.grad if name in sums[s] else w.grad
        if (m + 1) % each == 0:
            for own, total in zip(versions, sums, strict=True):
                own.append({n: torch.add(w, total.pop(n), alpha=-RATE) for n, w in own[-1].items()})
    return versions


def clips_as_one_process(backend: Backend, case: Case) -> None:
    """The norm of all gradients, and clipped ones, are torch's for the whole model; with an
    optimizer too."""
    stages = case.model()
    alone = copy.deepcopy(stages)
    x, target = case.batch()
    pipe = case.pipeline(backend, stages)
    pipe.step(x, target)
    case.gradients(alone, x, target)
    every = [p for stage in alone for p in stage.parameters()]
    norm = torch.nn.utils.clip_grad_norm_(every, 0.5)
    given = pipe.clip_grad_norm_(0.5)
    if pipe.stages:
        equal("norm", given, norm)
    optimizer = partial(torch.optim.SGD, lr=RATE)
    trained = case.pipeline(backend, copy.deepcopy(stages), optimizer=optimizer, max_norm=0.5)
    trained.step(x, target)
    optimizer(every).step()
    for s, stage in pipe.stages.items():
        own, its = stage.parameters(), trained.stages[s].parameters()
        for p, q, r in zip(own, alone[s].parameters(), its, strict=True):
            equal(f"gradient in stage {s}", p.grad, q.grad)
            equal(f"parameters of stage {s}", r, q)


def has_the_sequential_state(backend: Backend, case: Case) -> None:
    """State to and from one process's model, given as a list or cut by names."""
    stages = case.model()
    for s, stage in enumerate(stages):
        stage.register_buffer("count", torch.tensor(s))
        stage.register_buffer("flags", torch.tensor([True, False, True]))
    whole = torch.nn.Sequential(*copy.deepcopy(stages))
    cut = split(copy.deepcopy(whole), [str(s) for s in range(1, case.stages)])
    for given in (stages, cut):
        pipe = case.pipeline(backend, given)
        state = pipe.state_dict()
        assert list(state) == list(whole.state_dict())
        for key, value in whole.state_dict().items():
            equal(key, state[key], value)
        other = {key: value + 1 for key, value in state.items() if value.dtype != torch.bool}
        pipe.load_state_dict(state | other)
        for key, value in pipe.state_dict().items():
            equal(key, value, other.get(key, state[key]))


def ties_weights(backend: Backend, case: Case) -> None:
    """A weight of the first stage that others use too, as in one process, also if gradients add up,
    and where they are clipped and used."""
    stages = case.model()
    keys = [f"{s}.0.weight" for s in range(0, case.stages, 2)]
    for s in range(0, case.stages, 2):
        stages[s][0].weight = torch.nn.Parameter(stages[0][0].weight.detach().clone())
    alone = copy.deepcopy(stages)
    for s in range(0, case.stages, 2):
        alone[s][0].weight = alone[0][0].weight
    x, target = case.batch()
    pipe = case.pipeline(backend, copy.deepcopy(stages), tied=[keys])
    optimizer = partial(torch.optim.SGD, lr=RATE)
    trained = case.pipeline(backend, stages, optimizer=optimizer, tied=[keys], max_norm=0.5)
    trained.step(x, target)
    net = torch.nn.Sequential(*alone)
    for number in range(2):
        pipe.step(x, target)
        case.gradients(alone, x, target)
        for s, stage in pipe.stages.items():
            for p, q in zip(stage.parameters(), alone[s].parameters(), strict=True):
                # Gradients of each stage are added first, then those of all stages.
                assert torch.allclose(p.grad, q.grad, rtol=1e-11, atol=1e-11), number
    net.zero_grad()
    case.gradients(alone, x, target)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer(net.parameters()).step()
    for s, stage in trained.stages.items():
        for p, q in zip(stage.parameters(), alone[s].parameters(), strict=True):
            assert torch.allclose(p, q, rtol=1e-11, atol=1e-11)


class Residual(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A module that is no Sequential, with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 5)
        self.body = torch.nn.ModuleList([torch.nn.Linear(5, 5) for _ in range(3)])
        self.norm = torch.nn.BatchNorm1d(5)
        self.last = torch.nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        for layer in self.body:
            y = y + torch.tanh(layer(y))
        return self.last(self.norm(y))


def trains_exported(backend: Backend, model: Any, stages: Sequence[Any]) -> None:
    """A module that torch cut is, with its state and its buffers, that of one process."""
    x, target = values(8, 5, seed=1, dtype=torch.float32), values(8, 5, seed=2, dtype=torch.float32)
    pipe = Pipeline(
        stages,
        GENERATORS["1f1b"](3, 4),
        squares,
        optimizer=partial(torch.optim.SGD, lr=RATE),
        backend=backend,
    )
    pipe.load_state_dict(model.state_dict())
    pipe.step(x, target)
    alone = copy.deepcopy(model)
    for one, wanted in zip(x.split(2), target.split(2), strict=True):
        squares(alone(one), wanted).backward()
    torch.optim.SGD(alone.parameters(), lr=RATE).step()
    state = pipe.state_dict()
    assert sorted(state) == sorted(alone.state_dict())
    for key, value in alone.state_dict().items():
        equal(key, state[key], value)


class Fork(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A stage of three outputs, of other widths, of one of which nobody needs the gradient."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.inner(x)
        return y, y[:, :2] * 2, x


class Join(torch.nn.Module):  # type: ignore[misc]
    """A stage that takes outputs 1 and 2 of stage 0, and those of stages 1 and 2."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, two: Tensor, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return self.inner(x * y + z) + two.sum(1, keepdim=True)


def passes_several_outputs(backend: Backend, schedule: str) -> None:
    """Stages of several outputs, which go to different stages, are one process."""
    stages = [Fork(block(5, 0)), block(5, 1), block(5, 2), Join(block(5, 3))]
    alone = copy.deepcopy(stages)
    edges = [(0, 1), (1, 2), (2, 3), (0, 3, 2), (0, 3, 1), (1, 3)]
    table = GENERATORS[schedule](4, 4)
    pipe = Pipeline(stages, table, squares, edges=edges, backend=backend)
    x, target = values(11, 5, seed=1), values(11, 5, seed=2)
    pipe.step(x, target)
    for one, wanted in zip(x.tensor_split(4), target.tensor_split(4), strict=True):
        y, two, same = alone[0](one)
        z = alone[1](y)
        squares(alone[3](two, same, z, alone[2](z)), wanted).backward()
    for s, stage in pipe.stages.items():
        for p, q in zip(stage.parameters(), alone[s].parameters(), strict=True):
            equal(f"gradient in stage {s}", p.grad, q.grad)
