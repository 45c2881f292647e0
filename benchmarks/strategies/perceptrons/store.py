"""Results of runs: one line of JSON each, so that a table can be made of several sittings."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.strategies.perceptrons.runs import Configuration, Run

STORE = Path(__file__).parents[1] / "results" / "runs.jsonl"
Runs = dict[tuple[Configuration, bool], Run]
"""By configuration, and whether with the authors' mistakes."""


def stored(path: Path = STORE) -> Runs:
    """The runs of a store, the last of each; none if there is no such file."""
    found: Runs = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        row = json.loads(line)
        c = Configuration(**row["configuration"])
        run = {k: tuple(v) if isinstance(v, list) else v for k, v in row["run"].items()}
        found[c, row["mistakes"]] = Run(**run)
    return found


def store(c: Configuration, mistakes: bool, run: Run, path: Path = STORE) -> None:
    """Add a run; six significant digits."""
    rounded = json.loads(
        json.dumps(asdict(run)), parse_float=lambda text: float(f"{float(text):.6g}")
    )
    row = {"configuration": asdict(c), "mistakes": mistakes, "run": rounded}
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
