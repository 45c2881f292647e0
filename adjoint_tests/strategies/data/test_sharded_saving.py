"""The memory that torch's graph keeps of a module under fully_shard, other than parameters."""

from __future__ import annotations

import copy
import gc
import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import linop
from linop.strategies import Mesh, fully_shard

ROWS = torch.arange(24, dtype=torch.float64).reshape(3, 8).cos()


def sharded(work: Any) -> list[Any]:
    """The results of a function of a module under fully_shard, on two workers."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.Sigmoid()).double()

    def main(backend: Any) -> Any:
        return work(fully_shard(copy.deepcopy(net), Mesh(backend, dp=2)["dp"]))

    return linop.launch(main, 2)


def test_forwards_without_backward_keep_nothing() -> None:
    def forward(net: Any) -> StorageWeakRef:
        return StorageWeakRef(net(ROWS).untyped_storage())

    found = sharded(forward)
    gc.collect()
    assert all(result.expired() for result in found)


def test_results_that_are_changed_before_backward() -> None:
    def main(net: Any) -> str:
        y = net(ROWS)
        with torch.no_grad():
            y.mul_(2)
        try:
            y.sum().backward()
        except RuntimeError as error:
            return str(error)
        return ""

    for said in sharded(main):
        assert "modified by an inplace operation: a tensor of shape (3, 8)" in said
