"""Modules that a model calls several times, in several stages: they share parameters, whose
gradients are added."""

from __future__ import annotations

import importlib.util
import tempfile
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
from torch import nn

import linop
from linop import schedules
from linop.backends import Backend
from linop.errors import ArgumentError
from linop.strategies import Pipeline, split
from support.models.packages import missing
from support.requirements import needs_mpi
from support.strategies.pipelines.pipelines import squares
from support.strategies.pipelines.repeated_modules import (
    Net,
    Repeated,
    albert,
    cut,
    is_albert,
    is_one_process,
)
from support.workers import on_ranks, on_threads


@st.composite
def cases(draw: Any) -> Repeated:
    calls = draw(st.integers(2, 4))
    cuts = draw(st.sets(st.integers(0, calls), min_size=1, max_size=3))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"]))
    return Repeated(calls, (*sorted(cuts),), schedule, draw(st.sampled_from([None, 0.1])))


@example(Repeated(4, (1, 3), max_norm=0.1))
@example(Repeated(2, (2,)))
@given(cases())
def test_on_threads(case: Repeated) -> None:
    cut(case.calls, tuple(case.names))  # torch exports in one thread at a time
    with tempfile.TemporaryDirectory() as folder:
        on_threads(case.workers, is_one_process, case, folder)


@needs_mpi
@pytest.mark.timeout(300)
def test_on_ranks() -> None:
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(2, is_one_process, Repeated(3, (2,), max_norm=0.1), folder)


@pytest.mark.skipif(bool(missing()), reason="models of other people are not installed")
def test_albert() -> None:
    with tempfile.TemporaryDirectory() as folder:
        on_threads(3, is_albert, albert(), folder)


def test_one_worker_has_all_stages() -> None:
    """Then the parameter is one tensor, and nothing is sent."""

    def main(backend: Backend) -> None:
        net = Net(3).double()
        x = torch.ones(4, 3).double()
        squares(net(x), torch.zeros(4, 2).double()).backward()
        wanted = [p.grad for p in net.parameters()]
        net.zero_grad()
        table = schedules.interleaved(2, 2, 2)
        pipe = Pipeline(split(net, ["layer@2"], x[:2]), table, squares, backend=backend)
        pipe.step(x, torch.zeros(4, 2).double())
        for p, grad in zip(net.parameters(), wanted, strict=True):
            assert grad is not None and torch.allclose(p.grad, grad, atol=1e-12)

    linop.launch(main, 1)


def test_mistakes() -> None:
    x = torch.ones(4, 3).double()
    with pytest.raises(ArgumentError, match=r"'layer' is called 3 times: .* 'layer@1', the second"):
        split(Net(3).double(), ["layer"], x)
    with pytest.raises(ArgumentError, match=r"1 stages, not 2, begin at \['layer@3'\]"):
        split(Net(3).double(), ["layer@3"], x)
    with pytest.raises(ArgumentError, match="no submodule 'layers@1' to cut at"):
        split(Net(3).double(), ["layers@1"], x)
    net = Net(2).double()
    net.layer.norm = nn.BatchNorm1d(3).double()
    with pytest.raises(ArgumentError, match=r"write to the buffer 'layer\.norm\.running"):
        split(net, ["layer@1"], x)
    assert "forward" not in vars(net) and "forward" not in vars(net.layer)
    evaluated = split(net.eval(), ["layer@1"], x)  # nothing is written then
    assert torch.equal(evaluated[1](*evaluated[0](x)), net(x))
    stages = split(Net(2).double(), ["layer@1"], x[:2])

    def main(backend: Backend) -> None:
        table = schedules.one_forward_one_backward(2, 2)
        with pytest.raises(ArgumentError, match="of stage 1, and of stage 0, are one tensor in"):
            Pipeline(stages, table, squares, backend=backend)

    linop.launch(main, 2)
