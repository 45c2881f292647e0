"""LeNet-5 on MNIST over several seeds, sequential and distributed (paper, section 5 and appendix
C): are the test accuracies alike?

    python benchmarks/layers/lenet_accuracy.py run [--seeds N]     # the runs that are missing
    python benchmarks/layers/lenet_accuracy.py table               # in Markdown

It runs `examples/lenet5.py`, in float32 with the defaults of the paper, alone and on 4 ranks. Each
run adds a line to a file, which is not part of the repository: ``--record``.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from scipy import stats

from linop.backends.mpi import mpirun

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "lenet5.py"
KINDS = ("sequential", "distributed")

Record = Annotated[Path, typer.Option(help="File of the runs, a line each.")]
RECORD = ROOT / "benchmarks" / "raw" / "lenet_accuracy.jsonl"

app = typer.Typer(add_completion=False, help=__doc__)


def done(record: Path) -> list[dict[str, Any]]:
    """The recorded runs."""
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def one(kind: str, seed: int, epochs: int) -> dict[str, Any]:
    """Train once, in a new process; the record of the run."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record.json")
        arguments = [sys.executable, str(EXAMPLE), "--data", "mnist", "--seed", str(seed)]
        arguments += ["--epochs", str(epochs), "--record", str(record)]
        if kind == "sequential":
            process = subprocess.Popen([*arguments, "--sequential"], stdout=subprocess.DEVNULL)
        else:
            process = mpirun.Job(4, arguments, stdout=subprocess.DEVNULL)
        if process.wait():
            raise SystemExit(f"{kind}, seed {seed}: exit status {process.returncode}")
        history = json.loads(record.read_text())
    result = {"kind": kind, "seed": seed, "first": history["losses"][0]}
    return {**result, "accuracies": history["accuracies"], "seconds": history["seconds"]}


@app.command()
def run(
    seeds: Annotated[int, typer.Option(min=2, help="How many.")] = 5,
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    record: Record = RECORD,
) -> None:
    """Train for all seeds and kinds that are not recorded yet, seed by seed."""
    known = {(r["kind"], r["seed"]) for r in done(record)}
    record.parent.mkdir(parents=True, exist_ok=True)
    for seed in range(seeds):
        for kind in KINDS:
            if (kind, seed) not in known:
                result = one(kind, seed, epochs)
                with record.open("a") as file:
                    print(json.dumps(result), file=file)
                print(kind, seed, result["accuracies"][-1], flush=True)


@app.command()
def table(record: Record = RECORD) -> None:
    """Print the table of accuracies."""
    runs = done(record)
    last = {
        kind: {r["seed"]: r["accuracies"][-1] for r in runs if r["kind"] == kind} for kind in KINDS
    }
    print("| seed | sequential | distributed, 4 ranks |\n| --- | --- | --- |")
    both = sorted(set(last["sequential"]) & set(last["distributed"]))
    for seed in both:
        print(f"| {seed} | {last['sequential'][seed]:.2%} | {last['distributed'][seed]:.2%} |")
    a, b = ([last[kind][seed] for seed in both] for kind in KINDS)
    for name, f in (("mean", statistics.mean), ("standard deviation", statistics.stdev)):
        print(f"| {name} | {f(a):.2%} | {f(b):.2%} |")
    for name, f in (("minimum", min), ("median", statistics.median), ("maximum", max)):
        s, d = (f([t for r in runs if r["kind"] == kind for t in r["seconds"]]) for kind in KINDS)
        print(f"| {name} of an epoch | {s:.1f} s | {d:.1f} s |")
    tests = {
        "Welch's t-test": stats.ttest_ind(a, b, equal_var=False),
        "Mann and Whitney's": stats.mannwhitneyu(a, b),
        "the t-test of pairs, each of one seed": stats.ttest_rel(a, b),
    }
    found = ", ".join(f"{test.pvalue:.2f} by {name}" for name, test in tests.items())
    print(f"\nThe probability of such a difference, if they are alike: {found}.")


if __name__ == "__main__":
    app()
