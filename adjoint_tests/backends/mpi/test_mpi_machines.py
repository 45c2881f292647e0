"""Plans on ranks of two machines, made of namespaces: results, ways, errors, and what is left."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import linop
from support.job_programs import PATIENCE, other_sources
from support.machines import NAMES, Machines, missing_machines
from support.requirements import needs_mpi

_missing = missing_machines()
pytestmark = [
    needs_mpi,
    pytest.mark.skipif(bool(_missing), reason=_missing or "machines can be made"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize("each", [1, 2])
def test_all_operators_are_right(machines: Machines, program: Path, each: int) -> None:
    job = machines.run(
        each,
        program,
        "from support.contracts.machines import all_are_right\n"
        "backend = linop.backends.get('mpi', wait_limit=30)\n"
        "found = all_are_right(backend)\n"
        "say(f'right {found > 100} {backend.machines}')\n",
    )
    assert job.returncode == 0, job.stderr
    of = [0, 1] if each == 1 else [0, 0, 2, 2]
    assert job.stdout.splitlines() == [f"right True {of}"] * 2 * each, job.stderr
    assert machines.shared_files() == []


def test_the_way_is_said(machines: Machines, program: Path) -> None:
    job = machines.run(
        2,
        program,
        "backend = linop.backends.get('mpi')\n"
        "plan = total(4).compile(backend)\n"
        "plan(np.ones(3))\n"
        "say(plan.describe())\n",
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("inside this machine shared memory") == 4, job.stdout


@pytest.mark.parametrize("failing", [0, 3])
def test_a_worker_that_fails_is_heard_everywhere(
    machines: Machines, program: Path, failing: int
) -> None:
    job = machines.run(
        2,
        program,
        "backend = linop.backends.get('mpi', wait_limit=10)\n"
        "plan = total(4).compile(backend)\n"
        "plan(np.ones(3))\n"
        "try:\n"
        f"    plan(np.ones(4 if backend.worker == {failing} else 3))\n"
        "except linop.errors.LinopError as error:\n"
        "    say(f'{type(error).__name__}: {error}')\n",
    )
    assert job.returncode == 0, job.stderr
    lines = job.stdout.splitlines()
    assert len(lines) == 4, job.stdout + job.stderr
    assert all("ShapeError" in line and "(4,) given, (3,) expected" in line for line in lines)


def test_a_rank_that_raises_ends_the_job(machines: Machines, program: Path) -> None:
    job = machines.run(
        2,
        program,
        "backend = linop.backends.get('mpi', wait_limit=10)\n"
        "plan = total(4).compile(backend)\n"
        "plan(np.ones(3))\n"
        "if backend.worker == 2: fail()\n"
        "plan(np.ones(3))\n",
    )
    assert job.returncode != 0
    assert "planted" in job.stderr
    assert machines.shared_files() == []


def test_a_call_left_out_is_a_deadlock(machines: Machines, program: Path) -> None:
    job = machines.run(
        2,
        program,
        "backend = linop.backends.get('mpi', wait_limit=5)\n"
        "plan = total(4).compile(backend)\n"
        "plan(np.ones(3))\n"
        "try:\n"
        "    if backend.worker != 1: plan(np.ones(3))\n"
        "    total(4).compile(backend)\n"
        "except linop.errors.DeadlockError as error:\n"
        "    say('told')\n",
    )
    assert job.stdout.splitlines() == ["told"] * 4, job.stdout + job.stderr


@pytest.mark.parametrize("size", [2_000, 8_192])
def test_workers_out_of_step_are_told(machines: Machines, program: Path, size: int) -> None:
    """The number of a call is appended to its messages, which go in one piece, or in two."""
    job = machines.run(
        1,
        program,
        "backend = linop.backends.get('mpi', wait_limit=10)\n"
        f"long = linop.all_reduce(TensorSpace(({size},), Partition((2,)), axes=[COPIES]))\n"
        "there = linop.broadcast(TensorSpace((3,), Partition((1,))), Partition((2,)))\n"
        "one, two = there.compile(backend), long.compile(backend)\n"
        f"x, y = None if backend.worker else np.ones(3), np.ones({size})\n"
        "one(x), two(y), two(y)\n"
        "try:\n"
        "    if backend.worker: two(y)\n"
        "    else: one(x), two(y)\n"
        "except linop.errors.LinopError as error:\n"
        "    say('told' if 'is number' in str(error) else error)\n",
    )
    assert "told" in job.stdout.split(), job.stdout + job.stderr


CALLS = """
backend = linop.backends.get('mpi', wait_limit={limit})
plan = total(4).compile(backend)
x = np.arange(3.0)
wrong = 0
try:
    for k in range({calls}):
        if backend.worker == {stops} and k == 5:
            import signal, subprocess
            subprocess.Popen(['sh', '-c', f'sleep 8; kill -CONT {{os.getpid()}}'])
            os.kill(os.getpid(), signal.SIGSTOP)
        wrong += not np.array_equal(plan(x + k), 4 * (x + k))
        if k == 5:
            say('begun')
            open(sys.argv[0] + '.begun', 'w').close()
        time.sleep(0.01)
    say(f'{{wrong}} of {{k + 1}} wrong')
except linop.errors.DeadlockError as error:
    say('told')
"""


def test_a_stopped_rank_is_told_of_at_the_limit(machines: Machines, program: Path) -> None:
    job = machines.run(2, program, CALLS.format(limit=3, calls=20, stops=3))
    assert job.stdout.split().count("told") >= 3, job.stdout + job.stderr
    assert "wrong" not in job.stdout


def test_a_cable_that_is_cut_and_mended_loses_nothing(machines: Machines, program: Path) -> None:
    begun = program.with_name("program.py.begun")

    def cut() -> None:
        late = time.monotonic() + PATIENCE
        while not begun.exists() and time.monotonic() < late:
            time.sleep(0.1)
        machines.script("on.sh", NAMES[1], "ip", "link", "set", "eth0", "down")
        time.sleep(2)
        machines.script("on.sh", NAMES[1], "ip", "link", "set", "eth0", "up")

    cutting = threading.Thread(target=cut)
    cutting.start()
    job = machines.run(2, program, CALLS.format(limit=60, calls=500, stops=None))
    cutting.join()
    assert job.stdout.count("0 of 500 wrong") == 4, job.stdout + job.stderr


def test_full_shared_memory_of_one_machine(machines: Machines, program: Path) -> None:
    if machines.library() == "MPICH":
        pytest.skip("MPICH itself ends there: it has its messages in /dev/shm")
    machines.script("on.sh", NAMES[1], "mount", "-o", "remount,size=1m", "/dev/shm")
    try:
        machines.script("on.sh", NAMES[1], "sh", "-c", "head -c 900k /dev/zero > /dev/shm/full")
        job = machines.run(2, program, CALLS.format(limit=30, calls=20, stops=None))
    finally:
        machines.script("on.sh", NAMES[1], "rm", "/dev/shm/full")
        machines.script("on.sh", NAMES[1], "mount", "-o", "remount,size=50%", "/dev/shm")
    assert job.stdout.count("0 of 20 wrong") == 4, job.stdout + job.stderr


def test_why_messages_are_used_is_said(machines: Machines, program: Path) -> None:
    job = machines.run(
        2,
        program,
        "backend = linop.backends.get('mpi')\n"
        "line = Partition((2,), (0, 2))\n"
        "op = linop.all_reduce(TensorSpace((3,), line, axes=(COPIES,)))\n"
        "plan = op.compile(backend)\n"
        "plan(np.ones(3) if backend.worker in (0, 2) else None)\n"
        "if backend.worker in (0, 2): say(plan.describe())\n",
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("its workers share no machine") == 2, job.stdout


SETTINGS = """
try:
    linop.backends.get('mpi', wait_limit=20)
    say('works')
except linop.errors.BackendError as error:
    say(error)
"""


def test_other_sources_of_linop_are_told(machines: Machines, program: Path, tmp_path: Path) -> None:
    other_sources(tmp_path)
    job = machines.run(2, program, SETTINGS, other=f"PYTHONPATH={tmp_path}")
    lines = job.stdout.splitlines()
    assert len(lines) == 4, job.stdout + job.stderr
    assert len(set(lines)) == 1
    words = "different versions of linop, or different sources of it: workers 0, 1: "
    assert words in lines[0]
    assert f"; workers 2, 3: {linop.__version__} of sources " in lines[0]


def test_variables_of_one_machine(machines: Machines, program: Path) -> None:
    """A setting that differs is told; an argument may hold in its place, and other variables may
    differ."""
    text = SETTINGS + CALLS.format(limit="30, sums='fixed'", calls=20, stops=None)
    other = "LINOP_SUMS=any TZ=Asia/Tokyo LC_ALL=C PYTHONHASHSEED=7 OMP_NUM_THREADS=3"
    job = machines.run(2, program, text, other=other)
    words = "sums='fixed' by default on workers 0, 1 and LINOP_SUMS=any on workers 2, 3"
    assert job.stdout.count(words) == 4, job.stdout + job.stderr
    assert job.stdout.count("0 of 20 wrong") == 4, job.stdout + job.stderr
