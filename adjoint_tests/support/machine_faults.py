"""Faults between two machines, again and again, and counts of what came of them.

``PYTHONPATH=adjoint_tests python -m support.machine_faults --repeats 20 [NAME ...]`` with
`LINOP_MACHINES`, as in `support.machines`. A repeat is as it should be if every rank that is left
has right results, or the error that is expected within the wait limit and 5 seconds; if the job
ends; and if nothing of linop is left in shared memory.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from support.job_programs import HEAD
from support.machines import NAMES, Machines, two_machines

LATE = 5.0
"""Seconds after the wait limit at which an error is late."""
LAUNCHER = 10.0
"""Seconds that a launcher may take longer than its ranks."""
PROGRAM = """
record = os.open(os.environ["FAULT_RECORD"], os.O_WRONLY | os.O_APPEND)
phase, limit, calls = os.environ["FAULT_PHASE"], float(sys.argv[1]), int(sys.argv[2])

def note(words):
    say(f"{time.monotonic():.3f} {rank} {words}", record)

def reach(name):
    if name == phase:
        note("ready")
        if rank == 3 and name != "steady":
            time.sleep(600)

def main(backend):
    global rank
    rank = backend.worker
    short, long = (TensorSpace((n,), Partition((4,)), axes=(COPIES,)) for n in (300, 30_000))
    line = TensorSpace((403, 10), Partition((4, 1)))
    ops = [linop.all_reduce(short), linop.all_reduce(long), linop.halo_exchange(line, 3, padding=1)]
    reach("compile")
    plans = [op.compile(backend) for op in ops]
    xs = [np.arange(300.0), np.arange(30_000.0), np.arange(4030.0).reshape(403, 10)]
    ours = [xs[0], xs[1], xs[2][line.slices(rank)]]
    wanted = [op(op.domain.vector({r.name: x if k < 2 else x[line.slices(r.workers[0])]
              for r in op.domain.regions})) for k, (op, x) in enumerate(zip(ops, xs))]
    wanted = [one[op.codomain.on(rank)[0].name] for op, one in zip(ops, wanted)]
    reach("first call")
    for k in range(calls):
        for plan, x, y in zip(plans, ours, wanted):
            assert np.array_equal(plan((k % 7) * x), (k % 7) * y), "wrong"
        if k == 5:
            reach("steady")
        time.sleep(0.01)
    reach("end")
    reach("end of launch")
    note("right")

rank = -1
try:
    if phase == "end of launch":
        linop.launch(main, wait_limit=limit)
    else:
        main(linop.backends.get("mpi", wait_limit=limit))
except linop.errors.LinopError as error:
    note(f"{type(error).__name__}: {error}".replace(chr(10), " "))
    time.sleep(1)  # the first that raises ends the job: others have to say theirs before
    raise
except AssertionError as error:
    note(f"wrong: {error}")
    raise
"""


def _inside(machines: Machines, name: str) -> list[int]:
    """Processes of a machine."""
    with suppress(OSError):
        keeper = int((machines.state / f"{name}.pid").read_text())
        own = os.readlink(f"/proc/{keeper}/ns/ipc")
        return [one for one in _processes() if _space(one) == own and one != keeper]
    return []


def _processes() -> list[int]:
    return [int(one) for one in os.listdir("/proc") if one.isdigit()]


def _space(process: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/{process}/ns/ipc")
    return ""


def _ranks(machines: Machines, name: str) -> list[int]:
    found = []
    for one in _inside(machines, name):
        with suppress(OSError):
            arguments = Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0")
            if b"python" in arguments[0] and any(a.endswith(b"fault.py") for a in arguments[1:]):
                found.append(one)
    return found


def _left(machines: Machines, until: float) -> list[int]:
    """Ranks of the first machine that have not ended at some time."""
    while (left := _ranks(machines, NAMES[0])) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def _await(machines: Machines, job: subprocess.Popen[str], until: float, alone: bool) -> None:
    """Wait for a job's end, but if `alone` not longer than `LAUNCHER` after its ranks' on the first
    machine: a launcher may wait for a machine without power for ever."""
    ended = 0.0
    while job.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
        if not alone or _ranks(machines, NAMES[0]):
            ended = 0.0
        elif not ended:
            ended = time.monotonic()
        elif time.monotonic() > ended + LAUNCHER:
            return


def _kill(processes: list[int], number: signal.Signals = signal.SIGKILL) -> None:
    for one in processes:
        with suppress(ProcessLookupError):
            os.kill(one, number)


def _cable(machines: Machines, state: str) -> None:
    switch = (machines.state / "switch.pid").read_text().strip()
    command = ["nsenter", "-t", switch, "-n", "ip", "link", "set", "v2", state]
    subprocess.run(command, check=True)


def _cut(seconds: float) -> Callable[[Machines], None]:
    def act(machines: Machines) -> None:
        _cable(machines, "down")
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(_ranks(machines, name) for name in NAMES):
            time.sleep(0.1)
        _cable(machines, "up")

    return act


def _gone(machines: Machines) -> None:
    keeper = int((machines.state / "node2.pid").read_text())
    _kill([*_inside(machines, NAMES[1]), keeper])


def _powerless(machines: Machines) -> None:
    """A machine that says nothing any more: not even that its connections are closed."""
    _cable(machines, "down")
    _kill(_inside(machines, NAMES[1]), signal.SIGSTOP)


def _slow(machines: Machines) -> None:
    """Ranks of one machine run for a tenth of the time."""
    ranks = _ranks(machines, NAMES[1])
    for _ in range(40):
        _kill(ranks, signal.SIGSTOP)
        time.sleep(0.18)
        _kill(ranks, signal.SIGCONT)
        time.sleep(0.02)


def _slowed(*how: str) -> Callable[[Machines], None]:
    """Both directions of the cable through a queueing discipline."""

    def act(machines: Machines) -> None:
        for name in NAMES:
            machines.script("on.sh", name, "tc", "qdisc", "add", "dev", "eth0", "root", *how)

    return act


def _nothing(machines: Machines) -> None:
    del machines


@dataclass(frozen=True)
class Fault:
    """A fault: its action, its time, and the outcome that is expected.

    Attributes:
        act: the fault; it takes place when all ranks are ready.
        phase: where they are.
        expected: "right", or the class of the error on ranks that are left; "" if the launcher may
            end them before.
        left: number of ranks that are left.
        before: made before the job starts.
    """

    act: Callable[[Machines], None]
    expected: str
    phase: str = "steady"
    limit: float = 600
    calls: int = 100
    left: int = 4
    before: Callable[[Machines], None] = _nothing
    patience: float = 300


RATE = "tbf", "rate", "10mbit", "burst", "16kb", "latency", "50ms"
LOSSY = "tbf", "rate", "20mbit", "burst", "4kb", "limit", "8kb"
PHASES = (
    ("compile", 10),
    ("first call", 10),
    ("steady", 3000),
    ("end", 10),
    ("end of launch", 10),
)
FAULTS = {
    "cable cut for 5 s": Fault(_cut(5), "right"),
    "cable cut for 60 s": Fault(_cut(60), "right"),
    "cable cut for 60 s, limit 20 s": Fault(_cut(60), "DeadlockError", limit=20, calls=3000),
    "ranks of one machine run a tenth of the time": Fault(_slow, "right", limit=20, calls=60),
    "cable of 10 Mbit/s": Fault(_nothing, "right", limit=20, calls=10, before=_slowed(*RATE)),
    "cable that loses packets": Fault(
        _nothing, "right", limit=20, calls=10, before=_slowed(*LOSSY)
    ),
    **{
        f"machine {how}, {phase}": Fault(
            act, error, phase, limit=5, calls=calls, left=2, patience=60
        )
        for phase, calls in PHASES
        for how, act, error in (("gone", _gone, ""), ("without power", _powerless, "DeadlockError"))
    },
}


@contextmanager
def _fresh() -> Iterator[Machines]:
    with tempfile.TemporaryDirectory() as folder, two_machines(Path(folder)) as machines:
        try:
            yield machines
        finally:
            for name in NAMES:
                _kill(_inside(machines, name))


def once(fault: Fault) -> tuple[str, str]:
    """One repeat: what came of it in short, and the records of ranks."""
    with _fresh() as machines:
        record = machines.state / "record"
        record.touch()
        program = machines.state / "fault.py"
        program.write_text(HEAD + PROGRAM)
        env = {"FAULT_RECORD": str(record), "FAULT_PHASE": fault.phase, "PYTHONFAULTHANDLER": "1"}
        fault.before(machines)
        arguments = [sys.executable, str(program), str(fault.limit), str(fault.calls)]
        with (machines.state / "out").open("w+") as out:
            job = machines.start(2, arguments, out, **env)
            ends = time.monotonic() + fault.patience + fault.limit % 600
            while record.read_text().count(" ready") < 4 and time.monotonic() < ends:
                if job.poll() is not None:
                    break
                time.sleep(0.02)
            ready = record.read_text().count(" ready")
            begun = time.monotonic()
            fault.act(machines)
            _await(machines, job, ends, alone=fault.left < 4)
            after = time.monotonic() - begun
            hung = job.poll() is None
            left = [] if hung else _left(machines, begun + fault.limit + LATE)
            alone = hung and not _ranks(machines, NAMES[0])
            if hung:
                _kill(_ranks(machines, NAMES[0]), signal.SIGABRT)  # each prints where it was
                time.sleep(1)
                _kill([p for name in NAMES for p in _inside(machines, name)])
                job.kill()
                job.wait()
            out.seek(0)
            said = record.read_text() + f"status {job.returncode} after {after:.1f} s\n"
            said += "".join(f"| {line}" for line in out.readlines()[-90:])
        lines = [line.split(" ", 2) for line in record.read_text().splitlines()]
        told = [(float(at) - begun, words) for at, _, words in lines if words != "ready"]
        problems = []
        if ready < 4:
            problems.append(f"{ready} ranks ready")
        if alone:
            problems.append("the launcher stays")
        elif hung:
            problems.append("no end")
        if left:
            problems.append(f"{len(left)} ranks run on")
        if any("wrong" in words for _, words in told):
            problems.append("wrong results")
        if fault.expected == "right":
            if [words for _, words in told] != ["right"] * 4:
                problems.append(f"{sum(w == 'right' for _, w in told)} ranks right")
            if job.returncode:
                problems.append(f"status {job.returncode}")
        else:
            as_expected = [
                at
                for at, words in told
                if words.startswith(fault.expected) and at < fault.limit + LATE
            ]
            if fault.expected and len(as_expected) < fault.left:
                problems.append(f"{len(as_expected)} ranks told in time")
            # Open MPI's launcher may end with status 0 where it has lost a machine.
            if job.returncode == 0 and fault.expected and not hung:
                problems.append("status 0")
        with suppress(subprocess.CalledProcessError):
            names = NAMES if fault.left == 4 else NAMES[:1]
            files = [
                f for n in names for f in machines.script("on.sh", n, "ls", "/dev/shm").split()
            ]
            if any(file.startswith("linop-") for file in files):
                problems.append("shared memory left")
            elif files:
                said += f"MPI's in /dev/shm: {files}\n"
        latest = max([at for at, _ in told], default=0)
        said += f"last told after {latest:.1f} s\n"
        return ", ".join(problems) or "as it should be", said


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no repeat after these")
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    ends = time.monotonic() + given.seconds
    for name in given.names or FAULTS:
        counts: Counter[str] = Counter()
        slowest = 0.0
        for _ in range(given.repeats):
            if time.monotonic() > ends:
                break
            begun = time.monotonic()
            what, said = once(FAULTS[name])
            slowest = max(slowest, float(said.rsplit("after ", 1)[1].split()[0]))
            counts[what] += 1
            if given.show or what != "as it should be":
                print(f"--- {name}: {what} ({time.monotonic() - begun:.0f} s)\n{said}", flush=True)
        print(f"| {name} | {sum(counts.values())} | {dict(counts)} | {slowest:.1f} |", flush=True)


if __name__ == "__main__":
    main()
