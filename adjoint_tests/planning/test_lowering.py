"""Lowering: the plans of all workers of an operator.

That plans compute what their operator is, `test_catalogue` says for every operator. Here: they are
the same everywhere, fit together, cost what `cost` says, and grow with a worker's own part only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import COPIES, REPLICATED, LinearOperator, Partition, Region, Space, TensorSpace
from linop.errors import BackendError
from linop.normal_form.maps import LocalMap
from linop.operators.expressions import Local
from linop.operators.named_movement import out_of_place
from linop.planning.lowering import lower
from linop.planning.plan import Advance, Make, Put, Receive, Send
from linop.tools.samples import samples
from support.operators.catalogue import operators
from support.operators.properties import plans_fit, plans_of

LINE = Partition((3,))

PLANS = """
import numpy as np
import linop
from linop import COPIES, REPLICATED, Partition, TensorSpace
from linop.planning.lowering import lower, workers_of

print(hash("linop"))
grid = Partition((2, 3), [5, 3, 1, 4, 2, 0])
X = TensorSpace((7, 8), grid)
halo = linop.halo_exchange(X, (5, 3), stride=(1, 2), padding=1)
moved = linop.repartition(X, Partition((3, 2)))
shared = TensorSpace((4,), Partition((2, 3)), axes=(0, REPLICATED))
copied = linop.repartition(shared, TensorSpace((4,), Partition((2, 3)), axes=(0, COPIES)))
scaled = [linop.local_operators.diagonal(np.arange(float(r.size)), r) for r in copied.codomain]
mixed = copied.H @ linop.direct_sum(*scaled) @ copied
ring = linop.ring_all_reduce(copied.codomain)
kept = linop.offload(X) @ moved.H
ops = [halo, moved, copied, mixed, mixed + mixed @ mixed, ring, kept]
for op in [*ops, *(op.H for op in ops)]:
    print(op, op.stages.digest.hex(), op.stages.fingerprint.hex(), op.cost())
    for worker in workers_of(op.stages):
        print(lower(op.stages, worker).describe())
"""
"""Prints the plans of all workers of many operators, after a line that the hash seed changes."""


def printed_plans(seed: int) -> subprocess.Popen[str]:
    """A process that prints `PLANS` under a hash seed."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    env = os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, "-c", PLANS], env=env, stdout=subprocess.PIPE, text=True
    )


def test_plans_are_equal_under_any_hash_seed() -> None:
    processes = [printed_plans(seed) for seed in range(4)]
    outputs = [process.communicate(timeout=100)[0].partition("\n") for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    hashes, _, plans = zip(*outputs, strict=True)
    assert len(set(hashes)) == 4  # else nothing was tried
    assert plans[0].count("worker ") >= 2 * 6 * 6
    assert set(plans) == {plans[0]}


RANDOM = (
    "random_composition",
    "random_movement",
    "direct_sum",
    "sum_of_operators",
    "repartition",
    "halo_exchange",
    "blur",
)


@pytest.mark.parametrize("name", RANDOM)
@given(data=st.data())
def test_plans_of_random_operators_fit_and_cost_what_cost_says(
    name: str, data: st.DataObject
) -> None:
    plans_fit(data.draw(operators(name)))


def test_plans_of_samples_fit_and_cost_what_cost_says() -> None:
    for _, op in samples(5):
        plans_fit(op)


def halo(workers: int, each: int = 4) -> LinearOperator:
    """A halo of one element on either side of every block of a line of workers."""
    X = TensorSpace((each * workers,), Partition((workers,)), np.float32)
    return linop.halo_exchange(X, 3, padding=1)


def test_cost_of_a_halo_exchange() -> None:
    cost = halo(5).cost()
    assert (cost.messages, cost.bytes) == (8, 8 * 4)
    assert list(cost.workers) == [0, 1, 2, 3, 4]
    for worker, traffic in cost.workers.items():
        peers = 1 if worker in (0, 4) else 2
        assert (traffic.messages_sent, traffic.bytes_sent) == (peers, 4 * peers)
        assert (traffic.messages_received, traffic.bytes_received) == (peers, 4 * peers)


def test_sums_set_where_one_box_holds_the_others_and_add_to_zeros_where_none_does() -> None:
    def steps(*boxes: tuple[int, int]) -> list[str]:
        parts = [Region(f"p{k}", b - a, k) for k, (a, b) in enumerate(boxes)]
        new = Region("y", 6)
        op = out_of_place(
            Space(parts),
            Space(new),
            [(p, new[a:b]) for p, (a, b) in zip(parts, boxes, strict=True)],
        )
        made = [step for step in lower(op.stages, 0).steps if isinstance(step, Make | Put)]
        return [re.sub("message from (.) at 0", r"p\1", str(step)) for step in made]

    assert steps((0, 6), (0, 6)) == ["make y[6]", "y = p0", "y += p1"]
    assert steps((4, 6), (0, 6), (0, 2)) == [
        "make y[6]", "y = p1", "y[4:6] += p0", "y[0:2] += p2"
    ]  # fmt: skip
    assert steps((0, 3), (2, 5)) == ["make y[6] of zeros", "y[0:3] += p0", "y[2:5] += p1"]
    assert steps((0, 2), (2, 6)) == ["make y[6]", "y[0:2] = p0", "y[2:6] = p1"]


def test_a_plan_is_as_long_as_its_own_part() -> None:
    few, many = halo(8).stages, halo(64).stages
    assert len(lower(few, 4).steps) == len(lower(many, 40).steps)
    inner = lower(many, 40)
    assert {step.peer for step in inner.steps if isinstance(step, Send | Receive)} == {39, 41}


def test_a_worker_without_regions_does_nothing() -> None:
    idle = lower(halo(3).stages, 7)
    assert (idle.inputs, idle.outputs) == ((), ())
    assert all(isinstance(step, Advance) for step in idle.steps)


def messages(op: LinearOperator) -> list[tuple[int, int, int]]:
    """(sender, receiver, elements) of every message."""
    return [
        (plan.worker, step.peer, step.size)
        for plan in plans_of(op)
        for step in plan.steps
        if isinstance(step, Send)
    ]


@pytest.mark.parametrize("workers", [(0, 1, 2), (1, 2, 3), (2, 4, 7)])
def test_holders_of_a_replicated_region_read_their_own_copy(workers: tuple[int, ...]) -> None:
    line = Partition((3,), workers)
    shared = TensorSpace((5,), line, axes=(REPLICATED,))
    copied = linop.repartition(shared, TensorSpace((5,), line, axes=(COPIES,)))
    assert messages(copied) == []
    # Its adjoint is the all-reduce: every worker needs what the two others have.
    everybody = [(a, b, 5) for a in workers for b in workers if a != b]
    assert messages(copied.H) == everybody


def test_holders_of_a_replicated_region_share_the_work_of_serving_others() -> None:
    space = Space(Region("a", 5, (0, 1)))
    assert messages(linop.copy(space, space["a"], Region("b", 5, 1))) == []
    assert messages(linop.copy(space, space["a"], Region("b", 5, (0, 1, 2, 3)))) == [
        (0, 2, 5),
        (1, 3, 5),
    ]


def test_a_local_operator_stays_inside_one_worker() -> None:
    ends = Space(Region("a", 2, 0)), Space(Region("b", 2, 1))
    spanning = Local(LocalMap(*ends, lambda x: x, lambda y: y, "L"))
    with pytest.raises(BackendError, match=r"L spans several workers \(a on \(0,\), b on \(1,\)\)"):
        lower(spanning.stages, 0)


def test_describe_says_every_step() -> None:
    plans = plans_of(linop.gather(TensorSpace((6,), LINE)))
    assert [plan.describe() for plan in plans[:2]] == [
        "worker 0: x@0[2] -> x@0[6]; 0 messages sent, 0 bytes; 2 received, 32 bytes\n"
        "  receive 2 elements from 1  (16 bytes)\n"
        "  receive 2 elements from 2  (16 bytes)\n"
        "  make x@0[6]  (48 bytes)\n"
        "  x@0[0:2] = x@0  (16 bytes)\n"
        "  wait for messages\n"
        "  x@0[2:4] = message from 1 at 0  (16 bytes)\n"
        "  x@0[4:6] = message from 2 at 0  (16 bytes)\n"
        "  next stage",
        "worker 1: x@1[2] -> nothing; 1 messages sent, 16 bytes; 0 received, 0 bytes\n"
        "  send 2 elements to 0: x@1  (16 bytes)\n"
        "  next stage",
    ]


def test_describe_says_sums_and_local_operators() -> None:
    space = Space([Region("a", 2), Region("b", 2)], np.int64)
    total = 3 * linop.add(space, space["a"], space["b"])
    (plan,) = plans_of(total)
    lines = plan.describe().splitlines()
    made, first, second = (
        f"  {step}  (16 bytes)" for step in ("make b[2]", "b = 3 · a", "b += 3 · b")
    )
    assert lines.index(made) < lines.index(first) < lines.index(second)
    assert "  a = 3 · a  (16 bytes)" in lines
    (plan,) = plans_of(linop.local_operators.diagonal(np.ones(2), Region("a", 2), name="W"))
    assert "  a = W(a)" in plan.describe().splitlines()
    assert "  keep a" in plan.describe().splitlines()
