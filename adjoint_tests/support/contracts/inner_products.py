"""Inner products of distributed vectors: those of one vector on all workers are right, any others
are one error on all of them. Contracts for every SPMD backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

import linop
from linop.backends.engine.base import Backend
from linop.local_operators import matrix
from linop.solvers import cgls
from linop.spaces.vector import Vector

DTYPES = "float64", "float32", "complex128", "int64"
STEPS: dict[str, Callable[[Vector, Vector], Vector]] = {
    "v": lambda v, w: v,
    "copy": lambda v, w: v.copy(),
    "v + w": lambda v, w: v + w,
    "w + v": lambda v, w: w + v,
    "v - w": lambda v, w: v - w,
    "-v": lambda v, w: -v,
    "2 v": lambda v, w: 2 * v,
}
QUESTIONS: dict[str, Callable[[Vector, Vector], Any]] = {
    "norm": lambda v, w: v.norm(),
    "inner": lambda v, w: v.inner(w),
    "inner with itself": lambda v, w: v.inner(v),
    "space.inner": lambda v, w: v.space.inner(w, v),
    "no vector": lambda v, w: v.inner(3),  # type: ignore[arg-type]
}
Asked = tuple[int, str, int, str, str]
"""Vector 0 or 1 of which space, the steps that lead from there to v and to w, and the question."""
spaces = st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(1, 4)), min_size=1, max_size=3)


@st.composite
def questions(draw: st.DrawFn, workers: int) -> tuple[list[tuple[str, int]], list[list[Asked]]]:
    """Spaces, and rounds of one question by each worker: the same by all, or others by some."""
    drawn = draw(spaces)
    one = st.tuples(
        st.integers(0, len(drawn) - 1),
        st.sampled_from([*STEPS]),
        st.integers(0, 1),
        st.sampled_from([*STEPS]),
        st.sampled_from([*QUESTIONS]),
    )
    same = one.map(lambda asked: [asked] * workers)
    return drawn, draw(st.lists(same | st.lists(one, min_size=workers, max_size=workers)))


def pair(backend: Backend, kind: tuple[str, int], seed: int) -> tuple[list[Vector], list[Vector]]:
    """Two vectors of a space with a region on each worker, distributed and whole."""
    dtype, size = kind
    X = linop.Space(
        [linop.Region(f"x{w}", (size,), w) for w in range(backend.workers or 1)], np.dtype(dtype)
    )
    whole = [X.integers(seed), X.integers(seed + 1)]
    return [backend.vector(X, one[f"x{backend.worker}"]) for one in whole], whole


def only_the_same_are_added(
    backend: Backend, kinds: Sequence[tuple[str, int]], rounds: Sequence[Sequence[Asked]]
) -> None:
    """The answer of one process for the whole vectors, where all workers ask for the same; else an
    error with one text on all."""
    vectors = [pair(backend, kind, 2 * k) for k, kind in enumerate(kinds)]

    def ask(asked: Asked, of: int) -> Any:
        space, first, which, second, question = asked
        both = vectors[space][of]
        v = STEPS[first](both[which], both[1 - which])
        try:
            return QUESTIONS[question](v, STEPS[second](both[1 - which], both[which]))
        except linop.LinopError as error:
            return f"{type(error).__name__}: {error}"

    for asked in rounds:
        mine = asked[backend.worker or 0]
        found = ask(mine, 0)
        said = backend._meeting().gather_all(found)  # type: ignore[union-attr]
        assert len({repr(one) for one in said}) == 1, said
        if len(set(asked)) > 1 and not same_vectors(asked):
            told = "workers do different things" in str(found)
            # v + w is w + v: a number is right if it answers every worker's question.
            assert told or all(found == ask(one, 1) for one in asked), (asked, found)
        elif mine[-1] == "no vector":
            assert "expected a Vector, given 3" in found, found
        else:
            assert found == ask(mine, 1), (asked, found)


def same_vectors(asked: Sequence[Asked]) -> bool:
    """True if the questions differ only in what the operation does not use."""
    unused = "norm", "inner with itself", "no vector"
    return len({one[:3] + one[4:] if one[4] in unused else one for one in asked}) == 1


# Threads


def least_squares(workers: int, seed: int) -> tuple[linop.LinearOperator, Vector]:
    """A small problem, with a block on each worker, and its data."""
    rng = np.random.default_rng(seed)
    blocks = [
        matrix(
            rng.integers(-3, 4, (5, 4)) + 9.0 * np.eye(5, 4),
            linop.Region(f"x{w}", (4,), w),
            linop.Region(f"y{w}", (5,), w),
        )
        for w in range(workers)
    ]
    A = linop.direct_sum(*blocks)
    return A, A.codomain.integers(seed)


def threads_of_a_worker(backend: Backend, threads: int, rounds: int) -> None:
    """Each solves a problem of its own with a plan of its own, in another order on other
    workers: every answer is that of one process."""
    me, workers = backend.worker or 0, backend.workers or 1
    work = []
    for k in range(threads):
        A, y = least_squares(workers, k)
        plan = A.compile(backend)
        plan(np.zeros(4))
        plan.H(np.zeros(5))
        want = cgls(A, y, niter=8, tol=0.0)
        work.append((plan, backend.vector(A.codomain, y[f"y{me}"]), want))
    wrong: list[object] = []

    def solve(k: int) -> None:
        plan, y, want = work[k]
        try:
            for _ in range(rounds):
                found = cgls(plan, y, niter=8, tol=0.0)
                np.testing.assert_array_equal(found[0][f"x{me}"], want[0][f"x{me}"])
                assert found[5] == want[5]
        except BaseException as error:  # told to the thread that waits
            wrong.append(error)

    order = [(k + me) % threads for k in range(threads)]
    running = [threading.Thread(target=solve, args=(k,)) for k in order]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not wrong, wrong
