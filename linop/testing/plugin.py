"""pytest's plugin for ``@linop.testing.spmd``: a marker, options, and what ran on how many workers.

Installed with linop; from a checkout, ``pytest -p linop.testing.plugin``. It starts no MPI, except
under ``mpiexec``, where the ranks run the tests together (`linop.testing.workers.leading`).
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

from linop.backends import in_mpi_job
from linop.backends.settings import SPMD_BACKEND, SPMD_TIMEOUT, SPMD_WORKERS, Setting
from linop.testing.workers import leading, stacks
from linop.testing.workers.located import MARK
from linop.testing.workers.outcome import FailedExampleError
from linop.testing.workers.rank import Answer
from linop.testing.workers.session import OPTIONS, TALLY
from linop.testing.workers.spmd import Property, relax


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
    stacks.OUTPUT.descriptor = os.dup(2)  # what is 2 now, is captured while a test runs
    if in_mpi_job():
        config.pluginmanager.register(Together(config), "linop-together")


def take_options(config: pytest.Config) -> None:
    """Make pytest's options hold for all tests.

    Raises:
        pytest.UsageError: one has a wrong value.
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
    """The report of the ranks has all their stacks; that of this process says nothing."""
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, FailedExampleError):
        shown = call.excinfo.getrepr(style="value")
        if notes := getattr(call.excinfo.value, "__notes__", []):
            shown.addsection("the example", "\n".join(notes))
        report.longrepr = shown
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in summary():
        terminalreporter.write_line(line)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of pytest-xdist's tells the one that reports what has run in it."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        ran = [(backend, n, count) for (backend, n), count in TALLY.ran.items()]
        output["linop"] = ran, dict(TALLY.skipped), sorted(TALLY.left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """The process that reports adds it up."""
    ran, skipped, left_out = getattr(node, "workeroutput", {}).get("linop", ((), {}, ()))
    for backend, n, count in ran:
        TALLY.ran[backend, n] += count
    TALLY.skipped.update(skipped)
    TALLY.left_out.update(left_out)


def property_of(item: pytest.Item) -> Property | None:
    """What `spmd` has made of a test; None if it is another."""
    prop = getattr(getattr(item, "obj", None), MARK, None)
    return prop if isinstance(prop, Property) else None


def summary() -> list[str]:
    """How many examples ran on how many workers, and what did not run."""
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


class Together:
    """Under ``mpiexec``: rank 0 leads, and alone reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        leading.TEAM = leading.Team([item.nodeid for item in session.items])
        if leading.TEAM.rank > 0:
            self.config.pluginmanager.unregister(name="terminalreporter")

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """The others run what rank 0 says, in the place of a test."""
        team, prop = leading.TEAM, property_of(pyfuncitem)
        if team is None or team.rank == 0 or prop is None or prop.backend != "mpi":
            return None
        team.follow(pyfuncitem.nodeid)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Rank 0 says how a test begins and ends."""
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

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """What fails on another rank alone, is said there."""
        team = leading.TEAM
        if team is None or team.rank == 0 or not report.failed or MARK in report.keywords:
            return
        text = f"\nrank {team.rank}: {report.nodeid} failed\n{report.longreprtext}\n"
        os.write(stacks.OUTPUT.descriptor, text.encode(errors="replace"))

    def pytest_unconfigure(self) -> None:
        if leading.TEAM is not None:
            leading.TEAM.leave()
