"""Normalisation over blocks is torch's, forward and back, running statistics included."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from hypothesis import given, settings

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

import linop
from linop import REPLICATED, Partition, TensorSpace
from linop.backends import Backend
from linop.errors import LinopError
from support.layers.cases import WIDE, Case, block, is_its_twin, normal, same
from support.layers.norms import channel_norms, keeps_statistics, norms
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads


@given(norms(8))
def test_norms_on_threads(case: Case) -> None:
    on_threads(case.workers, is_its_twin, case)


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=20)
@given(norms(4))
def test_norms_on_ranks(case: Case) -> None:
    on_ranks(case.workers, is_its_twin, case)


@given(channel_norms(6))
def test_running_statistics_on_threads(case: Case) -> None:
    linop.launch(lambda backend: keeps_statistics(backend, case), case.workers)


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=6)
@given(channel_norms(4))
def test_running_statistics_on_ranks(case: Case) -> None:
    on_ranks(case.workers, keeps_statistics, case)


@pytest.mark.parametrize(("channels", "groups"), [(6, 3), (6, 2), (4, 1), (7, 7), (2, 1)])
def test_blocks_that_cut_groups_of_channels(channels: int, groups: int) -> None:
    grid = Partition((1, 4, 2))
    case = Case("GroupNorm", (grid,), (2, channels, 3), (groups, channels), kept=3, seed=2)
    on_threads(8, is_its_twin, case)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_groups_of_channels_without_space(groups: int) -> None:
    case = Case("GroupNorm", (Partition((1, 4)),), (3, 12), (groups, 12), kept=2, seed=2)
    on_threads(4, is_its_twin, case)


def test_a_far_mean_and_empty_blocks() -> None:
    """Two passes: the variance of numbers far from zero is not lost; and of three workers, the
    last has nothing."""

    def main(backend: Backend) -> None:
        layer = linop.layers.BatchNorm1d(Partition((3,)), 2, affine=False).to(WIDE)
        x = torch.tensor([[1e8, 1], [1e8 + 2, 3]], dtype=WIDE)
        y = layer(x[backend.worker : backend.worker + 1])
        expected = torch.tensor([[-1.0, -1.0], [1.0, 1.0]], dtype=WIDE)
        expected = expected[backend.worker : backend.worker + 1]
        assert torch.allclose(y, expected, atol=1e-5)
        assert torch.allclose(layer.running_var, torch.tensor([1.1, 1.1], dtype=WIDE))

    linop.launch(main, 3)


def test_layer_norm_of_a_linear_s_output() -> None:
    """A grid of two axes splits first and last dimension; x_axes says otherwise."""
    P = Partition((1, 2))
    whole = normal((2, 3, 4), 0)

    def main(backend: Backend) -> None:
        half = slice(2 * backend.worker, 2 * backend.worker + 2)
        norm = linop.layers.LayerNorm(P, 4).to(WIDE)
        assert norm.weight.shape == (2,)
        same(norm(whole[..., half]), torch.nn.LayerNorm(4).to(WIDE)(whole)[..., half])
        copy = linop.layers.LayerNorm(P, 4, x_axes=[0, REPLICATED]).to(WIDE)
        x = whole.clone().requires_grad_()
        y = copy(x)
        y.square().sum().backward()
        twin, z = torch.nn.LayerNorm(4).to(WIDE), whole.clone().requires_grad_()
        twin(z).square().sum().backward()
        same(x.grad, z.grad)
        if backend.worker == 0:
            same(copy.weight.grad, twin.weight.grad)

    linop.launch(main, 2)


def test_what_is_wrong_is_said_on_every_worker() -> None:
    P = Partition((2, 1, 1, 1))

    def main(backend: Backend) -> list[str]:
        norm, said = linop.layers.BatchNorm2d(P, 3), []
        outside = backend.worker == 2
        for shape in ((1, 4, 2, 2), (1, 3, 2), (1 - backend.worker, 3, 1, 1)):
            with pytest.raises(LinopError) as error:
                norm(None if outside else torch.zeros(tuple(map(abs, shape))))
            said.append(str(error.value))
        layer = linop.layers.LayerNorm(Partition((2,)), (3, 2))
        with pytest.raises(LinopError) as wrong:
            layer(None if outside else torch.zeros(1, 2, 2))
        y = norm.eval()(None if outside else torch.zeros(1, 3, 1, 1))
        assert y.requires_grad
        return [*said, str(wrong.value)]

    first, *others = linop.launch(main, 3)
    assert all(said == first for said in others)
    assert "Expected more than 1 value per channel" in first[2], first
    assert "(…, 3, 2) expected" in first[3], first


def test_workers_that_change_blocks() -> None:
    """The same blocks on other workers are another tensor, to be agreed on anew."""

    P, whole = Partition((2, 2)), normal((4, 3), 0)
    wanted = torch.nn.BatchNorm1d(3, dtype=WIDE)(whole).detach()

    def main(backend: Backend) -> None:
        norm = linop.layers.BatchNorm1d(P, 3, affine=False, track_running_stats=False)
        for first in (1, 2, 1):
            X = TensorSpace((4, 3), P, sizes={1: (first, 3 - first)})
            same(norm(block(X, whole, backend)), block(X, wanted, backend))

    linop.launch(main, 4)


def test_no_communicators_after_the_first_step() -> None:
    """Plans, and with them ways for messages, are made at the first call of a shape only."""

    def main(backend: Any) -> None:
        norm = linop.layers.BatchNorm1d(Partition((2, 1)), 3)
        norm(torch.randn(2, 3)).sum().backward()
        plans = backend._plans
        for train in (True, False, True):
            norm.train(train)(torch.randn(2, 3)).sum().backward()
        assert backend._plans == plans

    linop.launch(main, 2)


@pytest.mark.parametrize("name", ["BatchNorm2d", "GroupNorm", "LayerNorm", "RMSNorm"])
def test_no_samples_have_no_gradient(name: str) -> None:
    """As torch has it: gradients of parameters are 0, not NaN."""
    arguments: Any = {"BatchNorm2d": (3,), "GroupNorm": (3, 3)}.get(name, ([8, 8],))

    def main(backend: Any) -> None:
        layer = getattr(linop.layers, name)(Partition((1, 1, 2, 1)), *arguments)
        layer(torch.ones(0, 3, 4, 8)).sum().backward()
        for p in layer.parameters():
            assert p.grad is not None
            torch.testing.assert_close(p.grad, torch.zeros_like(p.grad))

    linop.launch(main, 2)
