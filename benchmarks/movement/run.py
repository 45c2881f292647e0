"""linop's operators beside raw mpi4py and beside peers: one command, tables with their goals.

    python benchmarks/movement/run.py [--quick] [--only broadcast] [--ranks 2] [--no-peers]

It starts the MPI jobs itself (with the ``mpiexec`` beside this Python), prints tables, and
saves them as ``results/<mpi>.md``. README.md says how they are measured.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout is measured, whatever is installed

from benchmarks.harness import report, saving  # noqa: E402
from benchmarks.harness.counting import library  # noqa: E402
from benchmarks.harness.jobs import console, run_job  # noqa: E402
from benchmarks.harness.task import MIB, RAW, SIZES, Task  # noqa: E402

BEGIN, END = "<!-- tables:begin -->", "<!-- tables:end -->"


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
    label: Annotated[
        str, typer.Option(help="Where the ranks are, for the file and the title; for machines.py.")
    ] = "",
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
                    for line in run_job(number, task.command(), counter if beside else None):
                        found.append(line | {"beside": beside})
                        if "name" in line:
                            size = report.bytes_text(line["size"])
                            status.update(f"{number} ranks: {line['name']}, {size}")
                except RuntimeError as error:
                    errors.append(str(error))
    facts = saving.machine(found)
    tables = by_title(found)
    for title, table in tables.items():
        console.print(report.rich_table(title, table))
        wrong = [r for r in table if r.failed and r.against in (RAW, "linop out=")]
        errors += [f"{r.operation} {r.direction}: {r.against}: {r.note}" for r in wrong]
    verdict = report.verdict([row for table in tables.values() for row in table])
    console.print(verdict)
    name = saving.library_name(facts) + (f"-{label}" if label else "")
    saving.save(output, name, facts, tables, verdict, errors)
    rows = saving.records(tables)
    if raw is not None:
        saving.save_raw(raw, {"machine": facts, "verdict": verdict, "errors": errors, "rows": rows})
    if write_readme:
        summary = [report.summary(rows, RAW), report.summary(rows, None)]
        title = " ".join(filter(None, [str(facts.get("MPI")), label]))
        saving.into_readme((BEGIN, END), name, title, facts, verdict, summary)
    for said in errors:
        console.print(said, style="red", markup=False)
    raise typer.Exit(1 if errors else 0)


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


if __name__ == "__main__":
    typer.run(main)
