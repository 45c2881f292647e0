"""Calls that one worker leaves out: the others notice, and use no message of another call."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.job_programs import PLANS, mpiexec, runs, runs_beside_others
from support.requirements import needs_mpi

pytestmark = [needs_mpi, pytest.mark.timeout(200)]

several = pytest.mark.parametrize("ranks", [2, 4])
sized = pytest.mark.parametrize("size", [8, 5_000, 200_000])


@several
@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.parametrize("size", [1, 3_000])
def test_a_call_that_a_worker_left_out_is_noticed(size: int, windows: bool, ranks: int) -> None:
    """At the next call of another plan, as soon as a message of it comes. The sender of the call
    that is left out is ahead, as long as there are buffers; by messages that is nowhere above what
    MPI keeps for itself."""
    text = f"""
backend = linop.backends.get(
    "mpi", comm=comm, wait_limit=20, windows={windows}, collectives=False)
one, two = spread(n, {size}).compile(backend), large(n, {size}).compile(backend)
for k in range(20):
    one(np.ones({size}) if me == 0 else None)
    two(np.ones({size}))
def rest():
    if me != 1:
        one(np.ones({size}) if me == 0 else None)
    two(np.ones({size}))
said = raised(rest)
if {not windows and size > 1} and said.startswith("DeadlockError: "):
    pass
else:
    assert "out of step" in said and "the workers of plan 2, <" in said, said
    assert ("is number 41 here, and number 42 on worker" in said
        or "is number 42 here, and number 41 on worker 1" in said), said
"""
    runs_beside_others(ranks, text)


@several
@pytest.mark.parametrize("windows", [True, False])
def test_a_last_call_that_a_worker_left_out_is_noticed(windows: bool, ranks: int) -> None:
    """When all compile again; for what was sent would be taken for messages of the next call."""
    text = f"""
backend = linop.backends.get(
    "mpi", comm=comm, wait_limit=20, windows={windows}, collectives=False)
one = spread(n, 1).compile(backend)
for k in range(3 if me == 1 else 4):
    one(np.ones(1) if me == 0 else None)
said = [raised(lambda: large(n, 1).compile(backend)) for _ in range(2)]
each = ", ".join(f"{{3 if w == 1 else 4}} on worker {{w}}" for w in range(n))
assert all("out of step" in one and each in one for one in said), said
"""
    runs_beside_others(ranks, text)


def test_a_call_that_a_worker_left_out_is_noticed_at_the_end(program: Path) -> None:
    """One plan, whose data go one way: nothing else differs."""
    text = """
def main(backend):
    plan = spread(n, 3).compile(backend)
    for k in range(10):
        if k != 5 or me == 0:
            plan(np.ones(3) if me == 0 else None)
said = raised(lambda: linop.launch(main))
assert "out of step" in said and "10 on worker 0, 9 on worker 1" in said, said
"""
    runs(2, program, text)


def test_a_worker_without_a_part_breaks_nothing(program: Path) -> None:
    text = """
backend = linop.backends.get("mpi", wait_limit=20)
plan = spread(2, 3).compile(backend)
plan(np.ones(3) if me == 0 else None)
if me == 2:
    assert "ArgumentError" in raised(lambda: plan(np.ones(3)))
comm.Barrier()
for _ in range(2):
    assert me == 2 or (plan(np.ones(3) if me == 0 else None) == 1).all()
"""
    runs(3, program, text)


@several
@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.parametrize("how", ["pool", "new", "one rank", "compile"])
def test_threads_may_share_the_calls(how: str, windows: bool, ranks: int) -> None:
    """All workers make the same calls in the same order, each in a thread that it likes."""
    text = f"""
import threading
from concurrent.futures import ThreadPoolExecutor
backend = linop.backends.get("mpi", comm=comm, wait_limit=20, windows={windows})
pool = ThreadPoolExecutor(2)
def in_new(call):
    done = []
    thread = threading.Thread(target=lambda: done.append(call()))
    thread.start()
    thread.join()
    return done[0]
def made(k, call):
    if {how!r} == "pool":
        return pool.submit(call).result()
    if {how!r} == "new" or {how!r} == "one rank" and me == 1 and k % 3 == 0:
        return in_new(call)
    return call()
compiled = in_new if {how!r} == "compile" and me == 1 else lambda call: call()
x = np.ones(3)
plans = [spread(n, 3).compile(backend), large(n, 3).compile(backend)]
for k in range(60):
    if k == 30:
        plans.append(compiled(lambda: spread(n, 3, 1).compile(backend)))
    plan = plans[k % len(plans)]
    root = {{0: 0, 1: None, 2: 1}}[k % len(plans)]
    y = made(k, lambda: plan(x if root in (None, me) else None))
    assert (y == (n if root is None else 1)).all()
"""
    runs_beside_others(ranks, text)


@several
def test_calls_that_need_not_be_in_order_are_not_compared(ranks: int) -> None:
    """Runs that overlap are begun as a worker likes; so are those of threads; and a worker that
    failed in one call, and one that did not notice, go on with other plans."""
    text = """
import threading
backend = linop.backends.get("mpi", comm=comm, wait_limit=20)
plans = [spread(n, 100).compile(backend) for _ in range(4)]
x = np.ones(100) if me == 0 else None
for plan in plans:
    plan(x)
for k in range(50):
    order = plans if me % 2 else plans[::-1]
    for plan in order:
        plan.start(x)
    for plan in plans:
        plan.finish()
    if me % 2:
        plans[0].start(x)
        plans[0].finish()
    else:
        plans[0](x)
    plans[1](x)
def work(plan):
    for _ in range(100 + 50 * (me % 2)):
        time.sleep(1e-5 * (me % 2))
    for _ in range(100):
        plan(x)
threads = [threading.Thread(target=work, args=(plan,)) for plan in plans]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for _ in range(20):
    assert all((plan(x) == 1).all() for plan in plans)
"""
    runs_beside_others(ranks, text)


ONE_WAY = """
comm = MPI.COMM_WORLD.Dup()
backend = linop.backends.get("mpi", comm=comm, windows={windows}, collectives=False)
plan = spread(n, 3).compile(backend)
for k in range(10):
    if k != 5 or me != 1:
        plan(np.ones(3) if me == 0 else None)
{end}
"""


@several
@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.parametrize("end", ["", "comm.Free()", "MPI.Finalize()", "raise SystemExit"])
def test_a_call_left_out_is_noticed_when_the_ranks_end(
    end: str, windows: bool, ranks: int, program: Path
) -> None:
    """A program without `launch`, whose data go one way."""
    job = mpiexec(ranks, program, PLANS + ONE_WAY.format(windows=windows, end=end))
    assert job.returncode != 0
    each = ", ".join(f"{9 if w == 1 else 10} on worker {w}" for w in range(ranks))
    for rank in range(ranks):
        words = rf"linop: worker {rank} ends the job: BackendError: workers are out of step.*{each}"
        assert re.search(words, job.stderr), job.stderr


def test_a_call_left_out_is_not_told_twice(program: Path) -> None:
    """A program that catches the error ends as it likes."""
    end = 'raised(lambda: spread(n, 3).compile(backend))\nos.write(1, b"caught\\n")'
    text = ONE_WAY.format(windows=True, end=end)
    assert runs(2, program, text) == ["caught"] * 2


def test_receives_of_one_sender_are_posted_in_the_order_of_its_sends(program: Path) -> None:
    """A share of a sum is received into a lent result, and a message of the next stage into a
    buffer that is the plan's."""
    text = """
size = 80_000
terms = [linop.Region(f"x{w}", size, w) for w in range(2)]
first, second = linop.Region("y0", size, 0), linop.Region("y1", size + 1, 1)
op = linop.allocate(linop.Space(terms), first, second)
for target in first[:], second[1:]:
    for term in terms:
        op = linop.add(op.codomain, term, target) @ op
op = linop.add(op.codomain, terms[0][:1], second[:1]) @ op
for term in terms:
    op = linop.deallocate(op.codomain, term) @ op
plan = op.compile(linop.backends.get("mpi", windows=False))
for k in range(3):
    values = [np.arange(size) + float(k), np.arange(size) * 1000.0]
    total = values[0] + values[1]
    expected = np.r_[values[0][:1], total] if me else total
    assert np.array_equal(plan(values[me]), expected)
assert any(put.stored for put in puts_of(plan._program.plan.steps))
"""
    runs(2, program, "from linop.planning.plan import puts_of\n" + text)
