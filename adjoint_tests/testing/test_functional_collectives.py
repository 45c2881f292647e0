"""Operators of functional collectives, read as collectives."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from torch import nn

from linop.testing.parallel.recording.recorder import Recorder
from linop.testing.parallel.recording.records import Collective
from support.running_job import ran

OPS: Any = torch.ops._c10d_functional


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    """A group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/s", rank=0, world_size=1)
        yield dist.group.WORLD
        dist.destroy_process_group()


def recorded(run: Any) -> list[Collective]:
    recorder = Recorder()
    with recorder.recording(nn.Identity(), str):
        run()
    return recorder.collectives


@pytest.mark.parametrize(
    ("run", "names", "reduction"),
    [
        (lambda x, g: OPS.all_reduce(x, "sum", g), ["all_reduce"], "sum"),
        (lambda x, g: OPS.all_reduce_(x.clone(), "avg", g), ["all_reduce"], "average"),
        (lambda x, g: OPS.all_reduce_coalesced([x, x], "max", g), ["all_reduce"] * 2, "maximum"),
        (lambda x, g: OPS.all_gather_into_tensor(x, 1, g), ["all_gather"], ""),
        (lambda x, g: OPS.all_gather_into_tensor_coalesced([x], 1, g), ["all_gather"], ""),
        (lambda x, g: OPS.reduce_scatter_tensor(x, "sum", 1, g), ["reduce_scatter"], "sum"),
        (lambda x, g: OPS.all_to_all_single(x, [4], [4], g), ["all_to_all"], ""),
        (lambda x, g: OPS.broadcast(x, 0, g), ["broadcast"], ""),
        (lambda x, g: OPS.wait_tensor(x), [], ""),
    ],
)
def test_functional_ones(run: Any, names: list[str], reduction: str, world: Any) -> None:
    x = torch.arange(8.0).reshape(4, 2)
    found = recorded(lambda: run(x, world.group_name))
    assert [one.name for one in found] == names
    for one in found:
        assert (one.ranks, one.reduction, one.dtype) == ((0,), reduction, "float32")
        assert one.sent == one.received == [(4, 2)]
        assert one.value is not None and (one.value == range(8)).all()


def of_dtensors() -> str:
    """On two ranks: an explicit redistribution, and one that an operation needs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def run() -> None:
        x = DTensor.from_local(torch.ones(2, 2), mesh, [Partial()])
        x.redistribute(mesh, [Replicate()])
        torch.relu(x)  # wants the sum

    found = [one for one in recorded(run) if one.reduction == "sum"]
    return str([(one.name, one.within, one.inside >= 0, one.group, one.ranks) for one in found])


def test_what_dtensors_move_says_for_which_operation() -> None:
    ended = ran(__file__, "of_dtensors")
    explicit = ("all_reduce", "", True, "", (0, 1))
    implicit = ("all_reduce", "aten::relu", False, "", (0, 1))
    assert ended.said == {rank: str([explicit, implicit]) for rank in (0, 1)}, ended


def test_a_functional_broadcast_is_differentiated_as_ever(world: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    alone = OPS.broadcast(x, 0, world.group_name)
    seen: list[Any] = []
    recorded(lambda: seen.append(OPS.broadcast(x, 0, world.group_name)))
    assert type(seen[0].grad_fn).__name__ == type(alone.grad_fn).__name__ == "CloneBackward0"
