"""Programs under ``mpiexec`` in which one rank waits for another that does not come: they end
within seconds, and every rank says the same."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from linop.backends.mpi import mpirun
from support.job_programs import ENVIRONMENT, PATIENCE, mpiexec
from support.requirements import needs_mpi

pytestmark = [needs_mpi, pytest.mark.timeout(200)]

SOON = 15.0
"""Seconds to the end of a job, its start included; the limit of a wait is 600."""

PROGRAM = """
from linop.errors import LinopError

def main(backend):
    me, n = backend.worker, backend.workers
    odd, x = me == n - 1, np.ones(3)
    A, B = (total(n).compile(backend) for _ in range(2))
    v = backend.vector(A.domain, x)
    for _ in range(3):
        A(x), B(x)
    {misuse}

try:
    linop.launch(main)
    say("ended well")
except LinopError as error:
    say(f"{{type(error).__name__}}: {{error}}")
"""

MISUSES = {
    "skips a call": (
        "odd or A(x); B(x)",
        r"worker 0 waits for (a message from worker|worker \d to receive).*; worker 1 waits",
    ),
    "calls one more": ("A(x); odd and A(x)", r"worker 0 waits for worker \d to end linop\.launch "),
    "returns early": ("if odd: return\n    A(x)", r"worker \d waits for worker \d to end linop\."),
    "exits with 0": ("if odd: sys.exit(0)\n    A(x)", r"worker \d has ended$"),
    "exits with 0, unseen": ("if odd: raise SystemExit\n    A(x)", r"worker \d has ended$"),
    "calls the adjoint": (
        "(A.H if odd else A)(x)",
        r"worker \d to call plan 1 \(adjoint\), <6x6|<9x9",
    ),
    "returns early, and others call in threads": (
        "if odd: return\n"
        "    import threading\n"
        "    def call():\n"
        "        try: A(x)\n"
        "        except LinopError as error: caught.append(error)\n"
        "    caught, thread = [], threading.Thread(target=call)\n"
        "    thread.start(); thread.join()\n"
        "    raise caught[0]",
        r"worker 0 waits for .*; worker 1 waits for worker 0 to end linop\.launch ",
    ),
    "takes a norm alone": ("v.norm() if odd else A(x)", r"worker \d to take a norm or inner prod"),
    "compiles alone": ("total(n).compile(backend) if odd else A(x)", r"worker \d to compile B_"),
    "compiles, and others take a norm": (
        "total(n).compile(backend) if odd else v.norm()",
        r"^BackendError: workers do different things: worker 0: take a norm or inner product.*; "
        r"worker \d: compile B_.*\. Do the same, in the same order",
    ),
}


@pytest.mark.parametrize("windows", ["0", "1"])
@pytest.mark.parametrize("misuse", MISUSES)
def test_a_rank_that_does_not_come(misuse: str, windows: str, program: Path) -> None:
    code, expected = MISUSES[misuse]
    ranks = 2 + list(MISUSES).index(misuse) % 2
    begun = time.monotonic()
    job = mpiexec(ranks, program, PROGRAM.format(misuse=code), LINOP_WINDOWS=windows)
    assert time.monotonic() - begun < SOON
    (said,) = set(job.stdout.splitlines())
    assert said.startswith(("DeadlockError: deadlock: ", "BackendError: ")), said
    assert re.search(expected, said), said
    assert len(job.stdout.splitlines()) == ranks - ("exit" in misuse)


def test_programs_go_on_after_a_deadlock(program: Path) -> None:
    text = """
    for _ in range(3):
        try:
            v.norm() if odd else A(x)
        except LinopError as error:
            assert str(error).startswith("deadlock: "), error
        A = total(n).compile(backend)
        assert A(x).tolist() == [n] * 3
        assert v.norm() > 0
"""
    job = mpiexec(3, program, PROGRAM.format(misuse=text.strip()))
    assert job.stdout.splitlines() == ["ended well"] * 3, job.stderr


@pytest.mark.parametrize("windows", ["0", "1"])
def test_what_was_started_goes_no_further(windows: str, program: Path) -> None:
    """A rank that waits elsewhere has not sent what comes after the wait where `start` left."""
    text = """
    twice = [linop.local(r, r, lambda a: 2 * a, lambda a: 2 * a) for r in A.domain.regions]
    C = (A.op @ linop.direct_sum(*twice) @ A.op).compile(backend)
    C(x)
    odd or time.sleep(0.5)
    C.start(x)
    v.norm() if odd else C.finish()
"""
    begun = time.monotonic()
    job = mpiexec(3, program, PROGRAM.format(misuse=text.strip()), LINOP_WINDOWS=windows)
    assert time.monotonic() - begun < SOON
    (said,) = set(job.stdout.splitlines())
    assert re.search(r"deadlock: worker 0 waits for .*; worker 2 waits for worker \d to take", said)


@pytest.mark.parametrize("windows", ["0", "1"])
def test_a_slow_rank_is_no_deadlock(windows: str, program: Path) -> None:
    """Be it in its own code, or in a local map of a plan."""
    text = """
    if odd: time.sleep(4)
    A(x)
    X = A.domain
    last = X.regions[-1]
    slow = linop.local(last, last, lambda a: (time.sleep(4), a)[1], lambda a: a)
    rest = linop.identity(linop.Space([r for r in X.regions if r is not last]))
    op = A.op @ linop.direct_sum(slow, rest)
    assert op.compile(backend)(x).tolist() == [n] * 3
"""
    job = mpiexec(3, program, PROGRAM.format(misuse=text.strip()), LINOP_WINDOWS=windows)
    assert job.stdout.splitlines() == ["ended well"] * 3, job.stdout + job.stderr


BEFORE = {
    "raise ValueError('planted')": "linop: worker 1 ends the job",
    "sys.exit(3)": "linop: worker 1 ends the job: it left with exit status 3\n",
    "sys.exit(0)": "deadlock: waiting for rank 1 of COMM_WORLD, which has ended, to call linop.lau",
    "MPI.Finalize(); sys.exit(0)": "deadlock: waiting for rank 1 of COMM_WORLD, which has ended",
}


@pytest.mark.parametrize(
    ("how", "imported"),
    [(how, module) for how in BEFORE for module in ("linop.backends.mpi.backend", "mpi4py")],
)
def test_a_rank_that_ends_before_it_starts(how: str, imported: str, program: Path) -> None:
    """Both if it has imported the backend, and if linop alone, which then leaves `sys.exit` as it
    is: the rank has ended, with whatever status."""
    text = f"""
from {imported} import MPI
if MPI.COMM_WORLD.rank == 1:
    {how}
linop.launch(lambda backend: None)
"""
    begun = time.monotonic()
    job = mpiexec(3, program, text)
    assert time.monotonic() - begun < SOON
    assert job.returncode != 0
    if imported == "mpi4py" and how == "sys.exit(3)":
        how = "sys.exit(0)"
    assert BEFORE[how] in job.stderr, job.stderr


def test_mpi_may_be_there_before_linop(program: Path) -> None:
    """A rank that has imported linop alone, and finalizes MPI."""
    text = """
import sys
from mpi4py import MPI
import linop
if MPI.COMM_WORLD.rank == 1:
    MPI.Finalize()
    sys.exit(0)
linop.launch(lambda backend: None)
"""
    program.write_text(text)
    begun = time.monotonic()
    job = mpirun.mpiexec(2, [sys.executable, str(program)], timeout=PATIENCE, env=ENVIRONMENT)
    assert time.monotonic() - begun < SOON
    assert BEFORE["MPI.Finalize(); sys.exit(0)"] in job.stderr, job.stderr


@pytest.mark.parametrize("how", ["sys.exit(3)", "sys.exit(259)"])
def test_a_status_is_the_jobs(how: str, program: Path) -> None:
    """Though others catch what comes of it, or wait for MPI itself."""
    for wait in ("A(x)", "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()"):
        job = mpiexec(3, program, PROGRAM.format(misuse=f"if odd: {how}\n    {wait}"))
        assert job.returncode == 3, job.stderr
        assert "linop: worker 2 ends the job: it left with exit status 3\n" in job.stderr


UNSEEN = """
try:
    main(linop.backends.get("mpi"))
except LinopError as error:
    say(f"{{type(error).__name__}}: {{error}}")
    {then}
"""


@pytest.mark.parametrize("windows", ["0", "1"])
@pytest.mark.parametrize(
    ("status", "then", "the_jobs"),
    [(0, "raise", 1), (0, "pass", 0), (3, "raise", 1), (3, "pass", 3), ("'words'", "pass", 1)],
)
def test_an_exit_that_is_not_seen_is_a_deadlock(
    status: object, then: str, the_jobs: int, windows: str, program: Path
) -> None:
    """`raise SystemExit`, whose status is known only after MPI's end. Where others catch the error
    that comes of it, the job's status is the one that the rank left with."""
    before, _ = PROGRAM.split("\ntry:")
    text = before + UNSEEN.replace("{then}", then)
    begun = time.monotonic()
    misuse = f"if odd: raise SystemExit({status})\n    A(x)"
    job = mpiexec(3, program, text.format(misuse=misuse), LINOP_WINDOWS=windows)
    assert time.monotonic() - begun < SOON
    assert job.returncode == the_jobs, job.stderr
    assert len(said := job.stdout.splitlines()) == 2
    assert all(re.match(r"DeadlockError: deadlock: .*; worker 2 has ended$", one) for one in said)


def test_an_exit_that_is_caught_is_none(program: Path) -> None:
    """Nor is the exception another than it was."""
    text = """
import pickle
from mpi4py import MPI
for leave in (sys.exit, SystemExit, quit):
    try:
        raise leave(3)
    except SystemExit as error:
        assert (error.code, error.args) == (3, (3,))
        assert type(pickle.loads(pickle.dumps(error))) is SystemExit
        error.code = 4
        assert error.code == 4
MPI.COMM_WORLD.Barrier()
"""
    job = mpiexec(2, program, text)
    assert job.returncode == 0, job.stderr
    assert job.stderr == ""


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_takes_no_part_ends_well(late: int, program: Path) -> None:
    """Whoever ends last: no message of ours may be left on its communicators."""
    text = f"""
from linop.backends.mpi.backend import MPI
world = MPI.COMM_WORLD
if world.rank == {late}:
    time.sleep(1.5)
some = world.Split(world.rank == 2)
if world.rank != 2:
    backend = linop.backends.get("mpi", comm=some)
    assert total(2).compile(backend)(np.ones(3)).tolist() == [2] * 3
say("well")
"""
    job = mpiexec(3, program, text)
    assert job.returncode == 0, job.stderr
    assert job.stdout.split() == ["well"] * 3


def test_a_late_rank_is_no_error_of_mpi(program: Path) -> None:
    """Whatever the program wants of errors: that a rank has not ended is none."""
    text = """
import mpi4py
mpi4py.rc.errors = "fatal"
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    time.sleep(2.5)
assert total(2).compile(linop.backends.get("mpi"))(np.ones(3)).tolist() == [2] * 3
assert MPI.COMM_WORLD.Get_errhandler() == MPI.ERRORS_ARE_FATAL
say("well")
"""
    job = mpiexec(2, program, text)
    assert job.returncode == 0, job.stderr
    assert job.stdout.split() == ["well"] * 2


THREAD = """
import threading
def main(backend):
    plan = total(backend.workers).compile(backend)
    plan(np.ones(3))
    def work():
        {work}
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    {after}
linop.launch(main)
"""


@pytest.mark.parametrize(
    ("work", "after"),
    [
        ("backend.worker and fail()", ""),
        ("plan(np.ones(3 + backend.worker))", ""),
    ],
)
def test_an_exception_in_a_thread_ends_the_job(work: str, after: str, program: Path) -> None:
    job = mpiexec(2, program, THREAD.format(work=work, after=after))
    assert job.returncode != 0
    assert "ends the job" in job.stderr, job.stderr


def test_an_exception_in_a_thread_before_linop_starts_is_python_s(program: Path) -> None:
    """It is printed, and the program goes on."""
    text = """
import threading
def fail():
    raise ValueError("planted")
thread = threading.Thread(target=fail)
thread.start()
thread.join()
linop.launch(lambda backend: None)
"""
    job = mpiexec(2, program, text)
    assert job.returncode == 0, job.stderr
    assert "planted" in job.stderr
    assert "ends the job" not in job.stderr, job.stderr


def test_a_rank_that_ends_before_mpi_is_waited_for_until_the_limit(program: Path) -> None:
    """With status 0, which mpiexec takes for well. MPI itself would wait forever."""
    text = """
if next(os.environ[name] for name in ("PMI_RANK", "PMIX_RANK") if name in os.environ) == "1":
    sys.exit(0)
time.sleep(2)
linop.launch(lambda backend: None)
"""
    begun = time.monotonic()
    job = mpiexec(2, program, text, LINOP_WAIT_LIMIT="3")
    assert time.monotonic() - begun < SOON
    assert job.returncode != 0
    # MPICH's own process manager may end first: it cannot write to the rank that has ended.
    ends = "waits_until_all_ranks_have_started_mpi", "HYDU_sock_write"
    assert any(words in job.stderr for words in ends), job.stderr


@pytest.mark.parametrize("limit", ["nan", "0", "-1", "soon"])
def test_a_limit_that_is_none(limit: str, program: Path) -> None:
    text = """
try:
    linop.backends.get("mpi")
except linop.errors.ArgumentError as error:
    say(error)
"""
    job = mpiexec(1, program, text, LINOP_WAIT_LIMIT=limit)
    words = "LINOP_WAIT_LIMIT: expected a number of seconds above 0 (inf for no limit), given "
    assert job.stdout.splitlines() == [f"{words}{limit!r}"], job.stderr
