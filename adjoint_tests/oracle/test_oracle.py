"""The first cases of each area of the oracle, from this run's seed."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import pytest

from oracle.cases import KINDS, Case, Drawer, WrongError, want
from oracle.running import Outcome, checked, run
from support.draws import IN_PROCESS, SEED

NEEDS = {"numbers": ["pylops"], "expressions": [], "files": ["torch"]}
"""Packages of each area, beside linop's own."""
LONG = {17}
"""Kinds whose cases start jobs: `python -m oracle` alone draws them."""
RUNS = [
    (area, kind)
    for area, kinds in {
        "numbers": (1, 2, 3, 4, 5, 6, 11, 12),
        "expressions": (22, 23, 24),
        "files": (15, 16),
    }.items()
    for kind in kinds
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("area, kind", RUNS)
def test_nothing_is_wrong(area: str, kind: int) -> None:
    """Repeat a case that fails by ``python -m oracle AREA --kind KIND --seed SEED --case CASE``."""
    for package in NEEDS[area]:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    drawers = importlib.import_module(f"oracle.{area}").DRAWERS
    seed = SEED or "0"
    wrong = [
        f"--seed {seed} --case {index}: [{KINDS[kind]}] {case.text}: {words}"
        for index, case, outcome, words in run({kind: drawers[kind]}, seed, 300.0, cases=IN_PROCESS)
        if outcome is Outcome.WRONG
    ]
    assert not wrong, "\n".join(wrong)


def test_every_kind_is_drawn() -> None:
    for area, packages in NEEDS.items():
        if all(find_spec(package) for package in packages):
            drawers: dict[int, list[Drawer]] = importlib.import_module(f"oracle.{area}").DRAWERS
            assert sorted(drawers) == sorted(
                [k for a, k in RUNS if a == area] + [k for k in LONG if area == "files"]
            )


def test_wrong_cases_are_told() -> None:
    outcome, words = checked(Case(1, "", lambda: want(False, "so")))
    assert (outcome, words) == (Outcome.WRONG, "so")
    outcome, words = checked(Case(1, "", lambda: print([].pop()), seconds=5))
    assert outcome is Outcome.WRONG and "raw IndexError" in words

    def never() -> None:
        while True:
            pass

    assert checked(Case(1, "", never, seconds=0.1))[1].startswith("raw TimeoutError")
    with pytest.raises(WrongError):
        want(None, "")
