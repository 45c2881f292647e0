"""Draw the plots of docs/best.md from the tables that its commands left: ``python
docs/best/plots.py`` writes ``*.svg`` beside this file."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from linop.svg import Picture

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGES = ROOT / "docs"


def _charts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("charts", HERE / "charts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    import charts
else:
    charts = _charts()


def table(path: Path, header: str) -> list[list[str]]:
    """The rows of a Markdown table, as texts.

    Args:
        header: how its first line begins, after "| ".

    Raises:
        ValueError: the page has no such table.
    """
    rows: list[list[str]] | None = None
    for line in path.read_text(encoding="utf-8").splitlines():
        if rows is None:
            rows = [] if line.startswith(f"| {header}") else None
        elif not line.startswith("|"):
            break
        elif not line.startswith("| ---"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    if not rows:
        raise ValueError(f"{path.name} has no table that begins with {header!r}")
    return rows


REDISTRIBUTION = RESULTS / "redistribution.md"
BINS = {
    "the least": 1.0,
    "up to 1.5 ×": 1.5,
    "up to 2 ×": 2.0,
    "up to 3 ×": 3.0,
    "up to 4 ×": 4.0,
    "up to 6 ×": 6.0,
    "up to 10 ×": 10.0,
}
"""Of the least that can be moved."""


def redistribution() -> Picture:
    """How many transitions move how much."""
    counts = {name: [0, 0] for name in BINS}
    for least, *moved, number in table(REDISTRIBUTION, "least"):
        for k, elements in enumerate(moved):
            assert int(least) or not int(elements)
            ratio = int(elements) / int(least) if int(least) else 1.0
            name = next(name for name, bound in BINS.items() if ratio <= bound)
            counts[name][k] += int(number)
    return charts.bars(
        "All 4,032 transitions of a tensor on 2 × 2 × 2 workers",
        counts,
        ("linop", "torch's DTensor, on GPUs"),
        "a transition moves",
        "All transitions of linop move the least that is possible, most of DTensor's more",
    )


def pylops_mpi() -> Picture:
    """Times of an iteration beside PyLops-MPI's."""
    rows = {}
    for cells in table(PAGES / "pylops_mpi.md", "tutorial | form"):
        rows[f"{cells[0]}, {cells[1]}"] = (float(cells[4]), float(cells[7]))
    return charts.ratios(
        "PyLops-MPI's four tutorials, in eight forms",
        rows,
        ("by the clock", "by the processor"),
        {0.1: "1/10", 0.2: "1/5", 0.5: "1/2", 1: "1 = PyLops-MPI"},
        "time of an iteration in linop / in PyLops-MPI (left is faster)",
        "An iteration of linop takes between a tenth and a half of PyLops-MPI's time",
    )


def convolutions() -> Picture:
    """DTensor's and spatial's convolutions."""
    rows = {}
    for setting, theirs, ours in table(PAGES / "spatial.md", "Conv2d(4, 4, 3, …)"):
        words = {"**wrong": ("wrong", "wrong, no error"), "right": ("right", "right")}
        first = words.get(theirs.split(",")[0].strip(), ("raises", "raises an error"))
        assert "within" in ours, ours
        error = ours.rsplit(" ", 1)[1]
        rows[setting.strip("`")] = (first, ("right", f"right, to {error}"))
    return charts.verdicts(
        "Conv2d(4, 4, 3, …) on an image whose rows are cut in two",
        rows,
        ("torch's DTensor", "linop"),
        "Of eight settings DTensor computes one right, linop all",
    )


PROOFS = {
    "halo: `verify`, all workers' plans": "halo: plans of all workers",
    "ring all-reduce = B R": "ring = all-reduce",
    "halo: H* = the adjoint written out": "halo: the adjoint",
    "grid broadcast: `verify`": "broadcast: plans of all",
    "all-reduce = B R": "all-reduce = B R",
    "halo: one worker's plan": "halo: one worker's plan",
}
"""Names in the table, and in the plot."""


def proofs() -> Picture:
    """Times of proofs by the number of workers."""
    lines: dict[str, dict[int, float]] = {name: {} for name in PROOFS.values()}
    for name, workers, least, *_ in table(RESULTS / "growth.md", "question"):
        if name in PROOFS:
            lines[PROOFS[name]][int(workers)] = float(least)
    return charts.growth(
        "Proofs and plans, in one process",
        lines,
        "workers",
        "seconds of the processor, the least of five runs",
        "Proofs of operators of 4,096 workers take about a second, in one process",
    )


PICTURES: Mapping[str, Callable[[], Picture]] = {
    "redistribution": redistribution,
    "pylops_mpi": pylops_mpi,
    "convolutions": convolutions,
    "proofs": proofs,
}


def main() -> None:
    """Write all plots."""
    for name, draw in PICTURES.items():
        draw().save(HERE / f"{name}.svg")


if __name__ == "__main__":
    main()
