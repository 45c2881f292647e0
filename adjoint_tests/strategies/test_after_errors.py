"""Strategies that are made after an error that all ranks have caught, in the same program."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from support.job_programs import mpiexec
from support.requirements import needs_mpi

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

STRATEGIES = """
from functools import partial
import torch
from linop.errors import LinopError
from linop.schedules import gpipe
from linop.strategies import (
    ColwiseParallel, DataParallel, Mesh, Pipeline, RowwiseParallel, fully_shard,
    parallelize_module, split,
)

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))

def passes(model):
    return lambda: model(torch.ones(2, 4)).sum().backward()

def data(backend):
    return passes(DataParallel(net()))

def zero3(backend):
    model, axis = net(), Mesh(dp=-1)["dp"]
    for layer in (model[0], model[2]):
        fully_shard(layer, axis)
    return passes(model)

def tensor(backend):
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return passes(parallelize_module(net(), Mesh(tp=-1)["tp"], plan))

def pipeline(backend):
    loss = torch.nn.MSELoss(reduction="sum")
    sgd = partial(torch.optim.SGD, lr=1e-3)
    model = Pipeline(split(net(), ["2"]), gpipe(2, 4), loss, optimizer=sgd, backend=backend)
    return lambda: model.step(torch.ones(4, 4), torch.ones(4, 4))
"""
"""Strategies, each as a function of a backend that makes it, and gives a step."""

LEFT_OUT = (
    STRATEGIES
    + """
def leave_out(step, backend):
    backend.worker or step()

def run(make, wrong):
    def main(backend):
        step = make(backend)
        for _ in range(2):
            step()
        wrong(step, backend)
    try:
        linop.launch(main)
        return "ended well"
    except (LinopError, ValueError) as error:
        return type(error).__name__

for make in data, zero3, tensor, pipeline:
    say(f"{make.__name__}: {run(make, leave_out)}, then {run(make, lambda *given: None)}")
"""
)


@needs_mpi
@pytest.mark.timeout(200)
def test_strategies_after_an_error(tmp_path: Path) -> None:
    job = mpiexec(2, tmp_path / "program.py", LEFT_OUT, patience=150)
    lines = job.stdout.splitlines()
    assert len(lines) == 2 * 4, job.stdout + job.stderr
    for line in lines:
        assert line.endswith(": DeadlockError, then ended well"), job.stdout


UNEQUAL = (
    STRATEGIES
    + """
from linop import Partition, layers

P, Q = Partition((1, 2)), Partition((2, 1))

def pooled(backend):
    pool, x = layers.MaxPool2d(Partition((1, 1, 1, 2)), 2), torch.ones(1, 1, 4, 4)
    return lambda: pool(x)

def linear(backend):
    layer, x = layers.Linear(P, 8, 8, P_W=Q), torch.ones(2, 4)
    return lambda: layer(x).sum().backward()

def several(backend):
    steps = [make(backend) for make in (pooled, pooled, linear, tensor, pooled)]
    return lambda: [step() for step in steps]

def one(backend):
    layers.Linear(P, 8, 4, P_W=Q)

def two(backend):
    pooled(backend)
    one(backend)

def main(backend):
    for alone, makes in (one, (linear, tensor, data)), (two, (pooled, several, pipeline)):
        for make in makes:
            step = linear(backend)
            try:
                alone(backend) if backend.worker else step()
                said = "no error"
            except LinopError:
                said = "an error"
            for _ in range(2):
                make(backend)()
            say(f"{alone.__name__}, {make.__name__}: {said}, then ended well")

linop.launch(main)
"""
)


@needs_mpi
@pytest.mark.timeout(200)
def test_layers_that_one_rank_made_before_an_error(tmp_path: Path) -> None:
    """The next ones have the same numbers on all ranks again."""
    job = mpiexec(2, tmp_path / "program.py", UNEQUAL, patience=150)
    lines = job.stdout.splitlines()
    assert len(lines) == 2 * 6, job.stdout + job.stderr
    for line in lines:
        assert line.endswith(": an error, then ended well"), job.stdout
