"""Fixtures of the tests of backends."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.machines import Machines, two_machines


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The path to which a test writes its program."""
    return tmp_path / "program.py"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Two machines, for the tests of a module."""
    try:
        with two_machines(tmp_path_factory.mktemp("machines")) as both:
            yield both
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no namespaces here: {error.stderr}")
