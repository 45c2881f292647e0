"""`block_diag`, `vstack` and `hstack` of blocks that each worker builds for itself, on threads and
on ranks."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import linop
from linop.errors import ArgumentError
from support.contracts import own_blocks
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

dtypes = st.sampled_from(["float64", "float32", "complex128", "int64"])


@given(st.data(), st.integers(1, 8), dtypes)
def test_block_diagonals_on_threads(data: st.DataObject, workers: int, dtype: str) -> None:
    on_threads(workers, own_blocks.diagonal, data.draw(own_blocks.blocks(workers)), dtype)


@given(st.data(), st.integers(1, 8), st.integers(1, 4), dtypes)
def test_stacks_on_threads(data: st.DataObject, workers: int, columns: int, dtype: str) -> None:
    on_threads(workers, own_blocks.stacks, data.draw(own_blocks.blocks(workers, columns)), dtype)


@pytest.mark.parametrize("workers", [2, 3])
def test_mistakes_on_threads(workers: int) -> None:
    on_threads(workers, own_blocks.mistakes)


@needs_mpi
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@settings(max_examples=5)
@given(data=st.data(), dtype=dtypes)
def test_blocks_on_ranks(ranks: int, data: st.DataObject, dtype: str) -> None:
    on_ranks(ranks, own_blocks.diagonal, data.draw(own_blocks.blocks(ranks)), dtype)
    on_ranks(ranks, own_blocks.stacks, data.draw(own_blocks.blocks(ranks, 3)), dtype)


@needs_mpi
@pytest.mark.timeout(300)
def test_mistakes_on_ranks() -> None:
    on_ranks(3, own_blocks.mistakes)


def test_blocks_are_of_the_tensor_that_is_cut_so() -> None:
    """A tensor space's blocks, given back under their names, make an operator on that space."""

    def main(backend: linop.backends.Worker) -> None:
        X = linop.TensorSpace((6, 3), linop.Partition((backend.workers,)))
        mine = linop.Space(X.region(backend.worker))
        scale = linop.local_operators.diagonal(np.full(X.local_shape(backend.worker), 2.0), mine)
        op = linop.block_diag(scale, backend=backend)
        assert op.domain == op.codomain == X
        assert isinstance(op.domain, linop.TensorSpace)
        assert op.domain.made_from == X.made_from
        plan = (linop.shift(X, 1) @ op).compile(backend)
        found = plan(np.full((2, 3), float(backend.worker)))
        assert (found == 2 * ((backend.worker - 1) % backend.workers)).all()

    linop.launch(main, 3, "threads")


def test_blocks_of_several_regions() -> None:
    """A common domain of two regions, in any shapes; scalars are regions, too."""
    A = np.arange(14.0).reshape(2, 7)

    def main(backend: linop.backends.Worker) -> None:
        domain = linop.Space([linop.Region("u", (2, 3)), linop.Region("v", ())])
        own = linop.local_operators.matrix(A + backend.worker, domain, linop.Region("y", 2))
        plan = linop.vstack(own, backend=backend).compile(backend)
        assert [region.workers for region in plan.domain] == [(0, 1, 2)] * 2
        u, v = np.arange(6.0).reshape(2, 3), np.array(3.0)
        given = {"u@0": u, "v@0": v}
        assert (plan(given) == (A + backend.worker) @ np.append(u, v)).all()
        back = plan.H(np.array([1.0, 2.0]))
        wanted = sum((A + k).T @ [1.0, 2.0] for k in range(3))
        assert (back["u@0"].ravel() == wanted[:6]).all()
        assert back["v@0"] == wanted[6]
        apart = linop.block_diag(own, backend=backend)
        assert [region.name for region in apart.domain][:2] == ["u@0", "v@0"]
        assert isinstance(apart.codomain, linop.TensorSpace)

    linop.launch(main, 3, "threads")


def test_all_calls_are_proven_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINOP_DEBUG", "1")
    drawn = [[own_blocks.Drawn(2, 3, "array")], [own_blocks.Drawn(1, 3, "product")]]
    on_threads(2, own_blocks.diagonal, drawn, "float64")
    on_threads(2, own_blocks.stacks, drawn, "float64")


def test_a_backend_with_all_workers_takes_all_blocks() -> None:
    backend = linop.backends.get("reference")
    op = linop.block_diag(np.eye(2), np.ones((1, 3)), backend=backend)
    assert op.compile(backend)(op.domain.integers(1)).equals(op(op.domain.integers(1)))
    for build in (linop.block_diag, linop.vstack, linop.hstack):
        with pytest.raises(ArgumentError, match="backend: expected a backend"):
            partial(build, backend="mpi")(np.eye(2))
