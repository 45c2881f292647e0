"""Operators of SciPy and PyLops without copies: nobody can change a vector of another, and nothing
is copied that need not be; and the shapes that PyLops' operators have."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Event, Thread
from typing import Any

import numpy as np
import pylops
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse.linalg import LinearOperator as SciPyOperator

import linop
from linop import Region, Space
from linop.local_operators import from_scipy
from linop.local_operators.borrowing import borrowing
from linop.testing import check_adjoint
from linop.testing.describing import seeds, whole_numbers
from support.contracts.tensors_of_ranks import of_tensors
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

KEPT = np.arange(6.0)


def changes(x: np.ndarray) -> np.ndarray:
    x *= 2
    return x


FUNCTIONS: dict[str, tuple[Callable[[np.ndarray], Any], Callable[[np.ndarray], Any]]] = {
    "changes its argument": (changes, lambda x: 2 * x),
    "returns its argument": (lambda x: x, lambda x: x),
    "returns a view of it": (lambda x: x[::-1], lambda x: x[::-1]),
    "returns a view of a view": (lambda x: x.reshape(2, 3).T.ravel("F"), lambda x: x),
    "returns its buffer": (lambda x: KEPT, lambda x: KEPT.copy()),
    "returns a view of its buffer": (lambda x: KEPT.reshape(-1), lambda x: KEPT.copy()),
    "returns a list": (lambda x: list(3 * x), lambda x: 3 * x),
    "returns new memory": (lambda x: 3 * x, lambda x: 3 * x),
    "returns a read-only array": (lambda x: np.broadcast_to(2.0, 6), lambda x: np.full(6, 2.0)),
}


def trace(*_: object) -> Callable[..., Any]:
    return trace


@contextmanager
def traced() -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def profiled() -> Iterator[None]:
    before = sys.getprofile()
    sys.setprofile(trace)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextmanager
def compiling_elsewhere() -> Iterator[None]:
    """Another thread is within a function that torch.compile runs: frames of all threads are run
    by torch, which holds the arguments of calls longer."""
    eval_frame = pytest.importorskip("torch._C._dynamo.eval_frame")
    inside, over = Event(), Event()

    def compiled() -> None:
        before = eval_frame.set_eval_frame(False)
        inside.set()
        over.wait(60)
        eval_frame.set_eval_frame(before)

    thread = Thread(target=compiled)
    thread.start()
    try:
        assert inside.wait(60)
        yield
    finally:
        over.set()
        thread.join()


WATCHES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "alone": nullcontext,
    "traced": traced,
    "profiled": profiled,
    "compiling elsewhere": compiling_elsewhere,
}


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nobody_changes_anothers_array(name: str, watch: str) -> None:
    function, wanted = FUNCTIONS[name]
    lent = borrowing(function)
    for _ in range(3):
        x, buffer = np.arange(6.0) + 1, KEPT.copy()
        with WATCHES[watch]():
            y = lent(x)
        assert (x == np.arange(6.0) + 1).all() and (y == wanted(x)).all()
        y[...] = -1  # the caller's own
        assert (x == np.arange(6.0) + 1).all() and (KEPT == buffer).all()
        assert not np.shares_memory(x, y) and not np.shares_memory(KEPT, y)


@pytest.mark.parametrize("watch", WATCHES)
def test_new_memory_is_not_copied(watch: str) -> None:
    made: list[int] = []

    def noted(y: np.ndarray) -> np.ndarray:
        made.append(y.ctypes.data)
        return y

    for function in (lambda x: noted(2 * x), lambda x: noted(2 * x).reshape(2, 3).ravel()):
        lent, x = borrowing(function), np.arange(6.0)
        with WATCHES[watch]():
            # Another thread that looks at frames may hold a result for a moment, which is copied.
            assert any(lent(x).ctypes.data == made[-1] for _ in range(9))


def test_what_is_lent_is_the_argument_itself() -> None:
    seen: list[np.ndarray] = []
    x = np.arange(6.0)
    borrowing(lambda x: seen.append(x) or 2 * x)(x)  # type: ignore[func-returns-value]
    assert np.shares_memory(seen[0], x) and not seen[0].flags.writeable


def test_a_function_that_fails_is_an_error() -> None:
    def fails(x: np.ndarray) -> np.ndarray:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        borrowing(fails)(np.arange(6.0))
    op = from_scipy(SciPyOperator((6, 6), matvec=changes, rmatvec=changes, dtype=float))
    x = np.arange(6.0)
    assert (op(x) == 2 * np.arange(6.0)).all() and (x == np.arange(6.0)).all()
    assert check_adjoint(op)


shapes = st.lists(st.integers(2, 4), min_size=1, max_size=3)


@given(shapes, st.data(), seeds)
def test_shapes_of_pylops_operators(shape: Sequence[int], data: st.DataObject, seed: int) -> None:
    axes = data.draw(st.permutations(range(len(shape))))
    axis = data.draw(st.integers(0, len(shape) - 1))
    T = pylops.Transpose(shape, axes)
    D = pylops.FirstDerivative(T.dimsd, axis=axis, kind="forward")
    op, x = from_scipy(D @ T), whole_numbers(tuple(shape), "float64", seed)
    assert op.domain["x"].shape == x.shape
    y = x.transpose(axes)
    wanted = np.diff(y, axis=axis, append=np.take(y, [-1], axis))
    result = op(x)
    assert result.shape == wanted.shape and (result == wanted).all()
    assert (op.H(wanted) == ((D @ T).H @ wanted.ravel()).reshape(x.shape)).all()
    flat = from_scipy(D @ T, Space(Region("z", x.size)))  # a given space is taken as it is
    assert (flat(x.ravel()).ravel() == wanted.ravel()).all()
    assert linop.block([[D @ T], [2 * (D @ T)]]).domain["x"].shape == x.shape


@pytest.mark.parametrize("workers", [1, 3])
def test_tensors_on_threads(workers: int) -> None:
    on_threads(workers, of_tensors)


@needs_mpi
def test_tensors_on_ranks() -> None:
    on_ranks(2, of_tensors)
