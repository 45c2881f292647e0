"""How much work planning and proving are, counted: rows of tables, plans, peak memory; no seconds.

What a worker of 4,096 touches is in `test_lazy_rows`.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import COPIES, LinearOperator, Partition, TensorSpace, simulate
from linop.backends import Backend
from linop.backends.engine.arrays.interface import NUMPY, Arrays
from linop.backends.engine.arrays.overlap import near
from linop.backends.engine.execution.views import Buffer
from linop.normal_form.boxes import Table, canonical
from linop.normal_form.matching import matching
from linop.normal_form.primitives import Add, Clear
from linop.operators import laws
from linop.operators.algebra import expanded
from linop.planning.lowering import lower


def copies(workers: int) -> TensorSpace:
    return TensorSpace((workers,), Partition((workers,)), axes=[COPIES])


@contextmanager
def rows_made() -> Iterator[list[int]]:
    """The lengths of all tables made inside."""
    lengths: list[int] = []
    made = Table.__init__

    def counting(self: Table, dst: np.ndarray, *columns: np.ndarray) -> None:
        lengths.append(len(dst))
        made(self, dst, *columns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Table, "__init__", counting)
        yield lengths


def test_lowering_a_worker_of_a_ring_makes_the_tables_of_its_steps_once() -> None:
    """A product of 62 steps, of which a worker's plan asks for rows six times."""
    stages = linop.ring_all_reduce(copies(32)).stages
    with rows_made() as proving:
        assert len(stages.movements[0].table) == 32 * 32
    fresh = linop.ring_all_reduce(copies(32)).stages
    with rows_made() as lowering:
        assert lower(fresh, 1).steps
    assert sum(lowering) < 1.5 * sum(proving)
    with rows_made() as others:
        for worker in range(2, 32):
            assert lower(fresh, worker).steps
    assert sum(others) < sum(lowering)


def test_another_worker_of_a_small_grid_reads_the_table() -> None:
    X = TensorSpace((12, 12), Partition((3, 3)))
    stages = linop.halo_exchange(X, 3, padding=1).stages
    lower(stages, 0)
    with rows_made() as lengths:
        for worker in range(1, 9):
            lower(stages, worker)
    assert sum(lengths) <= 8 * 8 * 49  # eight times the whole, at most


def peak(work: Callable[[], object]) -> int:
    """The most bytes held at once, above those before."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def all_to_all(workers: int) -> LinearOperator:
    X = TensorSpace((workers, workers), Partition((workers, 1)))
    return linop.repartition(X, Partition((1, workers)))


def test_a_simulated_all_to_all_holds_some_receivers_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And predicts what it does at once: all is summed by receiver."""
    op = all_to_all(128)
    whole, at_once = simulate(op), peak(lambda: simulate(all_to_all(128)))
    monkeypatch.setattr("linop.planning.routing.TRANSFERS_AT_ONCE", 1000)
    some, in_turn = simulate(op), peak(lambda: simulate(all_to_all(128)))
    for name in ("messages_sent", "bytes_sent", "messages_received", "bytes_received"):
        assert (getattr(some, name) == getattr(whole, name)).all()
    for name in ("sending", "waiting", "copying", "adding"):
        # Waiting is a difference of times of a millisecond, which round.
        assert np.allclose(getattr(some, name), getattr(whole, name), rtol=1e-12, atol=1e-18)
    assert some.stages == whole.stages == 1
    assert in_turn < at_once / 4


def halo(workers: int) -> LinearOperator:
    X = TensorSpace((4 * workers,), Partition((workers,)), name="grown")
    return linop.halo_exchange(X, 3, padding=1)


def test_simplifying_looks_at_each_step_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """In proportion to the program: four times the workers are four times the looks; and about once
    at each step, where no step that went has brought two others together."""
    looks = []
    last = laws._Product._last

    def counted(*arguments: Any) -> int:
        looks.append(1)
        return last(*arguments)

    monkeypatch.setattr(laws._Product, "_last", counted)
    found = []
    for workers in (16, 64):
        looks.clear()
        H = halo(workers)
        H.simplify()
        found.append(len(looks))
        parts = [part for op in H._flattened() for action in op.actions for part in action.parts]  # type: ignore[attr-defined]
        assert len(looks) < 1.1 * len(parts)
    assert found[1] < 4.5 * found[0]


def test_a_halo_is_written_out_in_proportion_to_its_messages() -> None:
    """Blocks are not compared each with each: four times the workers are four times the calls."""
    counts = []
    for workers in (64, 256):
        calls = [0]

        def counted(frame: object, event: str, argument: object, calls: list[int] = calls) -> None:
            calls[0] += event in ("call", "c_call")

        H = halo(workers)
        sys.setprofile(counted)
        try:
            expanded(H)
        finally:
            sys.setprofile(None)
        counts.append(calls[0])
    assert counts[1] < 5 * counts[0]


def test_programs_of_thousands_keep_no_object_for_each_action() -> None:
    """Neither written out, nor as an adjoint, nor simplified, nor in the normal form."""
    H = expanded(halo(64)).H
    simple = H.simplify()
    assert simple is not H
    assert len(H.stages.movements[0].table)
    kept = [thing for thing in gc.get_objects() if type(thing) in (Add, Clear)]
    mine = {region.name for step in H._flattened() for region in step.domain}
    assert not [action for action in kept if mine.issuperset(action.names)]


def test_what_stays_where_it_is_is_seen_without_a_long_table() -> None:
    many = linop.all_reduce(copies(1024)).movement()
    assert not many.still
    assert "table" not in vars(many)
    X = TensorSpace((6, 4), Partition((2, 2)))
    assert linop.repartition(X, X.partition).movement().still
    assert not linop.clear(X, X.regions[0][0:1, :]).movement().still
    assert not (2 * linop.identity(X)).movement().still


def test_boxes_side_by_side_are_merged_whatever_their_order() -> None:
    """The chunks of a ring, shuffled, with gaps, and with coefficients that differ."""
    start = np.array([3, 0, 1, 2, 6, 7, 9])
    zeros = np.zeros(7, np.int64)
    at = start[:, None]
    table = Table(zeros, zeros, at, at, np.ones((7, 1), np.int64), zeros + 1)
    merged = canonical(table)
    assert merged.at[:, 0].tolist() == [0, 6, 9]
    assert merged.extent[:, 0].tolist() == [4, 2, 1]


class Planned:
    """Plans that one worker of a network makes, by step."""

    def __init__(self, torch: Any, layers: Any, backend: Backend) -> None:
        side = 2 if backend.workers == 4 else 1
        grid = Partition((1, 1, side, side))
        self.torch, self.worker = torch, backend.worker
        self.model = torch.nn.Sequential(
            *(
                block
                for _ in range(3)
                for block in (
                    layers.Conv2d(grid, 2, 2, 3, padding=1, bias=False),
                    layers.BatchNorm2d(grid, 2),
                )
            )
        )

    def step(self, made: list[int], batch: int, grad: bool = True, wanted: bool = False) -> int:
        x = self.torch.randn(batch, 2, 4, 4, requires_grad=wanted)
        made[self.worker] = 0
        with self.torch.set_grad_enabled(grad):
            y = self.model(x)
            if grad:
                y.sum().backward()
        return made[self.worker]


def test_layers_of_one_shape_share_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three convolutions and norms of one shape are planned as one, forward and backward: halo,
    weight, sums, and scale. Nothing is planned again under no_grad, for who wants a gradient, or
    for another batch size, whose halo is the same but for an extent that nobody cuts."""
    torch = pytest.importorskip("torch")
    layers = pytest.importorskip("linop.layers")
    made = [0] * 4

    def counted(stages: Any, worker: int, placement: Any) -> Any:
        made[worker] += 1
        return lower(stages, worker, placement)

    monkeypatch.setattr("linop.planning.stretching.lower", counted)

    def main(backend: Backend) -> list[int]:
        network = Planned(torch, layers, backend)
        return [
            network.step(made, 2),
            network.step(made, 2),
            network.step(made, 2, grad=False),
            network.step(made, 2, wanted=True),
            network.step(made, 3),
            network.step(made, 3, grad=False),
        ]

    # How workers agree on calls, planned at the first, is a sum as any other.
    assert linop.launch(main, 4, "threads") == [[4 * 2, 0, 0, 0, 0, 0]] * 4


def test_layers_of_one_shape_make_their_operators_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the three convolutions and norms: halo, products, weight, sums (two movements), scale, and
    statistics; of another batch size, halo and products, which have its extent."""
    torch = pytest.importorskip("torch")
    layers = pytest.importorskip("linop.layers")
    made: list[int] = []

    def counted(*arguments: Any) -> Any:
        made.append(1)
        return matching(*arguments)

    def main(backend: Backend) -> list[int]:
        network = Planned(torch, layers, backend)
        counts = []
        for batch, grad in ((2, True), (2, True), (2, False), (3, True), (3, False)):
            before = len(made)
            network.step([0], batch, grad)
            counts.append(len(made) - before)
        return counts

    with monkeypatch.context() as patch:
        patch.setattr("linop.operators.named_movement.matching", counted)
        (alone,) = linop.launch(main, 1, "threads")
    assert alone == [7, 0, 0, 2, 0]


def test_calls_of_many_regions_look_at_each_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """10^4 regions are called in milliseconds, whatever memory their results go to: neither the
    first call, nor one with ``out``, compares each region with each other."""
    count = 300
    space = linop.Space([linop.Region(f"x{k}", 2) for k in range(count)])
    moved = [linop.move(linop.Space(r), r, linop.Region(f"y{r.name}", 2)) for r in space]
    seen = 0

    def counting(answer: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            nonlocal seen
            seen += 1
            return answer(*arguments)

        return counted

    monkeypatch.setattr(Buffer, "__eq__", counting(lambda one, other: one is other))
    asked = counting(Arrays.may_share_memory)
    monkeypatch.setattr(Arrays, "may_share_memory", asked)
    assert asked(NUMPY, np.ones(1), np.ones(1)) is False and Buffer(()) != Buffer(())
    assert seen == 2  # they are counted

    def main(backend: Backend) -> None:
        for op in (linop.direct_sum(*moved), linop.identity(space)):
            plan = op.compile(backend)
            x = {r.name: np.ones(2) for r in op.domain}
            for out in (None, {r.name: np.zeros(2) for r in op.codomain}):
                for _ in range(2):
                    assert all((y == 1).all() for y in plan(x, out=out).values())
        assert all((y == 1).all() for y in plan(x, out=x).values())

    linop.launch(main, 1)
    assert seen <= 5 * count


@given(data=st.data())
def test_arrays_that_meet_are_all_found(data: st.DataObject) -> None:
    """Among many, whatever their steps: those that `may_share_memory` says."""
    memory = np.zeros((12, 10))
    slices = st.slices(12)
    arrays = [
        memory[data.draw(slices), data.draw(st.slices(10))]
        for _ in range(data.draw(st.integers(13, 16)))
    ]
    pairs = [*near(arrays)]
    assert len({frozenset(pair) for pair in pairs}) == len(pairs)
    found = {tuple(sorted(p)) for p in pairs if NUMPY.may_share_memory(*(arrays[k] for k in p))}
    wanted = {
        (j, k)
        for k in range(len(arrays))
        for j in range(k)
        if NUMPY.may_share_memory(arrays[j], arrays[k])
    }
    assert found == wanted
