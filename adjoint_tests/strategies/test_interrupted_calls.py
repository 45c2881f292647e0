"""Calls of modules that Ctrl-C or another exception ends leave nothing behind: neither other
functions in the place of torch's, nor other parameters in the place of a module's."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
from torch import nn

import linop
from linop.backends import Backend
from linop.strategies import (
    Axis,
    ColwiseParallel,
    ContextParallel,
    DataParallel,
    Mesh,
    RowwiseParallel,
    SequenceParallel,
    full_module,
    fully_shard,
    parallelize_module,
    spatial,
)
from linop.strategies.interrupted import Ended, end_if_interrupted
from support.layers.cases import normal, same


class Stop(BaseException):
    """As KeyboardInterrupt no error, so that torch does not call hooks."""


class Fragile(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """It ends after so many submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 6), nn.LayerNorm(4), nn.Linear(6, 4)
        self.double()

    def forward(self, x: Any, stops: int = -1, kind: type[BaseException] = Stop) -> Any:
        for k, inner in enumerate((self.norm, self.up, self.down)):
            if stops == k:
                raise kind("in the middle")
            x = inner(x)
        if stops == 3:
            raise kind("in the middle")
        return x


def units(net: Fragile, axis: Axis) -> Any:
    for inner in net.children():
        fully_shard(inner, axis, reduction="sum")
    return fully_shard(net, axis, reduction="sum")


PLAN = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(1),
    "down": RowwiseParallel(output_layouts=1),
}
STRATEGIES: dict[str, Callable[[Fragile, Axis], Any]] = {
    "ZeRO 3": lambda net, axis: fully_shard(net, axis, reduction="sum"),
    "units": units,
    "context": lambda net, axis: ContextParallel(axis).parallelize(net),
    "tensor": lambda net, axis: parallelize_module(net, axis, PLAN, inputs=1),
    "data": lambda net, axis: DataParallel(net, axis, reduction="sum"),
    "space": lambda net, axis: spatial(net, axis, dims=(1,)),
}


def left() -> tuple[Any, ...]:
    """Modes that calls of torch go through in this thread."""
    return (
        torch.overrides._get_current_function_mode_stack(),
        torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
    )


@given(
    st.sampled_from([*STRATEGIES]),
    st.integers(0, 3),
    st.sampled_from([Stop, KeyboardInterrupt, SystemExit, GeneratorExit, ValueError]),
    st.integers(1, 3),
)
def test_nothing_is_left(
    strategy: str, stops: int, kind: type[BaseException], workers: int
) -> None:
    base = Fragile()
    x = normal((2, 6, 4), 1)

    def main(backend: Backend) -> None:
        axis = Mesh(backend, all=-1)["all"]
        net = STRATEGIES[strategy](copy.deepcopy(base), axis)
        rows = x.chunk(workers, 1)[axis.index]
        before = left()
        names = dict(net.named_parameters())
        for _ in range(2):
            with pytest.raises(kind, match="in the middle"):
                net(rows, stops, kind)
            assert left() == before
            assert all(p is names[name] for name, p in net.named_parameters())
        wanted = base(x).chunk(workers, 1)[axis.index]
        same(net(rows), wanted, 1e-12)
        assert left() == before

    linop.launch(main, workers)


def test_copies_have_ends_of_their_own() -> None:
    base = Fragile()

    def main(backend: Backend) -> None:
        axis = Mesh(backend, all=-1)["all"]
        net = fully_shard(copy.deepcopy(base), axis)
        other = copy.deepcopy(net)
        whole = full_module(net)
        assert "_call_impl" not in vars(whole)
        x = normal((2, 4), 1)
        with pytest.raises(Stop):
            other(x, 2)
        for one in (net, other, whole):
            same(one(x), net(x), 0)

    linop.launch(main, 2)


def enter(module: Any, args: Any) -> None:
    module.opened.append(len(module.opened))


def count(module: Any) -> int:
    return len(module.opened)


def leave(module: Any) -> None:
    module.opened.pop()


def test_ends_in_order() -> None:
    """Of several hooks the last one ends first; calls inside of calls end those that they began,
    and pickled modules do, too."""
    net: Any = Fragile()
    net.opened = []
    net.register_forward_pre_hook(enter)
    net.register_forward_pre_hook(enter)
    ended: list[str] = []
    for name in ("first", "second"):
        end_if_interrupted(net, lambda _: 2 - len(ended), lambda _, name=name: ended.append(name))
    with pytest.raises(Stop):
        net(torch.ones(1, 4).double(), 0)
    del net._call_impl
    end_if_interrupted(net, count, leave)
    net.opened.clear()
    other = pickle.loads(pickle.dumps(net))
    assert isinstance(other._call_impl, Ended) and other._call_impl._module is other
    for one in (net, other):
        with pytest.raises(Stop):
            one(torch.ones(1, 4).double(), 0)
        assert one.opened == []
