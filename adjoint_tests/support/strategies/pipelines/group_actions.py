"""Pipelines of sharded stages whose schedule gathers parameters and sums gradients: contracts for
threads and ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from linop.backends.engine.base import Backend
from linop.errors import ArgumentError, BackendError, LinopError
from linop.schedules import GENERATORS, Kind, Schedule
from linop.schedules.actions import GROUP
from linop.spaces.partition import balanced
from linop.strategies import (
    DataParallel,
    Mesh,
    Pipeline,
    checkpoint,
    full_state_dict,
    fully_shard,
    offload,
)
from linop.strategies.data.notes import PLACES
from linop.strategies.pipelines.stages.stage import sharded_units
from support.strategies.data.shards import slice_of, weak
from support.strategies.pipelines.pipelines import RATE, block, squares, values

Tensor = Any
WIDTH = 5


@dataclass(frozen=True)
class Grouped:
    """A table with group actions, and its batch.

    Args:
        text: the table.
        dp: workers that share each stage.
        whole: parameters and data are whole numbers, and gradients exact.
        recompute: as in `Pipeline`.
    """

    text: str
    dp: int = 2
    whole: bool = True
    recompute: bool = False

    @property
    def table(self) -> Schedule:
        return Schedule.from_csv(self.text)

    @property
    def workers(self) -> int:
        return self.dp * len(self.table.workers)

    def numbers(self, *shape: int, seed: int) -> Tensor:
        found = values(*shape, seed=seed)
        return (2 * found).round().clamp(-2, 2) if self.whole else found

    def model(self) -> list[Any]:
        """The stages: whole numbers stay whole."""
        stages: list[Any] = []
        for s in range(self.table.stages):
            inner: Any = torch.nn.ReLU() if self.whole else torch.nn.Tanh()
            ends = [torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2)]
            stages.append(torch.nn.Sequential(ends[0], inner, ends[1]))
            with torch.no_grad():
                for k, p in enumerate(stages[s].parameters()):
                    p.copy_(self.numbers(*p.shape, seed=100 * s + k))
        return stages

    def pipeline(self, mesh: Mesh, **options: Any) -> Pipeline:
        """Of this worker's stages, sharded: the first layer, then the rest."""
        stages, own = self.model(), set()
        for action in self.table.workers[mesh["pp"].index]:
            own.add(action.stage)
        for s in sorted(own):
            fully_shard(stages[s][0], mesh["dp"])
            fully_shard(stages[s], mesh["dp"])
        given = [stage if s in own else None for s, stage in enumerate(stages)]
        back, again = mesh["pp"].backend, self.recompute
        return Pipeline(given, self.table, squares, backend=back, recompute=again, **options)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Input and target of each worker of dp: of micro-batches of unequal size."""
        each = 2 * self.table.micro_batches + 1
        x, t = (self.numbers(self.dp * each, WIDTH, seed=k) for k in (7, 8))
        return list(zip(x.split(each), t.split(each), strict=True))


def is_the_twin(backend: Backend, case: Grouped) -> None:
    """Gradients of two steps are those of one process (whole numbers: exactly) or of data parallel
    workers that sum once (bit for bit); parameters are gathered and gradients reduced as often as
    the table says; and between steps each worker has its shards alone."""
    mesh = Mesh(backend, dp=case.dp, pp=len(case.table.workers))
    pipe = case.pipeline(mesh)
    twins = case.model()
    alone = torch.nn.Sequential(*twins)
    model = alone if case.whole else DataParallel(alone, mesh["dp"])
    batches = case.batches()
    for step in range(2):
        before = counted(pipe)
        pipe.step(*batches[mesh["dp"].index])
        if step:
            check_counts(case, pipe, before)
        sums_once(case, model, batches, mesh["dp"].index)
        for s, stage in pipe.stages.items():
            rows = slice_of(stage, mesh["dp"])
            wanted = dict(twins[s].named_parameters())
            for name, p in stage.named_parameters():
                mine = rows(name, wanted[name].grad)
                assert torch.equal(p.grad, mine), (s, name, p.grad, mine)
    pipe.eval()
    y = pipe(batches[mesh["dp"].index][0])
    if y is not None:
        with torch.no_grad():
            wanted = alone(batches[mesh["dp"].index][0])
        assert torch.allclose(y, wanted, rtol=1e-12)


def sums_once(case: Grouped, model: Any, batches: Sequence[Any], own: int) -> None:
    """Gradients of the micro-batches in order: of all workers in one process, or of this one, which
    are summed at the end."""
    for x, t in batches if case.whole else batches[own : own + 1]:
        sizes = balanced(len(x), case.table.micro_batches)
        net = model if case.whole else model.module
        kept = model.no_sync() if not case.whole else torch.enable_grad()
        with kept:
            for one, target in zip(x.split(sizes), t.split(sizes), strict=True):
                squares(net(one), target).backward()
    if not case.whole:
        model.reduce_gradients()


def counted(pipe: Pipeline) -> list[tuple[int, int, int, int]]:
    """Calls and bytes of every unit: of G, and of its adjoint."""
    bridges = [unit._bridge for stage in pipe.stages.values() for unit in sharded_units(stage)]
    both = [(bridge.plan.counters, bridge.plan.H.counters) for bridge in bridges]
    return [(a.calls, b.calls, a.bytes, b.bytes) for a, b in both]


def check_counts(case: Grouped, pipe: Pipeline, before: Sequence[Any]) -> None:
    row = pipe._plan.row
    wanted, found = [], []
    now = iter(zip(before, counted(pipe), strict=True))
    for s, stage in pipe.stages.items():
        kinds = [action.kind for action in row if action.stage == s]
        gathers, sums = kinds.count(Kind.UNSHARD), kinds.count(Kind.REDUCE_GRAD)
        if Kind.BACKWARD_WEIGHT in kinds:  # a stage that shares has its gradients with the input's
            sums = _not_empty(kinds)
        for unit in sharded_units(stage):
            own = unit._bridge.plan.counters.bytes_each
            back = unit._bridge.plan.H.counters.bytes_each
            # Each worker sends its shard, a digest of what it has done and a row of uses, and
            # gets the shards of its gradient back.
            noted = (PLACES + len(unit.members)) * 8 * (case.dp > 1)
            shard = sum(p.numel() * p.element_size() for p in unit.shards) + noted
            whole = sum(m.space.size * 8 for m in unit.members) + noted * case.dp
            assert own == shard * (case.dp - 1), (own, shard)
            assert back == whole - shard, (back, whole)
            old, new = next(now)
            if GROUP & {*kinds}:  # a stage without any gathers and sums in each of its modules
                wanted.append((gathers, sums, own * gathers, back * sums))
                found.append(tuple(b - a for a, b in zip(old, new, strict=True)))
    assert found == wanted, (found, wanted)
    assert not any(unit.held for stage in pipe.stages.values() for unit in sharded_units(stage))


def _not_empty(kinds: Sequence[Kind]) -> int:
    """Reductions after an input half or a backward since the last one."""
    found, fresh = 0, False
    for kind in kinds:
        fresh |= kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
        if kind == Kind.REDUCE_GRAD:
            found, fresh = found + fresh, False
    return found


def gives_memory_up(backend: Backend) -> None:
    """Whole parameters live from UNSHARD to RESHARD, whatever graphs need them."""
    text = "0UNSHARD,0F0,0F1,0RESHARD,0UNSHARD,0B0,0RESHARD,0UNSHARD,0B1,0REDUCE_GRAD"
    case = Grouped(text, dp=backend.workers or 1)
    mesh = Mesh(backend, dp=-1, pp=1)
    pipe = case.pipeline(mesh)
    stage, seen = pipe._stages[0], []
    each = {kind: getattr(stage, kind) for kind in ("unshard", "reshard")}

    def unshard() -> None:
        assert not any(pointer() for pointer in seen)
        each["unshard"]()
        seen.extend(weak(p) for p in stage.module.parameters())
        assert all(p.shape[0] == WIDTH for p in stage.module.parameters())

    def reshard() -> None:
        assert all(pointer() for pointer in seen[-4:])
        each["reshard"]()
        assert not any(pointer() for pointer in seen), "whole parameters are kept"

    stage.unshard, stage.reshard = unshard, reshard  # type: ignore[method-assign]
    pipe.step(*case.batches()[mesh["dp"].index])
    assert len(seen) == 12


TABLE = "0UNSHARD,0F0,0F1,0B0,0B1,0REDUCE_GRAD,0RESHARD\n1UNSHARD,1F0,1B0,1F1,1B1,1REDUCE_GRAD\n"
OTHER = TABLE.replace("1B1,1REDUCE_GRAD", "1RESHARD,1UNSHARD,1B1,1REDUCE_GRAD")


def differ_in_tables(backend: Backend) -> None:
    """Workers that share a stage have one table: an error before a message, on all."""
    mesh = Mesh(backend, dp=2, pp=2)
    case = Grouped(OTHER if mesh["dp"].index else TABLE)
    with pytest.raises(BackendError, match=r"parallel along 'dp', where .* with one schedule"):
        case.pipeline(mesh)
    Grouped(TABLE).pipeline(mesh).step(*Grouped(TABLE).batches()[mesh["dp"].index])


def keep_no_versions(backend: Backend) -> None:
    """Stages that are sharded are refused where a schedule reads older parameters."""
    mesh = Mesh(backend, dp=2, pp=2)
    stage = fully_shard(block(4, 0), mesh["dp"])
    stages = [stage if s == mesh["pp"].index else None for s in range(2)]
    with pytest.raises(ArgumentError, match="stage 0: the schedule reads older versions of its"):
        Pipeline(stages, GENERATORS["pipedream"](2, 3), squares, backend=mesh["pp"].backend)


WRAPS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda net: net,
    "checkpoint": lambda net: checkpoint(net, every=1),
    "offload": lambda net: offload(net, prefetch=1),
}


def wrapped_stages_are_sharded(backend: Backend) -> None:
    """Chains of sharded Sequentials are stages of sharded parameters: bitwise the plain ones. A
    stage that does not know it would keep torch's generator from others while it waits for them."""
    mesh = Mesh(backend, dp=2, pp=2)
    x, t = values(4, WIDTH, seed=1), values(4, WIDTH, seed=2)
    found: list[list[Tensor]] = []
    for wrap in WRAPS.values():
        plain = torch.nn.Sequential(block(WIDTH, mesh["pp"].index), torch.nn.Dropout(0.0))
        stage = wrap(fully_shard(plain, mesh["dp"]))
        stages = [stage if s == mesh["pp"].index else None for s in range(2)]
        table = GENERATORS["gpipe"](2, 2)
        pipe = Pipeline(stages, table, squares, backend=mesh["pp"].backend)
        for _ in range(3):
            pipe.step(x, t)
        found.append([p.grad for p in stage.parameters()] + [*full_state_dict(stage).values()])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other)) and len(found[0]) == len(other)


def hear_of_refusals(backend: Backend) -> None:
    """A refusal of one of two pipelines side by side is an error of both, which then go on."""
    mesh = Mesh(backend, dp=2, pp=2)
    case, wrong = Grouped(TABLE), mesh["dp"].index == 1

    def refused(what: str, work: Callable[[], Any]) -> None:
        told = "" if wrong else "that of 1 along 'dp' failed: .*"
        with pytest.raises(LinopError, match=f"{told}{what}"):
            work()

    refused("a number from 0", lambda: case.pipeline(mesh, max_norm=-1.0 if wrong else 1.0))
    pipe = case.pipeline(mesh)
    x, t = case.batches()[mesh["dp"].index]
    cut = x[:, :1] if wrong else x
    refused("cannot be multiplied", lambda: pipe.step(cut, t))
    refused("cannot be multiplied", lambda: pipe(cut))
    state = pipe.state_dict()
    refused("is missing", lambda: pipe.load_state_dict({} if wrong else state))
    with pytest.raises(LinopError, match="No such file"):
        pipe.load("no/file")
    refused("a number from 0", lambda: pipe.clip_grad_norm_(-1.0 if wrong else 1.0))
    pipe.step(x, t)
    with pytest.raises(BackendError, match=r"0 has state_dict .* 1 has an evaluation"):
        pipe(x) if wrong else pipe.state_dict()


def fails_beside(backend: Backend) -> None:
    """A user's error in the step of one worker ends the waits of those that share its stage, and of
    theirs, at once."""
    mesh = Mesh(backend, dp=2, pp=2)
    case = Grouped(TABLE)
    pipe = case.pipeline(mesh)
    batch = case.batches()[mesh["dp"].index]
    pipe.step(*batch)
    if backend.worker == 3:
        pipe.stages[1].register_forward_pre_hook(lambda *given: 1 / 0)
    begun = time.monotonic()
    with pytest.raises((ZeroDivisionError, BackendError), match="division by zero"):
        for _ in range(2):
            pipe.step(*batch)
    assert time.monotonic() - begun < 10
    if backend.worker == 3:
        time.sleep(1)  # as a program that goes on: others are told, and not that it has ended
    assert len([*pipe.parameters()]) == 4
    assert GROUP & {action.kind for action in pipe._plan.row}


def trains_as_one_process(backend: Backend) -> None:
    """Two updates with momentum, in one step, of sharded stages are those of one process."""
    text = "0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD,0U,0UNSHARD,0F1,0B1,0REDUCE_GRAD,0U"
    case = Grouped(text, dp=backend.workers or 1, whole=True)
    mesh = Mesh(backend, dp=-1, pp=1)

    def sgd(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=RATE, momentum=0.5)

    pipe = case.pipeline(mesh, optimizer=sgd)
    pipe.step(*case.batches()[mesh["dp"].index])
    alone = case.model()[0]
    optimizer = sgd(alone.parameters())
    each = [[x.split(balanced(len(x), 2)) for x in pair] for pair in case.batches()]
    for m in range(2):
        optimizer.zero_grad()
        for x, t in each:
            squares(alone(x[m]), t[m]).backward()
        optimizer.step()
    rows = slice_of(pipe.stages[0], mesh["dp"])
    for name, p in alone.named_parameters():
        own = dict(pipe.stages[0].named_parameters())[name]
        assert torch.allclose(own, rows(name, p.detach()), rtol=1e-12), name
