"""How much is moved where a tensor is split anew: linop, torch's DTensor, and the least possible.

    python benchmarks/redistribution/run.py [--threads 64] [--gloo 12] [--graph]

counts all 4,032 transitions between placements of a tensor on 2 × 2 × 2 workers (see
`transitions.py`), forward and adjoint. Of linop the plans of all workers are proven to be their
operators and their messages counted, blocks are compared with those of the global array, and some
transitions run on threads. Of DTensor the collectives are counted (see `dtensor.py`), in a process
of its own. Prints the tables, and saves them as ``results/redistribution.md``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from math import fsum, inf
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import linop
from benchmarks.harness import report, saving
from benchmarks.redistribution.transitions import (
    TRANSITIONS,
    check,
    counted,
    moved,
    run_on_threads,
    space,
    text,
)

RESULTS = saving.ROOT / "benchmarks/results/redistribution.md"
ALIKE = Sequence[int]
"""Elements, for each transition in the order of `TRANSITIONS`."""


class Summary(NamedTuple):
    """One way to redistribute, over all transitions."""

    above: int
    """Transitions in which it moves more than the least."""
    whole: float
    """Elements of all transitions together, over the least."""
    mean: float
    """Of the ratios of transitions, of those in which anything has to move."""
    worst: float


def summary(found: ALIKE, least: ALIKE) -> Summary:
    """The summary of one way."""
    assert all(a == 0 for a, b in zip(found, least, strict=True) if b == 0)
    ratios = [a / b for a, b in zip(found, least, strict=True) if b]
    above = sum(a > b for a, b in zip(found, least, strict=True))
    mean = fsum(ratios) / len(ratios)
    return Summary(above, sum(found) / sum(least), mean, max(ratios))


def of_dtensor(gloo: int, plan: str) -> tuple[str, list[tuple[int, int]]]:
    """(torch's version, elements by transition: on GPUs, on CPUs)."""
    script = Path(__file__).parent / "dtensor.py"
    command = [sys.executable, str(script), "--plan", plan, "--gloo", str(gloo)]
    said = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
    found = json.loads(said)
    return found["torch"], [(gpu, cpu) for gpu, cpu in found["elements"]]


def main(
    threads: Annotated[int, typer.Option(help="Transitions that run on threads.")] = 64,
    gloo: Annotated[int, typer.Option(help="Of DTensor's, on processes over gloo.")] = 12,
    graph: Annotated[bool, typer.Option(help="DTensor's planner by graphs too: a minute.")] = False,
) -> None:
    """Count, print and save."""
    found = [counted(*one) for one in TRANSITIONS]
    for one in TRANSITIONS:
        check(*one)
    step = max(1, len(TRANSITIONS) // threads) if threads else 0
    some = TRANSITIONS[step // 2 :: step] if threads else []
    ops = [linop.repartition(space(a), space(b)) for a, b in some]
    assert run_on_threads(some) == 8 * sum(moved(op) + moved(op.H) for op in ops)

    least = [one.least for one in found]
    ways = {
        "linop": summary([one.moved for one in found], least),
        "linop, adjoint": summary(
            [one.moved_back for one in found], [one.least_back for one in found]
        ),
    }
    torch, dtensor = of_dtensor(gloo, "greedy")
    gpu, cpu = map(list, zip(*dtensor, strict=True))
    ways |= {"DTensor, on GPUs": summary(gpu, least), "DTensor, on CPUs": summary(cpu, least)}
    if graph:
        _, shortest = of_dtensor(0, "graph")
        on_gpus = [elements for elements, _ in shortest]
        ways["DTensor, planned by graphs, on GPUs"] = summary(on_gpus, least)
    before, after = TRANSITIONS[max(range(len(least)), key=lambda k: gpu[k] / (least[k] or inf))]
    facts = saving.machine([]) | {"linop": version("linop-algebra"), "torch": torch}

    header = ["way", "transitions above the least", "elements of all, over the least"]
    header += ["mean ratio", "worst ratio"]
    lines = [
        [name, f"{s.above:,}", f"{s.whole:.2f}", f"{s.mean:.2f}", f"{s.worst:g}"]
        for name, s in ways.items()
    ]
    alike = Counter(zip(least, (one.moved for one in found), gpu, strict=True))
    columns = ["least", "linop", "DTensor, on GPUs", "transitions"]
    parts = [
        "# Redistribution: all transitions over 2 × 2 × 2 workers\n",
        saving.facts_text(facts),
        f"Of linop all {len(TRANSITIONS):,} were proven and compared, {len(some)} run on threads; "
        f"of DTensor {gloo} run over gloo.\nDTensor's worst on GPUs: ({text(before)}) → "
        f"({text(after)}).\n",
        report.markdown(header, lines),
        "## Elements that are moved in a transition\n",
        report.markdown(columns, [[*key, count] for key, count in sorted(alike.items())]),
    ]
    RESULTS.write_text("\n".join(parts), encoding="utf-8")
    print("\n".join(parts))


if __name__ == "__main__":
    typer.run(main)
