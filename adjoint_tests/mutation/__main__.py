"""Plant faults, each in a copy of the tree, and tell which test notices it.

    PYTHONPATH=adjoint_tests python -m mutation                       all of them
    PYTHONPATH=adjoint_tests python -m mutation "add twice" --jobs 2  some, two at a time

First the same tests run in a copy without a fault, where they have to pass. The exit status is 0 if
every fault was noticed.
"""

from __future__ import annotations

import datetime
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mutation.catalogue import FAULTS, ROOM_OF
from mutation.fault import KINDS, Fault
from mutation.runner import LIMIT, ROOT, Outcome, survey

SHOWN = 150
"""Characters of an example in a table."""


def table_of(outcomes: Sequence[Outcome]) -> Table:
    table = Table("fault", "caught by", "seconds", "smallest example")
    for one in outcomes:
        style = None if one.caught else "red"
        by = one.by if one.caught else f"NOT CAUGHT: {one.by}"
        table.add_row(one.fault.name, by, f"{one.seconds:.1f}", shortened(one.example), style=style)
    return table


def shortened(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 2] + " …"


def markdown_of(outcomes: Sequence[Outcome], commit: str, jobs: int) -> str:
    """The page of the documentation."""
    caught = sum(one.caught for one in outcomes)
    times = sorted(one.seconds for one in outcomes)
    return "\n".join(
        [
            "# Faults that the tests find",
            "",
            "Would the tests notice if linop were wrong? Each fault is a mistake that somebody",
            "could make, one or more of each kind, in every part of linop. It was planted in a",
            "copy of the tree, and tests of the suite that should notice it ran there until one",
            "failed. They pass without it.",
            "",
            f"**{caught} of {len(outcomes)} are caught**, in {times[0]:.1f} to {times[-1]:.1f} s,",
            f"{times[len(times) // 2]:.1f} in the median, with the start of pytest and the",
            f"shrinking of the example. {datetime.date.today()}, 2 cores, {jobs} at a time, commit",
            f"{commit}. Again, in some twenty minutes:",
            "",
            "```sh",
            "PYTHONPATH=adjoint_tests python -m mutation --jobs 2 --markdown docs/mutation.md",
            "```",
            "",
            "The faults are data, in `adjoint_tests/mutation/faults/`. Each names a function, an",
            "expression in it, and what takes its place; a test of the suite checks that all",
            "places exist.",
            "",
            *_kinds(outcomes),
            "",
            "The smallest example is what Hypothesis shrinks a failing one to: sizes, grids and",
            "seeds, of which the test builds an operator or a layer. A test that has its examples",
            "in its text fails with one of those.",
            "",
            "| part | kind | fault | planted in | caught by | s | smallest example |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *map(_row, outcomes),
            "",
        ]
    )


def _kinds(outcomes: Sequence[Outcome]) -> list[str]:
    """How many faults of each kind there are, and how many of them are caught."""
    lines = ["| kind | what is wrong | faults | caught |", "| --- | --- | --- | --- |"]
    for kind, says in KINDS.items():
        of_kind = [one.caught for one in outcomes if one.fault.kind == kind]
        if of_kind:
            lines.append(f"| {kind} | {says} | {len(of_kind)} | {sum(of_kind)} |")
    return lines


def _row(one: Outcome) -> str:
    fault = one.fault
    module, _, name = fault.place.partition(":")
    cells = [
        ROOM_OF.get(fault.name, ""),
        fault.kind,
        f"{fault.name}: {fault.says}",
        f"`{module.removeprefix('linop.')}`, `{name}`",
        _code(_where(one)),
        f"{one.seconds:.1f}",
        _code(shortened(one.example)),
    ]
    return f"| {' | '.join(cells)} |"


def _where(outcome: Outcome) -> str:
    return outcome.by if outcome.caught else f"NOT CAUGHT: {outcome.by}"


def _code(text: str) -> str:
    return "`" + text.replace("`", "'").replace("|", "\\|") + "`" if text else ""


def main(
    names: Annotated[list[str] | None, typer.Argument(help="of faults; by default all")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="copies at a time")] = 1,
    limit: Annotated[float, typer.Option(help="seconds for the tests of one fault")] = LIMIT,
    markdown: Annotated[Path | None, typer.Option(help="write the page of the docs here")] = None,
) -> None:
    """Plant faults, each in a copy of the tree, and tell which test notices it."""
    console = Console(emoji=False, highlight=False)
    faults = chosen(names or [])
    with Progress(console=console) as progress:
        bar = progress.add_task("without a fault", total=len(faults))

        def done(outcome: Outcome) -> None:
            progress.update(bar, advance=1, description=outcome.fault.name)
            if not outcome.caught:
                progress.console.print(
                    f"{outcome.fault.name}: NOT CAUGHT: {outcome.by}", markup=False
                )

        try:
            outcomes = survey(faults, jobs, limit, done)
        except RuntimeError as error:
            progress.stop()
            print(error, file=sys.stderr)
            raise typer.Exit(2) from None
    console.print(table_of(outcomes))
    caught = sum(one.caught for one in outcomes)
    console.print(f"{caught} of {len(outcomes)} faults caught")
    if markdown is not None:
        markdown.write_text(markdown_of(outcomes, _commit(), jobs))
    raise typer.Exit(0 if caught == len(outcomes) else 1)


def chosen(names: Sequence[str]) -> list[Fault]:
    """The faults of these names, or all.

    Raises:
        typer.BadParameter: there is no fault of a name.
    """
    known = {fault.name: fault for fault in FAULTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"no fault {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in names] if names else list(known.values())


def _commit() -> str:
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    typer.run(main)
