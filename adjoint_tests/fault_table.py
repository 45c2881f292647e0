"""Are the faults of `spmd_faults` found, again and again? A table: how often each was found, named
its ranks, and was shrunk to the smallest example; how long the slowest example took to end; and how
many did not end in the watch and 5 seconds.

    python adjoint_tests/fault_table.py --repeats 50
"""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import track
from rich.table import Table

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

import linop  # noqa: E402
from linop.testing import FailedExampleError  # noqa: E402
from spmd_faults import FAULTS, Fault  # noqa: E402

MARGIN = 5.0
"""Seconds after the watch in which an example has ended."""


@dataclass
class Hunt:
    """What came of one search for a fault."""

    fault: Fault
    watch: float
    message: str = ""
    seconds: list[float] = field(default_factory=list)
    """Of every example that failed: until its ranks had ended, or were ready for the next."""

    @property
    def minimum(self) -> tuple[int, int] | None:
        """Workers and size of the example that was reported."""
        workers = re.search(r"^workers=(\d+)", self.message, re.MULTILINE)
        size = re.search(r"^ *size=(\d+),", self.message, re.MULTILINE)
        return (int(workers[1]), int(size[1])) if workers and size else None

    @property
    def found(self) -> bool:
        return bool(self.message)

    @property
    def named(self) -> bool:
        """Whether the report has all the words it should; ``a|b`` is either of them."""
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


def row(fault: Fault, hunts: list[Hunt]) -> list[str]:
    """A fault's line of the table."""
    return [
        fault.name.replace("_", " "),
        str(len(hunts)),
        str(sum(h.found for h in hunts)),
        str(sum(h.named for h in hunts)),
        str(sum(h.shrunk for h in hunts)) if fault.minimum else "-",
        f"{max(h.slowest for h in hunts):.1f} s",
        str(sum(h.late for h in hunts)),
    ]


def main(
    repeats: Annotated[int, typer.Option(help="searches for each fault")] = 50,
    watch: Annotated[float, typer.Option(help="seconds in which an example has to end")] = 2.0,
    only: Annotated[str, typer.Option(help="only faults with this in their names")] = "",
    workers: Annotated[int, typer.Option(help="draw up to so many workers")] = 3,
) -> None:
    """Search for every fault, several times."""
    os.environ.setdefault("COLUMNS", "110")
    table = Table(title=f"{repeats} searches for each fault, watch {watch:g} s")
    for column in ("fault", "repeats", "found", "named", "shrunk", "slowest end", "late"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    chosen = [fault for fault in FAULTS.values() if only in fault.name]
    begin, failed = time.monotonic(), 0
    for fault in track(chosen, "searching", console=Console(stderr=True)):
        hunts = [hunt(fault, watch, tuple(range(1, workers + 1)), k) for k in range(repeats)]
        table.add_row(*row(fault, hunts))
        wrong = [h for h in hunts if not (h.found and h.named and h.shrunk) or h.late]
        failed += len(wrong)
        for one in wrong:
            print(f"--- {fault.name}: minimum {one.minimum}, slowest {one.slowest:.1f} s")
            print(one.message, flush=True)
    Console().print(table)
    print(f"{len(chosen)} faults, {failed} searches failed, {time.monotonic() - begin:.0f} s")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
