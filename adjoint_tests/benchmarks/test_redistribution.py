"""benchmarks/redistribution: linop at the least volume in all transitions; the page's numbers."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import linop
from support.requirements import needs_torch

ROOT = Path(__file__).resolve().parents[2]
_path = sys.path[:]  # as in test_published_runs
sys.path.append(str(ROOT))
from benchmarks.redistribution import transitions  # noqa: E402
from benchmarks.redistribution.transitions import PLACEMENTS, TRANSITIONS  # noqa: E402

sys.path[:] = _path

DRAWN = TRANSITIONS[::61]
"""61 is prime to 63, the number of transitions from one placement: all placements are met."""


def test_all_transitions_move_the_least() -> None:
    assert len(TRANSITIONS) == 4032
    for before, after in TRANSITIONS:
        found = transitions.counted(before, after)
        assert found.moved == found.least, (before, after)
        assert found.moved_back == found.least_back, (before, after)


def test_the_least_of_some() -> None:
    """By hand: of 512 elements a cube has 64, a slab of two workers 128."""
    rows, columns, all_of_it = (0, 0, 0), (1, 1, 1), (None, None, None)
    least = transitions.least
    X, Y, R = map(transitions.space, (rows, columns, all_of_it))
    assert least(X, Y) == 8 * (64 - 8) and least(R, X) == 0 and least(X, R) == 8 * (512 - 64)
    cubes, slabs = transitions.space((0, 1, 2)), transitions.space((0, 0, None))
    assert least(cubes, slabs) == 8 * (128 - 32) and least(slabs, cubes) == 8 * (64 - 32)


def test_placements_are_dtensor_s() -> None:
    """Of two mesh dimensions that split the same one, the first is the outermost."""
    X = transitions.space((0, 2, 0))
    assert X.local_shape(0) == (2, 8, 4)
    assert [X.slices(worker)[0].start for worker in (0, 1, 4, 5)] == [0, 2, 4, 6]
    assert [X.slices(worker)[2].start for worker in (0, 2)] == [0, 4]
    assert len({transitions.space(p).digest for p in PLACEMENTS}) == 64


def test_drawn_transitions_are_proven_and_right() -> None:
    for before, after in DRAWN:
        transitions.check(before, after)


def test_some_run_on_threads() -> None:
    some = TRANSITIONS[7::577]
    ops = [linop.repartition(transitions.space(a), transitions.space(b)) for a, b in some]
    sent = transitions.run_on_threads(some)
    assert sent == 8 * sum(transitions.moved(op) + transitions.moved(op.H) for op in ops) > 0


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = linop.repartition
    monkeypatch.setattr(linop, "repartition", lambda X, Y: 2 * right(X, Y))
    with pytest.raises(AssertionError):
        transitions.check(*TRANSITIONS[-1])
    with pytest.raises(AssertionError):
        transitions.run_on_threads(TRANSITIONS[-1:])


def page() -> tuple[Any, str]:
    plots = runpy.run_path(str(ROOT / "docs/best/plots.py"), run_name="plots")
    text = (ROOT / "docs/best.md").read_text(encoding="utf-8")
    return plots, " ".join(text.split())


def test_plots_are_those_that_are_drawn() -> None:
    """`python docs/best/plots.py` renews them."""
    plots, text = page()
    for name, draw in plots["PICTURES"].items():
        assert (ROOT / f"docs/best/{name}.svg").read_text(encoding="utf-8") == str(draw()), name
        assert f"(best/{name}.svg)" in text


def test_numbers_of_the_page_are_those_of_the_tables() -> None:
    plots, text = page()
    found = {row[0]: row[1:] for row in plots["table"](plots["REDISTRIBUTION"], "way")}
    assert found["linop"] == found["linop, adjoint"] == ["0", "1.00", "1.00", "1"]
    above, whole, _, worst = found["DTensor, on GPUs"]
    assert f"sends more in {above}, {whole} × as much in all, and up to {worst} ×" in text
    _, whole, _, worst = found["DTensor, on CPUs"]
    assert f"moves {whole} × as much as necessary, up to {worst} ×" in text
    assert f"{found['DTensor, planned by graphs, on GPUs'][1]} × on GPUs" in text
    rows = plots["table"](ROOT / "docs/pylops_mpi.md", "tutorial | form")
    for column, words in ((4, "An iteration takes"), (7, "Of the processor it takes")):
        ratios = [float(row[column]) for row in rows]
        assert f"{min(ratios):.2f} to {max(ratios):.2f}" in text.split(words)[1][:60], words


@needs_torch
@pytest.mark.slow
def test_dtensor_moves_what_the_table_says() -> None:
    """With the version of torch that was measured; any moves at least the least."""
    script = ROOT / "benchmarks/redistribution/dtensor.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, check=False, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    least = [transitions.least(*map(transitions.space, one)) for one in TRANSITIONS]
    gpu = [row[0] for row in said["elements"]]
    assert all(a >= b for a, b in zip(gpu, least, strict=True))
    plots, _ = page()
    if f"torch {said['torch']}." in plots["REDISTRIBUTION"].read_text(encoding="utf-8"):
        above = sum(a > b for a, b in zip(gpu, least, strict=True))
        rows = {row[0]: row[1:] for row in plots["table"](plots["REDISTRIBUTION"], "way")}
        whole = f"{sum(gpu) / sum(least):.2f}"
        assert rows["DTensor, on GPUs"][:2] == [f"{above:,}", whole]
