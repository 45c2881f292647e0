"""Regions in host and device memory, and moving between them.

That operators on spaces of mixed memories are the same interpreted, as matrices, on threads and on
ranks, `test_catalogue` and `test_mpi` say: the factories draw memories. Here is what is theirs
alone. What no backend without an accelerator can show, that a region lies where it says, is not.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import linop
from linop import COPIES, LinearOperator, Movement, Partition, Region, Space, TensorSpace
from linop.backends import Backend
from linop.errors import BackendError
from linop.normal_form.stages import Stages
from linop.planning.plan import Alias, Make, Put
from linop.planning.stage_passes import prepared
from linop.spaces.region import MEMORIES
from linop.testing.describing import (
    COMPUTED,
    Description,
    seeds,
    space_of,
    spaces,
    tensor_of,
)
from linop.testing.describing import tensors as described_tensors
from support.contracts.plans import argument, result, same
from support.operators.catalogue import operators
from support.operators.properties import backend_agrees, plans_fit, plans_of, stays_exact, two_roads
from support.traces import rows_of

memories = st.sampled_from(MEMORIES)
described = st.one_of(
    spaces(4, COMPUTED, least=0).map(space_of), described_tensors(4, dtypes=COMPUTED).map(tensor_of)
)
"""Spaces, and tensor spaces, on four workers or fewer."""

# Regions and spaces


@given(spaces(4, least=1), memories, memories)
def test_the_memory_is_what_a_region_is(space: Description, one: str, other: str) -> None:
    X, Y = (space_of(space).in_memory(memory) for memory in (one, other))
    alike = one == other
    for x, y in zip(X, Y, strict=True):
        assert (x.name, x.shape, x.workers) == (y.name, y.shape, y.workers)
        assert (x == y, len({x, y}) == 1, repr(x) == repr(y)) == (alike,) * 3
        assert x[...].overlaps(y[...]) == (alike and x.size > 0)
        assert (x in Y) == alike
        assert pickle.loads(pickle.dumps(x)) == x
    assert (X == Y, hash(X) == hash(Y), X.digest == Y.digest, str(X) == str(Y)) == (alike,) * 4
    prints = (linop.identity(Z).stages.fingerprint for Z in (X, Y))
    assert (len(set(prints)) == 1) == alike


@given(described_tensors(4), memories, memories)
def test_a_tensor_is_in_one_memory(tensor: Description, one: str, other: str) -> None:
    X, Y = (tensor_of(tensor).in_memory(memory) for memory in (one, other))
    alike = one == other
    assert (X == Y, X.digest == Y.digest, X.numbering == Y.numbering, repr(X) == repr(Y)) == (
        alike,
    ) * 4
    assert X.bounds == Y.bounds and X.axes == Y.axes and X.name == Y.name
    for Z in (X, tensor_of(tensor).in_memory(one)):
        alone = [Z.numbering.at(k) for k in range(len(Z))]  # each by itself, before all are made
        assert Z.regions == tuple(alone)
        assert {region.memory for region in Z} == {one}
    # Equal to the direct sum of its blocks, which says no more than them.
    assert Space(X.regions, X.dtype).in_memory(other) == Y


@given(described, memories)
def test_the_memories_of_a_space_are_those_of_its_regions(X: Space, memory: str) -> None:
    for Y in (X, X.in_memory(memory)):
        assert [MEMORIES[k] for k in Y.numbering.memories] == [region.memory for region in Y]


def test_it_prints() -> None:
    space = Space([Region("a", 2), Region("h", 2, (0, 1), "host")])
    assert str(space) == "a[2]@0 ⊕ h[2]@0,1:host"
    assert repr(space["h"]) == "Region(name='h', shape=(2,), workers=(0, 1), memory='host')"
    assert repr(space["a"]) == "Region(name='a', shape=(2,), workers=(0,))"
    (plan, _) = plans_of(linop.copy(space, space["h"], space["a"]))
    assert plan.describe() == (
        "worker 0: a[2], h[2]:host -> a[2], h[2]:host; 0 messages sent, 0 bytes; "
        "0 received, 0 bytes\n"
        "  make a[2]  (16 bytes)\n"
        "  a = h, host to default memory  (16 bytes)\n"
        "  keep h\n"
        "  next stage"
    )


# What keeps the memory of what it is made from


@given(st.sampled_from(["host", "device"]))
def test_what_is_made_beside_a_region_is_in_its_memory(memory: str) -> None:
    X = TensorSpace((8, 4), Partition((2,)), complex, memory=memory)
    x = X.regions[0]
    C = TensorSpace((8,), Partition((2,)), axes=[COPIES], memory=memory)
    for op in [
        linop.halo_exchange(X, 3, padding=1),
        linop.halo_exchange(X, 3, padding=1, in_place=True),
        linop.pad(X, ((1, 0), (0, 2))),
        linop.repartition(X, Partition((1, 2))),
        linop.gather(X),
        linop.shift(X, 1),
        linop.broadcast(C, Partition((3, 2))),
        linop.all_reduce(C),
        linop.local_operators.fft(x),
        linop.local_operators.restriction(x, x[:1]),
        linop.local_operators.matrix(np.ones((3, 16)), x),
    ]:
        for space in (op.domain, op.codomain):
            assert {region.memory for region in space} == {memory}, op
        assert op.cost().bytes_between_memories == 0, op


@pytest.mark.parametrize("memory", ["host", "device"])
def test_what_a_sum_needs_on_its_way_is_in_the_memory_of_its_terms(memory: str) -> None:
    x, y = Region("x", 2, 0, memory), Region("y", 3, 0, memory)
    A, B = (linop.local_operators.matrix(k * np.ones((3, 2)), x, y) for k in (1, 2))
    for op in (A + B, linop.direct_sum(A, linop.identity(Space(Region("z", 1, 0, memory))))):
        for movement in op.stages.movements:
            for space in (movement.domain, movement.codomain):
                assert {region.memory for region in space} == {memory}


def test_shares_of_a_sum_are_where_the_sum_goes() -> None:
    Y = TensorSpace((100_000,), Partition((2,)), axes=[COPIES], memory="device")
    X = Y.in_memory("host")
    total = Movement.of_blocks(X, Y, [(y[...], x[...], 1) for y in Y for x in X])
    stages = Stages((total,))
    assert len(prepared(stages).movements) == 2
    assert {region.memory for region in prepared(stages).movements[0].codomain} == {"device"}


# Moving


@given(described, memories, memories)
def test_offloading_twice_is_offloading_at_once(X: Space, one: str, other: str) -> None:
    first = linop.offload(X, one)
    assert first.codomain == X.in_memory(one)
    assert type(first.codomain) is type(X)
    second = linop.offload(first.codomain, other)
    assert (second @ first).equals(linop.offload(X, other))
    assert (first.H @ first).equals(linop.identity(X))
    assert (first @ first.H).equals(linop.identity(first.codomain))
    assert linop.offload(first.codomain, one).equals(linop.identity(first.codomain))
    assert second.H.equals(linop.offload(second.codomain, one)) == (second.domain == first.codomain)


@given(described, memories, seeds)
def test_offloading_moves_all_of_it_and_sends_nothing(X: Space, memory: str, seed: int) -> None:
    op = linop.offload(X, memory)
    x = X.integers(seed)
    y = op(x)
    assert all((y[name] == x[name]).all() for name in x.arrays)
    two_roads(op)
    plans_fit(op)
    backend_agrees(op, "threads", seed)
    copies = sum(r.size * len(r.workers) for r in X if r.memory != memory)
    for one in (op, op.H):
        cost = one.cost()
        assert (cost.messages, cost.bytes_between_memories) == (0, copies * X.dtype.itemsize)


@given(spaces(4, COMPUTED), st.data(), seeds)
def test_a_region_in_another_memory_is_another_region(
    space: Description, data: st.DataObject, seed: int
) -> None:
    """Its memory alone tells it from the one it is copied from; sums across memories come out of
    the adjoint."""
    X = space_of(space)
    region = data.draw(st.sampled_from(X.regions))
    new = Region("new", region.shape, region.workers, data.draw(memories))
    copied = linop.copy(X, region, new)
    x = X.integers(seed)
    assert (copied(x)["new"] == x[region.name]).all()
    y = copied.codomain.integers(seed)
    assert (copied.H(y)[region.name] == y[region.name] + y["new"]).all()
    moved = linop.move(X, region, new)
    assert moved.H.equals(linop.move(moved.codomain, new, region))
    for op in (copied, moved):
        backend_agrees(op, "threads", seed)


@pytest.mark.parametrize("backend", ["threads", "reference"])
def test_start_and_finish(backend: str) -> None:
    X = TensorSpace((3000, 4), Partition((2,)))

    def main(backend: Backend) -> None:
        plan = linop.offload(X).compile(backend)
        for one in (plan, plan.H):
            x, kept = argument(one, 1), argument(one, 1)
            one.start(x)
            y = one.finish()
            same(y, result(one, 1))
            assert not np.shares_memory(x, y)
            y[...] = 0
            same(x, kept)

    linop.launch(main, 2, backend)


# Plans

MIXED = ("random_composition", "random_movement", "repartition")


@pytest.mark.parametrize("name", MIXED)
@given(data=st.data())
def test_only_a_copy_changes_the_memory(name: str, data: st.DataObject) -> None:
    op = data.draw(operators(name))
    for plan in (plan for one in (op, op.H) for plan in plans_of(one)):
        made = {step.region.name for step in plan.steps if isinstance(step, Make)}
        for step in plan.steps:
            if isinstance(step, Alias):
                assert step.source.memory == step.target.memory
            if isinstance(step, Put) and step.crosses:
                assert step.target.region.name in made
                assert "memory" in str(step)
                assert not step.keeps


def steps_run(op: LinearOperator, workers: int, seed: int) -> dict[str, list[str]]:
    """Steps of each worker when it applies an operator, whose result is checked."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"

        def main(backend: Backend) -> None:
            plan = op.compile(backend)
            x = argument(plan, seed)
            with backend.trace(path):
                y = plan(x)
            same(y, result(plan, seed))

        linop.launch(main, workers)
        return {row: [event["name"] for event in events] for row, events in rows_of(path).items()}


@pytest.mark.parametrize("name", MIXED)
@given(data=st.data(), seed=seeds)
def test_a_copy_between_memories_is_a_step_of_its_own(
    name: str, data: st.DataObject, seed: int
) -> None:
    """It is not left out, nor made one with another, so that a backend can do it in its own way."""
    op = data.draw(operators(name, 3))
    assume(stays_exact(op))
    done = steps_run(op, 3, seed)
    for plan in plans_of(op):
        for step in plan.steps:
            if isinstance(step, Put) and step.crosses:
                assert str(step) in done[f"worker {plan.worker}"]


@pytest.mark.parametrize("first", ["host", "default"])
@pytest.mark.parametrize("second", ["host", "default"])
def test_a_sum_of_two_is_one_step_inside_one_memory(first: str, second: str) -> None:
    a, b, t = Region("a", 5, 0, first), Region("b", 5, 0, second), Region("t", 5)
    X = Space([a, b])
    copied = linop.copy(X, a, t)
    (labels,) = steps_run(linop.add(copied.codomain, b, t) @ copied, 1, 0).values()
    said = {"host": ", host to default memory", "default": ""}
    apart = [f"t = a{said[first]}", f"t += b{said[second]}"]
    at_once = first == second == "default"
    assert [x for x in labels if x[:2] == "t "] == (["t = a + b"] if at_once else apart)


class TwoStages(LinearOperator):
    """A movement after another, not made one."""

    def __init__(self, first: Movement, second: Movement) -> None:
        super().__init__(first.domain, second.codomain)
        self.movements = first, second

    def _adjoint(self) -> LinearOperator:
        first, second = self.movements
        return TwoStages(second.adjoint(), first.adjoint())

    def _interpret(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        x = self.domain.flatten(self.domain.vector(arrays))
        return self.codomain.unflatten(self.stages.to_matrix() @ x).arrays

    def _stages(self) -> Stages:
        return Stages(self.movements, ((),))

    def symbol(self, latex: bool = False) -> str:
        return "T"


@pytest.mark.parametrize("memory", ["device", "host"])
def test_a_sum_is_made_in_its_own_memory(memory: str) -> None:
    """A large sum that is copied to a result afterwards is made there at once, in one memory."""
    a, b, s = (Region(name, 6000, 0, "device") for name in "abs")
    t = Region("t", 6000, 0, memory)
    X, S, T = Space([a, b]), Space(s), Space(t)
    total = Movement.of_blocks(X, S, [(s[...], a[...], 1), (s[...], b[...], 1)])
    op = TwoStages(total, Movement.of_blocks(S, T, [(t[...], s[...], 1)]))
    (labels,) = steps_run(op, 1, 0).values()
    copied = [label for label in labels if label.startswith("t = s")]
    assert copied == (["t = s, device to host memory"] if memory == "host" else [])


def test_a_name_in_another_memory_is_not_worked_on_in_place() -> None:
    X = Space([Region("a", 9), Region("b", 9)])
    op = linop.offload(X)

    def main(backend: Backend) -> None:
        plan = op.compile(backend)
        x = argument(plan, 1)
        same(plan(x, out=x), result(plan, 1))
        same(plan(x, out=argument(plan, 2)), result(plan, 1))

    linop.launch(main, 1)
    # Nothing is read where it is written: that it is not in place is about the memory alone.
    left = linop.deallocate(X, X["a"])
    for memory in MEMORIES:
        again = linop.copy(left.codomain, X["b"], Region("a", 9, memory=memory)) @ left
        assert [plan.in_place for plan in plans_of(again)] == [memory == "default"]


# Workers


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_that_disagree_about_a_memory_are_told(workers: int) -> None:
    X = TensorSpace((7,), Partition((workers,)))

    def main(backend: Backend) -> None:
        for odd in range(workers):
            memory = "device" if backend.worker == odd else "host"
            for op in (linop.offload(X, memory), linop.identity(X.in_memory(memory))):
                with pytest.raises(BackendError, match="workers built different operators"):
                    op.compile(backend)
        plan = linop.offload(X).compile(backend)
        same(plan(argument(plan, 2)), result(plan, 2))

    linop.launch(main, workers)
