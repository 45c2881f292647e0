"""The page of habits: its programs run, its difference is theirs, and each row of its table has a
test."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import linop
from support.examples import example
from support.models.packages import torchvision
from support.requirements import needs_mpi
from support.strategies.data import habits
from support.workers import on_threads

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "habits.md").read_text()
ROWS = {
    "gradients as DDP's": "test_habits::is_a_mean_of_means",
    "accumulate gradients": "test_habits::is_a_mean_of_means",
    "global batches, an uneven last one": "test_habits::normalises_over_all_rows",
    "another order in each epoch": "test_habits::gives_each_row_once",
    "synchronised batch norm": "test_habits::normalises_over_all_rows",
    "mixed precision of shards": "test_habits::keeps_precision",
    "an optimizer's step in a hook of each gradient": "more_habits::updates_in_backward",
    "autocast": "test_habits::agrees_under_autocast",
    "a model in half precision": "test_habits::sums_widely",
    "freeze, and thaw later": "test_habits::thaws",
    "schedulers, hooks, `GradScaler`": "test_habits::is_an_optimizer",
    "`torch.save(net, path)`": "test_habits::is_pickled",
    "`copy.deepcopy(net)`, averages of weights": "test_habits::is_pickled",
    "save while training goes on": "test_habits::saves_beside_training",
    "safetensors, `save_pretrained`, `from_pretrained`": "docs/habits.md",
    "`torch.func.functional_call`, gradients of each sample": "test_habits::takes_other_parameters",
    "know the memory before it runs": "test_estimate::is_estimated",
    "`torch.compile(net, fullgraph=True)`, `torch.export`": "test_graphs_of_torch",
    "accelerate, Lightning": "test_habits_page::test_loops_of_others",
}


def test_each_row_has_a_test() -> None:
    table = PAGE.split("## What to write")[1].split("\n## ")[0]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()]
    assert [row for row in rows if row and row not in ("habit", "---")] == [*ROWS]
    for name in ROWS.values():
        if name.startswith("test_habits::"):
            assert callable(getattr(habits, name.split("::")[1]))


def lines_of(name: str) -> list[str]:
    return (DOCS / "habits" / name).read_text().splitlines()[1:]  # without the docstring


def changed(name: str) -> list[str]:
    """Lines that differ from the plain loop's."""
    every = difflib.unified_diff(lines_of("plain.py"), lines_of(name), lineterm="", n=0)
    return [one for one in every if re.match(r"[+-](?![+-])", one) and one.strip("+-")]


def test_lines_that_change() -> None:
    ours, theirs = changed("parallel.py"), changed("ddp.py")
    assert "\n".join(ours) in PAGE
    added = [sum(one.startswith("+") for one in lines) for lines in (ours, theirs)]
    assert added == [5, 6], (ours, theirs)


def run(*command: str) -> str:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    folder = DOCS / "habits"
    for _ in range(3):  # gloo aborts at the end at times, where ranks are slow
        done = subprocess.run(
            command,
            check=False,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
        )
        if not done.returncode or "torch.distributed.run" not in command:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_mpi
def test_programs() -> None:
    """linop's has one process's result for a last batch that does not divide; DDP's has not."""
    plain = run(sys.executable, "plain.py").split()[-1]
    ours = run("mpiexec", "-n", "2", sys.executable, "parallel.py").split()
    assert [x for x in ours if x[0].isdigit()] == [plain, plain]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    theirs = run(*torchrun, "ddp.py").split()
    assert plain not in theirs


@pytest.mark.parametrize("name", ["accelerate", "lightning"])
def test_loops_of_others(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install {name}")
    if importlib.util.find_spec("torchvision") is not None:
        torchvision()  # which they import, and which may lack its own operators
    main = example(f"with_{name}").main
    alone = linop.launch(main, 1)
    for found in linop.launch(main, 2):
        assert abs(found - alone[0]) < 1e-4


def test_mean_losses_are_warned_of() -> None:
    on_threads(2, habits.warns_of_a_mean)
