"""Seeing inside: counters, traces, descriptions of plans, and traffic rank by rank."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import linop
from linop import Partition, Region, Space, TensorSpace
from linop.backends import Backend
from linop.backends.engine.tracing import Event, Part, events
from linop.backends.mpi import mpirun
from linop.errors import ArgumentError, BackendError
from support.job_programs import ENVIRONMENT
from support.requirements import needs_mpi
from support.traces import rows_of

needs_pictures = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
SPMD = ["threads", "reference"]


def ring(workers: int) -> Any:
    return linop.shift(TensorSpace((4 * workers,), Partition((workers,))), 1)


# Counters


def counted(backend: Backend) -> list[tuple[Any, ...]]:
    plan = ring(3).compile(backend)
    x = np.arange(4.0)
    for _ in range(3):
        plan(x)
    plan.start(x)
    plan.finish()
    plan.H(plan(x))
    assert plan.counters.calls == 5
    assert plan.counters.seconds > 0
    del plan
    other = ring(3).compile(backend)  # of the same text: one row for both
    other(x)
    other.release()
    gc.collect()
    linop.identity(other.domain).compile(backend)  # never called: no row
    return [(r.operator, r.direction, r.calls, r.messages, r.bytes) for r in backend.counters()]


def test_counters_on_threads() -> None:
    rows = [("Shift_{+1}", "forward", 6, 6, 192), ("Shift_{+1}", "adjoint", 1, 1, 32)]
    assert linop.launch(counted, workers=3) == [rows] * 3


def test_the_reference_counts_calls_and_sends_nothing() -> None:
    rows = [("Shift_{+1}", "forward", 6, 0, 0), ("Shift_{+1}", "adjoint", 1, 0, 0)]
    assert linop.launch(counted, workers=3, backend="reference") == [rows] * 3


@pytest.mark.parametrize(("name", "sent"), [("threads", (6, 192)), ("reference", (0, 0))])
def test_one_process_counts_for_all_workers(name: str, sent: tuple[int, int]) -> None:
    backend = linop.backends.get(name)
    plan = ring(3).compile(backend)
    plan(plan(plan.domain.random(1)))
    (row,) = backend.counters()
    assert (row.calls, row.messages, row.bytes) == (2, *sent)
    assert row.seconds == plan.counters.seconds > 0


def test_a_failed_run_does_not_count() -> None:
    region = Region("x", 2)
    backend = linop.backends.get("threads")
    op = linop.local(region, region, lambda x: 1 / 0, lambda y: y)
    with pytest.raises(ZeroDivisionError):
        op.compile(backend)(np.ones(2))
    assert backend.counters() == []


def test_counters_print_as_a_table() -> None:
    def main(backend: Backend) -> str:
        plan = ring(2).compile(backend)
        plan(np.ones(4))
        long = linop.identity(plan.domain)
        for _ in range(8):
            long = long + plan.op @ plan.op
        long.compile(backend)(np.ones(4))
        return str(backend.counters())

    head, first, second = linop.launch(main, workers=2)[0].splitlines()
    assert head.split() == ["operator", "direction", "calls", "messages", "bytes", "seconds"]
    assert first.split()[:5] == ["Shift_{+1}", "forward", "1", "1", "32"]
    assert second.index("…") == 59
    assert len(head) == len(first) == len(second)


def test_counters_keep_no_plan() -> None:
    backend = linop.backends.get("threads")
    for _ in range(20):
        plan = ring(2).compile(backend)
        plan.H(plan(plan.domain.random(1)))
    del plan
    gc.collect()
    assert [row.calls for row in backend.counters()] == [20, 20]
    assert not backend.ledger._plans


# Traces


def traced(backend: Backend, path: str) -> None:
    """The call that tests of traces run."""
    plan = ring(backend.workers or 0).compile(backend)
    x = np.arange(4.0)
    plan(x)
    with backend.trace(path):
        plan(x)
        plan.H.start(x)
        plan(x)
        plan.H.finish()
    plan(x)
    plan.H(x)


def check_trace(path: Path, workers: int, steps: tuple[str, ...]) -> None:
    rows = rows_of(path)
    assert list(rows) == [f"worker {w}" for w in range(workers)]
    for worker, row in enumerate(rows.values()):
        plans = [event for event in row if event["cat"] == "plan"]
        forward, back = "Shift_{+1}", "Shift_{+1}*"
        assert [p["name"] for p in plans] == [forward, f"start {back}", forward, f"finish {back}"]
        for event in plans:
            name = back if back in event["name"] else forward
            assert event["args"] == {"operator": name, "messages": 1, "bytes": 32}
        first = [e for e in row if e["cat"] == "step" and e["ts"] < plans[1]["ts"]]
        labels = [event["name"] for event in first]
        for label in steps:
            after, before = (worker + 1) % workers, (worker - 1) % workers
            assert any(name.startswith(label.format(after)) for name in labels), (label, labels)
        sent = [e for e in first if "x@" in e["name"] and e["args"].get("peer") == after]
        assert [e["args"]["bytes"] for e in sent] == [32]
        (waited,) = [e for e in first if e["name"] == "wait for messages"]
        assert waited["args"] == {"operator": forward, "peers": [before], "bytes": 32}


def test_trace_on_threads(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    linop.launch(lambda backend: traced(backend, str(path)), workers=3)
    check_trace(path, 3, ("post 1 receives", "send 4 elements to {}", "wait for messages"))


def test_trace_of_the_reference_has_no_steps(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    linop.launch(lambda backend: traced(backend, str(path)), workers=2, backend="reference")
    rows = rows_of(path)
    assert [len(row) for row in rows.values()] == [4, 4]
    assert {event["cat"] for row in rows.values() for event in row} == {"plan"}


def test_a_first_call_shows_how_workers_agree(tmp_path: Path) -> None:
    path = tmp_path / "run.json"

    def main(backend: Backend) -> None:
        plan = ring(2).compile(backend)
        with backend.trace(path):
            plan(np.ones(4))

    linop.launch(main, workers=2)
    for row in rows_of(path).values():
        assert [event["name"] for event in row[:2]] == ["Shift_{+1}", "agree on the plan"]


@pytest.mark.parametrize("name", SPMD)
def test_trace_of_one_process(name: str, tmp_path: Path) -> None:
    backend = linop.backends.get(name)
    plan = ring(2).compile(backend)
    x = plan.domain.random(1)
    with backend.trace(tmp_path / "run.json"):
        plan(x)
        plan.start(x)
        plan.finish()
    rows = rows_of(tmp_path / "run.json")
    names = [event["name"] for event in rows["all workers"]]
    assert names == ["Shift_{+1}", "start Shift_{+1}", "finish Shift_{+1}"]
    if name == "threads":
        assert set(rows) == {"all workers", "worker 0", "worker 1"}
        assert any(event["name"].startswith("send 4") for event in rows["worker 1"])


def test_a_trace_changes_no_result_and_no_plan(tmp_path: Path) -> None:
    def main(backend: Backend) -> bool:
        X = TensorSpace((30_000,), Partition((2,)))
        plan = linop.halo_exchange(X, 3).compile(backend)
        x = np.arange(15_000.0)
        plain = plan(x)
        steps = plan._program.instructions  # type: ignore[attr-defined]
        before = list(steps)
        with backend.trace(tmp_path / "run.json"):
            same = np.array_equal(plan(x), plain)
            out = np.zeros_like(plain)
            same &= np.array_equal(plan(x, out=out), plain)
        return same and steps == before

    assert linop.launch(main, workers=2) == [True, True]


def test_a_trace_that_cannot_be_written_is_refused_on_all(tmp_path: Path) -> None:
    def main(backend: Backend) -> tuple[str, bool]:
        with (
            pytest.raises(ArgumentError, match="cannot be written") as caught,
            backend.trace(tmp_path / "missing" / "run.json"),
        ):
            raise AssertionError("the block must not run")
        return str(caught.value), backend.tracing is None

    first, *others = linop.launch(main, workers=3)
    assert first[1] and others == [first] * 2
    assert first[0].endswith("run.json: cannot be written: No such file or directory")


def test_one_trace_at_a_time(tmp_path: Path) -> None:
    backend = linop.backends.get("threads")
    with (
        backend.trace(tmp_path / "a.json"),
        pytest.raises(BackendError, match="another trace is being recorded"),
        backend.trace(tmp_path / "b.json"),
    ):
        pass
    assert not (tmp_path / "b.json").exists()


def test_a_block_that_raises_writes_nothing_and_ends_the_trace(tmp_path: Path) -> None:
    backend = linop.backends.get("threads")
    path = tmp_path / "run.json"
    with pytest.raises(ZeroDivisionError), backend.trace(path):
        1 / 0  # noqa: B018
    assert backend.tracing is None
    assert path.read_text() == ""


def test_machines_are_shifted_to_a_common_start() -> None:
    """Two on one machine keep their times; one on another, whose clock is ahead, is moved."""
    event = Event("a", "step", 7, 0.0, 1e-6, {})
    parts = [
        Part("here", 10.0, {0: [event._replace(begun=10.5)]}),
        Part("here", 10.25, {1: [event._replace(begun=10.5)]}),
        Part("there", 5000.0, {2: [event._replace(begun=5000.5)]}),
    ]
    times = {e["pid"]: e["ts"] for e in events(parts) if e["ph"] == "X"}
    assert times == {0: 5e5, 1: 5e5, 2: 5e5}


def test_threads_of_one_worker_have_lines_of_their_own() -> None:
    row = [Event("a", "step", 900 + k, float(k), 5.0, {}) for k in (0, 1, 0)]
    found = [e for e in events([Part("here", 0.0, {0: row})]) if e["ph"] == "X"]
    assert sorted(e["tid"] for e in found) == [0, 0, 1]


# Descriptions


def test_describe_says_regions_steps_bytes_and_the_way() -> None:
    def main(backend: Backend) -> str:
        text: str = ring(2).compile(backend).describe()
        return text

    assert linop.launch(main, workers=2)[0].splitlines() == [
        "worker 0: x@0[4] -> x@0[4]; 1 messages sent, 32 bytes; 1 received, 32 bytes",
        "  all-to-all over workers 0, 1, 4 elements each:",
        "  receive 4 elements from 1  (32 bytes)",
        "  send 4 elements to 1: x@0  (32 bytes)",
        "  make x@0[4]  (32 bytes)",
        "  wait for messages",
        "  x@0 = message from 1 at 0  (32 bytes)",
        "  next stage",
        "  by messages over mailboxes in memory",
    ]


def test_describe_where_nothing_travels() -> None:
    op = linop.identity(Space([Region("x", 2)]))
    assert (
        op.compile(linop.backends.get("threads"))
        .describe()
        .endswith("by nothing: this worker exchanges no messages")
    )
    text = ring(2).compile(linop.backends.get("reference")).describe()
    assert text.count("by nothing: the reference interprets the expression") == 2


# MPI

MPI = """
import sys
import numpy as np
import linop
from linop import Partition, TensorSpace

def ring(workers, size=4):
    return linop.shift(TensorSpace((size * workers,), Partition((workers,))), 1)

def traced(backend, path):
    plan = ring(backend.workers).compile(backend)
    x = np.arange(4.0)
    plan(x)
    with backend.trace(path):
        plan(x)
        plan.H.start(x)
        plan(x)
        plan.H.finish()
    plan(x)
    plan.H(x)
    return [(r.operator, r.direction, r.calls, r.messages, r.bytes) for r in backend.counters()]
"""


def mpi_program(folder: Path, ranks: int, text: str, windows: bool = True) -> str:
    """Output of a program on ranks."""
    (folder / "program.py").write_text(MPI + text)
    environment = ENVIRONMENT | {"LINOP_WINDOWS": str(int(windows))}
    arguments = [sys.executable, str(folder / "program.py")]
    job = mpirun.mpiexec(ranks, arguments, timeout=60, env=environment)
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout


@needs_mpi
@pytest.mark.parametrize("windows", [True, False])
def test_mpi_traces_and_counts(windows: bool, tmp_path: Path) -> None:
    text = f"""
def main(backend):
    rows = traced(backend, {str(tmp_path / "run.json")!r})
    assert rows == [("Shift_{{+1}}", "forward", 4, 4, 128), ("Shift_{{+1}}", "adjoint", 2, 2, 64)]
    try:
        with backend.trace({str(tmp_path / "missing" / "run.json")!r}):
            pass
    except linop.errors.ArgumentError as error:
        assert "No such file" in str(error)
    else:
        raise AssertionError

linop.launch(main)
"""
    mpi_program(tmp_path, 3, text, windows)
    shared = ("begin", "wait until {} is ready", "write x@", "tell {}", "wait for messages")
    sent = ("post 1 receives", "send 4 elements to {}", "wait for messages")
    check_trace(tmp_path / "run.json", 3, shared if windows else sent)


@needs_mpi
def test_mpi_describes_how_messages_travel(tmp_path: Path) -> None:
    text = """
def main(backend):
    for size in (4, 40_000):
        plan = ring(backend.workers, size).compile(backend)
        for _ in range(2):
            if backend.worker == 0:
                print(plan.describe().splitlines()[-1], flush=True)
            plan(np.ones(size))

linop.launch(main)
"""
    before, small, _, large = mpi_program(tmp_path, 2, text).splitlines()
    likely = "shared memory, for all ranks are on one machine"
    assert before == f"  by a way chosen at the first call; likely {likely}"
    assert small.startswith("  by shared memory: what comes is written into 8 buffers in turn")
    assert small.endswith("for the result has no more than 32768 bytes")
    assert large.startswith("  by shared memory: what comes is written into the result, for 320000")
    before, after, *_ = mpi_program(tmp_path, 2, text, windows=False).splitlines()
    assert after.startswith(
        "  by messages over MPI; all-to-all over workers 0, 1, 4 elements each by"
    )
    assert after.endswith("(fewer than 4 workers), for shared memory is switched off")
    likely = "messages over MPI, for shared memory is switched off"
    assert before == f"  by a way chosen at the first call; likely {likely}"


# Traffic


def grids() -> list[Any]:
    X = TensorSpace((9, 8), Partition((2, 3)))
    H = linop.halo_exchange(X, 3)
    copies = TensorSpace((5,), Partition((4,)), axes=(linop.COPIES,), dtype=np.float32)
    apart = Space([Region("a", 2, 7), Region("b", 2, 30)])
    return [H, H.H, H @ H.H, linop.ring_all_reduce(copies), linop.copy(apart, *apart.regions)]


@pytest.mark.parametrize("k", range(5))
def test_the_matrix_agrees_with_cost_and_plans(k: int) -> None:
    op = grids()[k]
    found = linop.planning.traffic_matrix(op)
    cost = op.cost()
    assert found.bytes.sum() == cost.bytes
    assert found.messages.sum() == cost.messages
    size = op.domain.dtype.itemsize
    wanted: dict[tuple[int, int], int] = {}
    for worker in found.workers.tolist():
        for send in linop.planning.lowering.lower(op.stages, worker).sends:
            key = worker, send.peer
            wanted[key] = wanted.get(key, 0) + send.size * size
    entries = found.bytes.tocoo()
    keys = zip(
        found.workers[entries.row].tolist(), found.workers[entries.col].tolist(), strict=True
    )
    assert dict(zip(keys, entries.data.tolist(), strict=True)) == wanted


def test_a_matrix_prints_rank_by_rank() -> None:
    assert str(linop.planning.traffic_matrix(ring(3))).splitlines() == [
        "bytes from  to 0  to 1  to 2",
        "         0     ·    32     ·",
        "         1     ·     ·    32",
        "         2    32     ·     ·",
    ]


def test_a_large_matrix_is_binned() -> None:
    matrix = linop.planning.traffic_matrix(ring(1000))
    dense, width = matrix.binned(16)
    assert width == 63
    assert dense.shape == (16, 16)
    assert dense.sum() == 32_000
    assert dense[0].tolist() == [62 * 32, 32, *[0] * 14]
    assert matrix.names(width)[-1] == "945–999"
    assert len(str(matrix).splitlines()) == 17


def test_ten_thousand_workers_take_a_moment() -> None:
    X = TensorSpace((1000, 1000), Partition((100, 100)))
    op = linop.halo_exchange(X, 3)
    matrix = linop.planning.traffic_matrix(op)
    assert matrix.bytes.shape == (10_000, 10_000)
    assert matrix.bytes.nnz == op.cost().messages < 90_000


@needs_pictures
@pytest.mark.parametrize(
    "make",
    [
        lambda: ring(3),
        lambda: linop.planning.traffic_matrix(ring(600)),
        lambda: linop.identity(ring(1).domain),
    ],
    ids=["few", "many", "nothing"],
)
def test_a_picture_of_traffic(make: Callable[[], Any], tmp_path: Path) -> None:
    from linop.tools.drawing import traffic

    traffic(tmp_path / "traffic.png", make())
    assert (tmp_path / "traffic.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_core_draws_and_prints_without_extras() -> None:
    code = """
import sys
import linop
op = linop.shift(linop.TensorSpace((4,), linop.Partition((2,))), 1)
backend = linop.backends.get("threads")
print(op, op._repr_latex_(), op.compile(backend).describe(), op.cost())
print(linop.planning.traffic_matrix(op))
extras = {"rich", "matplotlib", "mpi4py", "typer"}
assert not extras & set(sys.modules), sys.modules
"""
    root = str(Path(linop.__file__).parents[1])
    run = [sys.executable, "-c", code]
    said = subprocess.run(run, check=True, cwd=root, capture_output=True, text=True).stdout
    assert "Shift_{+1}" in said and "send 2 elements to 1" in said and "bytes from" in said, said


def test_scipy_s_matrices_are_imported_when_needed() -> None:
    code = "import sys; import linop\nassert 'scipy.sparse' not in sys.modules"
    root = str(Path(linop.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
