"""Output of ``linop verify``: a table for every check, and JSON and JUnit files for other programs.
Results are computed in `linop.testing.verify_command`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from linop.errors import ArgumentError, MissingExtraError
from linop.testing.verify_command import PROPERTIES, Result
from linop.writing import target, write_text


def show(results: Sequence[Result], console: Console) -> None:
    """Print a table of each check, then the full report of each failure."""
    for name in PROPERTIES:
        found = [result for result in results if result.checked == name]
        if found:
            console.print(_table(name, found))
    for result in results:
        if result.failed:
            text = f"\n{result.case}: {result.error or result.report}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    failed = sum(result.failed for result in results)
    console.print(f"{len(results)} checks, {failed} failed", highlight=False)


def _table(name: str, results: Sequence[Result]) -> Table:
    columns = ("operator", "size", "backend", "error", "tolerance", "seconds", "")
    table = Table(*columns, title=name, title_justify="left")
    for result in results:
        report = result.report
        numbers = ("", "") if report is None else (f"{report.error:.1e}", f"{report.tolerance:.1e}")
        row = (Text(result.case), result.size, result.backend, *numbers, f"{result.seconds:.3f}")
        table.add_row(*row, _verdict(result))
    return table


def _verdict(result: Result) -> Text:
    if result.failed:
        why = result.report.details if result.report is not None else result.error
        return Text(why.splitlines()[0], "red")
    return (
        Text(f"not decided: {result.skipped}", "yellow")
        if result.skipped
        else Text("passed", "green")
    )


def write(results: Sequence[Result], as_json: Path | None, as_junit: Path | None) -> None:
    """Write the results as JSON and as JUnit's XML, each if its path is given.

    Raises:
        ArgumentError: a file cannot be written.
    """
    try:
        if as_json is not None:
            text = json.dumps([result.as_dict() for result in results], indent=1)
            write_text(as_json, text + "\n")
        if as_junit is not None:
            _junit(results).write(str(target(as_junit, streams=True)), pretty=True)
    except OSError as error:
        raise ArgumentError(f"cannot be written: {error}") from None


def need_junit() -> None:
    """Check that JUnit's XML can be written.

    Raises:
        MissingExtraError: junitparser is not installed.
    """
    if importlib.util.find_spec("junitparser") is None:
        raise MissingExtraError("--junit needs junitparser: pip install 'linop-algebra[testing]'")


def _junit(results: Sequence[Result]) -> Any:
    """The results as a JUnit document, with a suite for every check."""
    from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

    document = JUnitXml("linop verify")
    for name in PROPERTIES:
        suite = TestSuite(name)
        for result in results:
            if result.checked != name:
                continue
            case = TestCase(result.case, f"linop.verify.{result.backend}", result.seconds)
            if result.error:
                case.result = [Error(result.error)]
            elif result.failed:
                case.result = [Failure(str(result.report))]
            elif result.skipped:
                case.result = [Skipped(result.skipped)]
            suite.add_testcase(case)
        document.add_testsuite(suite)
    return document
