"""linop's operators beside raw mpi4py and beside peers: one command, tables with their goals.

    python benchmarks/movement/run.py [--quick] [--only broadcast] [--ranks 2] [--no-peers]

It starts the MPI jobs itself (with the ``mpiexec`` beside this Python), prints tables, and
saves them as ``results/<mpi>.md``. README.md says how they are measured.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout is measured, whatever is installed

from benchmarks.harness import report  # noqa: E402
from benchmarks.harness.counting import library  # noqa: E402
from benchmarks.harness.task import MARK, MIB, RAW, SIZES, Task  # noqa: E402
from linop.backends.jobs import mpirun  # noqa: E402

BEGIN, END = "<!-- tables:begin -->", "<!-- tables:end -->"
README = ROOT / "benchmarks/README.md"
JOB_SECONDS = 1200.0
console = Console(width=None if sys.stdout.isatty() else 200)


def main(
    ranks: Annotated[list[int] | None, typer.Option(help="How many; repeat it [2 and 4].")] = None,
    sizes: Annotated[list[int] | None, typer.Option(help="Bytes a worker; repeat it.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Parts of names of operations.")] = None,
    seconds: Annotated[float, typer.Option(help="For each comparison; half beside peers.")] = 0.8,
    quick: Annotated[
        bool, typer.Option(help="A tenth of the time, up to 1 MiB; fewer peers.")
    ] = False,
    peers: Annotated[bool, typer.Option(help="PyLops-MPI and torch.distributed too.")] = True,
    output: Annotated[Path, typer.Option(help="Folder of the tables.")] = ROOT
    / "benchmarks/results",
    write_readme: Annotated[
        bool, typer.Option(help="Put the ratios into benchmarks/README.md.")
    ] = False,
    raw: Annotated[
        Path | None, typer.Option(help="File for all numbers, as JSON; by default none.")
    ] = None,
) -> None:
    """Measure, print, save; status 1 where a job failed or a result was wrong."""
    found: list[dict[str, Any]] = []
    errors: list[str] = []
    numbers = ranks or [2, 4]
    jobs = [(n, False) for n in ([1, *numbers] if ranks is None else numbers)]
    jobs += [(n, True) for n in (numbers[:1] if quick else numbers) if peers and n > 1]
    with tempfile.TemporaryDirectory() as folder:
        counter = library(Path(folder)) if peers else None
        for number, beside in jobs:
            task = Task(
                only=tuple(only or ()),
                sizes=tuple(sizes or ()),
                largest=MIB if quick and not sizes else SIZES[-1],
                seconds=seconds * (0.1 if quick else 1) * (0.5 if beside else 1),
                peers=beside,
            )
            with console.status(f"{number} ranks{', peers' if beside else ''}: starting") as status:
                try:
                    for line in run(number, task, counter if beside else None):
                        found.append(line | {"beside": beside})
                        if "name" in line:
                            size = report.bytes_text(line["size"])
                            status.update(f"{number} ranks: {line['name']}, {size}")
                except RuntimeError as error:
                    errors.append(str(error))
    facts = machine(found)
    tables = by_title(found)
    for title, table in tables.items():
        console.print(report.rich_table(title, table))
        wrong = [r for r in table if r.failed and r.against in (RAW, "linop out=")]
        errors += [f"{r.operation} {r.direction}: {r.against}: {r.note}" for r in wrong]
    verdict = report.verdict([row for table in tables.values() for row in table])
    console.print(verdict)
    name = library_name(facts)
    save(output, name, facts, tables, verdict, errors)
    rows = records(tables)
    if raw is not None:
        save_raw(raw, {"machine": facts, "verdict": verdict, "errors": errors, "rows": rows})
    if write_readme:
        summary = [report.summary(rows, RAW), report.summary(rows, None)]
        into_readme((BEGIN, END), name, str(facts.get("MPI")), facts, verdict, summary)
    for said in errors:
        console.print(said, style="red", markup=False)
    raise typer.Exit(1 if errors else 0)


def run(ranks: int, task: Task, counter: Path | None) -> Iterator[dict[str, Any]]:
    """Run a job; the rows that its rank 0 prints, as they arrive.

    Args:
        counter: library of `benchmarks.harness.counting` to preload, or None.

    Raises:
        RuntimeError: the job failed; with the end of its stderr.
    """
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    env |= {"OMP_NUM_THREADS": "1"} | ({"LD_PRELOAD": str(counter)} if counter else {})
    with (
        tempfile.TemporaryFile("w+") as said,
        mpirun.Job(ranks, task.command(), env=env, stdout=subprocess.PIPE, stderr=said) as job,
    ):
        watch = threading.Timer(JOB_SECONDS, job.end)
        watch.start()
        try:
            assert job.stdout is not None
            for line in job.stdout:
                if line.startswith(MARK):
                    yield json.loads(line.removeprefix(MARK))
            status = job.wait()
        finally:
            watch.cancel()
            job.end()
        if status:
            said.seek(0)
            tail = said.read()[-3000:]
            raise RuntimeError(f"the job with {ranks} ranks ended with status {status}:\n{tail}")


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


def by_title(found: list[dict[str, Any]]) -> dict[str, list[report.Row]]:
    """The rows of all comparisons in three tables."""
    tables: dict[str, list[report.Row]] = {
        "Beside raw mpi4py": [],
        "Other bounds": [],
        "Beside peers": [],
    }
    for line in found:
        if "name" not in line:
            continue
        for row in report.rows(line, line["beside"]):
            title = "Beside raw mpi4py" if row.against == RAW else "Other bounds"
            tables["Beside peers" if line["beside"] else title].append(row)
    return {title: table for title, table in tables.items() if table}


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


if __name__ == "__main__":
    typer.run(main)
