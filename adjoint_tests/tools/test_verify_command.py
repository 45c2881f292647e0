"""``linop verify``: what it finds, what it says, in tables and in files."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from typer.testing import CliRunner

from linop.backends.mpi import mpirun
from linop.testing.verify_command import PROPERTIES, cases
from linop.tools import cli, reporting
from support.requirements import needs_gpu, needs_mpi

pytestmark = pytest.mark.slow

EXAMPLES = """
import functools
import numpy as np
import scipy.sparse.linalg
from hypothesis import strategies as st
import linop
from linop import LinearOperator, Partition, Region, TensorSpace
from linop.testing import Pair, pair, strategies

X = TensorSpace((6,), Partition((2,)))
shift = linop.shift(X, 1)
wrong = linop.local(Region("x", 3), Region("y", 3), np.cumsum, np.cumsum, name="W")
number = 3
A = np.arange(6.0).reshape(2, 3)
B = A.copy()
B[1, 1] += 1
of_scipy = scipy.sparse.linalg.LinearOperator(A.shape, lambda x: A @ x, lambda y: B.T @ y)

class Box:
    inner = linop.halo_exchange(X, 3)

def ring(workers: int) -> LinearOperator:
    X = TensorSpace((8,), Partition((workers,)), axes=(linop.COPIES,))
    return linop.ring_all_reduce(X)

def twice() -> Pair:
    return pair(lambda x: 2 * x, lambda y: 2 * y, (2, 2), (2, 2))

def plain():
    return linop.gather(X)

def raises():
    return pair(lambda x: 1 / 0, lambda y: y, 3, 3)

def wants(more):
    return shift

def doubled(op):
    # From two elements on, an adjoint of which half is missing.
    if op.domain.size < 2:
        return op
    double = 2 * op
    double._h = op.H
    return double

curried = functools.partial(ring)
drawn = strategies.operators(2, kinds=["copy_out_of_place"])
badly_drawn = strategies.operators(2, kinds=["copy_out_of_place"]).map(doubled)
not_drawn = st.integers()
"""
"""A user's module, called verified_by_a_user."""

MODULE = "verified_by_a_user"
Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``linop verify`` here, in a folder with the user's module."""
    (tmp_path / f"{MODULE}.py").write_text(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "console", Console(width=300))
    monkeypatch.delitem(sys.modules, MODULE, raising=False)

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(cli.app, ["verify", *arguments], catch_exceptions=False)

    return run


def tables(output: str) -> dict[str, list[list[str]]]:
    """The rows of each table, by its title."""
    found: dict[str, list[list[str]]] = {}
    for line in output.splitlines():
        if line.strip() in PROPERTIES:
            found[line.strip()] = rows = []
        elif line.startswith("│"):
            rows.append([cell.strip() for cell in line.strip("│").split("│")])
    return found


@pytest.mark.parametrize("target", ["ring", "curried", "plain", "Box.inner", "twice", "A"])
def test_operators_are_found(run: Run, target: str) -> None:
    result = run("--workers", "3", f"{MODULE}:{target}")
    assert result.exit_code == 0, result.output
    found = tables(result.output)
    assert list(found) == list(PROPERTIES)
    for name, rows in found.items():
        on = ["reference"] if name == "matrix" else ["reference", "threads"]
        assert [row[2] for row in rows] == on
        assert {row[-1] for row in rows} == {"passed"}


def test_factories_get_the_number_of_workers(run: Run) -> None:
    for workers in (2, 3):
        result = run("--workers", str(workers), f"{MODULE}:ring")
        assert {row[1] for row in tables(result.output)["matrix"]} == {
            f"{8 * workers}×{8 * workers}"
        }


def test_all_samples_pass(run: Run) -> None:
    result = run("--workers", "2", "--examples", "1")
    assert result.exit_code == 0, result.output
    for name, rows in tables(result.output).items():
        assert len({row[0] for row in rows}) >= 24, name
        assert {row[-1] for row in rows} == {"passed"}


def test_all_operators_of_a_module(run: Run) -> None:
    result = run(MODULE)
    assert result.exit_code == 1
    names = {row[0] for row in tables(result.output)["linearity"]}
    assert names == {f"{MODULE}:{k}" for k in ("shift", "wrong", "of_scipy", "ring", "twice")}
    dots = {row[0]: row[-1] for row in tables(result.output)["dot product"]}
    assert dots[f"{MODULE}:shift"] == "passed"
    assert dots[f"{MODULE}:of_scipy"].startswith(
        "from x[1] (worker 0) to y[1] (worker 0): F has 4, the conjugate transpose of the adjoint "
    )
    assert re.search(r"\n\d+ checks, \d+ failed\n", result.output)
    assert "reproduce: linop.testing.check_adjoint(op, 'reference', seed=" in result.output


@pytest.mark.parametrize("backend", ["reference", "threads"])
def test_a_wrong_adjoint_fails(run: Run, backend: str) -> None:
    result = run("--backend", backend, f"{MODULE}:wrong")
    assert result.exit_code == 1
    found = tables(result.output)
    for name in ("dot product", "dot product of whole numbers", "matrix"):
        assert "(worker 0)" in found[name][0][-1], name
    assert found["linearity"][0][-1] == "passed"


def test_what_raises_fails_and_the_others_are_verified(run: Run) -> None:
    result = run("--backend", "reference", f"{MODULE}:raises")
    assert result.exit_code == 1
    for rows in tables(result.output).values():
        assert rows[0][-1] == "ZeroDivisionError: division by zero"
    assert "raised by the forward function" in result.output


def test_strategies_are_drawn_from_and_shrunk(run: Run) -> None:
    assert run("--examples", "5", f"{MODULE}:drawn").exit_code == 0
    again = [
        run("--examples", "50", "--seed", "1", "--backend", "reference", f"{MODULE}:badly_drawn")
        for _ in range(2)
    ]
    assert [result.exit_code for result in again] == [1, 1]
    said = [re.findall(r"FAILED for (2 \* linop\..*): error", result.output) for result in again]
    assert said[0] == said[1]
    assert len(said[0]) == 3
    # The smallest domain that is wrong has two elements.
    for printed in said[0]:
        assert "(2,)" in printed or printed.count("Region('x1', ())") == 1, printed


def test_files(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("junitparser")
    arguments = ("--json", "found.json", "--junit", "found.xml", "--examples", "2", "--seed", "7")
    result = run(*arguments, "--backend", "reference", MODULE)
    assert result.exit_code == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert {one["checked"] for one in found} == set(PROPERTIES)
    (wrong,) = [
        one for one in found if one["case"].endswith("of_scipy") and one["checked"] == "dot product"
    ]
    assert wrong["failed"]
    assert wrong["report"]["worst"]["from"] == {"region": "x", "index": [1], "workers": [0]}
    assert wrong["report"]["reproduce"].endswith(("seed=7, trials=1)", "seed=9, trials=1)"))
    root = ElementTree.parse(tmp_path / "found.xml").getroot()
    suites = {suite.get("name"): suite for suite in root.iter("testsuite")}
    assert set(suites) == set(PROPERTIES)
    assert sum(len(list(suite.iter("testcase"))) for suite in suites.values()) == len(found)
    failed = sum(one["failed"] for one in found)
    assert sum(len(list(suite.iter("failure"))) for suite in suites.values()) == failed


def test_a_file_that_cannot_be_written(run: Run) -> None:
    with pytest.raises(TypeError, match=r"cannot be written: .*No such file"):
        run("--json", "no/such/folder/found.json", f"{MODULE}:shift")


def test_junit_wants_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'linop-algebra\[testing\]'"):
        reporting.need_junit()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no_such_module_here:op"], "No module named 'no_such_module_here'"),
        ([f"{MODULE}:missing"], "has no attribute 'missing'"),
        ([f"{MODULE}:number"], "is int, not an operator"),
        ([f"{MODULE}:number.real"], "is int, not an operator"),
        ([f"{MODULE}:wants"], "a function is called with nothing, or with workers"),
        (["json"], "'json': no operators in this module"),
        (["--backend", "gpu", f"{MODULE}:shift"], "'gpu'; there are reference, threads, mpi"),
        (["--workers", "0", f"{MODULE}:shift"], "Invalid value for '--workers'"),
        (["--examples", "0", f"{MODULE}:shift"], "Invalid value for '--examples'"),
    ],
)
def test_bad_arguments(run: Run, arguments: list[str], text: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    words = re.sub(r"[\s│]+", " ", result.output)  # the message stands in a box, wrapped
    assert text in words


def test_a_strategy_of_something_else_fails(run: Run) -> None:
    result = run("--backend", "reference", "--examples", "3", f"{MODULE}:not_drawn")
    assert result.exit_code == 1
    assert "expected an operator, given 0" in result.output


on_ranks = pytest.mark.parametrize(
    "backend", ["mpi", pytest.param("cupy", marks=[pytest.mark.gpu, needs_gpu])]
)


@needs_mpi
@on_ranks
def test_on_ranks_that_it_starts(run: Run, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(".")
    result = run("--backend", backend, "--workers", "2", f"{MODULE}:ring")
    assert result.exit_code == 0, result.output
    for name, rows in tables(result.output).items():
        assert name != "matrix"
        assert [row[2] for row in rows] == [backend]
    result = run("--backend", backend, "--workers", "2", "--examples", "5", f"{MODULE}:drawn")
    assert result.exit_code == 0, result.output


@needs_mpi
def test_a_fault_on_ranks_that_it_starts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(".")
    result = run("--backend", "mpi", "--workers", "2", f"{MODULE}:wrong")
    assert result.exit_code == 1, result.output
    assert "dot-product test on mpi FAILED for" in result.output


def in_a_job(*arguments: str) -> Any:
    """``linop verify`` on two ranks."""
    path = ":".join(entry or str(Path.cwd()) for entry in sys.path)
    command = [sys.executable, "-m", "linop", "verify", "--workers", "2", *arguments]
    return mpirun.mpiexec(2, command, timeout=60, env={"PYTHONPATH": path, "COLUMNS": "200"})


@needs_mpi
def test_inside_an_mpi_job(run: Run) -> None:
    assert run("--help").exit_code == 0  # the folder has the module
    job = in_a_job(f"{MODULE}:wrong")
    assert job.returncode != 0
    assert job.stdout.count("3 checks, 2 failed") == 1, job.stdout + job.stderr


@needs_mpi
@pytest.mark.gpu
@needs_gpu
def test_inside_an_mpi_job_with_gpus(run: Run) -> None:
    assert run("--help").exit_code == 0
    job = in_a_job("--backend", "cupy", "--backend", "mpi", f"{MODULE}:ring")
    assert job.returncode == 0, job.stdout + job.stderr
    for words in ("6 checks, 0 failed", "cupy", "mpi"):
        assert words in job.stdout, job.stdout


def test_cases_of_a_strategy_say_so() -> None:
    (case,) = cases("linop.testing.strategies:operators", 3)
    assert case.drawn
    assert case.size == ""
