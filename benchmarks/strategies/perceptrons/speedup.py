"""Speed-up of the strategies, simulated for 1 to 128 workers on the authors' node, fitted to their
logs, and on a cluster that they did not have. What ranks do here is in `measured.py`.

    python benchmarks/strategies/perceptrons/speedup.py [--largest-ring 64]

writes results/speedup.md, and results/speedup.json for plots. Speed-up is of an epoch, over one
worker.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # this checkout is measured, whatever is installed

from benchmarks.harness.report import markdown  # noqa: E402
from benchmarks.strategies.perceptrons import node, runs  # noqa: E402
from benchmarks.strategies.perceptrons.runs import Configuration  # noqa: E402
from benchmarks.strategies.perceptrons.tables import WORKERS, Known  # noqa: E402
from linop.planning import Link, Network, Placement  # noqa: E402

FITTED = 64
"""Largest number of workers of the runs in the fit."""
CLUSTER = Network(between=Link())
"""One worker a machine, on Ethernet of 10 Gbit/s: the defaults of `linop.planning.Network`."""
RESULTS = Path(__file__).parents[1] / "results"
Seconds = dict[Configuration, float]


def fitted(known: Known) -> node.Node:
    """The authors' node, from their runs of up to `FITTED` workers."""
    return node.fit((c, log) for c, log in known.items() if c.workers <= FITTED)


def residuals(machine: node.Node, known: Known) -> Seconds:
    """Predicted over logged seconds, less one."""
    return {c: machine.step(c) * log.steps / log.seconds - 1 for c, log in known.items()}


def cluster(machine: node.Node, largest_ring: int) -> Seconds:
    """Seconds of an epoch with one worker a machine, of the authors' 1x128 network."""
    found = {}
    for strategy in ("server", "all-reduce", "ring"):
        for workers in WORKERS:
            if strategy != "ring" or workers <= largest_ring:
                c = Configuration(strategy, 1, 128, workers)
                placement = Placement([f"m{k}" for k in range(workers)])
                seconds, _ = node.communication(c, CLUSTER, placement)
                found[c] = (machine.computing(c) + seconds) * node.steps(c)
    return found


def speed_ups(epochs: Seconds) -> Seconds:
    """Speed-up over one worker of the same strategy and network."""
    one = {(c.strategy, c.network): t for c, t in epochs.items() if c.workers == 1}
    return {c: one[c.strategy, c.network] / t for c, t in epochs.items()}


def _rows(columns: dict[str, Seconds], form: str) -> Iterator[list[str]]:
    """A row for each strategy, network and kind of number; a column for each number of workers."""
    groups = {(c.strategy, c.network) for found in columns.values() for c in found}
    for strategy, network in sorted(groups):
        for name, found in columns.items():
            here = {
                c.workers: x
                for c, x in found.items()
                if (c.strategy, c.network) == (strategy, network)
            }
            if len(here) > 1:
                cells = [format(here[n], form) if n in here else "" for n in WORKERS]
                yield [strategy, network, *([name] if name else []), *cells]


def acceptance(missed: Seconds) -> list[str]:
    """The errors that were asked for, and those beyond."""

    def errors(workers: range, tensor: bool) -> list[float]:
        chosen = [c for c in missed if c.workers in workers and (c.strategy == "tensor") == tensor]
        return [abs(missed[c]) for c in chosen]

    last, data = errors(range(128, 129), True), errors(range(1, FITTED + 1), False)
    beyond = errors(range(128, 129), False)
    return [
        f"- tensor parallel, 128 workers (not in the fit): at most {max(last):.2%} (goal 5 %)",
        f"- data parallel, up to 64 workers: {np.median(data):.1%} in the median (goal 10 %), "
        f"{max(data):.1%} at most",
        f"- data parallel, 128 workers (not in the fit): {np.median(beyond):.1%} in the median, "
        f"{max(beyond):.1%} at most",
    ]


def main(
    largest_ring: Annotated[
        int, typer.Option(help="Workers up to which rings are simulated; 128 takes minutes.")
    ] = 64,
    logs: Annotated[Path, typer.Option(help="The authors' runs.")] = runs.LOGS,
) -> None:
    """Fit, simulate; write the tables."""
    known = runs.logs(logs)
    machine = fitted(known)
    print(machine, flush=True)
    missed = residuals(machine, known)
    print("\n".join(acceptance(missed)), flush=True)
    theirs = speed_ups({c: log.seconds for c, log in known.items()})
    epochs = {c: (1 + missed[c]) * log.seconds for c, log in known.items()}
    ours = speed_ups(epochs)
    elsewhere = cluster(machine, largest_ring)
    numbers = [f"{n}" for n in WORKERS]
    head = ("strategy", "network", *numbers)
    text = [
        "# Speed-up\n",
        "Written by `python benchmarks/strategies/perceptrons/speedup.py`. Messages and bytes are "
        "those of the model's evaluation and of its Jacobian's adjoint, by `linop.simulate`.\n",
        "## The authors' node, fitted to their logs\n",
        f"Runs of up to {FITTED} workers: {machine}.\n",
        "\n".join(acceptance(missed)) + "\n",
        "Predicted over logged seconds of the epoch, less one:\n",
        markdown(head, _rows({"": missed}, "+.1%")),
        "## Speed-up, logged and simulated\n",
        markdown(
            ("strategy", "network", "", *numbers),
            _rows({"logged": theirs, "simulated": ours}, ".1f"),
        ),
        "## A cluster, one worker a machine\n",
        f"The same computing times; {CLUSTER.between}.\n",
        markdown(head, _rows({"": speed_ups(elsewhere)}, ".1f")),
    ]
    (RESULTS / "speedup.md").write_text("\n".join(text))
    kept = {"node": epochs, "cluster": elsewhere}
    (RESULTS / "speedup.json").write_text(json.dumps({k: _plain(v) for k, v in kept.items()}))


def _plain(found: Seconds) -> list[list[Any]]:
    return [[c.strategy, c.layers, c.width, c.workers, float(f"{t:.4g}")] for c, t in found.items()]


if __name__ == "__main__":
    typer.run(main)
