"""Table 1 of Wang and Cao (2022), run again: right, and with the authors' mistakes.

    python benchmarks/strategies/perceptrons/mlp.py --published [--strategy server] [--only 1x16]

trains perceptrons on MNIST for one epoch, on up to 128 virtual workers in this process; adds each
run to results/runs.jsonl, and writes the tables in results/mlp.md from all that are there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # this checkout is measured, whatever is installed

from benchmarks.strategies.perceptrons import runs, tables  # noqa: E402
from benchmarks.strategies.perceptrons.store import STORE, store, stored  # noqa: E402


def main(
    published: Annotated[bool, typer.Option(help="Replay the authors' mistakes.")] = False,
    strategy: Annotated[list[str] | None, typer.Option(help="[all]")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Networks, such as 2x32. [all]")] = None,
    workers: Annotated[list[int] | None, typer.Option(help="[1, 2, 4, …, 128]")] = None,
    again: Annotated[bool, typer.Option(help="Also what is in the store.")] = False,
    logs: Annotated[Path, typer.Option(help="The authors' runs.")] = runs.LOGS,
    kept: Annotated[Path, typer.Option("--store", help="Where runs are kept.")] = STORE,
) -> None:
    """Train; then write the tables."""
    known = runs.logs(logs)
    chosen = [
        c
        for c in sorted(known, key=lambda c: (c.workers, c))
        if (not strategy or c.strategy in strategy)
        and (not only or c.network in only)
        and (not workers or c.workers in workers)
        and (again or (c, published) not in stored(kept))
    ]
    data = runs.handwritten.mnist() if chosen else None
    for c in chosen:
        assert data is not None
        begun = time.perf_counter()
        run = runs.train(c, data, published)
        store(c, published, run, kept)
        print(
            f"{c.strategy} {c.network}, {c.workers} workers: last tenth {run.last:.4f} (log "
            f"{known[c].last}), {run.accuracy:.1%} right, {time.perf_counter() - begun:.0f} s",
            flush=True,
        )
    kept.with_name("mlp.md").write_text(tables.page(known, stored(kept)))


if __name__ == "__main__":
    typer.run(main)
