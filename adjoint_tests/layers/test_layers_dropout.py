"""Dropout: one mask, whatever the partition, and however the workers came by it."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
from hypothesis import given, settings

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
from torch.utils.checkpoint import checkpoint

import linop
from linop import Partition
from linop.backends import Backend
from linop.errors import ArgumentError, DTypeError, ShapeError
from linop.layers.dropout import random_bits
from support.layers.cases import WIDE, Case, same
from support.layers.dropout import dropouts, drops_the_same, leaves_the_generator, two_masks
from support.requirements import needs_mpi
from support.workers import on_ranks


@given(dropouts(5))
def test_masks_on_threads(case: Case) -> None:
    masks, afterwards = two_masks(case)
    linop.launch(lambda backend: drops_the_same(backend, case, masks), case.workers)
    # Workers drew from their one generator together.
    assert int(torch.randint(1 << 40, ())) == afterwards


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=12)
@given(dropouts(4))
def test_masks_on_ranks(case: Case) -> None:
    on_ranks(case.workers, leaves_the_generator, case, *two_masks(case))


def test_the_mask_is_that_of_worker_0() -> None:
    """Even where generators are not in step, and where worker 0 has no block."""

    def main(backend: Backend) -> Any:
        torch.manual_seed(3)
        y = linop.layers.Dropout2d(Partition((1, 1, 2, 1), [1, 2]))(
            None if backend.worker == 0 else torch.ones(1, 64, 1, 1)
        )
        return None if backend.worker == 0 else y.flatten().tolist()

    _, left, right = linop.launch(main, 3)
    assert left == right
    assert 0 < sum(v > 0 for v in left) < 64


@pytest.mark.parametrize("keep", [True, False])
def test_checkpointing_on_one_worker_alone(keep: bool) -> None:
    """A recomputed forward has the first one's mask, and sends nothing again."""

    def main(backend: Backend) -> None:
        drop = linop.layers.Dropout(Partition((2,)))
        torch.manual_seed(0)
        x = torch.ones(64, requires_grad=True, dtype=WIDE)

        def layer(x: Any) -> Any:
            return drop(x).square()

        if backend.worker == keep:
            y = checkpoint(
                layer,
                x,
                use_reentrant=False,
                preserve_rng_state=keep,
                context_fn=linop.autograd.checkpoint_context,
            )
        else:
            y = layer(x)
        y.sum().backward()
        same(x.grad, 2 * y.detach())
        assert 0 < int((y > 0).sum()) < 64

    linop.launch(main, 2)


@pytest.mark.parametrize("p", [0.0, 0.2, 0.7, 1.0])
def test_what_is_kept_is_scaled_back(p: float) -> None:
    """Of ones, zeros in their proportion, within five standard deviations, and 1 / (1 - p)."""
    count = 10_000
    y = linop.layers.Dropout(Partition((1,)), p)(torch.ones(count, dtype=WIDE))
    kept = y[y != 0]
    assert abs(len(kept) / count - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / count)
    same(kept, torch.full_like(kept, 1 / (1 - p) if p < 1 else 0))


def test_masks_are_random() -> None:
    """The proportion, and the independence of neighbours, of seeds beside each other, and of bits;
    within five standard deviations."""
    shape, p = (64, 32, 64), 0.3
    where = tuple(slice(0, n) for n in shape)
    bits = [random_bits(torch.tensor([seed]), shape, where) for seed in (5, 6)]
    first, second = (b >= int(p * 2**53) for b in bits)
    count = first.numel()

    def is_about(share: Any, expected: float) -> None:
        deviation = math.sqrt(expected * (1 - expected) / count)
        assert abs(share.double().mean().item() - expected) < 5 * deviation

    is_about(first, 1 - p)
    for d in range(3):
        both = first & first.roll(1, d)
        is_about(both, (1 - p) ** 2)
    is_about(first & second, (1 - p) ** 2)
    assert bits[0].min() >= 0 and bits[0].max() < 2**53
    for k in range(53):
        is_about((bits[0] >> k) & 1, 0.5)


def test_splitmix64() -> None:
    """The first outputs for seed 1234567, as published with its test vectors."""
    bits = random_bits(torch.tensor([1234567]), (3,), (slice(0, 3),))
    published = (6457827717110365317, 3203168211198807973, 9817491932198370423)
    assert bits.tolist() == [n >> 11 for n in published]


def test_none_where_nothing_moves() -> None:
    """A worker outside passes None, to a layer that has nothing to send."""

    def main(backend: Backend) -> None:
        x = None if backend.worker else torch.ones(1, 1, 4, requires_grad=True)
        y = linop.layers.MaxPool1d(Partition((1, 1, 1)), 1)(x)
        z = linop.layers.Dropout(Partition((1,)), p=0.0)(y)
        z.sum().backward()
        assert z.numel() == (0 if backend.worker else 4)
        assert x is None or torch.equal(x.grad, torch.ones(1, 1, 4))

    linop.launch(main, 2)


def test_bad_arguments() -> None:
    with pytest.raises(ArgumentError, match="a probability, from 0 to 1"):
        linop.layers.Dropout(Partition((1,)), 1.5)
    with pytest.raises(ShapeError, match="4 dimensions expected"):
        linop.layers.Dropout2d(Partition((1,)))(torch.ones(2, 3))
    with pytest.raises(DTypeError, match="no whole numbers"):
        linop.layers.Dropout(Partition((1,)))(torch.ones(2, 3).long())
