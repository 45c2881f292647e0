"""``linop show --schedule``: table, checks, times, memory, pictures, and bad options."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from linop.schedules import one_forward_one_backward, with_messages
from linop.tools import cli

Run = Callable[..., Any]
SIZE = ("--stages", "4", "--micro-batches", "8")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``linop show`` in an empty folder, on a terminal of 100 characters."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "console", Console(width=100))
    return lambda *arguments: CliRunner().invoke(cli.app, ["show", *arguments])


def rows(output: str) -> list[list[str]]:
    """The cells of the tables in an output, row by row."""
    lines = [line for line in output.splitlines() if "│" in line or "┃" in line]
    return [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in lines]


def drawn(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("worker ")]


def test_1f1b(run: Run) -> None:
    result = run("--schedule", "1f1b", *SIZE)
    assert result.exit_code == 0
    first, *_, last = rows(result.output)
    assert first == ["worker", "actions"]
    assert last == ["3", "3", "24", "9", "1", "1"]
    table = {row[0]: row[1] for row in rows(result.output) if len(row) == 2}
    assert table["3"].startswith("3F0 3B0 3F1 3B1 ") and table["3"].endswith("3F7 3B7 3U")
    for line in (
        "✓ every action of 4 stages and 8 micro-batches, once",
        "✓ no deadlock with eager sends",
        "slots of edges with which no send waits: 0→1: 4, 1→0: 4, 1→2: 3, 2→1: 3, 2→3: 2, 3→2: 2",
        "time 33 (F = 1, B = 2; messages take none)",
        "bubble 3/11 of the total (27.3%)",
        "bubble 3/8 of the ideal (37.5%)",
    ):
        assert line in result.output.splitlines()
    assert drawn(result.output) == [
        "worker 0  F0F1F2F3············B0──F4B1──F5B2──F6B3──F7B4──··B5──··B6──··B7──",
        "worker 1  ··F0F1F2········B0──F3B1──F4B2──F5B3──F6B4──F7B5──··B6──··B7──····",
        "worker 2  ····F0F1····B0──F2B1──F3B2──F4B3──F5B4──F6B5──F7B6──··B7──········",
        "worker 3  ······F0B0──F1B1──F2B2──F3B3──F4B4──F5B5──F6B6──F7B7──············",
    ]


def test_colours_on_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cli, "console", Console(width=100, force_terminal=True, color_system="truecolor")
    )
    output = run("--schedule", "gpipe", "--stages", "2", "--micro-batches", "2").output
    assert "48;2;78;121;167mF0" in output  # the forward's colour, as the background


def test_long_pictures_are_in_parts(run: Run) -> None:
    result = run("--schedule", "1f1b", "--stages", "2", "--micro-batches", "20")
    lines = drawn(result.output)
    assert len(lines) == 2 * 3 and all(len(line) <= 100 for line in lines)
    assert lines[0].startswith("worker 0  F0 F1") or lines[0].startswith("worker 0  F0─F1─")
    assert "B19" in lines[4]


def test_versions_and_chunks(run: Run) -> None:
    pipedream = rows(run("--schedule", "pipedream", *SIZE).output)
    assert [row[-1] for row in pipedream if len(row) == 6][1:] == ["4", "3", "2", "1"]
    result = run("--schedule", "interleaved-1f1b", "--chunks", "2", *SIZE)
    assert [row[1] for row in rows(result.output) if len(row) == 6][1:] == ["0, 2", "1, 3"]


def test_a_table_of_ones_own(run: Run, tmp_path: Path) -> None:
    Path("mine.csv").write_text(one_forward_one_backward(2, 3).to_csv())
    result = run("--file", "mine.csv", "--svg", "mine.svg", "--trace", "mine.json")
    assert result.exit_code == 0
    assert drawn(result.output) == [
        "worker 0  F0F1····B0──F2B1──··B2──",
        "worker 1  ··F0B0──F1B1──F2B2──····",
    ]
    assert "written: mine.svg" in result.output and "written: mine.json" in result.output
    assert Path("mine.svg").read_text().startswith("<svg")
    assert "mine: 2 stages" in Path("mine.svg").read_text()
    assert json.loads(Path("mine.json").read_text())["traceEvents"]


def test_a_table_of_skip_connections(run: Run) -> None:
    table = with_messages(one_forward_one_backward(3, 2), [(0, 1), (1, 2), (0, 2)])
    Path("skip.csv").write_text(table.to_csv())
    result = run("--file", "skip.csv")
    assert result.exit_code == 0
    assert "slots of edges with which no send waits: 0→1: 2, 0→2: 2, 1→0: 2" in result.output
    Path("none.csv").write_text(table.to_csv().replace("2RECV_F0>0,", ""))
    result = run("--file", "none.csv")
    assert type(result.exception).__name__ == "UnmatchedMessageError"


def test_a_wrong_table_is_printed_and_named(run: Run) -> None:
    Path("wrong.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n")
    result = run("--file", "wrong.csv")
    assert ["1", "1F0 1B0 1F1"] in rows(result.output)
    assert result.exit_code == 1
    assert type(result.exception).__name__ == "MissingActionError"
    assert "✓" not in result.output and not drawn(result.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "zigzag", *SIZE], "--schedule zigzag: expected one of gpipe, 1f1b,"),
        (["--schedule", "1f1b"], "--schedule 1f1b: give --stages and --micro-batches, too"),
        (["--schedule", "1f1b", "--stages", "0", "--micro-batches", "1"], "'--stages'"),
        (["--schedule", "1f1b", "--chunks", "2", *SIZE], "--chunks: 1f1b has one stage on each"),
        (["--schedule", "interleaved-1f1b", "--chunks", "3", *SIZE], "a multiple of chunks=3"),
        (["--schedule", "pipedream-2bw", "--stages", "4", "--micro-batches", "3"], "at least"),
        (["--schedule", "1f1b", "--file", "t.csv"], "give --schedule or --file, not both"),
        (["--file", "t.csv", "--stages", "4"], "--stages: leave out, the file has its own"),
        (["--file", "missing.csv"], "--file missing.csv: cannot be read: "),
        (["--file", "bad.csv"], "--file bad.csv: line 1: action: expected a stage"),
        (["--file", "empty.csv"], "--file empty.csv: no actions; expected a line a worker"),
        (["--schedule", "1f1b", "--plan", *SIZE], "an operator and its options do not go with"),
        (["some:operator", "--schedule", "1f1b", *SIZE], "an operator and its options do not go"),
        (["some:operator", "--chunks", "2"], "options of a schedule: give --schedule or --file"),
        ([], "give MODULE:OPERATOR, --schedule or --file"),
    ],
)
def test_bad_options(run: Run, arguments: list[str], message: str) -> None:
    Path("bad.csv").write_text("0F0,0X0\n")
    Path("empty.csv").write_text("\n")
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())


def test_pictures_that_cannot_be_written(run: Run) -> None:
    result = run("--schedule", "1f1b", *SIZE, "--svg", "missing/a.svg")
    assert result.exit_code == 1
    assert "missing/a.svg: cannot be written: No such file" in str(result.exception)
