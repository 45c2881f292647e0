"""Losses of examples/language_model.py under four schedules on 2 and 4 workers, beside one process.

    python benchmarks/strategies/pipelines/language_model.py [--updates 300] [--kept FOLDER]

runs what the folder does not have, writes results/language_model.md and, with the extra `plot`,
docs/pipelines/language_model.svg. An hour at most on two cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # this checkout, whatever is installed

from benchmarks.harness.report import markdown  # noqa: E402

SCHEDULES, WORKERS = ("gpipe", "1f1b", "pipedream", "pipedream-2bw"), (2, 4)
RESULTS = Path(__file__).parents[1] / "results"
MEAN = 50
"""Updates of which a mean is shown."""
Losses = Mapping[tuple[str, int], Sequence[float]]


def trained(name: str, workers: int, updates: int, kept: Path) -> Sequence[float]:
    """Losses of a run, from the folder if it has them."""
    file = kept / f"{name}-{workers}.json"
    if not file.exists():
        script = ROOT / "examples" / "language_model.py"
        options = ["--schedule", name, "--workers", workers, "--steps", updates, "--losses", file]
        kept.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, script, *map(str, options)], check=True)
    found: list[float] = json.loads(file.read_text())
    return found


def page(losses: Losses) -> str:
    """Means over the updates, and whether losses are those of one process."""
    alone = losses["alone", 1]
    ends = range(MEAN, len(alone) + 1, MEAN)

    def line(name: str, workers: int, found: Sequence[float]) -> list[str]:
        means = [f"{sum(found[end - MEAN : end]) / MEAN:.4f}" for end in ends]
        same = sum(a == b for a, b in zip(alone, found, strict=True))
        return [name, str(workers), *means, f"{same} of {len(alone)}"]

    header = ["schedule", "workers", *(f"{end - MEAN + 1}–{end}" for end in ends), "equal losses"]
    table = markdown(header, [line(*key, found) for key, found in losses.items()])
    return (
        "# A language model in pipelines\n\n"
        "`python benchmarks/strategies/pipelines/language_model.py`: mean losses of updates, in "
        "nats a byte, and how many losses equal those of one process to the last bit.\n\n" + table
    )


def plot(losses: Losses, file: Path) -> None:
    """Curves of all runs, as means over 10 updates."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "linop"  # the same file for the same numbers
    import matplotlib.pyplot as plt

    figure, sides = plt.subplots(1, len(WORKERS), figsize=(9, 3.2), sharey=True)
    for side, workers in zip(sides, WORKERS, strict=True):
        for (name, w), found in losses.items():
            if w in (1, workers):
                means = [sum(found[k : k + 10]) / 10 for k in range(0, len(found) - 9, 10)]
                style = {"alone": "k-", "gpipe": "C1:", "1f1b": "C0--"}.get(name, "-")
                side.plot(range(10, len(found) + 1, 10), means, style, label=name, linewidth=1)
        side.set(title=f"{workers} workers", xlabel="updates")
    sides[0].set(ylabel="loss, nats a byte")
    sides[0].legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main(
    updates: Annotated[int, typer.Option(min=MEAN, help="Of each run.")] = 300,
    kept: Annotated[Path, typer.Option(help="Folder of losses.")] = RESULTS / "raw",
) -> None:
    """Train, and write the table and the picture."""
    keys = [("alone", 1), *((name, workers) for workers in WORKERS for name in SCHEDULES)]
    losses = {key: trained(*key, updates, kept) for key in keys}
    (RESULTS / "language_model.md").write_text(page(losses))
    plot(losses, ROOT / "docs" / "pipelines" / "language_model.svg")


if __name__ == "__main__":
    typer.run(main)
