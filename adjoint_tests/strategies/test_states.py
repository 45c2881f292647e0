"""States of parallel models are those of the single-process model, or refuse; shards refuse to be
computed with."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
from torch.nn import functional

from support.strategies.states import (
    COMPOSITIONS,
    EXTENTS,
    exported,
    is_the_models,
    pipelines_have_the_models,
    shards_are_read,
    shards_refuse,
)
from support.workers import on_threads

Use = Callable[[Any, Any], Any]
USES: dict[str, Use] = {
    "method": lambda net, x: net.scaled(x),
    "function": lambda net, x: functional.linear(x, net.up.weight, net.up.bias),
    "transposed": lambda net, x: x @ net.up.weight.T,
    "data": lambda net, x: x * (net.scale.data if not torch.is_grad_enabled() else net.scale),
    "cast": lambda net, x: x * net.scale.to(x.dtype).contiguous(),
    "scalar first": lambda net, x: x * (1 + net.scale),
    "norm": lambda net, x: net.up.weight.norm() * x,
    "sum": lambda net, x: torch.stack([p.pow(2).sum() for p in net.parameters()]),
    "einsum": lambda net, x: torch.einsum("bi,oi->bo", x, net.up.weight),
    "in place": lambda net, x: x.clone().mul_(net.scale),
    "index": lambda net, x: net.up.weight[0] * x,
    "list": lambda net, x: torch.cat([p.reshape(-1) for p in net.parameters()]),
    "addcmul": lambda net, x: torch.addcmul(x, x, net.scale),
    "where": lambda net, x: torch.where(x > 0, net.scale, x),
    "any": lambda net, x: times(x, (net.scale > 0.4).any()),
    "all": lambda net, x: times(x, net.scale.isfinite().all()),
    "norms": lambda net, x: torch.stack(torch._foreach_norm([*net.parameters()])),
}


def times(x: Any, number: Any) -> Any:
    return x * float(number) * torch.ones((), requires_grad=True)


@given(st.sampled_from(COMPOSITIONS), st.integers(0, 99), st.sampled_from(EXTENTS))
def test_compositions(names: list[str], seed: int, extents: tuple[int, int, int]) -> None:
    mesh = dict(zip(("ep", "dp", "tp"), extents, strict=True))
    with TemporaryDirectory() as folder:
        workers = extents[0] * extents[1] * extents[2]
        on_threads(workers, is_the_models, names, seed, mesh, str(Path(folder)))


@given(st.sampled_from([[], ["data parallel"], ["checkpoints"]]), st.integers(0, 99), st.booleans())
def test_pipelines(names: list[str], seed: int, cut: bool) -> None:
    on_threads(2, pipelines_have_the_models, names, seed, cut)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [1, 2])
def test_exported(seed: int) -> None:
    exported(seed)


@given(st.integers(2, 3), st.integers(0, 99), st.sampled_from([*USES]))
def test_shards_refuse(workers: int, seed: int, use: str) -> None:
    on_threads(workers, shards_refuse, seed, USES[use])


@given(st.integers(1, 3), st.integers(0, 99))
def test_shards_are_read(workers: int, seed: int) -> None:
    on_threads(workers, shards_are_read, seed)
