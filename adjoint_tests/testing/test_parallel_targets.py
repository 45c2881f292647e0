"""Files of parallel programs: the number of ranks that they ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from linop.errors import ArgumentError
from linop.testing.parallel.recording.programs import world_of

OBJECTS = """
WORLD = 2
class Base:
    WORLD = 3
class Derived(Base):
    pass
class Without:
    pass
made = type("Made", (), {"WORLD": 4})()
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("WORLD = 3", 3),
        ("WORLD: int = 3", 3),
        ("WORLD = RANKS = 3", 3),
        ("WORLD, HIDDEN = 3, 8", 3),
        ("HIDDEN, (WORLD, LAYERS) = 8, (3, 2)", 3),
        ("ROWS = 3\nWORLD = ROWS * 1", 3),
        ("if True:\n    WORLD = 1 + 2", 3),
        ("WORLD = 2\nWORLD += 1", 3),
        ("from sizes_of_jobs import WORLD", 3),
        ("from sizes_of_jobs import RANKS as WORLD", 5),
        ("from sizes_of_jobs import *", 3),
        ("def twin():\n    WORLD = 3", None),
        ("class Config:\n    WORLD = 3", None),
        ("print", None),
    ],
)
def test_the_world_of_a_file(text: str, expected: int | None, tmp_path: Path) -> None:
    (tmp_path / "sizes_of_jobs.py").write_text("WORLD, RANKS = 3, 5")
    program = tmp_path / "program.py"
    program.write_text(text)
    assert world_of(str(program)) == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("Base", 3), ("Derived", 3), ("Without", 2), ("made", 4)]
)
def test_the_world_of_an_object(name: str, expected: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(OBJECTS)
    assert world_of(f"{program}:{name}") == expected


def test_a_world_that_is_no_number(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("WORLD = 'many'")
    with pytest.raises(ArgumentError, match="'many', a number of ranks expected"):
        world_of(str(program))


def test_files_that_say_their_encoding(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_bytes(b"# coding: latin-1\nname = '\xe9'\nWORLD = 3\n")
    assert world_of(str(program)) == 3
    program.write_bytes(b"\xef\xbb\xbfWORLD = 3\n")
    assert world_of(str(program)) == 3


def test_a_world_that_is_no_whole_number(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("WORLD = 5 / 2\n")
    with pytest.raises(ArgumentError, match=r"WORLD is 2\.5, a number of ranks expected"):
        world_of(str(program))
