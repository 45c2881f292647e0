"""Shared memory of ranks, and who may still use it: released plans, ends of MPI, forks, threads.

Programs of ranks: each of these mistakes once ended in wrong results, or in a process that was
killed. Those that leave their process as it was run in one job, the others under their ``mpiexec``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

pytest.importorskip("mpi4py")

from linop.backends.mpi.shared_memory import pool
from support.job_programs import PLANS, mpiexec, runs, runs_beside_others
from support.requirements import needs_mpi

pytestmark = [needs_mpi, pytest.mark.timeout(200)]

several = pytest.mark.parametrize("ranks", [2, 4])
sized = pytest.mark.parametrize("size", [8, 5_000, 200_000])


# Plans that a peer has given up


@several
@sized
@pytest.mark.parametrize("how", ["plan.release()", "del plan; gc.collect()"])
def test_a_plan_that_a_peer_gave_up_is_refused_and_writes_nowhere(
    how: str, size: int, ranks: int
) -> None:
    """The last worker gives it up; the others call it once more. Arrays of the last worker, and its
    numbers, are another plan's by then."""
    text = f"""
import gc
backend = linop.backends.get("mpi", comm=comm, wait_limit=20)
plan, other = (large(n, {size}).compile(backend) for _ in range(2))
for k in range(3):
    assert (plan(np.full({size}, k + me + 1.0)) == sum(range(k + 1, k + 1 + n))).all()
kept = [other(np.full({size}, float(me))) for _ in range(3)]
if me == n - 1:
    {how}
comm.Barrier()
if me < n - 1:
    said = raised(lambda: plan(np.full({size}, 77.0)))
    assert f"call 4 of plan 1, <" in said, said
    assert f"worker {{n - 1}} released its plan after 3 calls" in said, said
    assert "was interrupted" in raised(lambda: plan(np.ones({size})))
for y in kept:
    assert (y == sum(range(n))).all(), y
third = large(n, {size}).compile(backend)
for k in range(9):
    assert (third(np.full({size}, k + me + 1.0)) == sum(range(k + 1, k + 1 + n))).all()
"""
    runs_beside_others(ranks, text)


@several
@sized
def test_who_only_sends_to_a_peer_that_gave_up_is_told(size: int, ranks: int) -> None:
    text = f"""
backend = linop.backends.get("mpi", comm=comm, wait_limit=20)
for root in range(n):
    plan = spread(n, {size}, root).compile(backend)
    x = np.ones({size}) if me == root else None
    for _ in range(3):
        assert (plan(x) == 1).all()
    if me == (root + 1) % n:
        plan.release()
    comm.Barrier()
    if me == root:
        said = raised(lambda: plan(x))
        assert f"worker {{(root + 1) % n}} released its plan after 3 calls" in said, said
"""
    runs_beside_others(ranks, text)


@several
@sized
def test_plans_are_given_up_at_different_times(size: int, ranks: int) -> None:
    """A sender that is ahead, and releases the plan after as many calls as its peers will make."""
    text = f"""
backend = linop.backends.get("mpi", comm=comm, wait_limit=20)
for root in range(n):
    for direction in range(20):
        plan = spread(n, {size}, root).compile(backend)
        time.sleep(0.001 * ((me + direction) % 3))
        for k in range(4):
            y = plan(np.full({size}, float(k)) if me == root else None)
            assert (y == k).all()
        if direction % 2:
            plan.release()
        del plan
"""
    runs_beside_others(ranks, text)


@pytest.mark.parametrize("keeper", [0, 1])
def test_who_leaves_last_writes_to_no_other_plan(keeper: int) -> None:
    """The memory in which a peer would have heard of it is another plan's by then."""
    text = f"""
backend = linop.backends.get("mpi", comm=comm, wait_limit=20)
x = np.ones(3)
for _ in range(5):
    old = large(n, 3).compile(backend)
    old(x)
    if me != {keeper}:
        old.release()
    new = large(n, 3).compile(backend)
    for k in range(4):
        assert new(x).tolist() == [n] * 3
        old.release()
"""
    runs_beside_others(2, text)


def test_caught_failures_lose_no_shared_memory(program: Path) -> None:
    text = """
import gc
backend = linop.backends.get("mpi", wait_limit=20)
def unused():
    return sum(b - a for s in backend._pool.segments for a, b in s._free)
def fail():
    plan = large(n, 1_000_000).compile(backend)
    plan(np.ones(1_000_000))
    raised(lambda: plan(np.ones(3)))
    plan = None
    gc.collect()
    large(n).compile(backend)
    return unused(), len(backend._pool.segments)
first = fail()
for _ in range(5):
    assert fail() == first
"""
    runs(2, program, text)


# Too little memory, and what is left


def ours() -> set[Path]:
    """The files of windows that still have a name."""
    return set(pool.WHERE.glob(f"{pool.PREFIX}*"))


def test_nothing_is_left_of_a_killed_job(program: Path) -> None:
    before = ours()
    text = """
import signal
backend = linop.backends.get("mpi")
plan = large(n).compile(backend)
plan(np.ones(40_000))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert mpiexec(2, program, PLANS + text).returncode != 0
    assert ours() == before


def test_a_file_that_was_left_is_removed_by_the_next_job(program: Path) -> None:
    """One of a job that was killed between making it and mapping it; not one that is being made."""
    left, young = (pool.WHERE / f"{pool.PREFIX}test-{os.getpid()}-{k}" for k in range(2))
    try:
        left.write_bytes(bytes(10))
        young.write_bytes(bytes(10))
        os.utime(left, (time.time() - 3600,) * 2)
        runs(2, program, "linop.backends.get('mpi')")
        assert not left.exists()
        assert young.exists()
    finally:
        left.unlink(missing_ok=True)
        young.unlink(missing_ok=True)


def test_windows_have_their_pages_from_the_start(program: Path) -> None:
    text = """
backend = linop.backends.get("mpi")
before = os.statvfs("/dev/shm").f_bfree
plan = large(n, 4_000_000).compile(backend)
after = os.statvfs("/dev/shm")
size = sum(s.size for s in backend._pool.segments) * n
assert size > 64 << 20
comm.Barrier()
blocks = sum(os.stat(f"/proc/self/map_files/{line.split()[0]}").st_blocks
    for line in open("/proc/self/maps") if "linop-" in line)
assert blocks * 512 >= size, (blocks, size)
"""
    runs(2, program, text)


LIMITS = {
    "address space": """
import resource
limit = int(open("/proc/self/statm").read().split()[0]) * 4096 + (40 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
""",
    "file descriptors": """
import resource
first_free = os.dup(0)
os.close(first_free)
resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, first_free))
""",
    "no room at all": """
from linop.backends.mpi.shared_memory import pool
def full(*arguments):
    raise OSError(28, "No space left on device")
os.posix_fallocate = full
""",
}


@pytest.mark.parametrize("what", LIMITS)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("odd", [0, 1])
def test_one_rank_that_lacks_memory_makes_all_use_messages(
    odd: int, when: str, what: str, program: Path
) -> None:
    """Before the backend is made, or a window for a large plan."""
    limit = "if me == ODD:\n" + "\n".join(f"    {line}" for line in LIMITS[what].splitlines())
    get = 'backend = linop.backends.get("mpi", wait_limit=20)\n'
    text = f"""
ODD = {odd}
import linop.backends.mpi.backend
small = large(n, 3).compile(linop.backends.get("mpi", comm=comm.Dup(), windows=False))
small(np.ones(3))
{limit + get if when == "before" else get + limit}
plan = large(n, 1_000_000).compile(backend)
for _ in range(2):
    assert (plan(np.ones(1_000_000)) == n).all()
say(plan.describe().splitlines()[-1])
"""
    lines = runs(2, program, text.replace("backend = linop", "\nbackend = linop"))
    # MPICH warns of few file descriptors, in lines of its own.
    assert sum("by messages over MPI" in line for line in lines) == 2, lines


def test_a_file_that_is_too_short_is_no_window() -> None:
    """As that of a window is where the rank that makes it may not, and others find it."""
    path = pool.WHERE / f"{pool.PREFIX}short-{os.getpid()}"
    path.touch()
    said = iter([[str(path)] * 3])

    def gather_all(data: str) -> list[str]:
        return next(said, [data] * 3)

    try:
        with pytest.raises(pool.NoWindowError, match="on worker 1"):
            pool.Segment(gather_all, 1, range(3), 4096)
    finally:
        path.unlink()


# The end of a backend


@several
def test_results_outlive_mpi(ranks: int, program: Path) -> None:
    text = """
backend = linop.backends.get("mpi")
plan = large(n).compile(backend)
kept = [plan(np.full(40_000, float(me))) for _ in range(3)]
pending = spread(n).compile(backend)
MPI.Finalize()
for y in kept:
    assert (y == sum(range(n))).all()
    y += 1
    assert (y == sum(range(n)) + 1).all()
assert "MPI is finalized" in raised(lambda: plan(np.ones(40_000)))
assert "MPI is finalized" in raised(lambda: plan.H(np.ones(40_000)))
assert "MPI is finalized" in raised(lambda: large(n).compile(backend))
"""
    runs(ranks, program, text)


@pytest.mark.parametrize("way", ["windows", "messages", "collectives"])
def test_a_run_that_nobody_finishes_keeps_its_memory(way: str, program: Path) -> None:
    """Whoever drops the plan, and when: what comes for it writes to nobody else's memory."""
    text = f"""
import gc, random
way = {way!r}
backend = linop.backends.get(
    "mpi", windows=way == "windows", collectives=way == "collectives" or None
)
mine = random.Random(me)
for seed in range(12):
    size = random.Random(seed).choice([1, 100, 3000, 30_000])
    X = TensorSpace((size * n,), Partition((n,)))
    for op, wanted in ((linop.shift(X, 1), (me - 1) % n), (large(n, size), n * (n - 1) / 2)):
        plan = op.compile(backend)
        for _ in range(1 + seed % 2):
            assert (plan(np.full(size, float(me))) == wanted).all()
        x = np.full(size, float(me))
        plan.start(x)
        del plan, x
        if mine.random() < 0.5:
            gc.collect()
        kept = [np.zeros(size) for _ in range(20)]
        again = large(n, size).compile(backend)
        for _ in range(2):
            assert (again(np.ones(size)) == n).all()
        assert not any(one.any() for one in kept)
say("well")
"""
    assert runs(3, program, text) == ["well"] * 3


@several
@pytest.mark.parametrize("windows", [None, False])
def test_a_freed_communicator_ends_its_plans(windows: bool | None, ranks: int) -> None:
    text = f"""
own = comm.Dup()
backend = linop.backends.get("mpi", comm=own, windows={windows})
plan, fresh = large(n).compile(backend), large(n, 3).compile(backend)
y = plan(np.ones(40_000))
vector = backend.vector(plan.codomain, y)
own.Free()
assert (y == n).all()
wrong = "the communicator of its backend was freed"
for call in (lambda: plan(y), lambda: plan.H(y), lambda: plan.start(y), lambda: fresh(np.ones(3)),
             lambda: large(n).compile(backend), vector.norm):
    assert wrong in raised(call), raised(call)
plan.release()
works = total(n).compile(linop.backends.get("mpi", comm=comm))
assert (works(np.ones(3)) == n).all()
"""
    runs_beside_others(ranks, text)


# Other processes and threads


@several
@pytest.mark.parametrize("windows", [None, False])
def test_a_fork_is_refused_and_disturbs_nobody(
    windows: bool | None, ranks: int, program: Path
) -> None:
    """However it ends."""
    text = f"""
backend = linop.backends.get("mpi", wait_limit=20, windows={windows})
plan, other = large(n).compile(backend), total(n).compile(backend)
wanted = sum(range(n))
assert (plan(np.full(40_000, float(me))) == wanted).all()
def child():
    for call in (lambda: plan(np.full(40_000, 9.0)), lambda: other(np.ones(3)),
                 lambda: plan.H(np.ones(40_000)), lambda: total(n).compile(backend)):
        assert f"is a fork of worker {{me}}" in raised(call), raised(call)
    plan.release()
ends = {{"sys.exit(0)": 0, "sys.exit(3)": 3, "raise ValueError('planted')": 1, "plan = None": 0}}
for end, wanted_status in ends.items():
    pid = os.fork()
    if pid == 0:
        child()
        exec(end)
        break
    for _ in range(20):
        assert (plan(np.full(40_000, float(me))) == wanted).all()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == wanted_status, (end, status)
    for _ in range(20):
        assert (plan(np.full(40_000, float(me))) == wanted).all()
    assert (other(np.full(3, float(me))) == wanted).all()
"""
    runs(ranks, program, text)


@several
def test_threads_compile_and_call_in_one_order(ranks: int) -> None:
    """A thread for each plan; the first calls wait for each other within a rank."""
    text = """
import threading
backend = linop.backends.get("mpi", comm=comm, wait_limit=20)
turn = [0]
changed = threading.Condition()
wrong = []
def work(k):
    try:
        with changed:
            changed.wait_for(lambda: turn[0] == k)
        plan = total(n).compile(backend)
        assert (plan(np.ones(3)) == n).all()
        with changed:
            turn[0] = k + 1
            changed.notify_all()
        for j in range(200):
            assert (plan(np.full(3, 1.0 * j + k)) == n * (j + k)).all()
    except BaseException as error:
        wrong.append(error)
        raise
threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not wrong
"""
    runs_beside_others(ranks, text)


# Long messages


@several
@pytest.mark.parametrize("collectives", [None, True])
def test_messages_of_more_bytes_than_mpi_counts(collectives: bool | None, ranks: int) -> None:
    """With a limit of 1,000 bytes in the place of 2^31 - 1."""
    text = f"""
import linop.planning.collective_selection as together
large_before, together.LARGE = together.LARGE, 1_000
options = dict(windows=False, collectives={collectives}, wait_limit=20)
backend = linop.backends.get("mpi", comm=comm, **options)
try:
    for size in (100, 999, 1000, 1001, 12_345, 100_000):
        X = TensorSpace((size,), Partition((n,)))
        for op in (spread(n, size), large(n, size), linop.shift(X, 3)):
            x = op.domain.random(size)
            x = linop.Vector(op.domain, {{k: a.astype("f8") for k, a in x.arrays.items()}})
            mine = {{r.name: x[r.name] for r in op.domain.on(me)}}
            wanted = op(x)
            plan = op.compile(backend)
            if {collectives} and size > 1000:
                assert "by MPI_" not in plan.describe(), plan.describe()
            for _ in range(2):
                y = plan(backend.vector(op.domain, mine) if mine else None)
                for r in op.codomain.on(me):
                    got = y[r.name] if isinstance(y, linop.Vector) else y
                    assert np.allclose(got, wanted[r.name], rtol=1e-12)
finally:
    together.LARGE = large_before
"""
    runs_beside_others(ranks, text)
