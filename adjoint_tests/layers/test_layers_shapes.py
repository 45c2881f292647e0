"""Flattening, shuffles and softmax over blocks are torch's, forward and back; mistakes are the same
error on every worker."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

import linop
from linop import LinopError, Partition, launch, layers
from linop.backends import Backend
from support.layers.cases import WIDE, Case, is_its_twin
from support.layers.shapes import activations, flattenings, shuffles, softmaxes, unflattenings
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads


@given(flattenings(8))
def test_flattening_on_threads(case: Case) -> None:
    on_threads(case.workers, is_its_twin, case)


@given(unflattenings(8))
def test_unflattening_on_threads(case: Case) -> None:
    on_threads(case.workers, is_its_twin, case)


@given(shuffles(8))
def test_shuffles_on_threads(case: Case) -> None:
    on_threads(case.workers, is_its_twin, case)


@given(softmaxes(8))
def test_softmax_on_threads(case: Case) -> None:
    on_threads(case.workers, is_its_twin, case)


def test_logarithms_of_large_elements_lose_no_digits() -> None:
    whole = 1e4 + torch.arange(6.0).reshape(2, 3).repeat(1, 2)

    def main(backend: Backend) -> Any:
        mine = slice(3 * backend.worker, 3 * backend.worker + 3)
        return layers.LogSoftmax(Partition((1, 2)), 1)(whole[:, mine])

    assert (torch.cat(launch(main, 2), 1) - whole.log_softmax(1)).abs().max() < 1e-6


@given(activations(8))
def test_activations_on_threads(case: Case) -> None:
    on_threads(case.workers, is_its_twin, case)


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=20)
@given(flattenings(4) | unflattenings(4) | shuffles(4) | softmaxes(4) | activations(4))
def test_shapes_and_softmax_on_ranks(case: Case) -> None:
    on_ranks(case.workers, is_its_twin, case)


def test_softmax_of_large_and_of_excluded_elements() -> None:
    """Nothing overflows, a block may be all -inf, and dtypes stay."""
    whole = torch.tensor([[1e4, 1e4 + 1, -torch.inf, -torch.inf]], dtype=WIDE)

    def main(backend: Backend) -> None:
        half = slice(2 * backend.worker, 2 * backend.worker + 2)
        for name in ("Softmax", "LogSoftmax"):
            layer, twin = (getattr(kind, name) for kind in (layers, torch.nn))
            y = layer(Partition((1, 2)), 1)(whole[:, half])
            torch.testing.assert_close(y, twin(1)(whole)[:, half])
        y = layers.Softmax(Partition((1, 2)), 1)(whole[:, half].bfloat16())
        assert y.dtype == torch.bfloat16

    launch(main, 2)


def test_without_a_dimension_torch_chooses_it() -> None:
    def main(backend: Backend) -> None:
        with pytest.warns(UserWarning, match="Implicit dimension choice"):
            y = layers.Softmax(Partition((1, 1)))(torch.zeros(1, 4))
        assert y.tolist() == [[0.25] * 4]

    launch(main, 1)


def test_a_head_of_a_network() -> None:
    """Of an image cut in space to classes: a pool of all of it, flattening, a linear layer."""
    P, Q = Partition((1, 1, 2, 2)), Partition((1, 4))
    torch.manual_seed(0)
    twin = torch.nn.Sequential(
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(6, 3)
    )
    x = torch.rand(2, 6, 4, 4)

    def main(backend: Backend) -> None:
        net = torch.nn.Sequential(
            layers.AdaptiveAvgPool2d(P, 1), layers.Flatten(P), layers.Linear(Q, 6, 3)
        )
        layers.scatter_state(net, twin.state_dict())
        r, c = divmod(backend.worker, 2)
        y = net(x[:, :, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2])
        wanted = twin(x).detach()
        mine = [0, 1, 2, 3, 3][backend.worker : backend.worker + 2]
        assert torch.allclose(y, wanted[:, mine[0] : mine[1]], atol=1e-6)

    linop.launch(main, 4)


def test_a_pool_of_an_image_moves_a_number_for_each_channel() -> None:
    """Workers send partial results to the first, and no pixels; flattening, where the cut goes with
    its dimension, moves nothing."""

    def main(backend: Backend) -> list[int]:
        P, Q = Partition((1, 1, 2, 2)), Partition((1, 4, 1, 1))
        layers.AdaptiveMaxPool2d(P, 1)(torch.rand(3, 8, 16, 16))
        layers.Flatten(Q)(torch.rand(3, 2, 16, 16))
        return [row.bytes for row in backend.counters() if row.operator[0] in "HP"]

    assert linop.launch(main, 4) == [[0], *[[3 * 8 * 4]] * 3]


P2 = Partition((1, 2))
P3 = Partition((1, 1, 2))
_UP = partial(layers.ConvTranspose1d, P3, 1, 1, 2, 2)

MISTAKES: list[tuple[Any, Any, str]] = [
    (lambda: layers.Flatten(P3, 2, 1), (1, 2, 2), "the first not after the last"),
    (lambda: layers.Flatten(P3, 0, -2), (1, 2, 2, 2), "a grid of as many axes"),
    (lambda: layers.Flatten(P3, 1, 3), (1, 2, 2), "end_dim=3 of an input of 3 dimensions"),
    (lambda: layers.Flatten(P3, P_y=P3), (1, 2, 2), "of 2 dimensions on"),
    (lambda: layers.Unflatten(P2, 1, (2, -1, -1)), None, "of which one may be -1"),
    (lambda: layers.Unflatten(P2, 1, (2, 2), P_y=P3), None, "add a Repartition"),
    (lambda: layers.Unflatten(P2, 1, (3, 2)), (1, 4), "a dimension of that size"),
    (lambda: layers.Unflatten(P2, 2, (2, 2)), (1, 4), "dim=2 of an input of 2"),
    (lambda: layers.PixelShuffle(P3, 0), None, "a whole number from 1"),
    (lambda: layers.PixelShuffle(P3, 2), (1, 2, 2), "in multiples of (4, 1, 1)"),
    (lambda: layers.PixelUnshuffle(P3, 2), (1, 3, 2), "in multiples of (1, 2, 2)"),
    (lambda: layers.ChannelShuffle(P3, 3), (1, 2, 2), "a multiple of 3 channels"),
    (lambda: layers.Softmax(P2, 2), (1, 1), "dimension 2 of an input"),
    (lambda: layers.Softmax(P2, 1), "int64", "a floating-point dtype expected"),
    (lambda: layers.Softmax2d(P2), (1, 1), "4 dimensions expected"),
    (lambda: layers.GLU(P2, 0), (1, 1), "one of even length expected"),
    (lambda: layers.PReLU(P2, 3), (1, 1), "(batch, 3, …)"),
    (lambda: layers.GroupNorm(P3, 2, 3), None, "that divides that of the channels"),
    (lambda: layers.GroupNorm(P3, 2, 4), (1, 3, 2), "(batch, 4, …)"),
    (lambda: layers.GroupNorm(P2, 2, 2), (1, 1), "more than 1 value per channel"),
    (lambda: layers.InstanceNorm1d(Partition((2,)), 2), (1, 2, 1), "more than 1 spatial element"),
    (lambda: layers.LocalResponseNorm(P3, 0), None, "a whole number from 1"),
    (lambda: layers.LocalResponseNorm(P2, 2), (1, 1), "3 dimensions or more"),
    (lambda: layers.RMSNorm(Partition((2,)), 3), (1, 2), "(…, 3) expected"),
    (lambda: layers.AdaptiveAvgPool1d(P3, 0), None, "output_size"),
    (lambda: layers.AdaptiveAvgPool1d(P3, (1, 2)), None, "output_size"),
    (lambda: layers.AdaptiveAvgPool2d(P3, 1), None, "a grid of 4 axes expected"),
    (lambda: layers.AdaptiveMaxPool1d(P3, 1, return_indices=True), None, "return_indices=True"),
    (lambda: layers.AdaptiveMaxPool1d(P3, 1), (1, 1, 0), "no extent 0 in space"),
    (lambda: layers.ConvTranspose1d(P3, 1, 1, 2, output_padding=1), None, "output_padding (1,)"),
    (lambda: layers.ConvTranspose1d(P3, 1, 1, 2, padding=3), (1, 1, 1), "no output"),
    (lambda: layers.ConvTranspose1d(P3, 2, 1, 2), (1, 1, 1), "(batch, 2, …)"),
    (lambda: partial(_UP(), output_size=(6,)), (1, 1, 1), "from (4,) to (5,) expected"),
    (lambda: partial(_UP(), output_size=(1, 4)), (1, 1, 1), "from (4,) to (5,) expected"),
]


@pytest.mark.parametrize(("make", "shape", "words"), MISTAKES)
def test_a_mistake_is_one_error_on_every_worker(make: Any, shape: Any, words: str) -> None:
    def main(backend: Any) -> str:
        with pytest.raises(LinopError) as caught:
            make()(torch.ones(1, 1, dtype=torch.int64) if shape == "int64" else torch.ones(shape))
        return str(caught.value)

    said = launch(main, 2)
    assert words in said[0], said[0]
    assert said[0] == said[1]
