"""Workers draw their blocks alone, with the numbers that torch draws for the whole."""

from __future__ import annotations

import importlib.util
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

import linop
from linop import Partition
from linop.errors import ArgumentError
from linop.layers.parameters import draws
from support.layers.drawing import CONTRACTS, all_of_them
from support.requirements import needs_mpi
from support.workers import on_ranks

contracts = pytest.mark.parametrize("contract", CONTRACTS, ids=lambda one: one.__name__)


@contracts
def test_on_threads(contract: Callable[..., None]) -> None:
    linop.launch(contract, 4)


@needs_mpi
@pytest.mark.timeout(300)
def test_on_ranks() -> None:
    on_ranks(4, all_of_them)


@st.composite
def blocks(draw: Any) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """A shape, and slices of a block of it."""
    shape = draw(st.lists(st.integers(0, 9), max_size=4).map(tuple))
    cuts = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return shape, tuple(slice(*cut) for cut in cuts)


@given(
    blocks(),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64]),
    st.sampled_from(["uniform_", "normal_", "padded"]),
    st.sampled_from([16, 48, 1 << 16]),
    st.integers(0, 99),
)
def test_pieces_have_the_bits_of_the_whole(
    given_block: tuple[Any, Any], dtype: Any, way: str, piece: int, seed: int
) -> None:
    """Of any shape and block, and the generator is afterwards where it would be."""
    shape, where = given_block

    def make() -> Any:
        x = torch.empty(shape, dtype=dtype)
        reals = torch.view_as_real(x) if dtype.is_complex else x
        if way == "uniform_":
            reals.uniform_(-0.5, 2)
        else:
            reals.normal_(1, 0.1)
        if way == "padded" and len(shape) > 1 and shape[0]:
            x[seed % shape[0]].fill_(0)
        return torch.nn.Parameter(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draws, "_PIECE", piece)
        torch.manual_seed(seed)
        found = draws.recorded_fills(make)
        assert found is not None
        made, recorder = found
        assert made.is_meta and recorder.device_of(made) == torch.device("cpu")
        block = torch.full([w.stop - w.start for w in where], 7, dtype=dtype)
        target = draws.Target(block, where, dtype, torch.device("cpu"))
        draws.replay(recorder.fills(), lambda _: target)
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    whole = make()
    assert torch.equal(block, whole.detach()[where])
    assert torch.equal(state, torch.get_rng_state())


def test_last_pieces() -> None:
    """`normal_` draws the last 16 elements once more where there are not a multiple of these."""
    for n in range(1, 120):
        test_pieces = test_pieces_have_the_bits_of_the_whole.hypothesis.inner_test
        test_pieces(((n,), (slice(0, n),)), torch.float32, "normal_", 48, n)


def test_other_ways_to_fill_are_not_recorded() -> None:
    for make in (
        lambda: torch.nn.Parameter(torch.rand(3)),
        lambda: torch.nn.Parameter(torch.empty(3)),
        lambda: torch.empty(3).normal_().mul_(2),
        lambda: torch.nn.init.orthogonal_(torch.empty(3, 3)),
        lambda: torch.nn.BatchNorm1d(3),
    ):
        assert draws.recorded_fills(make) is None


def test_parameters_that_were_not_drawn() -> None:
    layer = linop.layers.Linear(Partition((1, 1)), 3, 2)
    del layer.__dict__["_fills"]
    with pytest.raises(ArgumentError, match=r"'weight' was not drawn .*initialize"):
        layer.reset_parameters()
