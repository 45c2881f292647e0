"""The table of models of other people × strategies: linop's on threads and on ranks, and torch's own
on ranks over gloo, each beside one process.

    python benchmarks/strategies/models.py --write

prints a line for each cell as it is found, then the table; with ``--write`` it becomes the table of
`docs/models.md`. ``--only "transformers BERT"`` and ``--strategy zero3`` choose rows and columns.
Needs the extras ``models``, ``mpi`` and ``test``.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "adjoint_tests")]

from support.models.packages import missing, versions  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
WORDS = {"right": "right", "unfit": "—", "refused": "refused", "raw": "error", "wrong": "**wrong**"}
Cell = tuple[Any, Any]
"""linop's verdict, and torch's; None without a strategy of its own."""


def cell(case: Any) -> Cell:
    """The verdicts of a cell. linop's is that on ranks, if threads do not differ."""
    from support.models import running
    from support.models.peers import PEERS

    threads, ranks = running.on_threads(case), running.on_ranks(case)
    ours = ranks
    if threads.kind != ranks.kind:
        ours = running.Verdict("wrong", f"on threads: {threads}; on ranks: {ranks}")
    theirs = running.on_torch(case) if case.strategy in PEERS else None
    return ours, theirs


def cells(model: str, strategy: str) -> Iterator[tuple[str, str, Cell]]:
    """All cells, row by row; each in the usual configuration of its model."""
    from support.models.cases import Case
    from support.models.strategies import STRATEGIES
    from support.models.zoo import ZOO

    for name, family in ZOO.items():
        for column, (_, mesh) in STRATEGIES.items():
            if model in name and strategy in column:
                found = cell(Case(name, family.usual, column, mesh))
                print(f"{name} | {column}: {found[0]} | torch: {found[1]}", flush=True)
                yield name, column, found


def table(found: Iterable[tuple[str, str, Cell]]) -> list[str]:
    """Lines of Markdown: a row for each model, linop's verdict before torch's, and reasons as
    footnotes below."""
    rows: dict[str, dict[str, Cell]] = {}
    for name, column, one in found:
        rows.setdefault(name, {})[column] = one
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    notes: dict[str, int] = {}
    lines = [_line(["", *columns]), _line(["---"] * (len(columns) + 1))]
    for name, row in rows.items():
        lines.append(_line([name, *(_words(row.get(column), notes) for column in columns)]))
    said = [f"{number}. {text}" for text, number in notes.items()]
    return [*lines, "", *said]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _words(one: Cell | None, notes: dict[str, int]) -> str:
    if one is None:
        return ""
    return " / ".join("—" if each is None else _said(each, who, notes)
                      for who, each in zip(("linop", "torch"), one, strict=True))


def _said(verdict: Any, who: str, notes: dict[str, int]) -> str:
    word = WORDS[verdict.kind]
    if verdict.kind in ("right", "unfit"):
        return word
    text = f"{who}: {verdict.text}".replace("|", "\\|").replace("<", "\\<")
    return f"{word} [{notes.setdefault(text, len(notes) + 1)}]"


def written(lines: list[str], totals: Mapping[str, int]) -> None:
    """Put the table in its page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    today = datetime.datetime.now(datetime.UTC).date()
    head = f"{today}, {versions()}, 2 workers (4 along two axes), float64."
    counts = ", ".join(f"{n} {kind}" for kind, n in totals.items())
    text = "\n".join(["", "", head, f"linop: {counts}.", "", *lines, ""])
    PAGE.write_text(f"{before}{BEGIN}{text}{END}{after}")


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--only", default="", help="models whose name has this in it")
    options.add_argument("--strategy", default="", help="strategies whose name has this in it")
    options.add_argument("--write", action="store_true", help="write the table in docs/models.md")
    given = options.parse_args()
    if why := missing():
        raise SystemExit(why)
    warnings.simplefilter("ignore")
    found = list(cells(given.only, given.strategy))
    lines = table(found)
    totals: dict[str, int] = {}
    for *_, (ours, _) in found:
        totals[ours.kind] = totals.get(ours.kind, 0) + 1
    print("\n".join(lines))
    if given.write:
        written(lines, totals)
    return int("wrong" in totals)


if __name__ == "__main__":
    sys.exit(main())
