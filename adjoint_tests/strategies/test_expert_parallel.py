"""Expert parallelism equals one process, alone and with other strategies; models of transformers
are taken as they are."""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
from torch import nn

import linop
from linop.backends import Backend
from linop.errors import ArgumentError, BackendError, LinopError, ShapeError, SubsetError
from linop.strategies import DataParallel, ExpertParallel, Mesh, ShardedOptimizer, fully_shard
from linop.strategies.data.mean_losses import MeanLossWarning
from linop.strategies.experts.parallel_experts import multiplies_by_gates
from support.draws import FEW
from support.requirements import needs_mpi
from support.strategies.expert_nets import (
    Block,
    Experts,
    Stacked,
    accumulates,
    is_its_twin,
    is_its_twin_in_stages,
    is_mixtral,
    losses_of_routers,
    recomputes,
)
from support.strategies.expert_states import STRATEGIES, Layout, goes_on, is_clipped
from support.strategies.tensor.tensor_networks import filled
from support.workers import on_ranks, on_threads

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed: pip install 'linop-algebra[models]'",
)


@st.composite
def nets(draw: Any, most: int) -> Experts:
    dp = draw(st.sampled_from([1, 1, 2])) if most > 1 else 1
    count = dp * draw(st.integers(1, most // dp))
    experts = draw(st.integers(1, 5))
    return Experts(
        tuple(draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))),
        dp,
        experts,
        draw(st.integers(1, min(3, experts))),
        draw(st.sampled_from([None, 0.5, 1.0])) if dp == 1 else None,
        draw(st.booleans()),
        draw(st.integers(0, 99)),
    )


@example(Experts((2, 0, 1, 1), 2))
@example(Experts((2, 0, 1, 1), 2, shards=True))
@example(Experts((1, 1, 1, 1), experts=2, factor=0.5))
@given(nets(4))
def test_on_threads(case: Experts) -> None:
    on_threads(case.workers, is_its_twin, case)


@st.composite
def layouts(draw: Any, most: int) -> Layout:
    ep = draw(st.integers(1, most))
    dp = draw(st.integers(1, most // ep))
    strategy = draw(st.sampled_from(STRATEGIES))
    copies = strategy in ("dp", "zero1")
    return Layout(
        dp,
        ep,
        draw(st.integers(1, most // ep // dp)),
        strategy,
        tuple(draw(st.permutations(["dp", "ep", "tp"]))),
        ("dp", "ep") if copies else draw(st.sampled_from([("dp", "ep"), ("dp",)])),
        draw(st.integers(1, 4)),
        draw(st.integers(0, 99)),
    )


EVERY = [
    Layout(2, 2, 1, "zero3"),
    Layout(2, 2, 2, "zero3", ("tp", "dp", "ep")),
    Layout(2, 2, 2, "zero2", ("tp", "dp", "ep"), ("dp",)),
    Layout(2, 2, 1, "zero1", ("ep", "dp", "tp")),
    Layout(1, 2, 2, "dp"),
]
"""Some of which experts and others are cut over axes in common."""


@example(EVERY[0])
@example(EVERY[1])
@example(EVERY[4])
@given(layouts(6))
def test_norms(case: Layout) -> None:
    on_threads(case.workers, is_clipped, case)


@example(EVERY[0])
@example(EVERY[2])
@example(EVERY[3])
@given(layouts(4))
def test_states(case: Layout) -> None:
    with tempfile.TemporaryDirectory() as folder:
        on_threads(case.workers, goes_on, case, folder)


@needs_mpi
@pytest.mark.timeout(300)
def test_states_on_ranks() -> None:
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(2, goes_on, Layout(1, 2, 1, "zero3"), folder)
        on_ranks(2, is_clipped, Layout(1, 2, 1, "zero3"))


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=FEW)
@given(nets(2))
def test_on_ranks(case: Experts) -> None:
    on_ranks(case.workers, is_its_twin, case)


@pytest.mark.parametrize("rows", [(1, 2), (1, 1, 1, 1), (2, 0, 1, 1)])
@pytest.mark.parametrize("dp", [1, 2])
def test_micro_batches(rows: tuple[int, ...], dp: int) -> None:
    on_threads(len(rows), accumulates, Experts(rows, dp))


@pytest.mark.parametrize("dp", [1, 2])
def test_in_pipelines(dp: int) -> None:
    on_threads(4 * dp, is_its_twin_in_stages, dp)


@pytest.mark.parametrize("context", [True, False])
def test_checkpoints(context: bool) -> None:
    on_threads(3, recomputes, context)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_losses_of_routers(workers: int) -> None:
    on_threads(workers, losses_of_routers, workers)


@needs_transformers
@pytest.mark.parametrize(
    ("name", "workers", "dp"),
    [("Mixtral", 2, 1), ("Mixtral", 4, 1), ("Qwen3-MoE", 4, 2), ("OLMoE", 3, 1)],
)
def test_models_of_transformers(name: str, workers: int, dp: int) -> None:
    on_threads(workers, is_mixtral, name, dp)


@needs_mpi
@needs_transformers
@pytest.mark.timeout(300)
def test_mixtral_on_ranks() -> None:
    on_ranks(2, is_mixtral, "Mixtral", 1)


def test_means_are_not_advised() -> None:
    """Nor warned of, where the user has chosen sums."""

    def main(backend: Backend, reduction: Any) -> None:
        mesh = Mesh(backend, dp=2, ep=2)
        ep = ExpertParallel(mesh["ep"], mesh["dp"])
        net = DataParallel(ep.parallelize(Block(3, 1, 2)), mesh["dp", "ep"], reduction=reduction)
        net(torch.zeros(4, 2).double()).mean().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linop.launch(partial(main, reduction="sum"), 4, "threads")
    with pytest.warns(MeanLossWarning, match=r"Give loss \* net\.share") as caught:
        linop.launch(partial(main, reduction=None), 4, "threads")
    assert len([one for one in caught if one.category is MeanLossWarning]) == 1


def test_mistakes() -> None:
    def main(backend: Backend) -> None:
        mesh = Mesh(backend, dp=2, ep=2)
        ep = ExpertParallel(mesh["ep"])
        with pytest.raises(LinopError, match="Axis"):
            ExpertParallel("ep")  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="capacity_factor='much'; a number from 0"):
            ExpertParallel(mesh["ep"], capacity_factor="much")  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="no module of Linear is one of stacked experts"):
            ep.parallelize(torch.nn.Linear(2, 2))
        with pytest.raises(ArgumentError, match="no module of Block is called 'mlp'"):
            ep.parallelize(Block(3, 1, 2), "mlp")
        with pytest.raises(ArgumentError, match=r"'router' is a Linear; .* stacked, of shape"):
            ep.parallelize(Block(3, 1, 2), ["experts", "router"])
        net = ep.parallelize(Block(3, 1, 2))
        with pytest.raises(ArgumentError, match="no module of Block is one of stacked experts"):
            ep.parallelize(net)
        with pytest.raises(ArgumentError, match=r"of experts \('experts\.bias'\) are sums"):
            DataParallel(net, mesh["ep"], reduction="mean")
        with pytest.raises(ArgumentError, match=r"gradients of experts \('experts'\) are sums"):
            fully_shard(net, mesh["dp"], reduction="mean")
        with pytest.raises(ArgumentError, match="to ExpertParallel, as data=mesh"):
            DataParallel(net, mesh["dp", "ep"])
        with pytest.raises(ArgumentError, match="is a block that a linop"):
            fully_shard(net, mesh["dp", "ep"])
        with pytest.raises(ArgumentError, match=r"\['experts\.bias', .* have no copies to shard"):
            ShardedOptimizer(net, mesh["ep"], torch.optim.SGD)
        x = torch.zeros(4, 2).double()
        with pytest.raises(ShapeError, match=r"\(8, 2\) for experts of 6 tokens"):
            net.experts(x, torch.zeros(3, 1).long(), torch.ones(3, 1).double())
        with pytest.raises(ShapeError, match=r"\(6, 1\) and \(6, 2\); twice"):
            net.experts(x, torch.zeros(3, 1).long(), torch.ones(3, 2).double())
        index = torch.zeros(4, 1).long()
        index[2] = (0, 3, 0, -1)[mesh["ep"].index]
        with pytest.raises(SubsetError, match=r"indices from 0 to 3; there are 3 experts"):
            net.experts(x, index, torch.ones(4, 1).double())

    linop.launch(main, 4)


def test_buffers_of_experts_are_refused() -> None:
    """Nothing says how a buffer is cut."""
    block = Block(3, 1, 2)
    block.experts.register_buffer("scale", torch.ones(3))

    def main(backend: Backend) -> None:
        ep = ExpertParallel(Mesh(backend, ep=-1)["ep"])
        with pytest.raises(ArgumentError, match="that have no buffers"):
            ep.parallelize(block)
        with pytest.raises(ArgumentError, match="a module without buffers expected"):
            ep.parallelize(block, "experts")

    linop.launch(main, 2)


def test_batches_that_end_apart_are_refused() -> None:
    def main(backend: Backend) -> None:
        axis = Mesh(backend, ep=-1)["ep"]
        net = DataParallel(ExpertParallel(axis).parallelize(Block(3, 1, 2)), axis)
        with pytest.raises(ArgumentError, match="call the net with an empty batch"):
            next(iter(net.joined([])))
        with pytest.raises(ArgumentError, match="call the net with an empty batch"):
            net.without_batch()

    linop.launch(main, 2)


def test_nets_that_differ() -> None:
    def main(backend: Backend) -> None:
        ep = ExpertParallel(Mesh(backend, ep=-1)["ep"])
        with pytest.raises(LinopError, match=r"worker 1 has .*up \(4, 2, 3\)"):
            ep.parallelize(torch.nn.Sequential(Stacked(3 + (backend.worker or 0), 3, 2)))
        ep = ExpertParallel(ep.axis, capacity_factor=1 + (backend.worker or 0))
        with pytest.raises(BackendError, match=r"worker 1 has capacity_factor=2, worker 0"):
            ep.parallelize(Block(3, 1, 2))

    linop.launch(main, 2)


def test_modules_by_name_and_shared_ones() -> None:
    """Patterns say which modules are cut; one that is at two places stays one."""

    def main(backend: Backend) -> Any:
        ep = ExpertParallel(Mesh(backend, ep=-1)["ep"])
        net = torch.nn.Sequential(Block(3, 1, 2), Block(3, 1, 2), Block(3, 1, 2))
        net[2].experts = net[0].experts
        ep.parallelize(net, ["0.experts", "2.e*"])
        assert isinstance(net[1].experts, Stacked)
        assert net[2].experts is net[0].experts
        assert ep.experts(net) == [net[0].experts]
        return tuple(net[0].experts.up.shape)

    assert linop.launch(main, 2) == [(2, 2, 2), (1, 2, 2)]


class Weighing(Stacked):
    """Experts that weigh their input by the gate, as those of Llama 4."""

    def forward(self, x: Any, indices: Any, gates: Any) -> Any:
        each = indices.shape[1]
        rows = (x.unsqueeze(1) * gates.unsqueeze(-1)).flatten(0, 1)
        ones = gates.new_ones(indices.numel(), 1)
        return super().forward(rows, indices.reshape(-1, 1), ones).view(-1, each, x.shape[1]).sum(1)


def test_experts_that_weigh_their_input_are_refused() -> None:
    for k in range(60):  # rounding is none of it
        dtype = (torch.float64, torch.float32, torch.bfloat16)[k % 3]
        assert multiplies_by_gates(filled(Stacked(3, 1 + k % 7, 1 + k), k).to(dtype))
    for value in (torch.nan, torch.inf):  # of memory that has no values yet
        unfilled = Stacked(3, 4, 5)
        with torch.no_grad():
            for p in unfilled.parameters():
                p.fill_(value)
        assert multiplies_by_gates(unfilled)

    def main(backend: Backend) -> None:
        ep = ExpertParallel(Mesh(backend, ep=-1)["ep"])
        wrong = nn.ModuleDict({"experts": filled(Weighing(3, 4, 5), 0)}).train()
        with pytest.raises(ArgumentError, match="'experts': half the gate does not give half"):
            ep.parallelize(wrong)
        assert type(wrong["experts"]) is Weighing and wrong["experts"].training
        with torch.device("meta"):
            unknown = nn.ModuleDict({"experts": Weighing(3, 4, 5)})
        ep.parallelize(unknown)  # has no values yet

    linop.launch(main, 2)
