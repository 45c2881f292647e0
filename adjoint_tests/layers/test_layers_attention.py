"""Attention over blocks is torch's of the whole, forward and back; zeros of dropout do not depend
on the cut; mistakes are the same error on every worker."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from hypothesis import example, given, settings

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

import linop
from linop import COPIES, REPLICATED, Partition
from linop.backends import Backend
from linop.errors import ArgumentError, DTypeError, LinopError, PartitionError, ShapeError
from support.draws import FEW
from support.layers.attentions import Attending, alone, attends_as_one, attentions, drops_as_one
from support.layers.multiheads import Heads, heads, is_torchs
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

attention = linop.layers.scaled_dot_product_attention


@example(Attending(Partition((1, 3, 2)), 1, 2, 6, 33, mask="heads"))
@example(Attending(Partition((1, 1, 8)), 1, 1, 2, 3, causal=True))
@given(attentions(8))
def test_attention_on_threads(case: Attending) -> None:
    on_threads(case.workers, attends_as_one, case)


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=FEW)
@given(attentions(3, 33))
def test_attention_on_ranks(case: Attending) -> None:
    on_ranks(case.workers, attends_as_one, case)


@given(attentions(5, 33))
def test_dropout_of_attention_on_threads(case: Attending) -> None:
    # Workers draw from their one generator together.
    on_threads(case.workers, drops_as_one, case, alone(case))


def test_dropout_is_that_of_weights() -> None:
    """Rows of ones times the factors of dropout: multiples of 1 / (1 - p), with the right mean."""

    def main(backend: Backend) -> Any:
        q, v = torch.zeros(1, 1, 32, 4), torch.ones(1, 1, 32, 1)
        torch.manual_seed(1)
        return attention(q, q, v, dropout_p=0.25, P_x=Partition((1, 1, 2)))

    y = torch.cat(linop.launch(main, 2), 2)
    counts = y * 64 * 0.75
    assert torch.allclose(counts, counts.round(), atol=1e-4)
    assert 0.9 < y.mean() < 1.1


@example(Heads(Partition((3,)), (-1,), 2, 2, 2, 4))
@given(heads(8))
def test_multihead_attention_on_threads(case: Heads) -> None:
    on_threads(case.workers, is_torchs, case)


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=FEW)
@given(heads(3))
def test_multihead_attention_on_ranks(case: Heads) -> None:
    on_ranks(case.workers, is_torchs, case)


def test_states_of_multihead_attention() -> None:
    """A state of torch's module loads, and is gathered again."""
    twin = torch.nn.MultiheadAttention(6, 3)
    state = {name: x.clone() for name, x in twin.state_dict().items()}

    def main(backend: Backend) -> Any:
        net = linop.layers.MultiheadAttention(Partition((1, 1, 2)), 6, 3)
        linop.layers.scatter_state(net, state if backend.worker == 0 else None)
        return linop.layers.gather_state(net)

    found = linop.launch(main, 2)[0]
    assert list(found) == list(state)
    assert all(torch.equal(found[name], x) for name, x in state.items())


def test_mistakes_of_multihead_attention() -> None:
    def main(backend: Backend) -> None:
        kind, P = linop.layers.MultiheadAttention, Partition((1, 2, 1))
        for match, options in (
            ("add_bias_kv and add_zero_attn are not supported", {"add_bias_kv": True}),
            ("embed_dim=6, num_heads=4; a multiple", {"num_heads": 4}),
        ):
            with pytest.raises(ArgumentError, match=match):
                kind(P, 6, **{"num_heads": 3, **options})
        net = kind(P, 6, 3)
        x = torch.zeros(2, 1, 6)
        with pytest.raises(ArgumentError, match="need_weights=False expected"):
            net(x, x, x, need_weights=True)
        with pytest.raises(ShapeError, match="an input of 2 dimensions; 3 expected"):
            net(x[0], x[0], x[0])
        with pytest.raises(ShapeError, match=r"\(…, 6\) expected"):
            net(x[..., :4], x, x)

    linop.launch(main, 2)

    def both(backend: Backend) -> None:
        with pytest.raises(PartitionError, match=r"axes \[0, 1\] of .* both cut the heads"):
            linop.layers.MultiheadAttention(Partition((2, 2)), 6, 3, x_axes=(REPLICATED, -1))

    linop.launch(both, 4)


P2, ONE = Partition((1, 1, 2)), Partition((2,))
X = torch.zeros(1, 2, 4, 3)
MISTAKES: list[tuple[type[LinopError], str, tuple[Any, ...], dict[str, Any]]] = [
    (ArgumentError, "method='star'; one of", (X, X, X), {"method": "star"}),
    (ArgumentError, "dropout_p=1; a probability below 1", (X, X, X), {"dropout_p": 1}),
    (DTypeError, "one floating-point dtype expected", (X, X, X.double()), {}),
    (DTypeError, "one floating-point dtype expected", (X.int(), X.int(), X.int()), {}),
    (ShapeError, "equally many dimensions", (X, X[0], X[0]), {"x_axes": (-2,), "P_x": ONE}),
    (ShapeError, r"\(…, L, E\), \(…, S, E\)", (X, X[..., :2], X), {}),
    (ShapeError, "groups of heads need enable_gqa=True", (X, X[:, :1], X[:, :1]), {}),
    (
        ShapeError,
        "3 heads are no multiple of 2 groups",
        (torch.zeros(1, 3, 4, 3), X, X),
        {"enable_gqa": True},
    ),
    (ShapeError, r"attn_mask of shape \(1, 1, 8, 4\) altogether", (X, X, X, torch.ones(4, 4)), {}),
    (
        DTypeError,
        "attn_mask of torch.float64; torch.bool, or",
        (X, X, X, torch.ones(4, 8).double()),
        {},
    ),
    (
        LinopError,
        "attn_mask that requires a gradient",
        (X, X, X, torch.ones(4, 8, requires_grad=True)),
        {},
    ),
    (PartitionError, "holds the features", (X, X, X), {"x_axes": (0, 1, -1)}),
    (PartitionError, "holds copies", (X, X, X), {"x_axes": (0, 1, COPIES)}),
    (
        PartitionError,
        "'ulysses' cuts the heads",
        (X[0, 0],) * 3,
        {"method": "ulysses", "x_axes": (-2,), "P_x": ONE},
    ),
    (
        ShapeError,
        "a tensor of 1 dimensions",
        (X[0, 0, 0],) * 3,
        {"x_axes": (-1,), "P_x": ONE},
    ),
]


@pytest.mark.parametrize("kind, match, given, options", MISTAKES)
def test_mistakes(
    kind: type[LinopError], match: str, given: tuple[Any, ...], options: dict[str, Any]
) -> None:
    def main(backend: Backend) -> None:
        with pytest.raises(kind, match=match):
            attention(*given, **{"P_x": P2, **options})
        attention(X, X, X, P_x=P2)  # all go on

    linop.launch(main, 2)


def test_arguments_that_differ() -> None:
    """The error says which."""

    def main(backend: Backend) -> None:
        with pytest.raises(LinopError, match="is_causal=False on worker 0 and is_causal=True"):
            attention(X, X, X, is_causal=backend.worker == 1, P_x=P2)

    linop.launch(main, 2)
