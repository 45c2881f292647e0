"""A spectral convolution on blocks is the sequential one, forward and back."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import given

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

import linop
from linop import Partition
from linop.errors import ArgumentError, DTypeError, PartitionError, ShapeError
from support.layers.spectral import Spectral, is_sequential, spectral_layers
from support.requirements import needs_mpi
from support.workers import on_ranks


@given(spectral_layers(6))
def test_spectral_convolutions_on_threads(case: Spectral) -> None:
    linop.launch(lambda backend: is_sequential(backend, case), case.workers)


@needs_mpi
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "case",
    [
        Spectral(Partition((1, 1, 2, 2)), (3, 2, 5, 6), 3, (3, 4), real=True, seed=1),
        Spectral(Partition((2, 1, 2), (3, 0, 2, 1)), (3, 2, 7), 1, (4,), real=False, seed=2),
        Spectral(Partition((1, 1, 2, 2)), (3, 2, 5, 6), 3, (3, 4), real=True, seed=3, half=True),
    ],
)
def test_spectral_convolutions_on_ranks(case: Spectral) -> None:
    on_ranks(case.workers, is_sequential, case)


def test_bad_arguments_of_a_spectral_convolution() -> None:
    grid = Partition((1, 1, 1))
    with pytest.raises(PartitionError, match="a grid of 4 axes expected"):
        linop.layers.SpectralConv(grid, 2, 2, (3, 3))
    with pytest.raises(ArgumentError, match="a complex dtype expected"):
        linop.layers.SpectralConv(grid, 2, 2, (3,), dtype=torch.float32)
    layer = linop.layers.SpectralConv(grid, 2, 3, (3,))
    assert layer(torch.zeros(1, 2, 5)).shape == (1, 3, 5)
    with pytest.raises(ShapeError, match=r"\(batch, 2, …\) of 3 dimensions expected"):
        layer(torch.zeros(1, 3, 5))
    with pytest.raises(ShapeError, match=r"\(3,\) modes of dimensions \(2,\), of lengths \(2,\)"):
        layer(torch.zeros(1, 2, 2))
    with pytest.raises(DTypeError, match="an input of float64 for a weight of complex64"):
        layer(torch.zeros(1, 2, 5, dtype=torch.float64))
    with pytest.raises(ArgumentError, match="a frequency of the last dimension expected"):
        linop.layers.SpectralConv(grid, 2, 2, (0,), real=True)
    real = linop.layers.SpectralConv(grid, 2, 3, (3,), real=True)
    assert "n_modes=(3,), real=True" in repr(real)
    assert real(torch.zeros(1, 2, 5)).shape == (1, 3, 5)
    with pytest.raises(
        ShapeError, match=r"at most \(2,\) of a real tensor, of the last one from 0"
    ):
        real(torch.zeros(1, 2, 3))
    with pytest.raises(DTypeError, match="an input of complex64; a real one expected"):
        real(torch.zeros(1, 2, 5, dtype=torch.complex64))
