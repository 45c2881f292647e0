"""Tables of runs beside the logs, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

import numpy as np

from benchmarks.harness.report import markdown
from benchmarks.strategies.perceptrons.runs import Configuration, Log, Run
from benchmarks.strategies.perceptrons.store import Runs

Known = Mapping[Configuration, Log]
WORKERS = tuple(2**k for k in range(8))


def page(known: Known, found: Runs) -> str:
    """The replay beside the logs, and training as it should be beside the replay."""
    replayed = [c for c in known if (c, True) in found]
    right = [c for c in known if (c, False) in found]
    return "\n".join(
        [
            "# Table 1 of Wang and Cao (2022), run again\n",
            "One epoch of MNIST, learning rate 0.1, float32; every loss is computed, by as many "
            "workers as the table says, which are threads of one process. Written by "
            "`python benchmarks/strategies/perceptrons/mlp.py`.\n",
            "## As published: the replay beside the logs\n",
            f"{len(replayed)} of {len(known)} runs were replayed. {summary(known, found)}\n",
            "Agreement by strategy and network; the runs of all numbers of workers together:\n",
            markdown(
                (
                    "strategy",
                    "network",
                    "runs",
                    "first losses equal",
                    "largest difference",
                    "largest difference of the last tenth",
                    "spread of the authors' last tenth",
                ),
                _agreement(known, found),
            ),
            "The spread is that between the logs' numbers of workers, 1 to 16.\n",
            "## Right beside published\n",
            f"{len(right)} runs. Mean loss of the last tenth, and share of the 10,000 test images "
            "that are right (which the seed does not give). Right: the mean over the batch of all "
            "workers, σ', shards of one matrix, one bias. Published: the authors' mistakes, "
            "replayed.\n",
            markdown(
                ("strategy", "network", "", *(f"{n}" for n in WORKERS)), _beside(known, found)
            ),
        ]
    )


def summary(known: Known, found: Runs) -> str:
    """How many of the first losses, and of the last means, are those of the logs."""
    pairs = [(found[c, True], log) for c, log in known.items() if (c, True) in found]
    if not pairs:
        return ""
    equal = [same for run, log in pairs for same in run.agrees(log)]
    last = [abs(run.last - log.last) for run, log in pairs]
    return (
        f"Of their first five losses {sum(equal)} of {len(equal)} have all printed digits; the "
        f"largest difference is {max(_off(*pair) for pair in pairs):.2g}. The mean of the last "
        f"tenth has the printed four decimals in {sum(d < 5.1e-5 for d in last)} of {len(last)}; "
        f"the largest difference is {max(last):.2g}. Sums of float32 in another order differ in "
        f"the last digits, and such differences grow over an epoch."
    )


def _off(run: Run, log: Log) -> float:
    """Largest difference of the first losses, relative."""
    return float(np.max(np.abs(np.divide(run.first, log.first) - 1)))


def _groups(known: Known) -> Iterator[tuple[tuple[str, str], list[Configuration]]]:
    key = lambda c: (c.strategy, c.network)  # noqa: E731
    for name, group in groupby(sorted(known), key):
        yield name, list(group)


def _agreement(known: Known, found: Runs) -> Iterator[list[str]]:
    for name, group in _groups(known):
        pairs = [(found[c, True], known[c]) for c in group if (c, True) in found]
        if pairs:
            equal = [same for run, log in pairs for same in run.agrees(log)]
            last = max(abs(run.last - log.last) for run, log in pairs)
            few = [known[c].last for c in group if c.workers <= 16]
            yield [
                *name,
                str(len(pairs)),
                f"{sum(equal)} of {len(equal)}",
                f"{max(_off(*pair) for pair in pairs):.1e}",
                f"{last:.1e}",
                f"{max(few) - min(few):.3f}" if len(few) > 1 else "",
            ]


def _beside(known: Known, found: Runs) -> Iterator[list[str]]:
    for (strategy, network), group in _groups(known):
        by_workers = {c.workers: c for c in group}
        for mistakes, name in ((False, "right"), (True, "published")):
            runs = [
                found.get((by_workers[n], mistakes)) if n in by_workers else None for n in WORKERS
            ]
            if any(runs):
                cells = ["" if r is None else f"{r.last:.3f}, {r.accuracy:.1%}" for r in runs]
                yield [strategy, network, name, *cells]
