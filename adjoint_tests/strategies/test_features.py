"""The table of features in the page on strategies: torch has what it says, and so has linop."""

from __future__ import annotations

import copy
import importlib.util
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

import linop
from linop.backends.engine.base import Backend
from linop.schedules import Schedule
from linop.strategies import Pipeline
from support.schedules.torch_tables import text, torch_schedule
from support.strategies.pipelines.pipelines import block, equal, squares, values
from support.workers import on_threads

PAGE = Path(__file__).resolve().parents[2] / "docs" / "strategies.md"
TESTS = Path(__file__).resolve().parents[1]
TORCH = "torch.nn.parallel", "torch.distributed.fsdp", "torch.distributed.pipelining.schedules"


def rows() -> list[list[str]]:
    """Cells: a feature, that of torch, that of others, ours, and the tests that run ours."""
    table = PAGE.read_text().split("## What others have, and what is here")[1].split("\n## ")[0]
    lines = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def names(cell: str) -> list[str]:
    """The text between backquotes."""
    return re.findall(r"`([^`]+)`", cell)


def test_names_of_the_table() -> None:
    """A name of torch or linop is there; and tests that a row names."""
    assert len(rows()) == 11
    for feature, theirs, _, ours, tests in rows():
        for name in names(theirs):
            found = [module for module in TORCH_MODULES if hasattr(import_module(module), name)]
            assert found, (feature, name)
        for name in names(ours):
            path = name.split("(")[0].split(".")
            homes = linop.strategies, linop.schedules, linop
            assert any(hasattr(home, path[0]) for home in homes), (feature, name)
        assert names(tests), feature
        for name in names(tests):
            (file,) = TESTS.rglob(f"{name.split('::')[0]}.py")
            assert f"def {name.split('::')[1]}(" in file.read_text(), (feature, name)


TORCH_MODULES = (*TORCH, "torch.distributed.tensor.parallel", "torch.utils.checkpoint")


def runs_torchs_table(backend: Backend, table: Schedule) -> None:
    """Gradients under a schedule that torch made are those of one process, bit for bit."""
    stages = [block(3, seed) for seed in range(table.stages)]
    alone = copy.deepcopy(stages)
    pipe = Pipeline(stages, table, squares, backend=backend)
    x, target = values(8, 3, seed=1), values(8, 3, seed=2)
    pipe.step(x, target)
    pieces = zip(x.chunk(4), target.chunk(4), strict=True)
    for one, wanted in pieces:
        squares(torch.nn.Sequential(*alone)(one), wanted).backward()
    for s, stage in pipe.stages.items():
        for p, q in zip(stage.parameters(), alone[s].parameters(), strict=True):
            equal(f"gradient in stage {s}", p.grad, q.grad)


@pytest.mark.parametrize(
    "name", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "Interleaved1F1B"]
)
def test_torchs_tables_run(name: str) -> None:
    with torch_schedule(f"Schedule{name}", 2, 4, 2) as theirs:
        table: Any = Schedule.from_csv(text(theirs.pipeline_order), name)
    on_threads(2, runs_torchs_table, table)
