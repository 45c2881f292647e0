"""Output of ``linop verify --torch`` and ``--mpi``: the report of a parallel program beside its
twin, on the console, as JSON and as JUnit's XML. The comparison is in `linop.testing.parallel`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from linop.errors import ArgumentError
from linop.testing.parallel.findings import ParallelReport
from linop.testing.parallel.mpi.report import PairReport
from linop.testing.parallel.twins.relations import Kind
from linop.writing import target, write_text


def show(report: ParallelReport | PairReport, console: Console) -> None:
    """Print a report."""
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)


def write(report: ParallelReport | PairReport, as_json: Path | None, as_junit: Path | None) -> None:
    """Write a report as JSON and as JUnit's XML, each if its path is given.

    Raises:
        ArgumentError: a file cannot be written.
    """
    try:
        if as_json is not None:
            write_text(as_json, json.dumps(report.as_dict(), indent=1) + "\n")
        if as_junit is not None:
            _junit(report).write(str(target(as_junit, streams=True)), pretty=True)
    except OSError as error:
        raise ArgumentError(f"cannot be written: {error}") from None


def _junit(report: ParallelReport | PairReport) -> Any:
    """A report as a JUnit document: a case for the loss, for each gradient, and for each buffer
    that differs. The output of the first one has the movements of the program and their adjoints.
    """
    from junitparser import Failure, JUnitXml, TestCase, TestSuite

    suite = TestSuite("parallel and sequential")
    failures, movements = _failures(report), _movements(report)
    for name, text in failures.items():
        case = TestCase(name, f"linop.verify.{report.program}", report.seconds / len(failures))
        if text:
            case.result = [Failure(text)]
        if movements:
            case.system_out, movements = movements, ""
        suite.add_testcase(case)
    document = JUnitXml("linop verify")
    document.add_testsuite(suite)
    return document


def _movements(report: ParallelReport | PairReport) -> str:
    """Movements forward and backward, as operators in words."""
    return str(report) if isinstance(report, PairReport) else "\n".join(map(str, report.pairs))


def _failures(report: ParallelReport | PairReport) -> dict[str, str]:
    """The text of each thing that was compared, empty if it is right."""
    if isinstance(report, PairReport):
        return {"adjoint": "" if report else str(report)}
    failures = {"loss": "" if report.loss_is_equal else report.loss}
    for name, verdict in report.parameters.items():
        found = next((str(one) for one in report.findings if name in one.parameters), str(verdict))
        failures[name] = "" if verdict.kind is Kind.EQUAL else found
    for name in report.buffers:
        failures[name] = next((str(one) for one in report.findings if one.origin == name), name)
    return failures
