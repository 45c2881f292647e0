"""Mixtures of experts over workers are those of one process; the three factors of their movement
are the operator."""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import numpy as np
import torch
from scipy.sparse import block_diag, csr_array

import linop
from linop import COPIES, Partition, Routing, TensorSpace, layers
from linop.backends import Backend
from linop.errors import ArgumentError, PartitionError, ShapeError
from linop.layers.experts.exchange import rounded
from linop.layers.experts.losses import router_losses
from linop.layers.experts.slots import counts_of, kept_of, most_rows, slots_of
from linop.testing.factories.experts import routing_of, routings
from support.draws import FEW
from support.layers.mixtures import Mixture, derives_again, is_one_process, mixtures
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads


@example(Mixture((3, 0, 9, 1), experts=3, k=2, one=1, factor=0.5))
@example(Mixture((2, 2, 2, 2, 2, 2, 2, 2), experts=5, k=3, outside=0, one=2))
@example(Mixture((4, 3), experts=2, k=1, one=0, outside=1))
@example(Mixture((0, 0), experts=2, k=1))
@given(mixtures(8, 40))
def test_on_threads(case: Mixture) -> None:
    on_threads(case.workers, is_one_process, case)


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=FEW)
@given(mixtures(4, 12))
def test_on_ranks(case: Mixture) -> None:
    on_ranks(case.workers, is_one_process, case)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 99))
def test_gradients_of_gradients(lengths: Any, seed: int) -> None:
    case = Mixture(tuple(lengths), seed=seed)
    on_threads(case.workers, derives_again, case)


# The movement


@st.composite
def cuts(draw: Any) -> Any:
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=8))
    return tuple(lengths), draw(routings(sum(lengths)))


def selection(columns: Any, width: int) -> Any:
    """The matrix that takes these rows of so many."""
    ones = np.ones(len(columns), np.int64)
    return csr_array((ones, (np.arange(len(columns)), columns)), (len(columns), width))


@example(((2, 2), {"indices": (0, 1, 1, 0, 0, 1, 1, 0), "k": 2, "experts": 3, "capacity": 2}))
@example(((5, 0, 1), {"indices": (2,) * 12, "k": 2, "experts": 5, "capacity": 3}))
@given(cuts())
def test_three_factors_are_the_operator(case: Any) -> None:
    """Rows into a buffer, an all-to-all of equal blocks, rows out of a buffer: their product is
    dispatch, and its transpose with the gates between is combine."""
    lengths, described = case
    routing, workers = routing_of(described), len(lengths)
    (tokens, k), capacity = routing.indices.shape, routing.capacity
    ends = np.cumsum([0, *lengths])
    own = [routing.indices[a:b] for a, b in pairwise(ends)]
    counts = np.stack([counts_of(indices, routing.experts) for indices in own])
    kept = kept_of(counts, capacity)
    block = rounded(most_rows(kept))
    each = [slots_of(own[w], counts, kept, w, capacity, block) for w in range(workers)]
    buffer = workers * block
    into: Any = block_diag(
        [
            selection(one.tokens if n else [], n) if n else csr_array((buffer, 0), dtype=np.int64)
            for one, n in zip(each, lengths, strict=True)
        ],
        "csr",
    )
    # Matrices number elements in the global order: of what arrives, (from, to, row of the block).
    arrived = [
        (one.arrived // block * workers + w) * block + one.arrived % block
        for w, one in enumerate(each)
    ]
    out = selection(np.concatenate(arrived), workers * buffer)
    P = Partition((workers,))
    blocks = TensorSpace((workers, workers, block), P, np.int64, [0])
    moved = linop.all_to_all(blocks, 0, 1).to_matrix()
    X = TensorSpace((tokens,), P, np.int64, sizes={0: lengths})
    D = linop.dispatch(X, routing)
    assert (out @ moved @ into != D.to_matrix()).nnz == 0
    assert [sum(one.counts) for one in each] == [r.shape[0] for r in D.codomain.regions]

    gates = np.random.default_rng(0).integers(1, 9, (tokens, k))
    back = []
    for one, n, a in zip(each, lengths, ends[:-1], strict=True):
        g = gates[a : a + n] * (1 if one.dropped is None else ~one.dropped)
        sums = csr_array((g.reshape(-1), (np.arange(n * k) // k, one.rows)), (n, buffer))
        back.append(sums)
    combined = block_diag(back, "csr") @ moved.T @ out.T
    assert np.array_equal(
        combined.toarray(), linop.combine(X, routing, gates).to_matrix().toarray()
    )


@given(st.integers(0, 10**6))
def test_blocks_are_an_eighth_too_long_at_most(rows: int) -> None:
    found = rounded(rows)
    assert max(rows, 1) <= found <= max(8, rows + 7, rows * 9 / 8)
    assert len({rounded(n) for n in range(rows + 128, 2 * (rows + 128), 1 + rows // 99)}) <= 10


def test_plans_serve_several_routings() -> None:
    """Calls of other routings make few plans."""

    def main(backend: Backend) -> Any:
        torch.manual_seed(0)
        net = layers.MixtureOfExperts(Partition((2,)), 4, 4, 4)
        for _ in range(30):
            net(torch.randn(300, 4)).sum().backward()
        rows = [row for row in backend.counters() if row.operator.startswith("T")]
        return len(rows), sum(row.calls for row in rows)

    for plans, calls in linop.launch(main, 2):
        assert calls == 4 * 30
        assert plans <= 6, plans


def test_mistakes() -> None:
    def main(backend: Backend) -> None:
        kind, P = layers.MixtureOfExperts, Partition((2,))
        for match, options in (
            ("top_k=5 of num_experts=4; one at least", {"top_k": 5}),
            ("capacity_factor=-1; a number from 0", {"capacity_factor": -1}),
            ("activation='sin'; one of silu, gelu, relu", {"activation": "sin"}),
        ):
            with pytest.raises(ArgumentError, match=match):
                kind(P, 3, 2, 4, **options)
        with pytest.raises(ShapeError, match=r"an input of shape \(4, 5\); \(…, 3\) expected"):
            kind(P, 3, 2, 4)(torch.zeros(2, 5))
        with pytest.raises(PartitionError, match="splits the features; axes that split other"):
            kind(P, 3, 2, 4, x_axes=[-1])(torch.zeros(2, 3))
        with pytest.raises(PartitionError, match=r"holds .*; axes that split other"):
            kind(P, 3, 2, 4, x_axes=[COPIES])(torch.zeros(2, 3))

    linop.launch(main, 2)


def test_what_is_dropped_is_zero() -> None:
    """Also beside rows that are not finite."""

    def main(backend: Backend) -> Any:
        net = layers.MixtureOfExperts(Partition((1,)), 2, 2, 1, 1, capacity_factor=0.5)
        return net(torch.tensor([[torch.inf, 1.0], [1.0, 1.0]])).detach()

    y = linop.launch(main, 1)[0]
    assert not y[0].isfinite().all()
    assert torch.equal(y[1], torch.zeros(2))


def test_losses_of_many_tokens_in_half_precision() -> None:
    """Their sums, and the square of their number, are no numbers of float16."""
    logits = torch.randn(4000, 8, generator=torch.Generator().manual_seed(0)) * 3
    counts = torch.bincount(logits.topk(2).indices.flatten(), minlength=8)
    for half, wanted in zip(
        router_losses(logits.half(), counts, 4000),
        router_losses(logits, counts, 4000),
        strict=True,
    ):
        assert half.dtype == torch.float16 and torch.isclose(half.float(), wanted, rtol=1e-2)


def test_routings_of_both_agree() -> None:
    """GShard's order: second choices come after all first ones."""
    routing = Routing([[0, 1], [1, 0], [0, 1]], 2, 2)
    assert routing.slots.tolist() == [0, 4, 1, 2]
