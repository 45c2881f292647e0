"""Blocks that each worker builds for itself: what every worker gets is what NumPy makes of all of
them. Contracts for every SPMD backend. Whole numbers, compared with ``==``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg
from hypothesis import strategies as st

import linop
from linop import Region, Space, TensorSpace
from linop.backends.engine.base import Backend
from linop.errors import LinopError
from linop.testing.describing import whole_numbers

KINDS = "array", "sparse", "scipy", "operator", "product"


class Drawn(NamedTuple):
    """The matrix of a worker's block: of rows and columns, given as one of `KINDS`."""

    rows: int
    columns: int
    kind: str


def blocks(workers: int, columns: int | None = None) -> st.SearchStrategy[list[list[Drawn]]]:
    """For each worker the blocks that it has: one, or several, or none; not none of all. With
    `columns`, all have as many."""
    number = st.integers(1, 4)
    one = st.builds(
        Drawn, number, number if columns is None else st.just(columns), st.sampled_from(KINDS)
    )
    own = st.lists(one, min_size=1, max_size=1) | st.lists(one, max_size=2)
    return st.lists(own, min_size=workers, max_size=workers).filter(any)


def values(worker: int, k: int, drawn: Drawn, dtype: str) -> np.ndarray:
    return whole_numbers((drawn.rows, drawn.columns), dtype, 10 * worker + k)


def given(worker: int, k: int, drawn: Drawn, dtype: str) -> Any:
    """A block as its worker gives it; regions have the names and the workers that they have by
    default, or names of the worker's own."""
    A = values(worker, k, drawn, dtype)
    if drawn.kind == "sparse":
        return scipy.sparse.csr_array(A)
    if drawn.kind == "scipy":
        return scipy.sparse.linalg.aslinearoperator(A)
    if drawn.kind == "array":
        return A
    domain = Space(Region(f"x@{worker}", drawn.columns, worker), dtype)
    codomain = Space(Region(f"y@{worker}", drawn.rows, worker), dtype)
    op = linop.local_operators.matrix(A, domain, codomain)
    return op if drawn.kind == "operator" else (2 * linop.identity(codomain)) @ op


def matrices(every: Sequence[Sequence[Drawn]], dtype: str) -> list[list[np.ndarray]]:
    """The blocks of each worker."""
    return [
        [_factor(one) * values(w, k, one, dtype) for k, one in enumerate(own)]
        for w, own in enumerate(every)
    ]


def _factor(one: Drawn) -> int:
    return 2 if one.kind == "product" else 1


def flat(x: Any) -> np.ndarray:
    """A worker's argument or result as one array."""
    arrays = [] if x is None else list(x.values()) if isinstance(x, dict) else [x]
    return np.concatenate([np.ravel(a) for a in arrays]) if arrays else np.zeros(0)


def argument(space: Space, worker: int, seed: int) -> Any:
    """Whole numbers for a worker's regions, in the form that plans take; the same for replicated
    ones."""
    arrays = {r.name: whole_numbers(r.shape, space.dtype.name, seed) for r in space.on(worker)}
    return (arrays if len(arrays) > 1 else next(iter(arrays.values()))) if arrays else None


def diagonal(backend: Backend, every: Sequence[Sequence[Drawn]], dtype: str) -> None:
    """`block_diag` applies each worker's own matrices, and their adjoints."""
    me = backend.worker
    assert me is not None
    own = [given(me, k, one, dtype) for k, one in enumerate(every[me])]
    op = linop.block_diag(*own, backend=backend)
    A = matrices(every, dtype)[me]
    D = scipy.linalg.block_diag(*A) if A else np.zeros((0, 0))
    plan = op.compile(backend)
    assert plan.counters.messages_each == 0
    for one, matrix in ((plan, D), (plan.H, D.conj().T)):
        x = argument(one.domain, me, me)
        assert (flat(one(x)) == matrix @ flat(x)).all()
    if all(len(blocks) == 1 for blocks in every):
        assert isinstance(op.domain, TensorSpace)
        assert op.domain.bounds[0][-1][1] == sum(one.columns for (one,) in every)
    assert linop.testing.check_adjoint(op, backend=backend)


def stacks(backend: Backend, every: Sequence[Sequence[Drawn]], dtype: str) -> None:
    """`vstack` applies each worker's own matrices to one argument, and its adjoint sums over the
    workers; `hstack` is the adjoint of a `vstack`."""
    me = backend.worker
    assert me is not None
    own = [given(me, k, one, dtype) for k, one in enumerate(every[me])]
    V = linop.vstack(*own, backend=backend).compile(backend)
    A = [np.vstack(some) if some else np.zeros((0, 0)) for some in matrices(every, dtype)]
    ys = [whole_numbers(len(some), dtype, 5 + w) for w, some in enumerate(A)]
    x = argument(V.domain, me, 3)
    assert (flat(V(x)) == A[me] @ flat(x)).all()
    total = flat(V.H(shaped(ys[me], V.codomain, me)))
    terms = [a.conj().T @ y for a, y in zip(A, ys, strict=True) if len(a)]
    assert (total == (sum(terms) if len(A[me]) else np.zeros(0))).all()
    adjoints = [linop.block_diag(one).H for one in own]
    H = linop.hstack(*adjoints, backend=backend).compile(backend)
    assert (flat(H(shaped(ys[me], H.domain, me))) == total).all()


def shaped(y: Any, space: Space, worker: int) -> Any:
    """A flat array as a worker's argument."""
    regions = space.on(worker)
    if not regions:
        return None
    pieces = np.split(y, np.cumsum([r.size for r in regions])[:-1])
    arrays = {r.name: p.reshape(r.shape) for r, p in zip(regions, pieces, strict=True)}
    return arrays if len(arrays) > 1 else next(iter(arrays.values()))


def mistakes(backend: Backend) -> None:
    """Errors are the same on all workers, whoever made the mistake; the next call is right."""
    me, last = backend.worker, (backend.workers or 1) - 1
    said = []
    A, spread = np.ones((2, 3)), TensorSpace(4, linop.Partition(2))
    wrong: list[Any] = [
        lambda: linop.block_diag(*(["no operator"] if me == last else [A]), backend=backend),
        lambda: linop.block_diag(A.astype("complex64" if me == last else "f8"), backend=backend),
        lambda: linop.block_diag(backend=backend),
        lambda: linop.vstack(np.ones((2, 4 if me == last else 3)), backend=backend),
        lambda: linop.block_diag(linop.identity(spread), backend=backend),
    ]
    for work in wrong:
        with pytest.raises(LinopError) as caught:
            work()
        said.append(str(caught.value))
    for worker, other in enumerate(backend.transport.gather_all(said)):  # type: ignore[attr-defined]
        assert other == said, worker
    assert f"block_diag: on worker {last}:" in said[0]
    assert f"worker {last} complex64" in said[1]
    assert "no worker has a block" in said[2]
    assert f"x[3], worker {last} x[4]" in said[3]
    assert "inside one worker's memory" in said[4]
    op = linop.block_diag(A, backend=backend)
    assert (op.compile(backend)(np.ones(3)) == 3).all()
    with pytest.raises(LinopError, match=r"known to worker . alone"):
        op(op.domain.zeros())
