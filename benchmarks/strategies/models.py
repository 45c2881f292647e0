"""The table of models of other people × strategies: linop's on threads and on ranks, and torch's
own on ranks over gloo, each beside one process.

    python benchmarks/strategies/models.py --write

prints a line for each cell as it is found, then the table; with ``--write`` it becomes the table of
`docs/models.md`. ``--only "transformers BERT"``, ``--strategy zero3`` and ``--side torch`` choose
cells; what `results/models.jsonl` has is not run again without ``--again``. Needs the extras
``models``, ``mpi`` and ``test``.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "adjoint_tests")]

from support.models.packages import missing, versions  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
TOTALS = {"unfit": "cells with no plan here (—)"}
WORDS = {"right": "right", "unfit": "—", "refused": "refused", "raw": "error", "wrong": "**wrong**"}
STORE = Path(__file__).with_name("results") / "models.jsonl"
SIDES = "threads", "ranks", "torch"
Verdicts = dict[tuple[str, str, str], tuple[str, str]]
"""Kind and text by model, strategy and side."""
Cell = tuple[Any, Any]
"""linop's verdict, and torch's; None without a strategy of its own."""


def known() -> Verdicts:
    """The verdicts in the store; of those of one cell, the last."""
    lines = STORE.read_text().splitlines() if STORE.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(r["model"], r["strategy"], r["side"]): (r["kind"], r["text"]) for r in rows}


def measure(model: str, strategy: str, sides: Sequence[str], again: bool) -> None:
    """Run the cells that are chosen, each in the usual configuration of its model, and keep their
    verdicts; those that are in the store already not again, unless asked."""
    from support.models import running
    from support.models.cases import Case
    from support.models.peers import PEERS
    from support.models.strategies import STRATEGIES
    from support.models.zoo import ZOO

    run = {"threads": running.on_threads, "ranks": running.on_ranks, "torch": running.on_torch}
    found = {} if again else known()
    for side, name, column in itertools.product(sides, ZOO, STRATEGIES):
        chosen = model in name and strategy in column and (side != "torch" or column in PEERS)
        if not chosen or (name, column, side) in found:
            continue
        verdict = run[side](Case(name, ZOO[name].usual, column, STRATEGIES[column][1]))
        row = {"model": name, "strategy": column, "side": side, **vars(verdict)}
        with STORE.open("a") as file:
            file.write(f"{json.dumps(row, ensure_ascii=False)}\n")
        print(f"{name} | {column} | {side}: {verdict}", flush=True)


def cells(found: Verdicts) -> Iterator[tuple[str, str, Cell]]:
    """All cells, row by row. linop's verdict is that on ranks, if threads do not differ."""
    from support.models.running import Verdict
    from support.models.strategies import STRATEGIES
    from support.models.zoo import ZOO

    for name, column in itertools.product(ZOO, STRATEGIES):
        threads, ranks, torch = (found.get((name, column, side)) for side in SIDES)
        ours = Verdict(*(ranks or threads or ("unfit", "")))
        if threads and ranks and threads[0] != ranks[0]:
            ours = Verdict("wrong", f"on threads {': '.join(threads)}; on ranks {': '.join(ranks)}")
        yield name, column, (ours, torch and Verdict(*torch))


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
    return " / ".join(
        "—" if each is None else _said(each, who, notes)
        for who, each in zip(("linop", "torch"), one, strict=True)
    )


def _said(verdict: Any, who: str, notes: dict[str, int]) -> str:
    word = WORDS[verdict.kind]
    if verdict.kind in ("right", "unfit"):
        return word
    text = re.sub(r"([|<\[])", r"\\\1", f"{who}: {verdict.text}")
    return f"{word} [{notes.setdefault(text, len(notes) + 1)}]"


def written(lines: list[str], totals: Mapping[str, int]) -> None:
    """Put the table in its page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    today = datetime.datetime.now(datetime.UTC).date()
    head = f"{today}, {versions()}, 2 workers (4 along two axes), float64."
    counts = ", ".join(f"{n} {TOTALS.get(kind, kind)}" for kind, n in totals.items())
    text = "\n".join(["", "", head, f"linop: {counts}.", "", *lines, ""])
    PAGE.write_text(f"{before}{BEGIN}{text}{END}{after}")


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--only", default="", help="models whose name has this in it")
    options.add_argument("--strategy", default="", help="strategies whose name has this in it")
    options.add_argument("--side", choices=SIDES, action="append", help="by default all three")
    options.add_argument("--again", action="store_true", help="also what the store has")
    options.add_argument("--write", action="store_true", help="write the table in docs/models.md")
    given = options.parse_args()
    if why := missing():
        raise SystemExit(why)
    warnings.simplefilter("ignore")
    measure(given.only, given.strategy, given.side or SIDES, given.again)
    found = list(cells(known()))
    lines = table(found)
    totals = Counter(ours.kind for *_, (ours, _) in found)
    print("\n".join(lines))
    if given.write:
        written(lines, totals)
    return int("wrong" in totals)


if __name__ == "__main__":
    sys.exit(main())
