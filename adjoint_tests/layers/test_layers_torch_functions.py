"""Torch's functions of whole models, done with distributed ones, on threads and on ranks."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

import linop
from linop import Partition, layers
from linop.backends import Backend
from support.layers import torch_functions
from support.requirements import needs_mpi
from support.workers import on_ranks

contracts = pytest.mark.parametrize(
    "contract", torch_functions.CONTRACTS, ids=lambda contract: contract.__name__
)


@contracts
@pytest.mark.parametrize("workers", [2, 4])
def test_on_threads(contract: Callable[..., None], workers: int) -> None:
    linop.launch(contract, workers)


@needs_mpi
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "contract",
    [*torch_functions.CONTRACTS, torch_functions.plain_modules_on_blocks_are_warned_of],
    ids=lambda contract: contract.__name__,
)
def test_on_ranks(contract: Callable[..., None]) -> None:
    on_ranks(2, contract, wait_limit=10)


def test_threads_warn_of_plain_modules() -> None:
    """In debug mode alone."""
    P = Partition((1, 2, 1))
    debug = False

    def main(backend: Backend) -> None:
        backend.debug = debug  # type: ignore[attr-defined]
        pool = layers.AvgPool1d(P, 1)
        torch.nn.Sequential(pool, torch.nn.GroupNorm(2, 4))(torch.ones(2, 4, 4))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linop.launch(main, 2)
    debug = True
    with pytest.warns(UserWarning, match=r"Sequential\.1 \(GroupNorm\): given a block of a tensor"):
        linop.launch(main, 2)


def test_one_worker_is_torch() -> None:
    """It has whole tensors."""
    for contract in torch_functions.ALONE:
        linop.launch(contract, 1)
