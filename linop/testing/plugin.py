"""pytest plugin for ``@linop.testing.spmd``: a marker, options, and a summary of the examples run.

Active once linop is installed; from a checkout, ``pytest -p linop.testing.plugin``. MPI is started
under ``mpiexec`` only, where the ranks run the tests together (`linop.testing.workers.leading`).
Hooks of pytest belong here; running examples is in `linop.testing.workers`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator
from typing import Any

import pytest

from linop.backends import in_mpi_job
from linop.backends.together.settings import SPMD_BACKEND, SPMD_TIMEOUT, SPMD_WORKERS, Setting
from linop.testing.workers import jobs, leading, stacks
from linop.testing.workers.located import MARK
from linop.testing.workers.outcome import FailedExampleError
from linop.testing.workers.rank import Answer
from linop.testing.workers.session import OPTIONS, TALLY
from linop.testing.workers.spmd import Property, relax

IDLE = 60.0
"""Seconds after which ranks without work are ended."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("linop", "tests across workers (@linop.testing.spmd)")
    group.addoption(
        "--linop-workers",
        metavar="N",
        help="run no test on more than N workers (environment: LINOP_SPMD_WORKERS)",
    )
    group.addoption(
        "--linop-backend",
        metavar="mpi|threads",
        help="run all of these tests on that backend (LINOP_SPMD_BACKEND)",
    )
    group.addoption(
        "--linop-timeout",
        metavar="SECONDS",
        help="that long an example may take, whatever its test says (LINOP_SPMD_TIMEOUT)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}: runs on several workers (set by itself)")
    take_options(config)
    stacks.OUTPUT.descriptor = os.dup(2)  # pytest redirects descriptor 2 while a test runs
    if in_mpi_job():
        config.pluginmanager.register(Together(config), "linop-together")


@pytest.fixture
def assert_parallel(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """`linop.testing.assert_parallel`, whose report is kept as the property ``linop`` of the test,
    as JSON."""
    from linop.testing.parallel.check import check_parallel

    def check(*args: Any, **keywords: Any) -> None:
        report = check_parallel(*args, **keywords)
        if report is not None:
            record_property("linop", json.dumps(report.as_dict()))
            if not report:
                raise AssertionError(str(report))

    return check


def take_options(config: pytest.Config) -> None:
    """Read the options (or their environment variables) into `OPTIONS`.

    Raises:
        pytest.UsageError: an option has an invalid value.
    """

    def taken(setting: Setting) -> Any:
        found = setting.found(config.getoption(setting.option))
        if found.wrong:
            raise pytest.UsageError(found.wrong)
        return found.value

    OPTIONS.workers = taken(SPMD_WORKERS)
    OPTIONS.backend = taken(SPMD_BACKEND)
    OPTIONS.timeout = taken(SPMD_TIMEOUT)


def pytest_itemcollected(item: pytest.Item) -> None:
    if property_of(item) is not None:
        item.add_marker(MARK)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    prop = property_of(item)
    if prop is not None:
        relax(getattr(item, "obj"))  # noqa: B009


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the ranks' report of a failed example, without the traceback of this process."""
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, FailedExampleError):
        shown = call.excinfo.getrepr(style="value")
        if notes := getattr(call.excinfo.value, "__notes__", []):
            shown.addsection("the example", "\n".join(notes))
        report.longrepr = shown
    return report


def pytest_runtest_logfinish() -> None:
    """End the ranks that no test has used for a while: together they fill a machine's memory."""
    jobs.close_idle(IDLE)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in summary():
        terminalreporter.write_line(line)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a worker process of pytest-xdist: send the tally to the controller."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        ran = [(backend, n, count) for (backend, n), count in TALLY.ran.items()]
        output["linop"] = ran, dict(TALLY.skipped), sorted(TALLY.left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """In the controller of pytest-xdist: add the tally of a worker process."""
    ran, skipped, left_out = getattr(node, "workeroutput", {}).get("linop", ((), {}, ()))
    for backend, n, count in ran:
        TALLY.ran[backend, n] += count
    TALLY.skipped.update(skipped)
    TALLY.left_out.update(left_out)


def property_of(item: pytest.Item) -> Property | None:
    """The `Property` of a test decorated by `spmd`; None for any other test."""
    prop = getattr(getattr(item, "obj", None), MARK, None)
    return prop if isinstance(prop, Property) else None


def summary() -> list[str]:
    """Lines with the number of examples by backend and number of workers, and skipped tests."""
    lines = []
    for backend in sorted({backend for backend, _ in TALLY.ran}):
        ran = {n: count for (name, n), count in sorted(TALLY.ran.items()) if name == backend}
        numbers = ", ".join(f"{count} on {n}" for n, count in ran.items())
        unit = "ranks" if backend == "mpi" else "threads"
        lines.append(f"spmd: {sum(ran.values())} examples on {backend}: {numbers} {unit}")
    for reason, count in TALLY.skipped.items():
        lines.append(f"spmd: {count} tests skipped: {reason}")
    if TALLY.left_out:
        lines.append(f"spmd: for want of workers, left out: {', '.join(sorted(TALLY.left_out))}")
    return lines


def following(item: pytest.Item) -> leading.Team | None:
    """The team of a rank above 0, for a test whose examples rank 0 sends; otherwise None."""
    team, prop = leading.TEAM, property_of(item)
    if team is None or team.rank == 0 or prop is None or prop.backend != "mpi":
        return None
    return team


class Together:
    """Hooks under ``mpiexec``: rank 0 draws examples and reports, the other ranks follow."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        leading.TEAM = leading.Team([item.nodeid for item in session.items])
        if leading.TEAM.rank > 0:
            self.config.pluginmanager.unregister(name="terminalreporter")

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """On ranks above 0: run the examples that rank 0 sends, instead of the test."""
        team = following(pyfuncitem)
        if team is None:
            return None
        team.follow(pyfuncitem.nodeid)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """On rank 0: announce the begin of a test, and send its outcome to the other ranks."""
        team, prop = leading.TEAM, property_of(item)
        if team is None or team.rank > 0 or prop is None or prop.backend != "mpi":
            return (yield)
        team.begin(item.nodeid)
        answer = Answer("failed")
        try:
            result = yield
            answer = Answer()
        except pytest.skip.Exception as error:
            answer = Answer("skipped", str(error))
            raise
        finally:
            team.end(answer)
        return result

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item) -> bool | None:
        """pytest-timeout's: ranks above 0 have no timer, since rank 0's ends the job.

        One of theirs that fires first makes an answer, which rank 0 reports as a failed test,
        while its own timer fires outside of any test: an internal error of pytest.
        """
        return None if following(item) is None else True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """On ranks above 0: print a failure outside of `spmd` tests, which rank 0 may not have."""
        team = leading.TEAM
        if team is None or team.rank == 0 or not report.failed or MARK in report.keywords:
            return
        text = f"\nrank {team.rank}: {report.nodeid} failed\n{report.longreprtext}\n"
        os.write(stacks.OUTPUT.descriptor, text.encode(errors="replace"))

    def pytest_unconfigure(self) -> None:
        if leading.TEAM is not None:
            leading.TEAM.leave()
