"""Networks that are drawn, cut in space, have one process's outputs and gradients."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from support.requirements import needs_mpi
from support.strategies.spatial import TOLERANCE, difference, equals_one_process
from support.strategies.spatial_networks import draw
from support.workers import on_ranks, on_threads

EXTENTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (3, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 3), (2, 2, 2)]
"""Of grids, of which a network of fewer dimensions takes the first axes."""


class Drawn:
    """Settings from Hypothesis."""

    def __init__(self, data: Any) -> None:
        self._draw = data.draw

    def int(self, least: int, most: int) -> int:
        return self._draw(st.integers(least, most))  # type: ignore[no-any-return]

    def of(self, values: Sequence[Any]) -> Any:
        return self._draw(st.sampled_from(list(values)))


def drawn(data: Any, most: int) -> tuple[Any, tuple[int, ...], tuple[int, ...], int]:
    c = Drawn(data)
    try:
        description = draw(c)
    except (RuntimeError, ValueError):  # torch refuses the setting
        assume(False)
        raise
    ndim = len(description[0]) - 2
    extents = c.of([e[:ndim] for e in EXTENTS if torch.tensor(e[:ndim]).prod() <= most])
    dims = tuple(range(2, ndim + 2))
    return description, extents, dims, c.of([0, 1 << 15])


@given(st.data())
def test_on_threads(data: Any) -> None:
    description, extents, dims, large = drawn(data, 8)
    workers = int(torch.tensor(extents).prod())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_threads(workers, equals_one_process, description, extents, dims, large)


@needs_mpi
@given(st.data())
def test_on_ranks(data: Any) -> None:
    description, extents, dims, large = drawn(data, 4)
    workers = int(torch.tensor(extents).prod())
    on_ranks(workers, equals_one_process, description, extents, dims, large)


@pytest.mark.parametrize(
    "operations",
    [
        [("conv", {"out_channels": 3, "kernel_size": (3, 3), "padding": (1, 1)})],
        [("pool", {"kind": "Max", "given": {"kernel_size": 3, "stride": 2, "padding": 1}})],
    ],
)
@pytest.mark.parametrize("size", [1, 3, 5])
def test_images_smaller_than_the_grid(operations: Any, size: int) -> None:
    description = (2, 2, size, 6), 0, tuple(operations)
    on_threads(8, equals_one_process, description, (4, 2), (2, 3), 0)


def test_extents_that_a_factor_keeps_are_copied() -> None:
    """As torch does: a factor of 1.2 makes 4 rows of 4."""
    given = {"mode": "bilinear", "scale_factor": (1.2, 1.6), "align_corners": False}
    description = (2, 2, 4, 5), 0, (("resize", given),)
    on_threads(4, equals_one_process, description, (2, 2), (2, 3), 0)


def test_the_batch_is_cut_too() -> None:
    operations = (
        ("norm", {"kind": "batch", "affine": True, "momentum": 0.1, "track": True}),
        (
            "conv",
            {"out_channels": 3, "kernel_size": (3, 3), "stride": (2, 1), "padding": (1, 1)},
        ),
    )
    description = (5, 2, 7, 6), 0, operations
    on_threads(8, equals_one_process, description, (2, 2, 2), (0, 2, 3), 0)


def test_a_difference_is_found() -> None:
    x = torch.ones(3, dtype=torch.float64)
    assert difference(x, x) == 0
    assert difference(x + 1e-9, x) > TOLERANCE
    assert difference(x[:2], x) == float("inf")


def test_torch_computes_wrong_gradients_of_batch_norms() -> None:
    """The reason for `as_torch_means`; where it fails, torch is mended, and that can go."""
    x, g = torch.randn(2, 2, 2, 2, 4, 1, dtype=torch.float64)
    bias = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    odd = g.permute(0, 4, 2, 3, 1).contiguous().permute(0, 4, 2, 3, 1)
    assert torch.equal(odd, g) and odd.stride() != g.stride()
    torch.nn.functional.batch_norm(x, None, None, None, bias, True).backward(odd)
    assert bias.grad is not None
    assert difference(bias.grad, g.sum((0, 2, 3, 4))) > 1e-3


def test_torch_resamples_single_columns_wrongly() -> None:
    """The reason for two columns at least in `spatial_windows.smooth`; where it fails, torch is
    mended."""
    column = torch.arange(2, dtype=torch.float64).reshape(1, 1, 2, 1)

    def resized(x: torch.Tensor) -> torch.Tensor:
        size = (5, x.shape[3])
        return torch.nn.functional.interpolate(x, size, mode="bilinear", antialias=True)

    three = resized(column.expand(1, 1, 2, 3))
    assert difference(three[..., :1], three[..., 2:]) == 0
    assert difference(resized(column), three[..., :1]) > 1e-3
