"""Planting faults in copies of the tree, and what tests say there.

Nothing is installed: pytest runs in the copy, which is first on its path. Examples are
derandomized, so that a run can be repeated.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mutation.fault import Fault, PlaceError

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("linop", "backends", "layers", "adjoint_tests", "examples", "setup.cfg")
"""Folders and files that the tests need."""
LIMIT = 300.0
"""Seconds for the tests of one fault. The suite's own watches end a hang long before that."""
CALM = 3600.0
"""Seconds for the tests without a fault: none of them ends at once."""
ENDED = "pytest ended"
GONE = "its place is gone"
_PARSING = threading.Lock()
"""CPython 3.11 counts the depth of `ast.parse` for all threads together, and fails where two parse
at once (gh-106905)."""


@dataclass(frozen=True)
class Outcome:
    """Result of the tests of one fault."""

    fault: Fault
    caught: bool
    by: str
    """The test that failed first; or why none did."""
    seconds: float
    """From the start of pytest to its end."""
    example: str
    """The smallest example, as Hypothesis shrunk it; empty where the test has no examples."""


@dataclass(frozen=True)
class Run:
    """One run of pytest."""

    status: int | None
    """None where the time was up."""
    output: str
    seconds: float


def survey(
    faults: Sequence[Fault],
    jobs: int = 1,
    limit: float = LIMIT,
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Plant each fault and run its tests; `done` hears of each outcome as it comes. A fault whose
    place is gone is not caught.

    Raises:
        RuntimeError: the tests do not pass without a fault, or pytest cannot run them.
    """
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="linop-") as folder, ThreadPoolExecutor(jobs) as pool:
        whole = Path(folder) / "whole"
        copy_tree(ROOT, whole)
        _pass_without(whole, [test for fault in faults for test in fault.tests], pool, jobs)
        todo = [pool.submit(attempt, fault, whole, Path(folder), limit) for fault in faults]
        try:
            for future in as_completed(todo):
                outcome = future.result()
                outcomes[outcome.fault.name] = outcome
                done(outcome)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [outcomes[fault.name] for fault in faults]


def attempt(fault: Fault, whole: Path, folder: Path, limit: float) -> Outcome:
    """Plant a fault in a copy, and run its tests there.

    Args:
        whole: the tree without it.
        folder: where copies are made.
    """
    try:
        with _PARSING:
            text = fault.planted(whole)
    except PlaceError as error:
        return Outcome(fault, False, f"{GONE}: {error}", 0.0, "")
    copy = Path(tempfile.mkdtemp(dir=folder))
    try:
        copy_tree(whole, copy)
        (copy / fault.file).write_text(text)
        run = run_tests(copy, fault.tests, limit)
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    caught, by, example = judged(run)
    return Outcome(fault, caught, by, round(run.seconds, 1), example)


def copy_tree(source: Path, target: Path) -> None:
    """Copy what the tests need."""
    for part in (p for p in PARTS if (source / p).exists()):
        if (source / part).is_dir():
            # Caches go by the time of a file: a fault planted in the same second would be missed.
            shutil.copytree(
                source / part, target / part, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / part, target / part)


def run_tests(folder: Path, tests: Sequence[str], limit: float, *options: str) -> Run:
    """Run tests of a copy of the tree until the first one fails, or the time is up; nothing that
    they have started is left."""
    # Ranks lead sessions of their own, so what a run has started is found by this.
    mark = f"LINOP_MUTANT={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    settings = {"PYTHONPATH": str(folder), "HYPOTHESIS_SEED": "0", "OMP_NUM_THREADS": "1"}
    plain = ("-x", "-q", "--tb=short", "--color=no", "-p", "no:cacheprovider")
    targets = [target(folder, test) for test in tests]
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *plain, *options, *targets],
        cwd=folder,
        env=os.environ | settings | {name: value, "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
        status: int | None = process.returncode
    except subprocess.TimeoutExpired:
        _end(mark)
        process.kill()
        output, status = process.communicate()[0], None
    finally:
        _end(mark)
    return Run(status, output, time.monotonic() - begun)


def target(root: Path, test: str) -> str:
    """The argument of pytest for a test file, or a test in it: the path from the tree's root.

    Raises:
        RuntimeError: no folder has the file, or several have.
    """
    file, *name = test.partition("::")
    found = [path.relative_to(root) for path in (root / "adjoint_tests").rglob(file)]
    if len(found) != 1:
        raise RuntimeError(f"one {file} in adjoint_tests expected, {len(found)} found")
    return "".join([str(found[0]), *name])


def _end(mark: str) -> None:
    """Kill every process that was started with this in its environment."""
    while left := list(_marked(mark.encode())):
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def _marked(mark: bytes) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's, or just ended
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def judged(run: Run) -> tuple[bool, str, str]:
    """True if a fault was noticed; by which test, or why by none; and the smallest example.

    Raises:
        RuntimeError: pytest could not run the tests.
    """
    if run.status is None:
        return False, f"no end after {run.seconds:.0f} s", ""
    if run.status == 0:
        return False, "all tests passed", ""
    found = re.search(
        r"^(?:FAILED|ERROR) (?:adjoint_tests/(?:\w+/)*)?(.*?)(?: - |$)", run.output, re.MULTILINE
    )
    if found is not None:
        return True, found[1], example_in(run.output)
    if run.status in (3, 4, 5):  # pytest's own: an internal error, bad usage, no tests
        raise RuntimeError(f"pytest did not run the tests:\n{run.output}")
    return True, f"{ENDED} with status {run.status}", ""


def example_in(output: str) -> str:
    """The shortest example that Hypothesis shrunk a failure to, on one line; empty if there is
    none."""
    # Each line begins with an E, or with a bar where there are several failures.
    text = re.sub(r"^(E| *\|) *", "", output, flags=re.MULTILINE)
    words = "Failing test case|Failing explicit example|Falsifying example"
    ends = r"^You can reproduce|^\+---|^(?=\S+:\d+: )|^==="
    found = re.findall(
        rf"^(?:{words}): \w+\(\n(.*?)^\)\n(.*?)(?={ends}|\Z)",
        text,
        re.DOTALL | re.MULTILINE,
    )
    return min((_on_one_line(given, drawn) for given, drawn in found), key=len, default="")


def _on_one_line(given: str, drawn: str) -> str:
    """Arguments and draws of a test, less those in its name."""
    items = [item for item in given.splitlines() if not item.startswith(("name=", "data=", "#"))]
    draws = re.sub(r"^Draw \d+(?: \(.*?\))?: ", "", drawn, flags=re.MULTILINE)
    return " ".join(" ".join([*items, draws]).split()).rstrip(",")


def _pass_without(whole: Path, tests: Sequence[str], pool: ThreadPoolExecutor, jobs: int) -> None:
    """See that the tests pass where there is no fault.

    Raises:
        RuntimeError: they do not.
    """
    files = {test for test in tests if "::" not in test}
    once = [t for t in dict.fromkeys(tests) if t in files or t.partition("::")[0] not in files]
    parts = [part for k in range(jobs) if (part := once[k::jobs])]
    for run in pool.map(lambda part: run_tests(whole, part, CALM), parts):
        if run.status != 0:
            raise RuntimeError(f"the tests do not pass without a fault:\n{run.output}")
