"""The page of torch's modules has all of them, and is what its script makes."""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).parents[2] / "docs" / "torch_nn" / "table.py"


def test_each_module_of_torch_is_in_the_tables() -> None:
    known = runpy.run_path(str(SCRIPT))["known"]()
    every = {
        name
        for name, kind in vars(torch.nn).items()
        if inspect.isclass(kind) and issubclass(kind, torch.nn.Module)
    }
    assert not every - known, "no place in docs/torch_nn/table.py"


def test_the_page_is_up_to_date() -> None:
    made = runpy.run_path(str(SCRIPT))
    text = made["PAGE"].read_text()
    assert made["page"](text) == text, "run: python docs/torch_nn/table.py"
