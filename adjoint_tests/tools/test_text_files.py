"""Text files of users, in every encoding that a byte-order mark says: schedules, machine files and
traces are the same as in plain UTF-8."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from linop.errors import ArgumentError
from linop.planning.placement import Placement
from linop.schedules import Schedule, one_forward_one_backward, pictures, simulate
from linop.text import read_text
from linop.tools import cli

ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-32"]
TABLE = "0F0,0B0,0U\n"
HOSTS = "één slots=2\nzwei:1\n"

each = pytest.mark.parametrize("encoding", ENCODINGS)
endings = pytest.mark.parametrize("ending", ["\n", "\r\n"])


@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\r\ufeff")), st.sampled_from(ENCODINGS)
)
def test_any_text_is_read(
    tmp_path_factory: pytest.TempPathFactory, text: str, encoding: str
) -> None:
    path = tmp_path_factory.mktemp("text") / "file"
    path.write_bytes(text.encode(encoding))
    assert read_text(path) == text
    path.write_bytes(text.replace("\n", "\r\n").encode(encoding))
    assert read_text(str(path)) == text


@each
@endings
def test_schedules(tmp_path: Path, encoding: str, ending: str) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(TABLE.replace("\n", ending).encode(encoding))
    result = CliRunner().invoke(cli.app, ["show", "--file", str(path)])
    assert result.exit_code == 0, result.output
    assert "0F0 0B0 0U" in result.output


@each
@endings
def test_machine_files(tmp_path: Path, encoding: str, ending: str) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(HOSTS.replace("\n", ending).encode(encoding))
    assert Placement.read(path).machines.tolist() == Placement(["a", "a", "b"]).machines.tolist()


@each
def test_traces(tmp_path: Path, encoding: str) -> None:
    simulation = simulate(one_forward_one_backward(2, 2))
    plain = pictures.trace(simulation)
    path = tmp_path / "run.json"
    path.write_bytes(plain.encode(encoding))
    both = json.loads(pictures.trace(simulation, path))["traceEvents"]
    alone = json.loads(plain)["traceEvents"]
    assert len(both) > len(alone)


def test_the_text_of_a_schedule_may_have_a_mark() -> None:
    assert Schedule.from_csv("\ufeff" + TABLE).workers == Schedule.from_csv(TABLE).workers


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes("één".encode("latin-1"))
    with pytest.raises(ArgumentError, match="cannot be read: 'utf-8' codec"):
        Placement.read(path)
    result = CliRunner().invoke(cli.app, ["show", "--file", str(path)])
    assert result.exit_code != 0
