"""Context parallelism equals one process; causal work is balanced; memory is that of a worker's
tokens."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
from torch import nn
from torch.autograd import forward_ad

import linop
from linop import Partition
from linop.backends import Backend
from linop.errors import ArgumentError, LinopError, PartitionError, ShapeError
from linop.layers.attention.cuts import Kind, in_order, parts, positions, size, work, zigzag
from linop.spaces.partition import balanced
from linop.strategies import ContextParallel, Mesh
from support.draws import FEW
from support.layers.attentions import MASKS, Attending
from support.layers.cases import normal, same
from support.requirements import needs_mpi
from support.strategies.contexts import (
    Composed,
    Context,
    attends_as_whole,
    cuts_heads_and_sequences,
    derives_again,
    derives_again_of_some,
    is_its_twin,
    keeps_its_tokens,
    recomputes,
    runs_torchs_layers,
    runs_torchs_modules,
)
from support.workers import on_ranks, on_threads

ONE = Partition((1,))


@st.composite
def contexts(draw: Any, most: int, longest: int = 257, masks: Any = MASKS) -> Context:
    groups, length = draw(st.integers(1, 12)), st.integers(1, longest) | st.integers(1, 9)
    call = Attending(
        ONE,
        draw(st.integers(1, 2)),
        groups,
        draw(st.integers(1, 12 // groups)),
        draw(length),
        draw(st.none() | length),
        (draw(st.integers(1, 4)),) * 2,
        draw(st.sampled_from(masks)),
        draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )
    method = draw(st.sampled_from(["ring", "ulysses"]))
    return Context(call, draw(st.integers(1, most)), method, draw(st.none() | st.booleans()))


@example(Context(Attending(ONE, 1, 4, 3, 257, causal=True), 8))
@example(Context(Attending(ONE, 1, 1, 12, 257, causal=True), 8, "ulysses"))
@given(contexts(8))
def test_on_threads(case: Context) -> None:
    on_threads(case.workers, attends_as_whole, case)


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=FEW)
@given(contexts(3, 33))
def test_on_ranks(case: Context) -> None:
    on_ranks(case.workers, attends_as_whole, case)


@example(Context(Attending(ONE, 1, 1, 1, 2), 2, "ulysses"))  # a worker without heads
@given(contexts(4, 12, (None,)))
def test_gradients_of_gradients(case: Context) -> None:
    on_threads(case.workers, derives_again, case)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_gradients_of_some_gradients(method: str, wanted: int) -> None:
    for workers in (2, 3, 4):  # of which two have heads
        on_threads(workers, derives_again_of_some, method, wanted)
    on_threads(4, derives_again_of_some, method, wanted, 2)  # and some tokens


def test_forward_mode() -> None:
    """Tangents, too."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attention = torch.nn.functional.scaled_dot_product_attention
    xs, ts = ([normal((1, 4, 9, 3), s + k) for k in range(3)] for s in (0, 3))
    with sdpa_kernel(SDPBackend.MATH):
        _, wanted = torch.func.jvp(lambda *x: attention(*x, is_causal=True), tuple(xs), tuple(ts))

    def main(backend: Backend) -> Any:
        cp = ContextParallel(Mesh(backend, cp=-1)["cp"])
        with torch.no_grad():
            duals = [
                forward_ad.make_dual(cp.shard(x, 2), cp.shard(t, 2))
                for x, t in zip(xs, ts, strict=True)
            ]
            y = cp.scaled_dot_product_attention(*duals, is_causal=True)
        return cp, forward_ad.unpack_dual(y).tangent

    with forward_ad.dual_level():  # one for all threads
        for cp, tangent in linop.launch(main, 3):
            same(tangent, cp.shard(wanted, 2))


@given(st.integers(1, 8), st.integers(0, 40))
def test_memory_is_that_of_a_workers_tokens(workers: int, length: int) -> None:
    on_threads(workers, keeps_its_tokens, 1 + 8 * length)


@pytest.mark.parametrize("lonely", [None, 0, 2])
def test_checkpoints(lonely: int | None) -> None:
    on_threads(3, recomputes, lonely)


COMPOSED = st.builds(
    Composed,
    st.integers(1, 2),
    st.integers(1, 3),
    shards=st.booleans(),
    method=st.sampled_from(["ring", "ulysses"]),
    length=st.integers(1, 12),
)


@example(Composed(1, 2, 2))
@example(Composed(2, 2, 2, method="ulysses"))
@given(COMPOSED)
def test_with_other_strategies(case: Composed) -> None:
    on_threads(case.workers, is_its_twin, case)


# Cuts


@given(st.integers(1, 8), st.integers(0, 1200))
def test_causal_work_is_balanced(workers: int, length: int) -> None:
    """Within 5 % from 64 tokens a worker on; below, within one block of rows and all columns."""
    cut = zigzag(length, workers)
    assert sorted(p for segments in cut for p in positions(segments)) == [*range(length)]
    each = [work(segments) for segments in cut]
    if length >= 64 * workers:
        assert max(each) <= 1.05 * min(each)
    assert max(each) - min(each) <= -(-length // workers) * length


@given(
    st.integers(1, 6),
    st.integers(0, 60),
    st.integers(0, 60),
    st.tuples(st.booleans(), st.booleans()),
)
def test_parts_are_the_causal_matrix(
    workers: int, rows: int, columns: int, zigzags: tuple[bool, bool]
) -> None:
    """Each pair of a query and a key that it takes is in one part, and no other is."""
    cuts = [
        zigzag(n, workers) if one else in_order(balanced(n, workers))
        for n, one in zip((rows, columns), zigzags, strict=True)
    ]
    for mine in cuts[0]:
        for theirs in cuts[1]:
            found = torch.zeros(size(mine), size(theirs), dtype=torch.int64)
            numbers = torch.tensor(positions(mine)), torch.tensor(positions(theirs))
            for part in parts(mine, theirs, True):
                block = found[part.rows, part.columns]
                if part.kind is Kind.FULL:
                    block += 1
                elif part.kind is Kind.DIAGONAL:
                    assert block.shape[0] == block.shape[1]
                    block += torch.ones_like(block).tril()
                else:
                    i, j = numbers[0][part.rows], numbers[1][part.columns]
                    block += (j <= i.unsqueeze(1)).long()
            wanted = numbers[1] <= numbers[0].unsqueeze(1)
            assert torch.equal(found, wanted.long())


def test_mistakes() -> None:
    def main(backend: Backend) -> None:
        axis = Mesh(backend, cp=-1)["cp"]
        with pytest.raises(ArgumentError, match="method='star'; one of ring, ulysses expected"):
            ContextParallel(axis, "star")
        with pytest.raises(LinopError, match="Axis"):
            ContextParallel("cp")  # type: ignore[arg-type]
        cp = ContextParallel(axis)
        x = torch.zeros(1, 1, 5 + 3 * (backend.worker or 0), 2)
        with pytest.raises(PartitionError, match=r"\[5, 8\] tokens; .* have \[7, 6\]: cut"):
            cp.scaled_dot_product_attention(x, x, x)

    linop.launch(main, 2)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_multihead_attention_of_torch(method: str) -> None:
    for workers in (1, 2, 3):
        on_threads(workers, runs_torchs_modules, method, False)
        on_threads(workers, runs_torchs_modules, method, True)
    on_threads(2, runs_torchs_modules, method, True, False)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_with_heads_that_are_cut(method: str) -> None:
    on_threads(4, cuts_heads_and_sequences, method)


def test_layers_of_torch() -> None:
    for trains in (True, False):
        on_threads(3, runs_torchs_layers, trains)


class Windowed(nn.Module):
    """As those of transformers that have no mask where few tokens come."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.sliding_window = window

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(x, x, x, mask, is_causal=mask is None)


def test_what_is_not_attention_of_the_whole_sequence_is_refused() -> None:
    def main(backend: Backend) -> None:
        cp = ContextParallel(Mesh(backend, cp=-1)["cp"])
        heads = cp.parallelize(nn.MultiheadAttention(4, 2, batch_first=True))
        x = torch.zeros(1, 5, 4)
        with pytest.raises(ArgumentError, match="call it with need_weights=False"):
            heads(x, x, x)
        zeros = cp.parallelize(nn.MultiheadAttention(4, 2, add_zero_attn=True))
        with pytest.raises(ArgumentError, match="one without expected"):
            zeros(x, x, x, need_weights=False)
        for wrong in (nn.Conv1d(4, 4, 3), nn.LSTM(4, 4)):
            with pytest.raises(ArgumentError, match=r"1 .* looks at several tokens"):
                cp.parallelize(nn.Sequential(nn.Linear(4, 4), wrong))
        eager = nn.Linear(4, 4)
        eager.config = SimpleNamespace(_attn_implementation="eager")  # type: ignore[assignment]
        with pytest.raises(ArgumentError, match=r"the net .* attention by 'eager', .*='sdpa'"):
            cp.parallelize(eager)
        y = torch.zeros(1, 1, 4, 2)
        with pytest.raises(PartitionError, match="of 8 tokens, of which attention takes 6 at a"):
            cp.parallelize(nn.Sequential(Windowed(6)))(y)
        local = torch.zeros(4, 4, dtype=torch.bool)
        with pytest.raises(ShapeError, match="as many columns as this worker has keys; those of"):
            cp.scaled_dot_product_attention(y, y, y, local)
        assert cp.parallelize(nn.Sequential(Windowed(None), Windowed(8)))(y).shape == y.shape

    linop.launch(main, 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_masks_that_say_the_window(workers: int) -> None:
    def main(backend: Backend) -> None:
        cp = ContextParallel(Mesh(backend, cp=-1)["cp"])
        x = normal((1, 2, 9, 4), 1)
        apart = torch.arange(9).unsqueeze(1) - torch.arange(9)
        mask = (apart >= 0) & (apart < 3)
        net = nn.ModuleList([Windowed(3)])
        wanted = net[0](x, mask)
        cp.parallelize(net)
        y = net[0](cp.shard(x, -2), cp.shard(mask, -2))
        assert (y - cp.shard(wanted, -2)).abs().max() < 1e-12

    linop.launch(main, workers)


def test_autocast_of_masks() -> None:
    def main(backend: Backend) -> None:
        cp = ContextParallel(Mesh(backend, cp=-1)["cp"])
        for kind in (torch.float32, torch.float64):  # autocast leaves doubles as they are
            x, mask = normal((1, 2, 9, 4), 1).to(kind), normal((9, 9), 2).to(kind)
            mine = cp.shard(x, -2)
            with torch.autocast("cpu", torch.bfloat16):
                wanted = torch.nn.functional.scaled_dot_product_attention(x, x, x, mask)
                y = cp.scaled_dot_product_attention(mine, mine, mine, cp.shard(mask, -2))
            assert y.dtype == wanted.dtype
            assert (y - cp.shard(wanted, -2)).abs().max() < 0.05

    linop.launch(main, 2)
