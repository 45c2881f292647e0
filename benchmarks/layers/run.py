"""linop's bridge to torch, and its layers, beside hand-written ones, torch.distributed over gloo
and sequential torch: one command, tables with their goals.

    python benchmarks/layers/run.py [--quick] [--only Linear] [--ranks 2] [--no-peers]

As `benchmarks/movement/run.py`; it needs torch. Results: ``results/layers-<mpi>.md``.

Not compared, because torch 2.13 computes them wrongly: the gradients of the functional broadcast,
and DTensor's convolutions split over space. torch.distributed has no halo exchange.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout is measured, whatever is installed

from benchmarks.harness import report, saving  # noqa: E402
from benchmarks.harness.jobs import console, run_job  # noqa: E402
from benchmarks.harness.task import (  # noqa: E402
    BOTH,
    BY_HAND,
    DTENSOR,
    GLOO,
    HAND_COPIES,
    KIB,
    MIB,
    PLAN,
    SEQUENTIAL,
    SIZES,
    Task,
)

BEGIN, END = "<!-- layers:begin -->", "<!-- layers:end -->"
TITLES = {
    "bridge": "The bridge",
    "movement": "Movement modules",
    "layer": "Layers with parameters",
    "step": "Steps of training",
}
"""Title of the table, by the kind of its cases."""


def main(
    ranks: Annotated[list[int] | None, typer.Option(help="How many; repeat it [2 and 4].")] = None,
    sizes: Annotated[list[int] | None, typer.Option(help="Bytes a worker; repeat it.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Parts of names of cases.")] = None,
    seconds: Annotated[float, typer.Option(help="For each comparison, about.")] = 3.0,
    quick: Annotated[bool, typer.Option(help="A tenth of the time, up to 1 MiB.")] = False,
    peers: Annotated[bool, typer.Option(help="torch.distributed over gloo too.")] = True,
    pinned: Annotated[
        bool,
        typer.Option(help="Each rank stays on one core, where others work too; with --no-peers."),
    ] = False,
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
    if pinned and peers:
        raise typer.BadParameter("gloo's threads would share their rank's core: --no-peers too")
    found: list[dict[str, Any]] = []
    errors: list[str] = []
    task = Task(
        only=tuple(only or ()),
        sizes=tuple(sizes or ()),
        # Most layers have one size, above those of quick runs.
        largest=MIB if quick and not sizes else 64 * MIB,
        seconds=seconds * (0.1 if quick else 1),
        peers=peers,
        pinned=pinned,
        program="benchmarks.layers.rank",
    )
    for number in ranks or [2, 4]:
        with console.status(f"{number} ranks: starting") as status:
            try:
                for line in run_job(number, task.command()):
                    found.append(line)
                    if "name" in line:
                        size = report.bytes_text(line["size"])
                        status.update(f"{number} ranks: {line['name']}, {size}")
            except RuntimeError as error:
                errors.append(str(error))
    tables: dict[str, list[report.Row]] = {}
    for line in found:
        if "name" in line:
            tables.setdefault(TITLES[line["kind"]], []).extend(rows(line))
    for title, table in tables.items():
        console.print(report.rich_table(title, table))
        errors += [f"{r.operation} {r.direction}: {r.against}: {r.note}" for r in table if r.failed]
    verdict = report.verdict([row for table in tables.values() for row in table])
    console.print(verdict)
    facts = saving.machine(found)
    name = f"layers-{saving.library_name(facts)}"
    saving.save(output, name, facts, tables, verdict, errors)
    records = saving.records(tables)
    if raw is not None:
        saved = {"machine": facts, "verdict": verdict, "errors": errors, "rows": records}
        saving.save_raw(raw, saved)
    if write_readme:
        title = f"Layers, {facts.get('MPI')}"
        saving.into_readme((BEGIN, END), name, title, facts, verdict, summary(records))
    for said in errors:
        console.print(said, style="red", markup=False)
    raise typer.Exit(1 if errors else 0)


def rows(found: dict[str, Any]) -> Iterator[report.Row]:
    """The rows of one comparison, as `benchmarks.layers.rank` prints it."""
    times, failed = found["times"], found["failed"]
    for key in [*times, *failed]:
        direction, _, against = key.partition("/")
        if against == "linop":
            continue
        theirs, ours = times.get(key), times.get(f"{direction}/linop")
        size = found["size"]
        goal, met = judged(found, direction, against, theirs, ours)
        yield report.Row(
            found["name"],
            direction,
            size,
            found["ranks"],
            against,
            theirs,
            ours,
            None,
            goal,
            met,
            failed.get(key, ""),
        )


def judged(
    found: dict[str, Any], direction: str, against: str, theirs: Any, ours: Any
) -> tuple[str, bool | None]:
    """The goal, and True if it is met; None if there is none."""
    name, kind, size, ranks = (found[key] for key in ("name", "kind", "size", "ranks"))
    if not theirs or not ours:
        return "", None
    if (against, direction) in ((PLAN, "forward"), (BOTH, "both")):
        return "≤ 15 µs more", ours[1] - theirs[1] <= 15
    bound = None
    if against in (BY_HAND, HAND_COPIES) and kind == "movement" and size >= 64 * KIB:
        bound = 1.1
    if name.startswith("LeNet"):
        bound = {(BY_HAND, 4): 1.1, (SEQUENTIAL, 2): 0.8}.get((against, ranks))
    if against in (GLOO, DTENSOR):
        bound = 1.0
    return ("", None) if bound is None else (f"≤ {bound:g}", ours[1] <= bound * theirs[1])


def summary(records: list[dict[str, Any]]) -> list[str]:
    """Tables of ratios: of cases with several sizes, and of cases with one."""
    by_size = [r | {"peer": True} for r in records if r["size"] in SIZES]
    others = [r for r in records if r["size"] not in SIZES and r["ratio"] is not None]
    return [report.summary(by_size, None), one_size(others)]


def one_size(records: list[dict[str, Any]]) -> str:
    """Ratios of cases of one size, a column for each direction."""
    directions = ["forward", "backward", "both", "step"]
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for r in records:
        mark = {None: "", True: " ✓", False: " ✗"}[r["met"]]
        text = f"{r['ratio']:.2f}{mark} ({_ms(r['theirs'][1])} → {_ms(r['linop'][1])})"
        key = (r["operation"], str(r["ranks"]), r["against"])
        lines.setdefault(key, {})[r["direction"]] = text
    header = ["operation (ms)", "ranks", "against", *directions]
    return report.markdown(
        header, [[*key, *(v.get(d, "") for d in directions)] for key, v in lines.items()]
    )


def _ms(micro: float) -> str:
    return report.number(micro / 1000)


if __name__ == "__main__":
    typer.run(main)
