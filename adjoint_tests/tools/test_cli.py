"""The command line: doctor, show, verify and the demo."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from linop.backends.mpi import mpirun
from linop.errors import MissingExtraError
from linop.tools import cli
from support.requirements import needs_mpi

EXAMPLES = """
import functools
import numpy as np
import linop
from linop import Partition, Region, TensorSpace

X = TensorSpace((6,), Partition((2,)))
shift = linop.shift(X, 1)
total = linop.all_reduce(linop.TensorSpace((100_000,), linop.Partition((2,)), axes=(linop.COPIES,)))
wrong = linop.local(Region("x", 3), Region("y", 3), np.cumsum, np.cumsum, name="W")
number = 3
matrix = np.eye(2)

grid = linop.halo_exchange(TensorSpace((40, 8), Partition((2, 2))), 3, padding=1)

class Box:
    inner = linop.halo_exchange(X, 3)

def ring(workers):
    X = TensorSpace((8,), Partition((workers,)), axes=(linop.COPIES,))
    return linop.ring_all_reduce(X)

def line(workers):
    X = TensorSpace((workers,), Partition((workers,)))
    return linop.halo_exchange(X, 3, padding=1)

def plain():
    workers = Partition((2,))
    return linop.gather(TensorSpace((6,), workers))

curried = functools.partial(ring)

def clumsy():
    return linop.scatter(X, Partition((2,)))
"""
"""A user's module, called examples_of_a_user."""

MODULE = "examples_of_a_user"
Run = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the user's module."""
    (tmp_path / f"{MODULE}.py").write_text(EXAMPLES)
    return tmp_path


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in that folder, on a wide terminal."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setattr(cli, "console", Console(width=200))
    importlib.invalidate_caches()
    return lambda *arguments: CliRunner().invoke(cli.app, arguments)


def rows(output: str) -> list[list[str]]:
    """The cells of the tables in an output, row by row."""
    lines = [line for line in output.splitlines() if "│" in line or "┃" in line]
    return [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in lines]


def test_help(run: Run) -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("doctor", "show", "verify", "demo"):
        assert command in result.output


def test_doctor_says_what_is_here(run: Run) -> None:
    result = run("doctor")
    assert result.exit_code == 0
    found = {name: (what, purpose) for name, what, purpose in rows(result.output)}
    for name in ("linop", "numpy", "mpi4py", "MPI library", "mpiexec", "CUDA-aware MPI"):
        assert all(found[name]), name
    assert found["numpy"][0] == sys.modules["numpy"].__version__
    assert found["cupy"][1] == "backend cupy: arrays on GPUs"


def test_doctor_says_how_to_install_what_is_missing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    extras = {"mpi4py": "mpi", "torch": "torch", "cupy": "cupy", "hypothesis": "testing"}
    for name in (*extras, "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(mpirun, "command", without_mpiexec)
    result = run("doctor")
    assert result.exit_code == 0
    found = {name: what for name, what, _ in rows(result.output)}
    for name, extra in (extras | {"matplotlib": "plot"}).items():
        assert found[name] == f"missing: pip install 'linop-algebra[{extra}]'"
    assert "In a clone of linop, write '.[extra]'" in result.output
    assert found["mpiexec"] == "no mpiexec here"
    assert found["MPI library"].startswith("no MPI library")
    assert found["CUDA-aware MPI"].startswith("no MPI library")


def without_mpiexec(workers: int, arguments: list[str]) -> list[str]:
    raise MissingExtraError("no mpiexec here")


def test_show_prints_operator_adjoint_and_traffic(run: Run) -> None:
    result = run("show", f"{MODULE}:shift")
    assert result.exit_code == 0
    assert f"{MODULE}:shift: x@0[3]@0 ⊕ x@1[3]@1 -> x@0[3]@0 ⊕ x@1[3]@1" in result.output
    table = {row[0]: row[1:] for row in rows(result.output)}
    assert table["named"] == ["Shift_{+1}", "Shift_{+1}*"]
    assert len(table["expanded"]) == len(table["simplified"]) == 2
    assert table["messages"] == ["2", "2"]
    assert table["bytes"] == ["48", "48"]
    for worker in "01":
        sides = [row[1:] for row in rows(result.output) if row[0] == worker]
        assert sides == [["operator", *["1", "24"] * 2], ["adjoint", *["1", "24"] * 2]]
    assert "…" not in result.output  # headings fit into 80 columns


def test_show_prints_bytes_rank_by_rank(run: Run) -> None:
    lines = run("show", f"{MODULE}:shift").output.splitlines()
    assert lines[-3:] == [
        "bytes from  to 0  to 1",
        "         0     ·    24",
        "         1    24     ·",
    ]


def test_show_prints_plans_and_predictions(run: Run) -> None:
    result = run("show", "--plan", f"{MODULE}:shift")
    assert result.exit_code == 0, result.output
    assert "worker 0" not in run("show", f"{MODULE}:shift").output
    forward, back = result.output.split(f"{MODULE}:shift, adjoint\n")
    assert f"{MODULE}:shift, operator\n" in forward
    for text in (forward, back):
        assert text.count("x@0[3] -> x@0[3]; 1 messages sent, 24 bytes; 1 received, 24 bytes") == 1
        assert text.count("  send 3 elements to 0: x@1  (24 bytes)") == 1
        assert "predicted: 2 workers, 1 stages with messages: 2 messages, 48 bytes" in text


def test_show_prints_the_plan_of_one_worker(run: Run) -> None:
    result = run("show", "--plan", "--worker", "1", f"{MODULE}:shift")
    assert result.output.count("worker 1: ") == 2
    assert "worker 0: " not in result.output
    result = run("show", "--plan", "--worker", "2", f"{MODULE}:shift")
    assert result.exit_code == 2
    assert "Invalid value for --worker: 2; there are 0, 1" in result.output


def test_show_prints_plans_before_and_after_each_pass(run: Run) -> None:
    """A sum that is large enough is done in shares."""
    target = f"{MODULE}:total"
    result = run("show", "--passes", "--worker", "1", target)
    assert result.exit_code == 0, result.output
    for side in ("operator", "adjoint"):
        _, _, plans = result.output.partition(f"{target}, {side}, worker 1: before any pass")
        steps = plans.split("worker 1: after ")
        before, apart, levels, shares, collectives, inside, fused, stored = steps[:8]
        assert "all-reduce over workers 0, 1" in before
        assert "send 100000 elements to 0: x@1" in before
        assert apart.splitlines()[:2] == ["factored_products", "the same"]
        assert levels.splitlines()[:2] == ["hierarchy", "the same"]
        assert shares.startswith("reduce_scatter_sums\n")
        assert "reduce-scatter over workers 0, 1, 50000 elements each" in shares
        assert "send 50000 elements to 0: share 1 of sum 0" in shares
        assert collectives.splitlines()[:2] == ["in_collectives", "the same"]
        assert inside.splitlines()[:2] == ["added_inside", "the same"]
        assert "share 1 of sum 0 = message from 0 at 0 + x@1[50000:100000]" in fused
        assert "share 1 of sum 0[50000] within x@1[50000:100000]" in stored
        text = plans.split("worker 1: instructions, with messages among threads\n")[1].split(
            "\n\n"
        )[0]
        assert "# send 50000 elements to 0: share 1 of sum 0\n" in text
        compile(f"def run(c0):\n{textwrap.indent(text, ' ')}", "listing", "exec")
    result = run("show", "--passes", "--worker", "2", target)
    assert result.exit_code == 2
    assert "2; there are 0, 1" in result.output


def test_show_places_workers_on_machines(run: Run, folder: Path) -> None:
    target = f"{MODULE}:grid"
    (folder / "machines").write_text("left\nright\nleft slots=1\nright:1\n")
    result = run("show", "--machines", "machines", target)
    assert result.exit_code == 0, result.output
    table = {row[0]: row[1:] for row in rows(result.output)}
    # Blocks of 20×4: columns of the grid are on one machine, rows would exchange shorter faces.
    assert table["bytes between machines"] == [str(4 * 8 * 21)] * 2
    assert result.output.splitlines()[-6:] == [
        "bytes from  to left  to right",
        "      left       64       336",
        "     right      336        64",
        "another order of the workers (a heuristic) saves 512 bytes between machines:",
        "  left: 2, 3",
        "  right: 0, 1",
    ]


def test_show_prints_a_hierarchy(run: Run) -> None:
    result = run("show", "--ranks-per-machine", "1", "--passes", f"{MODULE}:shift")
    assert result.exit_code == 0, result.output
    assert "no order of the workers was found that sends fewer bytes" in result.output
    target = f"{MODULE}:ring"
    result = run("show", "--ranks-per-machine", "2", "--passes", "--worker", "0", target)
    assert "after hierarchy\nworker 0" in result.output
    assert "reduce to worker 0 over workers 0, 1, 8 elements each" in result.output
    assert "send 8 elements to 2: partial sum 0 of group 0 of 2" in result.output
    result = run("show", "--ranks-per-machine", "2", "--machines", "f", target)
    assert result.exit_code == 2
    assert "give --ranks-per-machine or --machines, not both" in result.output


def test_show_draws_operators_and_their_predicted_times(run: Run, folder: Path) -> None:
    result = run("show", "--svg", "op.svg", "--trace", "op.json", f"{MODULE}:shift")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-2:] == ["written: op.svg", "written: op.json"]
    assert "turned round" in (folder / "op.svg").read_text(encoding="utf-8")
    events = json.loads((folder / "op.json").read_text())["traceEvents"]
    assert {"X", "s", "f"} <= {event["ph"] for event in events}
    result = run("show", "--svg", "op.png", f"{MODULE}:shift")
    assert result.exit_code == 1
    assert "ends in .svg expected" in str(result.exception)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_show_draws_traffic(run: Run, folder: Path) -> None:
    result = run("show", "--traffic", "traffic.png", f"{MODULE}:shift")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "picture: traffic.png"
    assert (folder / "traffic.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    result = run("show", "--traffic", "missing/traffic.png", f"{MODULE}:shift")
    assert result.exit_code == 2
    assert "No such file" in result.output


def test_a_picture_without_matplotlib_names_the_extra(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run("show", "--traffic", "traffic.png", f"{MODULE}:shift")
    assert isinstance(result.exception, MissingExtraError)
    assert "pip install 'linop-algebra[plot]'" in str(result.exception)


def test_names_are_printed_as_they_are(run: Run) -> None:
    """ ":ring:" is a name between two colons, and to some printers an emoji."""
    assert f"{MODULE}:ring: x@0[8]@0 ⊕ x@1[8]@1" in run("show", f"{MODULE}:ring").output


@pytest.mark.parametrize("workers", [5, 20_000])
def test_simulate_predicts_for_any_number_of_workers(run: Run, workers: int) -> None:
    result = run("simulate", f"{MODULE}:line", "--workers", str(workers))
    assert result.exit_code == 0, result.output
    heads = [line for line in result.output.splitlines() if "stages with messages" in line]
    assert len(heads) == 2
    assert all(line.startswith(f"{workers} workers, ") for line in heads)
    assert f"{2 * (workers - 1)} messages, {16 * (workers - 1)} bytes" in heads[0]


def test_simulate_takes_operators(run: Run) -> None:
    result = run("simulate", f"{MODULE}:shift", "--ranks-per-machine", "1")
    assert result.exit_code == 0, result.output
    assert f"{MODULE}:shift, operator\n2 workers, " in result.output
    assert re.search(r"bytes between machines +24 ", result.output)
    result = run("simulate", f"{MODULE}:shift", "--workers", "9")
    assert f"{MODULE}:shift, adjoint, which has 2 workers\n" in result.output
    assert run("simulate").exit_code == 2
    assert run("simulate", f"{MODULE}:number").exit_code == 2


def test_show_is_of_linops_operators(run: Run) -> None:
    result = run("show", f"{MODULE}:matrix")
    assert result.exit_code == 2
    assert "is ndarray, not linop's" in re.sub(r"[\s│]+", " ", result.output)


def test_show_needs_a_target(run: Run) -> None:
    assert run("show").exit_code == 2


def test_an_error_of_linop_is_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--help").exit_code == 0  # the folder is the current one
    monkeypatch.setattr(sys, "argv", ["linop", "show", f"{MODULE}:clumsy"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: scatter: the tensor is on workers (0, 1); expected one")
    assert "Traceback" not in said


# In processes of their own


def linop_command(folder: Path, *arguments: str, timeout: float = 100) -> Any:
    """Run ``linop`` as users do, in a folder."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.run(
        [sys.executable, "-m", "linop", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "200", "FORCE_COLOR": "1"},
        capture_output=True,
        check=False,
        text=True,
        timeout=timeout,
    )


needs_pictures = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("matplotlib", "PIL")),
    reason="matplotlib is not installed",
)


@needs_mpi
@needs_pictures
@pytest.mark.timeout(300)
def test_demo(tmp_path: Path) -> None:
    result = linop_command(tmp_path, "demo", "--output", "picture.png", timeout=290)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "\x1b" not in result.stdout + result.stderr  # a pipe, whatever FORCE_COLOR says
    table = rows(result.stdout)
    assert table[0][:3] == ["what", "backend", "workers"]
    assert {row[1] for row in table} >= {"reference", "threads", "mpi", "to_scipy()"}
    assert {row[-1] for row in table[1:]} == {"yes"}
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_names_are_no_markup(run: Run, folder: Path) -> None:
    (folder / "marked.py").write_text(
        "import linop\n"
        "a, b = linop.Region('[/red]', 3), linop.Region('[bold]x', 3, 1)\n"
        "op = linop.copy(linop.Space(a), a, b)\n"
    )
    for command in (("show", "marked:op", "--plan"), ("verify", "marked:op")):
        result = run(*command)
        assert result.exit_code == 0, result.output
    assert "marked:op: [/red][3]@0 -> [/red][3]@0 ⊕ [bold]x[3]@1" in run("show", "marked:op").output
