"""Strategies in graphs of torch's compiler: with the bits of eager calls, or an error that says
why."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

import linop
from linop import Partition, layers
from linop.backends.autograd.functions import FOLLOWS
from support.requirements import needs_mpi
from support.strategies.graphs import (
    contexts,
    data_parallel,
    experts,
    functions_that_draw,
    losses,
    refusals,
    shards,
    stages,
    tensor_parallel,
)
from support.workers import on_ranks

if not FOLLOWS:
    pytest.skip("torch's compiler runs modules since 2.13", allow_module_level=True)


@needs_mpi
@pytest.mark.parametrize(
    "contract",
    [
        tensor_parallel,
        losses,
        contexts,
        data_parallel,
        refusals,
        functions_that_draw,
        experts,
        stages,
        shards,
    ],
)
def test_strategies(contract: Any) -> None:
    on_ranks(2, contract, watch=200.0)


def test_threads_are_told_to_be_processes() -> None:
    def program(backend: Any, fullgraph: bool) -> bool:
        net = layers.RMSNorm(Partition((1, 2)), 8).double()
        x = torch.ones(3, 4).double() * (1 + backend.worker)
        y = net(x)
        call = torch.compile(net, fullgraph=fullgraph, backend="aot_eager")
        return torch.equal(call(x), y)

    torch.compiler.reset()
    with pytest.raises(Exception, match="start processes, by mpiexec or torchrun"):
        linop.launch(lambda b: program(b, True), 2, "threads")
    torch.compiler.reset()
    assert linop.launch(lambda b: program(b, False), 2, "threads") == [True, True]
