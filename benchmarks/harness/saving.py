"""Tables of results, in files and between markers of README.md, with the machine that they are
of."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.harness.jobs import ROOT, console

README = ROOT / "benchmarks/README.md"


def machine(found: list[dict[str, Any]]) -> dict[str, str]:
    """Date, commit, CPU, and the software that the jobs report."""
    facts = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "CPU": f"{_cpu()}, {os.cpu_count()} cores",
    }
    for line in found:
        facts |= line.get("machine", {})
        facts |= line.get("peers", {})
    return facts


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((s.partition(":")[2].strip() for s in lines if s.startswith("model name")), "?")


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = " and changes" if git("status", "--porcelain", "-uno") else ""
        return git("rev-parse", "--short", "HEAD") + changed
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def library_name(facts: dict[str, str]) -> str:
    """Short name of the MPI library, for file names: "openmpi", "mpich"."""
    kind = "".join(c for c in facts.get("MPI", "mpi").split(" v")[0].lower() if c.isalpha())
    return "mpich" if kind.startswith("mpich") else kind


def save(
    folder: Path,
    name: str,
    facts: dict[str, str],
    tables: dict[str, list[report.Row]],
    verdict: str,
    errors: list[str],
) -> None:
    """Write the tables to ``<name>.md`` in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [f"# {facts.get('MPI', 'MPI')}\n", facts_text(facts), f"{verdict}.\n"]
    parts += [f"Failed: {error}\n" for error in errors]
    for title, table in tables.items():
        parts += [f"## {title}\n", report.markdown(report.COLUMNS, map(report.cells, table))]
    (folder / f"{name}.md").write_text("\n".join(parts))
    console.print(f"saved: {folder / name}.md")


def records(tables: dict[str, list[report.Row]]) -> list[dict[str, Any]]:
    """The rows as plain data."""
    return [
        row.record() | ({"peer": True} if title == "Beside peers" else {})
        for title, table in tables.items()
        for row in table
    ]


def save_raw(path: Path, saved: dict[str, Any]) -> None:
    """Write all numbers to a file, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(saved, indent=1, ensure_ascii=False) + "\n")
    console.print(f"saved: {path}")


def facts_text(facts: dict[str, str]) -> str:
    """Names and versions in one line."""
    return ", ".join(f"{key} {value}" for key, value in facts.items()) + ".\n"


def into_readme(
    marks: tuple[str, str],
    name: str,
    title: str,
    facts: dict[str, str],
    verdict: str,
    summary: list[str],
) -> None:
    """Write a summary between two markers of README.md; it replaces the one with the same link."""
    link = f"results/{name}.md"
    head = [f"### {title}\n", facts_text(facts), f"{verdict}. All numbers: [{name}.md]({link}).\n"]
    text = "\n".join([*head, *summary])
    begin, end = marks
    before = README.read_text().partition(begin)[2].partition(end)[0].strip("\n")
    parts = [part.strip("\n") + "\n" for part in re.split("(?m)^(?=### )", before) if part.strip()]
    place = next((k for k, part in enumerate(parts) if f"({link})" in part), len(parts))
    between(begin, end, "\n".join([*parts[:place], text, *parts[place + 1 :]]))


def between(begin: str, end: str, text: str) -> None:
    """Replace the text between two markers of README.md."""
    whole = README.read_text()
    before, after = whole.split(begin)[0], whole.split(end)[1]
    README.write_text(f"{before}{begin}\n\n{text}\n{end}{after}")
