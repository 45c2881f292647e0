"""Losses of blocks are torch's of the whole, and so are their gradients."""

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
from linop import Partition, TensorSpace
from linop.backends import Backend
from linop.errors import LinopError
from support.layers.cases import WIDE, Case, normal, same
from support.layers.losses import FAMILIES, MORE_WORDS, REFUSED, WORDS, is_torch_s, losses, workers
from support.requirements import needs_mpi
from support.workers import on_ranks


@pytest.mark.filterwarnings("ignore:reduction")  # what KLDivLoss will mean by "mean"
@pytest.mark.parametrize("family", FAMILIES)
@given(st.data())
def test_losses_on_threads(family: str, data: Any) -> None:
    case = data.draw(losses(8, FAMILIES[family]))
    linop.launch(lambda backend: is_torch_s(backend, case), workers(case))


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=15)
@given(losses(3))
def test_losses_on_ranks(case: Case) -> None:
    on_ranks(workers(case), is_torch_s, case)


def test_a_block_of_impossible_classes() -> None:
    """All logits of a worker -inf: its gradients are zeros, as torch's are."""
    whole = torch.tensor([[1.0, 2.0, -torch.inf, -torch.inf]], dtype=WIDE)
    z, t = whole.clone().requires_grad_(), torch.tensor([1])
    torch.nn.CrossEntropyLoss()(z, t).backward()

    def main(backend: Backend) -> None:
        half = slice(2 * backend.worker, 2 * backend.worker + 2)
        x = whole[:, half].clone().requires_grad_()
        linop.layers.CrossEntropyLoss(Partition((1, 2)))(x, t).backward()
        same(x.grad, z.grad[:, half])

    linop.launch(main, 2)


def test_a_variance_of_rows_whose_features_are_cut() -> None:
    """Each worker of a row has the whole gradient of its variance."""
    x, t, var = normal((2, 4), 0), normal((2, 4), 1), normal((2,), 2).exp()
    z = var.clone().requires_grad_()
    torch.nn.GaussianNLLLoss()(x, t, z.unsqueeze(1)).backward()

    def main(backend: Backend) -> None:
        half, v = slice(2 * backend.worker, 2 * backend.worker + 2), var.clone().requires_grad_()
        linop.layers.GaussianNLLLoss(Partition((1, 2)))(x[:, half], t[:, half], v).backward()
        same(v.grad, z.grad)

    linop.launch(main, 2)


def test_what_is_wrong_is_said_on_every_worker() -> None:
    P = Partition((1, 2))

    def main(backend: Backend) -> list[str]:
        said = []

        def wrong(name: str, x: Any, t: Any, **options: Any) -> None:
            loss = getattr(linop.layers, name)(P, **options)
            out = backend.worker == 2
            with pytest.raises(LinopError) as error:
                loss(None if out else x, None if out else t)
            said.append(str(error.value))
            if "reduction" in options:  # values were wrong; and nothing is broken
                loss(None if out else x.clamp(max=1), None if out else t.clamp(max=1))

        x = torch.ones(2, 2)
        only = backend.worker == 1
        for reduction in ("mean", "none"):
            wrong("CrossEntropyLoss", x, torch.tensor([4 if only else 0, 1]), reduction=reduction)
            wrong("BCELoss", x + only, x, reduction=reduction)
            wrong("BCELoss", x, x + only, reduction=reduction)
        wrong("MSELoss", x, x[:, : 2 - only])
        wrong("MSELoss", x, x.double())
        wrong("SoftMarginLoss", x, x + 0j)
        wrong("HingeEmbeddingLoss", x, x + 0j)
        wrong("NLLLoss", x, torch.zeros(2))
        wrong("NLLLoss", x, torch.zeros(2).long(), weight=torch.ones(3))
        for name, options in (
            ("MSELoss", {"reduction": "most"}),
            ("HuberLoss", {"delta": -1.0}),
            ("CrossEntropyLoss", {"label_smoothing": 2.0}),
        ):
            with pytest.raises(LinopError) as error:
                getattr(linop.layers, name)(P, **options)
            said.append(str(error.value))
        return said

    first, *others = linop.launch(main, 3)
    assert all(said == first for said in others)
    for said, words in zip(first, WORDS, strict=True):
        assert words in said, (words, said)


def test_the_replicated_result_is_one() -> None:
    """Functions of the loss that every worker computes afterwards count once."""
    P = Partition((2,))
    space = TensorSpace((4,), P)
    whole = normal((4,), 0)

    def main(backend: Backend) -> None:
        x = whole[space.slices(backend.worker)].clone().requires_grad_()
        loss = linop.layers.MSELoss(P, reduction="sum")(x, torch.zeros_like(x))
        (3 * loss.sqrt()).backward()
        z = whole.clone().requires_grad_()
        (3 * z.square().sum().sqrt()).backward()
        same(x.grad, z.grad[space.slices(backend.worker)])

    linop.launch(main, 2)


def test_what_does_not_fit_a_loss() -> None:
    """Of losses with several tensors, and over classes: the same error on every worker, before any
    message; afterwards the layer goes on."""

    def main(backend: Backend) -> list[str]:
        said, rows, columns = [], Partition((2,)), Partition((1, 2))
        only, out = backend.worker == 1, backend.worker == 2
        layers = linop.layers

        def wrong(loss: Any, *given: Any, right: Any = None) -> None:
            with pytest.raises(LinopError) as error:
                loss(*[None if out else x for x in given])
            said.append(str(error.value))
            if right is not None:
                loss(*[None if out else x for x in (*given[:-1], right)])

        x, one = torch.ones(2, 2), torch.zeros(2).long()
        wrong(layers.GaussianNLLLoss(rows), x, x, x - 2 * only, right=x)
        wrong(layers.GaussianNLLLoss(columns), x, x, torch.ones(2, 1))
        wrong(layers.MarginRankingLoss(rows), x, x.double(), x)
        wrong(layers.CosineEmbeddingLoss(columns), x, x, x)
        wrong(layers.TripletMarginLoss(columns), x, x, x[:1])
        wrong(layers.MultiMarginLoss(columns), x, one + 4 * only, right=one)
        wrong(layers.MultiMarginLoss(columns), x, x[0])
        wrong(layers.MultiMarginLoss(columns, weight=torch.ones(2)), x, one)
        wrong(layers.MultiLabelMarginLoss(columns), x, x.long() + 7 * only, right=x.long())
        wrong(layers.MultiLabelSoftMarginLoss(columns, torch.ones(2)), x, x)
        ctc = layers.CTCLoss(columns), torch.zeros(3, 2, 4), x.long(), one + 3
        wrong(*ctc, one + 9 * only, right=one + 1)
        wrong(*ctc, one.double())
        wrong(layers.CTCLoss(columns), torch.zeros(3, 2, 4), one, one, one)
        for make in (
            lambda: layers.CTCLoss(Partition((2, 1))),
            lambda: layers.TripletMarginLoss(rows, margin=0.0),
            lambda: layers.TripletMarginWithDistanceLoss(columns, distance_function=torch.sub),
            lambda: layers.MultiMarginLoss(rows, p=3),
            lambda: layers.MSELoss(rows)(x, x, x),
            lambda: layers.MSELoss(rows)(x, targets=x),
        ):
            with pytest.raises(LinopError) as error:
                make()
            said.append(str(error.value))
        return said

    first, *others = linop.launch(main, 3)
    assert all(said == first for said in others)
    for said, words in zip(first, MORE_WORDS, strict=True):
        assert words in said, (words, said)


def test_names_of_tensors() -> None:
    """Calls may name tensors as torch does."""
    P, x = Partition((1,)), normal((3, 2), 0)
    loss = linop.layers.MarginRankingLoss(P)
    same(loss(x, target=x.sign(), input2=-x), torch.nn.MarginRankingLoss()(x, -x, x.sign()))


def test_every_loss_of_torch_is_there_or_refused() -> None:
    missing = {name for name in torch.nn.modules.loss.__all__ if not hasattr(linop.layers, name)}
    assert missing <= set(REFUSED), missing
