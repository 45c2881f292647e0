"""Steps of training with the same bits on 1, 2, 4 and 8 workers."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

import linop
from linop import COPIES
from linop.errors import ArgumentError, PartitionError
from linop.strategies import (
    ColwiseParallel,
    CrossEntropyLoss,
    GradientError,
    Mesh,
    PrepareModuleInput,
    SequenceParallel,
    VirtualShards,
    parallelize_module,
)
from support.requirements import needs_mpi
from support.strategies.exact_training import (
    STRATEGIES,
    WORKERS,
    batch,
    checked,
    checked_over_features,
    has_the_bits,
    perceptron,
    squares,
    trained,
)
from support.workers import on_ranks

STEPS = 10


def on_tree(workers: int, program: Any, *arguments: Any, **options: Any) -> list[Any]:
    return linop.launch(
        lambda b: program(b, *arguments, **options), workers, "threads", sums="tree"
    )


@cache
def alone(strategy: str, steps: int = STEPS) -> Any:
    (found,) = on_tree(1, trained, strategy, steps)
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ten_steps_have_the_same_bits_on_threads(strategy: str) -> None:
    wanted = alone(strategy)
    assert len({*wanted[0]}) == STEPS
    for workers in WORKERS[1:]:
        assert on_tree(workers, trained, strategy, STEPS) == [wanted] * workers
    assert alone("dp") == alone("zero3")  # and one process, of which neither is more


def test_in_float32() -> None:
    for strategy in STRATEGIES:
        found = {on_tree(n, trained, strategy, 2, torch.float32)[0][1] for n in (1, 4)}
        assert len(found) == 1


@needs_mpi
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_on_ranks(strategy: str) -> None:
    on_ranks(4, has_the_bits, strategy, 3, alone(strategy, 3), sums="tree", watch=120.0)


@given(
    st.sampled_from(["dp", "zero3", "layers"]),
    st.sampled_from(WORKERS),
    st.integers(8, 40),
    st.integers(0, 999),
)
def test_check_finds_no_bit(strategy: str, workers: int, rows: int, seed: int) -> None:
    """Of any number of rows, which shards have unequal parts of."""
    assert on_tree(workers, checked, strategy, "", rows, seed) == [0.0] * workers


def test_check_says_that_one_bit_is_wrong() -> None:
    with pytest.raises(GradientError) as caught:
        on_tree(2, checked, "dp", "bit")
    text = str(caught.value)
    assert "gradients of `0.weight` differ by up to" in text and "e-16 of the largest" in text
    own, twins = text.rpartition(": ")[2].split(", the twin's ")
    assert own != twins and float(own) == pytest.approx(float(twins), rel=1e-12)
    with pytest.raises(GradientError, match=r"all gradients of `0\.weight` differ by up to"):
        on_tree(2, checked, "dp", "twice")


@pytest.mark.parametrize("workers", [2, 4])
def test_check_of_a_tensor_parallel_net(workers: int) -> None:
    assert on_tree(workers, checked_over_features) == [0.0] * workers
    with pytest.raises(GradientError, match=r"`head\.weight` differ by up to"):
        on_tree(workers, checked_over_features, True)


def test_sums_by_worker_are_another_rounding() -> None:
    """So that the tree is of use, and missed."""

    def without(backend: Any) -> float:
        backend.sums = "tree"  # as the program believes
        shards = VirtualShards(Mesh(backend, only=-1)["only"])
        backend.sums = "fixed"
        net = linop.strategies.DataParallel(perceptron(0), shards.axis)
        shards.step(net, lambda m, x, t: squares(m(x), t), *batch(0, 16))
        return float(net.module[0].weight.grad.sum())

    def right(backend: Any) -> float:
        axis = Mesh(backend, only=-1)["only"]
        net = linop.strategies.DataParallel(perceptron(0), axis)
        VirtualShards(axis).step(net, lambda m, x, t: squares(m(x), t), *batch(0, 16))
        return float(net.module[0].weight.grad.sum())

    wanted = on_tree(1, right)[0]
    assert on_tree(8, right) == [wanted] * 8
    assert linop.launch(without, 8, "threads")[0] != wanted


def test_a_parameter_that_some_shards_leave_out() -> None:
    """Counts as zero, whichever worker has these; one that all leave out has no gradient."""

    def found(backend: Any) -> Any:
        axis = Mesh(backend, only=-1)["only"]
        net = perceptron(1)
        net.idle = torch.nn.Parameter(torch.ones(2))
        model = linop.strategies.DataParallel(net, axis) if axis.size > 1 else net

        def term(m: Any, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return squares(net(x), t) if float(x[0, 0]) > 0 else (net[3].bias * t).sum()

        value = VirtualShards(axis).step(model, term, *batch(3, 16))
        assert net.idle.grad is None
        return [float(value), *(p.grad.tolist() for p in net[:4].parameters())]

    wanted = on_tree(1, found)[0]
    for workers in (2, 8):
        assert on_tree(workers, found) == [wanted] * workers


def test_gradients_of_a_step_replace_those_before() -> None:
    """Under every strategy, though nobody calls zero_grad."""

    def found(backend: Any, strategy: str) -> torch.Tensor:
        axis = Mesh(backend, only=-1)["only"]
        net = perceptron(0)
        if strategy == "dp":
            net = linop.strategies.DataParallel(net, axis)
        else:
            linop.strategies.fully_shard(net, axis)
        for seed in 1, 2:
            given = batch(seed, 16)
            VirtualShards(axis).step(net, lambda m, x, t: squares(m(x), t), *given)
        return next(net.parameters()).grad

    wanted = on_tree(1, found, "dp")[0]
    for workers in (1, 2):
        shards = on_tree(workers, found, "zero3")
        assert torch.equal(torch.cat(shards), wanted)


def test_what_cannot_be() -> None:
    def refused(backend: Any, what: str) -> None:
        axis = Mesh(backend, only=-1)["only"]
        net = perceptron(0)
        if what == "shards":
            VirtualShards(axis, 6)
        if what == "rows":
            model = linop.strategies.DataParallel(net, axis)
            VirtualShards(axis).step(model, squares, *batch(0, 7))
        if what == "plain":
            VirtualShards(axis).step(net, squares, *batch(0, 8))
        if what == "copies":
            gathered = {"0": ColwiseParallel(), "1": PrepareModuleInput(-1, COPIES)}
            parallelize_module(net, axis, gathered, shards=8)
        if what == "uneven":
            plan = {"3": ColwiseParallel(output_layouts=linop.REPLICATED)}
            parallelize_module(net, axis, plan, shards=16)
        if what == "class":
            net[2] = torch.nn.GroupNorm(2, 32)
            parallelize_module(net, axis, {"2": SequenceParallel(0)}, shards=8)
        if what in ("mean", "half", "norm"):
            if what == "half":
                net = net.bfloat16()
            if what == "norm":
                net[2] = linop.strategies.sync_batch_norm(torch.nn.BatchNorm1d(32), axis)
            reduction = "mean" if what == "mean" else "sum"
            model = linop.strategies.DataParallel(net, axis, reduction=reduction)
            VirtualShards(axis).step(model, squares, *batch(0, 8))
        if what in ("shards of means", "shards of halves"):
            option: dict[str, Any] = {"param_dtype": torch.bfloat16}
            option = {"reduction": "mean"} if "means" in what else option
            model = linop.strategies.fully_shard(net, axis, **option)
            VirtualShards(axis).step(model, squares, *batch(0, 8))
        if what == "entropy":
            CrossEntropyLoss(axis, shards=None if backend.worker else 3)
        if what == "mine":
            linop.strategies.check(net, net, batch(0, 8), squares, exact=True, mine=batch(0, 8))

    for what, kind, text in (
        ("shards", ArgumentError, "a power of two that 2 workers divide expected, given shards=6"),
        ("rows", ArgumentError, r"at least 8 rows expected, given a tensor of shape \(7, 16\)"),
        ("plain", ArgumentError, r"DataParallel\(net, axis\), or a net of fully_shard, expected"),
        ("mean", ArgumentError, "bits depend on the number of workers: reduction='mean'"),
        ("shards of means", ArgumentError, "bits depend .* reduction='mean'"),
        (
            "half",
            ArgumentError,
            r"parameters \['module\.0\.weight'.* of torch\.bfloat16, whose",
        ),
        ("shards of halves", ArgumentError, "leave param_dtype and reduce_dtype out"),
        ("norm", ArgumentError, "batch norms over the rows of all workers"),
        ("copies", ArgumentError, "let each module have an input that is split"),
        ("uneven", PartitionError, "8 features for 16 shards; as many for each expected"),
        ("class", ArgumentError, "let each module|is not cut into shards"),
        ("entropy", ArgumentError, "a power of two that 2 workers divide expected, given shards=3"),
        ("mine", ArgumentError, "exact=True has no tolerance=, and takes no mine="),
    ):
        with pytest.raises(kind, match=text):
            on_tree(2, refused, what)

    def every(backend: Any) -> None:
        with pytest.raises(ArgumentError, match=r"on worker 0: .* given shards=3"):
            refused(backend, "entropy")

    on_tree(2, every)
    with pytest.raises(ArgumentError, match=r"a backend with sums='tree' expected, such as of"):
        linop.launch(lambda b: VirtualShards(Mesh(b, only=-1)["only"]), 4, "threads")
