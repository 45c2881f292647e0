"""Reductions over dimensions that are cut are torch's, and so are their gradients."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

import linop
from linop import REPLICATED, Partition
from linop.backends import Backend
from linop.errors import LinopError
from support.layers.cases import WIDE, Case, normal, same
from support.layers.reductions import FAMILIES, is_torch_s, reductions, workers
from support.requirements import needs_mpi
from support.workers import on_ranks


@pytest.mark.parametrize("family", FAMILIES)
@given(st.data())
def test_reductions_on_threads(family: str, data: Any) -> None:
    case = data.draw(reductions(8, FAMILIES[family]))
    linop.launch(lambda backend: is_torch_s(backend, case), workers(case))


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=10)
@given(reductions(3))
def test_reductions_on_ranks(case: Case) -> None:
    on_ranks(workers(case), is_torch_s, case)


def test_equal_elements_share_the_gradient() -> None:
    """Evenly, however many of them a worker has."""
    whole = torch.tensor([[3.0, 3, 1, 3, 0, 2], [-1, -1, -1, -1, -1, -1]], dtype=WIDE)

    def main(backend: Backend) -> None:
        third = slice(2 * backend.worker, 2 * backend.worker + 2)
        for kind in ("Amax", "Amin"):
            z = whole.clone().requires_grad_()
            getattr(torch, kind.lower())(z, 1).sum().backward()
            x = whole[:, third].clone().requires_grad_()
            getattr(linop.layers, kind)(Partition((1, 3)), 1)(x).sum().backward()
            same(x.grad, z.grad[:, third])

    linop.launch(main, 3)


def test_infinite_elements() -> None:
    """The largest may be infinite, on one worker or on several."""
    whole = torch.tensor([[1.0, torch.inf, 2.0, torch.inf], [-torch.inf] * 4], dtype=WIDE)

    def main(backend: Backend) -> None:
        half = slice(2 * backend.worker, 2 * backend.worker + 2)
        for kind, wanted in (("Amax", whole.amax(1)), ("LogSumExp", whole.logsumexp(1))):
            y = getattr(linop.layers, kind)(Partition((1, 2)), 1)(whole[:, half])
            assert torch.equal(y, wanted), (kind, y)

    linop.launch(main, 2)


def test_a_network_after_a_global_pool() -> None:
    """The mean over space is replicated, and so is what is computed of it: it counts once."""
    P, whole, weight = Partition((1, 1, 2, 2)), normal((3, 4, 5, 6), 0), normal((2, 4), 1)
    z = whole.clone().requires_grad_()
    (z.mean((2, 3)) @ weight.T).square().sum().backward()

    def main(backend: Backend) -> None:
        X = linop.TensorSpace(whole.shape, P)
        x = whole[X.slices(backend.worker)].clone().requires_grad_()
        pooled = linop.layers.Mean(P, (2, 3))(x)
        (pooled @ weight.T).square().sum().backward()
        same(x.grad, z.grad[X.slices(backend.worker)])
        # Of what is replicated, a further reduction.
        again = linop.layers.Norm(P, x_axes=[0, 1, REPLICATED, REPLICATED])(pooled.detach())
        same(again, whole.mean((2, 3)).norm())

    linop.launch(main, 4)


def test_what_is_wrong_is_said_on_every_worker() -> None:
    P = Partition((2,))

    def main(backend: Backend) -> list[str]:
        said = []

        def wrong(make: Any, x: Any = None) -> None:
            with pytest.raises(LinopError) as error:
                make(None if backend.worker == 2 else x)
            said.append(str(error.value))

        wrong(linop.layers.Sum(P, 2), torch.ones(2, 3))
        wrong(linop.layers.Sum(P, (1, -1)), torch.ones(2, 3))
        wrong(linop.layers.Sum(P, 0), torch.ones(2, 3).long())
        wrong(linop.layers.Amax(P, 0), torch.ones(0, 3))
        wrong(lambda _: linop.layers.Sum(P, (1, 1)))
        wrong(lambda _: linop.layers.Norm(P, "fro"))
        return said

    first, *others = linop.launch(main, 3)
    assert all(said == first for said in others)
    words = (
        "dim=(2,) for an input of shape (4, 3)",
        "dim=(1, -1) for an input of shape (4, 3)",
        "floating-point dtype expected",
        "elements along dimensions (0,) expected",
        "dim=(1, 1); different whole numbers",
        "ord='fro'; a number expected",
    )
    for said, expected in zip(first, words, strict=True):
        assert expected in said, (expected, said)
