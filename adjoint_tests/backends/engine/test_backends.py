"""Bound plans: how arrays come and go, and what is promised of results.

That plans compute what their operator is, `test_catalogue` says; of ranks, the MPI tests; how
programs start and fail, `test_launch`.
"""

from __future__ import annotations

import random
import re
import threading
import time
from typing import Any

import numpy as np
import pytest

import linop
from linop import COPIES, REPLICATED, LinearOperator, Partition, Region, Space, TensorSpace, Vector
from linop.backends import Backend
from linop.errors import (
    ArgumentError,
    BackendError,
    RegionError,
    ShapeError,
    SpaceError,
    explained_at,
)
from support.contracts.plans import total

LINE = Partition((3,))
A, B, C, D = Region("a", 2), Region("b", 3), Region("c", 2, 1), Region("d", 2, 2)

spmd = pytest.mark.parametrize("backend", ["threads", "reference"])
"""Backends on which an SPMD program runs in this process."""


def moved() -> LinearOperator:
    """a and b stay on worker 0; c of worker 1 becomes d of worker 2."""
    return linop.move(Space([A, B, C]), C, D)


def swapped(dtype: Any = np.float64) -> LinearOperator:
    """Two workers exchange a number."""
    return linop.shift(TensorSpace((2,), Partition((2,)), dtype), 1)


@spmd
def test_launch_gives_what_each_worker_returned(backend: str) -> None:
    results = linop.launch(lambda b: (b.worker, b.workers, b.name), workers=3, backend=backend)
    assert results == [(w, 3, backend) for w in range(3)]
    assert linop.launch(lambda b: b.workers, backend=backend) == [1]


@spmd
def test_a_worker_passes_and_gets_a_bare_array_a_dict_or_none(backend: str) -> None:
    a, b, c = np.arange(2.0), np.arange(3.0), np.array([5.0, 7.0])

    def main(backend: Backend) -> Any:
        plan = moved().compile(backend)
        y = plan(({"a": a, "b": b}, c, None)[backend.worker or 0])
        return y, plan.H(y)

    (y0, x0), (y1, x1), (y2, x2) = linop.launch(main, workers=3, backend=backend)
    assert [{n: v.tolist() for n, v in z.items()} for z in (y0, x0)] == [
        {"a": [0, 1], "b": [0, 1, 2]}
    ] * 2
    assert (y1, x1.tolist()) == (None, [5, 7])
    assert (y2.tolist(), x2) == ([5, 7], None)


@spmd
def test_a_dict_may_name_one_region_or_none(backend: str) -> None:
    def main(backend: Backend) -> Any:
        given: Any = ({"a": np.ones(2), "b": np.ones(3)}, {"c": np.full(2, 4.0)}, {})
        return moved().compile(backend)(given[backend.worker or 0])

    assert linop.launch(main, workers=3, backend=backend)[2].tolist() == [4, 4]


@spmd
@pytest.mark.parametrize(
    ("worker", "given", "error", "text"),
    [
        (0, np.ones(2), ArgumentError, r"worker 0: a bare ndarray given; it holds 'a' .*, 'b'"),
        (0, None, ArgumentError, r"worker 0: None given; it holds 'a' of shape \(2,\), 'b'"),
        (0, {"a": np.ones(2)}, RegionError, r"worker 0: no array for the regions \['b'\]"),
        (1, {"z": np.ones(2)}, RegionError, "unknown region 'z'; this space has 'a', 'b', 'c'"),
        (1, np.ones(3), ShapeError, r"'c': shape \(3,\) given, \(2,\) expected"),
        (2, np.ones(2), ArgumentError, "worker 2 holds no region here; pass None"),
    ],
)
def test_a_wrong_argument_on_one_worker_ends_the_program(
    backend: str, worker: int, given: Any, error: type[Exception], text: str
) -> None:
    right: Any = ({"a": np.ones(2), "b": np.ones(3)}, np.ones(2), None)

    def main(backend: Backend) -> None:
        plan = moved().compile(backend)
        plan(given if backend.worker == worker else right[backend.worker or 0])
        plan.H.H(right[backend.worker or 0])

    with pytest.raises(error, match=text) as caught:
        linop.launch(main, workers=3, backend=backend)
    # On threads every worker raises it, and any of them may be the first.
    raised = "." if backend == "threads" else worker
    explained, last = caught.value.__notes__
    assert explained == explained_at(error.__name__)
    assert re.fullmatch(f"raised on worker {raised} of 3", last)


@spmd
def test_a_vector_gives_a_vector(backend: str) -> None:
    op = moved()

    def main(backend: Backend) -> Any:
        plan = op.compile(backend)
        x = backend.vector(op.domain, op.domain.integers(1).arrays)
        y, back = plan(x), plan.H(plan(x))
        assert isinstance(y, Vector)
        assert (y.space, back.space) == (op.codomain, op.domain)
        return list(y.arrays), y.inner(plan(x)), x.inner(back)

    results = linop.launch(main, workers=3, backend=backend)
    assert [names for names, _, _ in results] == [["a", "b"], [], ["d"]]
    # An inner product is a number of all workers, however many regions each of them holds.
    x = op.domain.integers(1)
    assert {value for _, *values in results for value in values} == {x.inner(x)}


@pytest.mark.parametrize("name", ["threads", "reference"])
def test_a_process_that_holds_all_workers(name: str) -> None:
    op = moved()
    plan = op.compile(linop.backends.get(name))
    x = op.domain.integers(3)
    y = plan(x.arrays)
    assert list(y) == ["a", "b", "d"]
    assert y["d"].tolist() == x["c"].tolist()
    assert isinstance(plan(x), Vector)
    one = linop.local_operators.diagonal(np.arange(3.0)).compile(linop.backends.get(name))
    assert one(np.ones(3)).tolist() == one.H(np.ones(3)).tolist() == [0, 1, 2]
    with pytest.raises(ArgumentError, match="this process: None given; it holds 'a'"):
        plan(None)


@spmd
def test_start_and_finish(backend: str) -> None:
    def main(backend: Backend) -> list[float]:
        me = float(backend.worker or 0)
        first, second = swapped().compile(backend), swapped().compile(backend)
        assert first.H.H is first
        with pytest.raises(BackendError, match="finish without a start"):
            first.finish()
        first.start(np.array([me]))
        with pytest.raises(BackendError, match="start, while an earlier run is not finished"):
            first.start(np.array([me]))
        # Others may run in between, the adjoint included; messages are not mixed up.
        second.start(np.array([me + 10]))
        back = first.H(np.array([me + 20]))
        results = [float(*second.finish()), float(*first.finish()), float(*back)]
        with pytest.raises(BackendError, match="finish without a start"):
            first.finish()
        return results

    results = linop.launch(main, workers=2, backend=backend)
    assert results == [[11, 1, 21], [10, 0, 20]]


@spmd
def test_a_start_with_a_wrong_argument_leaves_the_plan_usable(backend: str) -> None:
    def main(backend: Backend) -> float:
        plan = swapped().compile(backend)
        with pytest.raises(ShapeError):
            plan.start(np.ones(9))
        return float(*plan(np.array([float(backend.worker or 0)])))

    assert linop.launch(main, workers=2, backend=backend) == [1, 0]


def test_start_does_not_wait() -> None:
    """A worker starts a call before the other begins it: one that is checked, then fast ones."""
    gates = [threading.Event() for _ in range(4)]

    def main(backend: Backend) -> list[float]:
        me, results = backend.worker or 0, list[float]()
        plan = swapped().compile(backend)
        plan(np.array([0.0]))
        for k, gate in enumerate(gates):
            assert me == 0 or gate.wait(20)
            plan.start(np.array([me + 2.0 * k]))
            gate.set()
            results.append(float(*plan.finish()))
        assert plan.counters.calls == 5
        return results

    assert linop.launch(main, workers=2, backend="threads") == [[1, 3, 5, 7], [0, 2, 4, 6]]


def test_an_interrupted_run_cannot_be_finished() -> None:
    def main(backend: Backend) -> None:
        plan: Any = linop.identity(Space(Region("a", 2))).compile(backend)
        plan.start(np.ones(2))
        plan.fail(BackendError("no more"))
        with pytest.raises(BackendError, match="was interrupted: BackendError: no more"):
            plan.finish()

    linop.launch(main, workers=1, backend="threads")


@spmd
@pytest.mark.parametrize("alone", [False, True], ids=["spmd", "whole"])
def test_results_own_their_memory(backend: str, alone: bool) -> None:
    space = Space([A, B])
    ops = [
        linop.identity(space),
        linop.copy(space, A, Region("a2", 2)),
        linop.local(A, A, lambda x: x, lambda y: y),
        linop.direct_sum(linop.identity(Space(A)), linop.local_operators.restriction(B, B[1:])),
    ]

    def main(backend: Backend) -> None:
        for op in ops:
            x = op.domain.integers(5)
            given = backend.vector(op.domain, x.copy().arrays)
            results = list(op.compile(backend)(given).arrays.values())
            arrays = [*given.arrays.values(), *results]
            assert all((given[r.name] == x[r.name]).all() for r in op.domain)
            for k, array in enumerate(arrays):
                assert not any(np.shares_memory(array, other) for other in arrays[:k])
            for array in results:
                array += 1  # and they can be written

    if alone:
        main(linop.backends.get(backend))
    else:
        linop.launch(main, workers=1, backend=backend)


def program(backend: Backend) -> Any:
    """An SPMD program: a halo exchange, a product, sums, and an inner product."""
    X = TensorSpace((11, 3), Partition((4,)), np.int64)
    H = linop.halo_exchange(X, (3, 1), padding=(1, 0))
    scale = [
        linop.local_operators.diagonal(np.arange(r.size).reshape(r.shape), Space(r, int))
        for r in H.codomain
    ]
    plan = (H.H @ linop.direct_sum(*scale) @ H).compile(backend)
    x = backend.vector(X, X.integers(2).arrays)
    y = plan(x)
    everywhere = total(4, 50, np.int64).compile(backend)
    sums = everywhere(np.full(50, y.inner(x)))
    return y[X.region(backend.worker or 0).name].tolist(), x.inner(y), y.norm(), sums.tolist()


def test_the_same_text_gives_the_same_on_every_backend() -> None:
    results = [linop.launch(program, workers=4, backend=name) for name in ("threads", "reference")]
    assert results[0] == results[1]
    assert len({inner for _, inner, _, _ in results[0]}) == 1


def test_repeated_runs_give_the_same_bits() -> None:
    op = total(4, 50, np.float32)
    x = op.domain.random(0)

    def main(backend: Backend) -> bytes:
        plan = op.compile(backend)
        mine = backend.vector(op.domain, x.arrays)
        time.sleep(random.random() / 500)  # messages come in another order each time
        y = plan(mine)
        return b"".join(a.tobytes() for a in y.arrays.values()) + repr(y.inner(mine)).encode()

    runs = [linop.launch(main, workers=4) for _ in range(15)]
    assert all(run == runs[0] for run in runs)
    assert len(set(runs[0])) == 1  # all workers, too


@spmd
def test_inner_products_span_workers_and_count_replicated_regions_once(backend: str) -> None:
    spaces = [
        TensorSpace((7,), LINE, np.int32),
        TensorSpace((7,), LINE, np.complex64, axes=(COPIES,)),
        TensorSpace((7,), LINE, np.float64, axes=(REPLICATED,)),
        Space([Region("r", 4, (1, 2)), Region("s", 5, 2)], np.uint8),
    ]

    def main(backend: Backend) -> list[Any]:
        found = []
        for space in spaces:
            v, w = (backend.vector(space, space.integers(seed).arrays) for seed in (1, 2))
            found += [v.inner(w), (2 * v + w).inner(v), v.norm(), (v - v).norm()]
        return found

    wanted: list[Any] = []
    for space in spaces:
        v, w = space.integers(1), space.integers(2)
        wanted += [v.inner(w), (2 * v + w).inner(v), v.norm(), 0]
    assert linop.launch(main, workers=3, backend=backend) == [wanted] * 3


def test_reference_sees_holders_that_disagree() -> None:
    shared = Space(Region("r", 2, (0, 1)))

    def main(backend: Backend) -> None:
        linop.identity(shared).compile(backend)(np.full(2, float(backend.worker or 0)))

    with pytest.raises(SpaceError, match="'r' is replicated, but worker 1 holds other values than"):
        linop.launch(main, workers=2, backend="reference")


def test_describe_says_the_steps_of_the_workers_held_here() -> None:
    def main(backend: Backend) -> str:
        text: str = moved().compile(backend).describe()
        return text

    parts = []
    for part in linop.launch(main, workers=3):
        *lines, how = part.splitlines()
        nothing = "0 messages sent, 0 bytes; 0 received" in lines[0]
        way = "nothing: this worker exchanges no messages" if nothing else "mailboxes in memory"
        assert how.endswith(way)
        parts.append(part)
    assert [part.splitlines()[0] for part in parts] == [
        "worker 0: a[2], b[3] -> a[2], b[3]; 0 messages sent, 0 bytes; 0 received, 0 bytes",
        "worker 1: c[2] -> nothing; 1 messages sent, 16 bytes; 0 received, 0 bytes",
        "worker 2: nothing -> d[2]; 0 messages sent, 0 bytes; 1 received, 16 bytes",
    ]
    assert moved().compile(linop.backends.get("threads")).describe() == "\n".join(parts)
