"""Fixtures of the tests of backends."""

from pathlib import Path

import pytest


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The path to which a test writes its program."""
    return tmp_path / "program.py"
