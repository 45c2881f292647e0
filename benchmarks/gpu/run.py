"""Plans on a GPU: movement on the device beside copies of as many bytes; ranks that share the
device, with staged and with CUDA-aware messages, beside raw mpi4py; a layer's step beside torch's.

    python benchmarks/gpu/run.py [--quick] [--only add] [--ranks 2]

Messages go from device to device where the MPI library can (docs/gpu.md), else through main memory.
``benchmarks/gpu/suite.sh`` installs what is needed, runs the tests on the GPU, then this. Results:
``results/gpu.md``, and with ``--write-readme`` benchmarks/README.md; all numbers with ``--raw``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout is measured, whatever is installed

from benchmarks.harness import report, saving  # noqa: E402
from benchmarks.harness.jobs import console, run_job  # noqa: E402
from benchmarks.harness.task import MIB, Task  # noqa: E402

BEGIN, END = "<!-- gpu:begin -->", "<!-- gpu:end -->"
GOAL, FROM = 0.8, 64 * MIB
"""Fraction of a copy's bandwidth that linop's movement should reach, from this size in bytes on."""


def main(
    ranks: Annotated[list[int] | None, typer.Option(help="How many; repeat it [1, 2, 4].")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Parts of names of cases.")] = None,
    sizes: Annotated[list[int] | None, typer.Option(help="Bytes; repeat it.")] = None,
    seconds: Annotated[float, typer.Option(help="For each comparison, about.")] = 2.0,
    quick: Annotated[bool, typer.Option(help="A tenth of the time, up to 1 MiB.")] = False,
    output: Annotated[Path, typer.Option(help="Folder of the tables.")] = ROOT
    / "benchmarks/results",
    write_readme: Annotated[bool, typer.Option(help="Put them into benchmarks/README.md.")] = False,
    raw: Annotated[
        Path | None, typer.Option(help="File for all numbers, as JSON; by default none.")
    ] = None,
) -> None:
    """Measure, print, save; status 1 where a job failed."""
    task = Task(
        only=tuple(only or ()),
        sizes=tuple(sizes or ()),
        largest=MIB if quick else 1024 * MIB,
        seconds=seconds * (0.1 if quick else 1),
        program="benchmarks.gpu.rank",
    )
    found: list[dict[str, Any]] = []
    errors: list[str] = []
    for number in ranks or [1, 2, 4]:
        console.print(f"{number} ranks")
        try:
            found += run_job(number, task.command())
        except RuntimeError as error:
            errors.append(str(error))
    facts = saving.machine(found)
    text = "\n".join([saving.facts_text(facts), *tables([f for f in found if "table" in f])])
    text += "".join(f"\nFailed: {error}\n" for error in errors)
    output.mkdir(parents=True, exist_ok=True)
    (output / "gpu.md").write_text(f"# GPU\n\n{text}")
    print(text)
    if raw is not None:
        saving.save_raw(raw, {"machine": facts, "errors": errors, "found": found})
    if write_readme:
        saving.between(BEGIN, END, text)
    raise typer.Exit(1 if errors else 0)


def tables(found: list[dict[str, Any]]) -> list[str]:
    """All tables in Markdown."""
    parts: list[str] = []
    for name, title, rows in (
        ("local", "What stays on the GPU (µs by its own clock, medians)", local_rows),
        ("ranks", "Ranks that share the GPU (µs, medians of the slowest rank)", timed_rows),
        ("step", "A layer's step (µs, medians of the slowest rank)", timed_rows),
    ):
        here = [line for line in found if line["table"] == name]
        if here:
            columns, cells = rows(here)
            parts += [f"### {title}\n", report.markdown(columns, cells)]
    return parts


Cells = tuple[list[str], list[list[str]]]


def local_rows(found: list[dict[str, Any]]) -> Cells:
    """Times, and the fraction of the bandwidth of a copy of as many bytes."""
    columns = ["movement", "size", "copy µs", "linop µs", "GB/s", "of the copy's", "goal"]
    cells = []
    for line in found:
        copy, ours = (line["times"][side][1] for side in ("copy", "linop"))
        share = copy / ours
        goal = "" if line["size"] < FROM else f"{GOAL:.0%} {'met' if share >= GOAL else 'missed'}"
        numbers = [f"{copy:.1f}", f"{ours:.1f}", f"{line['bytes'] / ours / 1e3:.0f}"]
        size = report.bytes_text(line["size"])
        cells.append([line["name"], size, *numbers, f"{share:.0%}", goal])
    return columns, cells


def timed_rows(found: list[dict[str, Any]]) -> Cells:
    """Median times, a column for each side; ``--raw`` saves minimum and maximum too."""
    sides = list(dict.fromkeys(side for line in found for side in line["times"]))
    cells = []
    for line in found:
        medians = (line["times"].get(side) for side in sides)
        shown = ["–" if t is None else f"{t[1]:.0f}" for t in medians]
        cells.append([line["name"], report.bytes_text(line["size"]), str(line["ranks"]), *shown])
    return ["operation", "size", "ranks", *sides], cells


if __name__ == "__main__":
    typer.run(main)
