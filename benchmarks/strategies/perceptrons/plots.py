"""Plots of loss against time, and of speed-up against workers: the seed's logs on the left, ours on
the right.

    python benchmarks/strategies/perceptrons/plots.py

reads what `mlp.py` and `speedup.py` left in results/, and writes PNG and SVG into docs/mlp/. It
needs the extra `plot`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # this checkout, whatever is installed

import matplotlib as mpl  # noqa: E402

mpl.use("Agg")
mpl.rcParams["svg.hashsalt"] = "linop"  # the same file for the same numbers
import matplotlib.pyplot as plt  # noqa: E402

from benchmarks.strategies.perceptrons import runs  # noqa: E402
from benchmarks.strategies.perceptrons.runs import Configuration, Log  # noqa: E402
from benchmarks.strategies.perceptrons.store import stored  # noqa: E402

RESULTS = Path(__file__).parents[1] / "results"
LINES = [("server", "1x128"), ("all-reduce", "1x128"), ("tensor", "1x128"), ("tensor", "1x512")]
SHOWN = 1, 8, 64
"""Numbers of workers whose losses are shown."""


def losses(known: dict[Configuration, Log], epochs: dict[Configuration, float]) -> Any:
    """Loss against seconds. The logs give five first losses, and the mean of the last tenth; ours
    are computed, on simulated time."""
    figure, sides = plt.subplots(1, 3, figsize=(10, 3.4), sharex=True, sharey=True)
    found = stored()
    titles = "the seed's logs", "replayed, simulated time", "right, simulated time"
    for side, title, mistakes in zip(sides, titles, (None, True, False), strict=True):
        for strategy, color in (("server", "C0"), ("tensor", "C1")):
            for workers, style in zip(SHOWN, ("-", "--", ":"), strict=True):
                c = Configuration(strategy, 1, 128, workers)
                log = known[c]
                if mistakes is None:
                    at = [*((np.arange(5) + 1) / log.steps), 0.95]
                    times, values = np.array(at) * log.seconds, [*log.first, log.last]
                elif (c, mistakes) in found:
                    values = list(found[c, mistakes].curve)
                    times = (np.arange(len(values)) + 0.5) / len(values) * epochs[c]
                else:
                    continue
                marker = "." if mistakes is None else ""
                label = f"{strategy}, {workers}"
                side.plot(times, values, style, marker=marker, color=color, label=label)
        side.set(title=title, xlabel="seconds", xscale="log")
    sides[0].set(ylabel="loss, 1 × 128", ylim=(0, 3))
    sides[1].legend(fontsize="x-small", title="strategy, workers", title_fontsize="x-small")
    return figure


def speed_ups(
    known: dict[Configuration, Log],
    node: dict[Configuration, float],
    cluster: dict[Configuration, float],
) -> Any:
    """Speed-up against workers: logged, simulated on their node, simulated on a cluster."""
    figure, sides = plt.subplots(1, 3, figsize=(10, 3.4), sharey=True)
    logged = {c: log.seconds for c, log in known.items()}
    rings = [(strategy, "1x128") for strategy in ("server", "all-reduce", "ring")]
    kinds = (
        ("the seed's logs, one node", logged, LINES),
        ("simulated, the same node", node, LINES),
        ("simulated, one worker a machine", cluster, rings),
    )
    for side, (title, epochs, lines) in zip(sides, kinds, strict=True):
        for name in lines:
            of = {c.workers: t for c, t in epochs.items() if (c.strategy, c.network) == name}
            workers = sorted(of)
            label = " ".join(name)
            side.plot(workers, [of[1] / of[n] for n in workers], "o-", ms=3, label=label)
        side.plot([1, 128], [1, 128], color="0.8", zorder=0)
        side.set(title=title, xlabel="workers")
        side.set_xscale("log", base=2)
        side.set_yscale("log", base=2)
        side.legend(fontsize="x-small")
    sides[0].set_ylabel("speed-up of an epoch")
    return figure


def main(
    into: Annotated[Path, typer.Option(help="The folder of the plots.")] = ROOT / "docs" / "mlp",
    logs: Annotated[Path, typer.Option(help="The authors' runs.")] = runs.LOGS,
) -> None:
    """Draw."""
    kept = json.loads((RESULTS / "speedup.json").read_text())
    node, cluster = (
        {Configuration(*row[:4]): row[4] for row in kept[name]} for name in ("node", "cluster")
    )
    known = runs.logs(logs)
    into.mkdir(parents=True, exist_ok=True)
    for name, figure in (
        ("losses", losses(known, node)),
        ("speedup", speed_ups(known, node, cluster)),
    ):
        figure.tight_layout()
        figure.savefig(into / f"{name}.png", dpi=110)
        figure.savefig(into / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
