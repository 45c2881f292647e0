"""Rows with goals, from measured times, and rows as tables. The goals are here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from benchmarks.harness.task import FLOOR, KIB, MIB, ONE_BUFFER, RAW, ROOT_COPIES

Times = Sequence[float]
"""Minimum, median and maximum."""
FORWARD = "linop forward"
BY_HAND = ("first derivative", "CGLS, 10 iterations")
"""Cases with a hand-written side that are in the peers' table only."""
REDUCING = ("broadcast", "sum-reduce", "all-reduce")


@dataclass(frozen=True)
class Row:
    """One comparison of linop with another side, in one direction and at one size."""

    operation: str
    direction: str
    size: int
    """Bytes a worker."""
    ranks: int
    against: str
    theirs: Times | None
    """Microseconds a call: minimum, median, maximum."""
    linop: Times | None
    """Times of ``plan(x)``, with a new result; beside raw MPI with one buffer for argument and
    result, of ``plan(x, out=x)``."""
    linop_out: Times | None
    """Times of ``plan(x, out=y)``."""
    goal: str = ""
    met: bool | None = None
    note: str = ""
    calls: tuple[float, float] | None = None
    """MPI calls, waits excepted, of the rank that makes most: theirs and linop's."""

    @property
    def best(self) -> Times | None:
        """Times that are compared: of ``plan(x)``, which takes its results from a pool of buffers;
        with ``out=`` if only that was timed."""
        return self.linop or self.linop_out

    @property
    def failed(self) -> bool:
        """True if the other side was not timed: it failed, or gave another result."""
        return self.theirs is None and self.calls is None

    @property
    def ratio(self) -> float | None:
        return None if not self.best or not self.theirs else self.best[1] / self.theirs[1]

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio}


def rows(found: dict[str, Any], peers: bool) -> list[Row]:
    """The rows of one comparison, as `benchmarks.movement.rank` prints it."""
    times, name, size, ranks = found["times"], found["name"], found["size"], found["ranks"]
    rivals = [*times, *found["failed"]]
    hidden = () if not peers or name in BY_HAND else (RAW, ROOT_COPIES, FLOOR)
    table = []
    for direction in ("forward", "adjoint"):
        ours = times.get(f"{direction}/linop")
        out = times.get(f"{direction}/linop out=")
        for key in rivals:
            at, _, against = key.partition("/")
            if at != direction or against in ("linop", ONE_BUFFER, *hidden):
                continue
            if against == "linop out=" and key in times:
                continue
            mine = f"{direction}/linop" if ours else f"{direction}/linop out="
            calls = _calls(found["calls"], key, mine)
            note = found["failed"].get(key, "")
            alike = times.get(f"{direction}/{ONE_BUFFER}") if against == RAW else None
            row = Row(name, direction, size, ranks, against, times.get(key), alike or ours, out)
            table.append(_judged(row, note, calls))
        timed = ours or out
        if direction == "adjoint" and timed and not peers and ranks > 1 and size >= KIB:
            forward = times.get("forward/linop") or times["forward/linop out="]
            table.append(_judged(Row(name, direction, size, ranks, FORWARD, forward, ours, out)))
    if name.startswith("CGLS"):
        table += _iteration(found)
    return table


def _calls(calls: dict[str, Any], theirs: str, ours: str) -> tuple[float, float] | None:
    if not calls.get(theirs) or calls.get(ours) is None:
        return None
    return _number(calls[theirs]), _number(calls[ours])


def _number(calls: dict[str, float]) -> float:
    """Number of calls without waits, each of which belongs to the call that it completes."""
    return sum(n for name, n in calls.items() if not name.startswith("Wait"))


def _iteration(found: dict[str, Any]) -> list[Row]:
    """Rows with the MPI calls of one CGLS iteration; at the size of 1 KiB only."""
    calls = found["calls"]
    if not calls.get("linop") or found["size"] != KIB:
        return []
    table = []
    for against in calls:
        if against != "linop" and calls[against]:
            pair = _number(calls[against]), _number(calls["linop"])
            kinds = "; ".join(
                f"{side}: " + ", ".join(f"{name} {n:g}" for name, n in sorted(calls[side].items()))
                for side in (against, "linop")
            )
            table.append(
                Row(
                    "CGLS, MPI calls of one iteration",
                    "forward",
                    found["size"],
                    found["ranks"],
                    against,
                    None,
                    None,
                    None,
                    "linop ≤ 4 calls",
                    pair[1] <= 4,
                    kinds,
                    pair,
                )
            )
    return table


def _judged(row: Row, note: str = "", calls: tuple[float, float] | None = None) -> Row:
    goal, met = "", None
    best, theirs, ratio = row.best, row.theirs, row.ratio
    if best is not None and theirs is not None and ratio is not None:
        if row.operation == "three tiny diagonals composed":
            goal, met = "linop ≤ 5 µs", best[1] <= 5
        elif row.against == RAW and row.size == 8:
            goal, met = "≤ 5 µs more", best[1] - theirs[1] <= 5
        elif (bound := _bound(row)) is not None:
            goal, met = f"≤ {bound:g}", ratio <= bound
    return Row(**(asdict(row) | {"goal": goal, "met": met, "note": note, "calls": calls}))


def _bound(row: Row) -> float | None:
    """Largest ratio that meets the goal; None if there is none."""
    large = row.size >= MIB
    if row.against == FORWARD:
        return 1.3
    if row.against == FLOOR:
        return 1.6 if large else None
    if row.against != RAW:
        return None
    if row.operation in BY_HAND:
        return None
    if row.operation.startswith("two-column"):
        return 0.5 if "in place" in row.operation else 1.0
    if row.size < 64 * KIB:
        return 1.5
    if large and row.operation.startswith("repartition"):
        return 0.8
    return 0.7 if large and row.operation in REDUCING else 1.0


def verdict(table: Iterable[Row]) -> str:
    """Number of goals met, by number of ranks; with a warning where ranks share cores."""
    judged: dict[int, list[bool]] = {}
    for row in table:
        if row.met is not None:
            judged.setdefault(row.ranks, []).append(row.met)
    cores = os.cpu_count() or 1
    return "goals met: " + ", ".join(
        f"{sum(met)} of {len(met)} with {ranks} rank{'s' * (ranks > 1)}"
        + (f" (which share {cores} cores: times of the scheduler)" if ranks > cores else "")
        for ranks, met in sorted(judged.items())
    )


COLUMNS = (
    "operation",
    "direction",
    "a worker",
    "ranks",
    "against",
    "theirs µs (min / median / max)",
    "linop µs",
    "linop out= µs",
    "ratio",
    "goal",
    "met",
)


def cells(row: Row) -> list[str]:
    """A row as text."""
    calls = "" if row.calls is None else f"{row.calls[0]:g} → {row.calls[1]:g} calls"
    met = "" if row.met is None else "yes" if row.met else "NO"
    against = f"{row.against} ({row.note})" if row.note else row.against
    return [
        row.operation,
        row.direction,
        bytes_text(row.size),
        str(row.ranks),
        f"{against}; {calls}" if calls else against,
        _times(row.theirs),
        _times(row.linop),
        _times(row.linop_out),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        row.goal,
        met,
    ]


def bytes_text(size: int) -> str:
    """A size in bytes as text, with a binary unit."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def number(value: float) -> str:
    """Three significant digits, no exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _times(times: Times | None) -> str:
    return " / ".join(map(number, times)) if times else ""


def rich_table(title: str, table: Iterable[Row]) -> Table:
    """A table for the terminal; goals met are green, goals missed red."""
    shown = Table(title=title, title_justify="left")
    for column in COLUMNS:
        shown.add_column(column)
    for row in table:
        style = {None: "", True: "green", False: "red"}[row.met]
        shown.add_row(*cells(row), style=style)
    return shown


def markdown_lines(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Lines of a table in Markdown, as they come."""
    for cells in (header, ["---"] * len(header)):
        yield f"| {' | '.join(cells)} |"
    for cells in lines:
        yield f"| {' | '.join(map(str, cells))} |"


def markdown(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown."""
    return "\n".join([*markdown_lines(header, lines), ""])


def summary(records: Iterable[dict[str, Any]], against: str | None) -> str:
    """Table of ratios in Markdown, a column for each size; None for `against`: all peers."""
    chosen = [r for r in records if r["ratio"] is not None and r["size"] >= KIB]
    chosen = [r for r in chosen if (r["against"] == against if against else "peer" in r)]
    sizes = sorted({r["size"] for r in chosen})
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    for r in chosen:
        key = (r["operation"], r["direction"], str(r["ranks"]), r["against"])
        mark = {None: "", True: " ✓", False: " ✗"}[r["met"]]
        ours = r["linop"] or r["linop_out"]
        text = f"{r['ratio']:.2f}{mark} ({number(r['theirs'][1])} → {number(ours[1])})"
        lines.setdefault(key, {})[r["size"]] = text
    header = ["operation", "direction", "ranks", "against", *map(bytes_text, sizes)]
    return markdown(header, [[*key, *(v.get(s, "") for s in sizes)] for key, v in lines.items()])
