"""The backend ``torch`` under torchrun, over gloo, on 1 to 4 processes: contracts that hold on
threads and on ranks of MPI."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from support.contracts import failing_calls as call_contracts
from support.contracts import plans as plan_contracts
from support.contracts import repeated_calls, runs
from support.contracts import torchrun as contracts
from support.job_programs import HEAD, other_sources
from support.layers import contracts as layer_contracts
from support.layers import networks
from support.torchrun import COUNTS, drawn, on_torchrun, torchrun

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("workers", COUNTS)
def test_the_catalogue(workers: int) -> None:
    on_torchrun(workers, contracts.the_catalogue, drawn()[workers], watch=60)


@pytest.mark.parametrize("what", [*plan_contracts.OPERATORS][::2])
def test_every_mode_of_a_call(what: str) -> None:
    on_torchrun(2, repeated_calls.of_several_workers, what, 1)


@pytest.mark.parametrize("workers", [3])
@pytest.mark.parametrize(
    "contract",
    [
        plan_contracts.a_vector_with_out_gives_a_vector,
        runs.one_run_at_a_time,
        runs.a_plan_inside_a_plan,
        runs.released_plans_end,
        runs.senders_may_be_ahead,
        runs.long_sums_may_be_ahead,
        runs.stages_keep_apart,
        repeated_calls.a_halo_in_place,
    ],
    ids=lambda f: f.__name__,
)
def test_a_plan(contract: Callable[..., None], workers: int) -> None:
    on_torchrun(workers, contract)


def test_runs_overlap() -> None:
    on_torchrun(2, runs.runs_overlap, 1)


@pytest.mark.parametrize(
    "contract",
    [contracts.groups_and_settings_are_checked, contracts.forks_have_no_connections],
    ids=lambda f: f.__name__,
)
def test_backends(contract: Callable[..., None]) -> None:
    on_torchrun(2, contract)


# Layers


@pytest.mark.parametrize(
    "contract",
    [
        layer_contracts.movements_are_their_operators,
        layer_contracts.replicated_linear_layers_are_megatrons,
        layer_contracts.shapes_may_be_promised,
        layer_contracts.bad_tensors_are_errors_on_all,
        layer_contracts.different_calls_are_errors_on_all,
    ],
    ids=lambda f: f.__name__,
)
def test_layers(contract: Callable[..., None]) -> None:
    on_torchrun(2, contract, new=True)


def test_lenet_trains_as_its_twin() -> None:
    pytest.importorskip("sklearn")
    on_torchrun(4, networks.lenet_trains_as_its_twin, "digits", 64, 5, 1e-10, watch=60)


# Calls that go wrong


@pytest.mark.parametrize("workers", [4])
@pytest.mark.parametrize(
    "contract",
    [
        call_contracts.a_first_call_fails_everywhere,
        call_contracts.only_its_workers_agree,
        call_contracts.different_plans_are_told,
        call_contracts.different_operators_are_told,
        call_contracts.errors_that_all_catch_are_over,
        call_contracts.errors_of_later_calls_wait,
    ],
    ids=lambda f: f.__name__,
)
def test_a_call(contract: Callable[..., None], workers: int) -> None:
    on_torchrun(workers, contract, wait_limit=10)


def test_debug_mode_agrees_on_every_call() -> None:
    on_torchrun(2, call_contracts.debug_mode_agrees_on_every_call, debug=True, wait_limit=10)


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("trouble", call_contracts.TROUBLES)
def test_a_later_call_fails_everywhere(trouble: str, workers: int) -> None:
    on_torchrun(workers, contracts.a_later_call_fails_everywhere, trouble, 0.02, wait_limit=10)


@pytest.mark.parametrize("when", ["compile", "first call", "later call"])
@pytest.mark.parametrize(("workers", "odd"), [(4, 3)])
def test_waits_end(workers: int, odd: int, when: str) -> None:
    on_torchrun(workers, contracts.waits_end, when, odd, wait_limit=contracts.LIMIT)


# Deadlocks


@pytest.mark.parametrize("misuse", contracts.MISUSES)
def test_deadlocks_are_found(misuse: str) -> None:
    on_torchrun(4, contracts.deadlocks_are_found, misuse)


@pytest.mark.parametrize("workers", [2, 4])
def test_threads_have_plans_of_their_own(workers: int) -> None:
    on_torchrun(workers, call_contracts.threads_have_plans_of_their_own, 2.0)


def test_slow_workers_are_no_deadlock() -> None:
    on_torchrun(4, contracts.slow_workers_are_no_deadlock, 2.0)


# Whole programs


def program(odd: str) -> str:
    """A program in which worker 1 does something else before the second call."""
    return (
        HEAD
        + f"""
def main(backend):
    plan = total(backend.workers).compile(backend)
    say(plan(np.ones(3))[0])
    if backend.worker == 1:
        {odd}
    try:
        plan(np.ones(3))
    except linop.errors.LinopError as error:
        say(f"{{type(error).__name__}}: {{error}}")
        raise

say(linop.launch(main, wait_limit=20))
"""
    )


def test_a_program_runs(tmp_path: Path) -> None:
    done = torchrun(2, tmp_path / "program.py", program("pass"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["2.0", "2.0", "[None, None]", "[None, None]"]


def test_other_sources_of_linop_are_told(tmp_path: Path) -> None:
    other_sources(other := tmp_path / "other")
    where = f"import os, sys\nif os.environ['RANK'] == '1': sys.path.insert(0, {str(other)!r})\n"
    text = """
try:
    linop.backends.get("torch", wait_limit=20)
except linop.errors.BackendError as error:
    say(error)
"""
    done = torchrun(2, tmp_path / "program.py", where + HEAD + text)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and len(set(lines)) == 1, done.stdout + done.stderr
    assert "different sources of it: worker 0: " in lines[0] and "; worker 1: " in lines[0], lines


def test_at_the_limit_all_say_where_they_are(tmp_path: Path) -> None:
    text = program("time.sleep(3)").replace("wait_limit=20", "wait_limit=1")
    done = torchrun(2, tmp_path / "program.py", text)
    assert done.returncode == 1
    for words in (
        "a wait took longer than 1 s: worker 0 waits for a message from worker 1 in stage 0 of pl",
        "linop: worker 1: a wait took longer than 1 s elsewhere: this worker does not wait in lin",
        "time.sleep(3)",
        "first called at program.py:",
    ):
        assert words in done.stdout + done.stderr, (words, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ("fail()", "worker 1 has ended"),
        ("os._exit(0)", "the connection to worker 1 ended during a wait for a message from worker"),
    ],
)
def test_a_worker_that_ends_is_told(odd: str, told: str, tmp_path: Path) -> None:
    done = torchrun(2, tmp_path / "program.py", program(odd))
    assert done.returncode == 1, done.stdout
    # torchrun may end the other before it can say so.
    assert told in done.stdout or "planted" in done.stderr, (done.stdout, done.stderr)


@pytest.mark.parametrize("odd", [0, 1])
def test_a_worker_that_ends_well_is_told_of_at_once(odd: int, tmp_path: Path) -> None:
    """Worker 0 has the store, and stays until the others end."""
    text = program("sys.exit(0)").replace("backend.worker == 1", f"backend.worker == {odd}")
    text = text.replace("wait_limit=20", "wait_limit=600")
    done = torchrun(2, tmp_path / "program.py", text)
    assert "DeadlockError: deadlock: " in done.stdout, (done.stdout, done.stderr)
    assert f"worker {odd} has ended" in done.stdout, (done.stdout, done.stderr)
