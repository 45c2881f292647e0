"""Are the faults of `support.spmd.faults` found, again and again? A table: how often each was
found, named its ranks, and was shrunk to the smallest example; how long the slowest example took to
end; and how many did not end in the watch and 5 seconds.

    PYTHONPATH=adjoint_tests python -m support.spmd.fault_table --repeats 50
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import track
from rich.table import Table

import linop
from linop.testing import FailedExampleError
from support.spmd import rejections  # noqa: F401  # registers its faults
from support.spmd.faults import FAULTS, Fault

MARGIN = 5.0
"""Seconds after the watch in which an example has ended."""


@dataclass
class Hunt:
    """Result of one search for a fault."""

    fault: Fault
    watch: float
    message: str = ""
    seconds: list[float] = field(default_factory=list)
    """Of every example that failed: until its ranks had ended, or were ready for the next."""

    @property
    def minimum(self) -> tuple[int, int] | None:
        """Workers and size of the example that was reported."""
        workers = re.search(r"^workers=(\d+)", self.message, re.MULTILINE)
        size = re.search(r"^ *size=(?:\w+\()?(\d+)\)?,", self.message, re.MULTILINE)
        return (int(workers[1]), int(size[1])) if workers and size else None

    @property
    def found(self) -> bool:
        return bool(self.message)

    @property
    def named(self) -> bool:
        """True if the report has all the words it should; ``a|b`` is either of them."""
        return all(any(w in self.message for w in words.split("|")) for words in self.fault.says)

    @property
    def shrunk(self) -> bool:
        return self.fault.minimum is None or self.minimum == self.fault.minimum

    @property
    def slowest(self) -> float:
        return max(self.seconds, default=0.0)

    @property
    def late(self) -> bool:
        return self.slowest > self.watch + MARGIN


def hunt(
    fault: Fault,
    watch: float,
    workers: tuple[int, ...],
    number: int = 0,
    sizes: tuple[int, int] | None = None,
) -> Hunt:
    """Let Hypothesis look for a fault.

    Args:
        fault: what to look for.
        watch: seconds in which an example has to end.
        workers: of which numbers to draw.
        number: the seed.
        sizes: the smallest and the largest to draw; by default 0 and the fault's.
    """
    result = Hunt(fault, watch)
    test = linop.testing.spmd(workers=workers, timeout=watch)(fault.test.__wrapped__)  # type: ignore[attr-defined]

    @seed(number)
    @settings(
        max_examples=60,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(size=st.integers(*(sizes or (0, fault.sizes))).map(fault.travels))
    def example(size: object) -> None:
        try:
            test(size=size)
        except FailedExampleError as error:
            result.seconds.append(error.outcome.seconds if error.outcome else 0.0)
            raise

    try:
        example()
    except Exception as error:
        result.message = "\n".join([str(error), *getattr(error, "__notes__", [])])
    return result


Record = dict[str, Any]
"""Record of a search, as JSON."""


def recorded(name: str, number: int, watch: float, workers: int) -> Record:
    """Search for a fault, in a process of its own."""
    found = hunt(FAULTS[name], watch, tuple(range(1, workers + 1)), number)
    right = found.found and found.named and found.shrunk and not found.late
    kept = ("found", "named", "shrunk", "slowest", "late", "watch")
    record: Record = {"fault": name, "seed": number} | {k: getattr(found, k) for k in kept}
    return record if right else record | {"message": found.message}


def lines(records: list[Record]) -> Iterator[list[str]]:
    """The table, a fault a line."""
    for fault in FAULTS.values():
        mine = [r for r in records if r["fault"] == fault.name]
        if mine:
            counts = {k: str(sum(r[k] for r in mine)) for k in ("found", "named", "shrunk", "late")}
            yield [
                fault.name.replace("_", " "),
                str(len(mine)),
                counts["found"],
                counts["named"],
                counts["shrunk"] if fault.minimum else "-",
                f"{max(r['slowest'] for r in mine):.1f} s",
                counts["late"],
            ]


def main(
    repeats: Annotated[int, typer.Option(help="searches for each fault")] = 50,
    watch: Annotated[float, typer.Option(help="seconds in which an example has to end")] = 2.0,
    only: Annotated[str, typer.Option(help="only faults with this in their names")] = "",
    workers: Annotated[int, typer.Option(help="draw up to so many workers")] = 3,
    jobs: Annotated[int, typer.Option(help="searches at a time; most wait most of the time")] = 1,
    record: Annotated[
        Path | None, typer.Option(help="file of searches: those in it are not done again")
    ] = None,
    markdown: Annotated[bool, typer.Option(help="print the table in Markdown")] = False,
) -> None:
    """Search for every fault, several times."""
    chosen = [name for name in FAULTS if only in name]
    text = record.read_text() if record and record.exists() else ""
    records: list[Record] = [json.loads(line) for line in text.splitlines()]
    known = {(r["fault"], r["seed"]) for r in records}
    wanted = [(name, k) for k in range(repeats) for name in chosen if (name, k) not in known]
    begin = time.monotonic()
    # A job is kept by the process that started it, and ends with it.
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        hunts = [pool.submit(recorded, name, k, watch, workers) for name, k in wanted]
        console = Console(stderr=True)
        for done in track(as_completed(hunts), "searching", len(hunts), console=console):
            records.append(done.result())
            if record:
                with record.open("a") as file:
                    print(json.dumps(records[-1]), file=file)
    header = ["fault", "searches", "found", "named", "shrunk", "slowest end", "late"]
    if markdown:
        rows = [header, ["---"] + ["---:"] * 6, *lines(records)]
        print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    else:
        os.environ.setdefault("COLUMNS", "110")
        table = Table(*header, title=f"{len(records)} searches")
        for row in lines(records):
            table.add_row(*row)
        Console().print(table)
    wrong = [r for r in records if "message" in r]
    for r in wrong:
        print(f"--- {r['fault']}, seed {r['seed']}, slowest {r['slowest']:.1f} s\n{r['message']}")
    print(f"{len(wrong)} searches failed; {len(wanted)} took {time.monotonic() - begin:.0f} s")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
