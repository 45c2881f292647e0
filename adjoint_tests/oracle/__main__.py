"""The command ``python -m oracle AREA``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections import Counter

from oracle.cases import KINDS
from oracle.running import Outcome, run

AREAS = ("numbers", "expressions", "models", "files")


def main() -> int:
    """Run an area's cases; the exit status is 1 where something was wrong."""
    parser = argparse.ArgumentParser(prog="oracle", description=__doc__)
    parser.add_argument("area", choices=AREAS)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to draw")
    parser.add_argument("--seed", default="0", help="of all cases")
    parser.add_argument("--case", type=int, help="this case alone")
    parser.add_argument("--kind", type=int, action="append", help="cases of these kinds alone")
    given = parser.parse_args()
    drawers = importlib.import_module(f"oracle.{given.area}").DRAWERS
    wanted = {kind: d for kind, d in drawers.items() if not given.kind or kind in given.kind}
    counts: Counter[tuple[int, str]] = Counter()
    for index, case, outcome, words in run(wanted, given.seed, given.minutes * 60, given.case):
        counts[case.number, outcome.value] += 1
        loud = "  <<<<" if outcome is Outcome.WRONG else ""
        print(f"{index}: [{case.number}] {case.text}: {outcome.value} {words}{loud}", flush=True)
    print(f"\nlinop from {importlib.import_module('linop').__file__}, seed {given.seed}")
    for number in sorted(wanted):
        row = ", ".join(f"{counts[number, o.value]} {o.value}" for o in Outcome)
        print(f"{number:4}  {KINDS[number]}: {row}")
    return int(any(counts[number, Outcome.WRONG.value] for number in wanted))


if __name__ == "__main__":
    sys.exit(main())
