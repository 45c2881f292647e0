"""Time loops against the recursion of their steps in NumPy, exactly, on all backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import linop
from linop import Partition, Region, Space, TensorSpace
from linop.backends import Backend
from linop.errors import ArgumentError, LinopError, RegionError, SpaceError
from linop.testing.describing import Description, seeds
from linop.testing.factories import build, describe
from support.contracts.loops import (
    is_compiled_once,
    is_its_recursion,
    lengths_agree,
    recursion,
    stands_anywhere,
    wrong_arguments_fail_everywhere,
)
from support.operators.properties import stays_exact
from support.requirements import needs_mpi, needs_torch
from support.workers import EVERY_ROAD, on_ranks, on_threads

X = TensorSpace((6, 2), Partition((3,)), np.int64)
A = linop.stencil(X, {(0, 0): 2, (1, 0): -1, (0, 1): 3})


def exact(described: Description) -> Description:
    assume(stays_exact(build("time_loop", described)))
    return described


@given(describe("time_loop"), seeds)
def test_a_loop_is_its_recursion(described: Description, seed: int) -> None:
    op, wanted = build("time_loop", exact(described)), recursion(described)
    assert (op.to_matrix().toarray() == wanted).all()
    assert (op.H.to_matrix().toarray() == wanted.conj().T).all()
    assert (op @ np.eye(op.shape[1], dtype=op.dtype) == wanted).all()
    is_its_recursion(linop.backends.get("threads"), described, seed)


@given(st.integers(1, 4), st.data(), seeds)
def test_on_threads(workers: int, data: st.DataObject, seed: int) -> None:
    described = exact(data.draw(describe("time_loop", workers)))
    on_threads(workers, is_its_recursion, described, seed)


@needs_mpi
@given(data=st.data(), seed=seeds)
def test_on_ranks(data: st.DataObject, seed: int) -> None:
    road = EVERY_ROAD[data.draw(st.sampled_from(sorted(EVERY_ROAD)))]
    described = exact(data.draw(describe("time_loop", 2)))
    on_ranks(2, is_its_recursion, described, seed, **road)


@example(0)
@given(st.integers(0, 5))
def test_repeat_is_the_power(n: int) -> None:
    ring = TensorSpace(5, Partition(5))
    moved = linop.shift(ring, 1)
    assert linop.repeat(moved, n).equals(moved**n)
    assert linop.repeat(A, n).equals(A**n)
    assert linop.repeat(A, n).H.equals(A.H**n)


def test_a_series_of_a_tensor_is_a_tensor() -> None:
    op = linop.timeloop(A, 4, A, A, initial=False)
    assert op.domain == TensorSpace((4, 6, 2), X.partition, np.int64, (1,))
    assert isinstance(op.domain, TensorSpace) and isinstance(op.codomain, TensorSpace)
    signals = np.zeros((4, 6, 2), np.int64)
    signals[1, 3, 0] = 1
    heard = op.codomain.gather(op(op.domain.scatter(signals)))
    assert not heard[0].any() and heard[1].any()
    pulse = X.gather((A @ A)(X.scatter(signals[1])))
    assert (heard[1] == pulse).all()
    assert str(op) == "Loop_4(Step)" and str(op.H) == "Loop_4(Step*)"
    assert "Loop" in op.symbol(latex=True)


def test_loops_stand_anywhere() -> None:
    stands_anywhere(linop.backends.get("reference"))
    stands_anywhere(linop.backends.get("threads"))
    for workers in (1, 3):
        on_threads(workers, stands_anywhere)
    linop.launch(stands_anywhere, 2, "reference")


@needs_mpi
def test_loops_stand_anywhere_on_ranks() -> None:
    on_ranks(2, stands_anywhere)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_step_is_compiled_once(workers: int) -> None:
    on_threads(workers, is_compiled_once)


def test_lengths_agree() -> None:
    on_threads(3, lengths_agree)


@pytest.mark.parametrize("later", [False, True])
def test_wrong_arguments_fail_everywhere(later: bool) -> None:
    on_threads(2, wrong_arguments_fail_everywhere, later)


def test_solvers_take_loops() -> None:
    Y = TensorSpace((8,), Partition((2,)))
    S = linop.stencil(Y, {0: 2.0, 1: 0.5, -1: 0.5})
    op = linop.timeloop(S, 3, linop.identity(Y), linop.identity(Y))
    linop.testing.assert_adjoint(op)
    right = np.random.default_rng(0).random((3, 8))
    plan = op.compile(linop.backends.get("threads"))
    for one in (op, plan):
        found = linop.solvers.lsqr(one, one(one.domain.scatter(right)), atol=1e-12, btol=1e-12)
        np.testing.assert_allclose(op.domain.gather(found.x), right, rtol=1e-8)


@needs_torch
def test_gradients_run_backwards() -> None:
    import torch

    op = linop.repeat(A, 3)
    with linop.backends.use(linop.backends.get("threads")):
        one = linop.TensorSpace((4,), Partition((1,)))
        op = linop.timeloop(linop.stencil(one, {0: 2.0, 1: 1.0}), 3, linop.identity(one))
        x = torch.arange(12.0, dtype=torch.float64).reshape(3, 4).requires_grad_()
        y = linop.autograd.apply(op, x)
        (grad,) = torch.autograd.grad(y @ y, x)
        assert (grad.numpy().ravel() == op.rmatvec(2 * op.matvec(x.detach().numpy().ravel()))).all()


def test_messages_are_counted_by_step() -> None:
    backend = linop.backends.get("threads")
    plan = linop.repeat(A, 5).compile(backend)
    plan(X.zeros())
    assert sum(row.messages for row in backend.counters()) == 5 * A.cost().messages
    assert plan.describe().startswith("5 times:")


Y = TensorSpace((6, 2), Partition((2,)), np.int64, name="y")
P = linop.repartition(X, Y)
BAD: dict[str, tuple[Callable[[], Any], type[LinopError], str]] = {
    "no step": (lambda: linop.repeat(3, 2), ArgumentError,  # type: ignore[arg-type]
                "repeat, step: expected an operator, given 3"),
    "ends": (lambda: linop.repeat(P, 2), SpaceError,
             "repeat: the step must map the space of states to itself; A"),
    "negative": (lambda: linop.repeat(A, -1), ArgumentError,
                 "repeat: n is a whole number of steps from 0; given -1"),
    "fraction": (lambda: linop.timeloop(A, 1.5), ArgumentError,  # type: ignore[arg-type]
                 "timeloop, number of steps: expected a whole number, given 1.5"),
    "sources": (lambda: linop.timeloop(A, 2, P), SpaceError,
                "timeloop, sources: its codomain must be the space of states, "),
    "receivers": (lambda: linop.timeloop(A, 2, None, P.H), SpaceError,
                  "timeloop, receivers: its domain must be the space of states, "),
    "no operator": (lambda: linop.timeloop(A, 2, np.eye(3)), ArgumentError,  # type: ignore[arg-type]
                    "timeloop, sources: expected an operator or None, given "),
    "nothing in": (lambda: linop.timeloop(A, 2, initial=False), ArgumentError,
                   "timeloop: initial=False without sources leaves nothing; give sources"),
    "nothing out": (lambda: linop.timeloop(A, 2, final=False), ArgumentError,
                    "timeloop: final=False without receivers leaves nothing; give receivers"),
    "names": (lambda: linop.timeloop(A, 2, A, initial=True), RegionError,
              "regions of one name, x@0, x@1, x@2; give the sources' domain"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_loops_are_named(case: str) -> None:
    attempt, error, message = BAD[case]
    with pytest.raises(error) as caught:
        attempt()
    assert message in str(caught.value)


def test_the_oracle_notices_a_wrong_loop() -> None:
    cut = {"shape": (3,), "grid": (1,), "workers": (0,), "axes": (0,), "dtype": "int64"}
    cuts = tuple({**cut, "name": name} for name in "xyz")
    described = {"cuts": cuts, "n": 2, "ends": "both", "seed": 3, "back": False}
    other = build("time_loop", {**described, "n": 2, "seed": 4})
    assert (other.to_matrix().toarray() != recursion(described)).any()


def test_regions_of_any_space() -> None:
    regions = [Region("a", (2,), (0, 1)), Region("b", (), 1)]
    space = Space(regions, np.int64)
    swap = linop.timeloop(linop.identity(space), 3, linop.identity(space), initial=False)
    assert swap.domain == Space([Region("a", (3, 2), (0, 1)), Region("b", (3,), 1)], np.int64)
    x = swap.domain.vector({"a": np.arange(6).reshape(3, 2), "b": np.arange(3)})
    y = swap(x)
    assert y["a"].tolist() == [6, 9] and y["b"] == 3


def test_loops_through_real_and_complex_spaces() -> None:
    """Real records of a complex state, and steps that are linear over the reals alone: their plan
    runs that of one step, whatever n is."""
    X = TensorSpace((6,), Partition((2,)), complex)
    step = 0.5j * linop.shift(X, 0)
    loop = linop.timeloop(step, 3, receivers=linop.real(X))
    x = X.integers(3)
    wanted, now = [], X.gather(x)
    for _ in range(3):
        now = 0.5j * now
        wanted.append(now.real)
    assert loop.codomain.dtype == float
    assert (loop.codomain.gather(loop(x)) == np.array(wanted)).all()
    bent = step + linop.conj(X)
    others = [
        linop.repeat(bent, 3),
        linop.timeloop(bent, 2, sources=linop.identity(X), receivers=linop.imag(X)),
        linop.real(X) @ (2j * linop.repeat(step, 3) + linop.repeat(step, 3)) @ linop.conj(X),
        linop.in_steps(linop.real(X), linop.repeat(step, 2)),
    ]
    for op in (loop, *others):
        for one in (op, op.H):
            assert linop.testing.check_exact(one)
            assert linop.testing.check_adjoint(one, "threads", trials=1)

    def main(backend: Backend) -> None:
        long = linop.real(X) @ linop.repeat(1j * linop.shift(X, 0), 10**6)
        assert long.compile(backend).op is long

    linop.launch(main, workers=2)
