"""The table of docs/experts.md is what its script makes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("torch")

SCRIPT = Path(__file__).parents[2] / "docs" / "experts" / "table.py"


def test_the_table_is_up_to_date() -> None:
    made = runpy.run_path(str(SCRIPT))
    text = made["PAGE"].read_text()
    assert made["page"](text) == text, "run: python docs/experts/table.py"
