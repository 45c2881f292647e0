"""Parallel programs whose faults were named wrongly once: each of another mechanism."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import linop.layers  # noqa: F401  # it guards functions of torch: its lines are no place
from linop.testing import check_parallel
from linop.testing.parallel.recording.programs import of_file, world_of
from linop.testing.parallel.relations import Kind

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parents[1] / "parallel_programs"


def found(name: str, version: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CASE", version)
    path = str(FOLDER / f"{name}.py")
    return check_parallel(of_file(path), workers=world_of(path))


@pytest.mark.parametrize(
    ("name", "kind", "place", "said"),
    [
        # A scaling before the sum, of another number on each rank.
        ("clip_before_mean", Kind.OTHER, "clip_grad_norm_", "before they are summed"),
        # `apply` was taken before anything was recorded.
        ("taken_apply", Kind.UNSUMMED, "gathered(self.out(h", "The input of out is replicated"),
        # Two sums over one axis of a mesh, none over the other.
        ("summed_twice", Kind.WRONG_RANKS, "GROUPS[second]", "over ranks 0, 1 and 2, 3 twice"),
        # A broadcast is a message, too, and its detach no fault.
        ("heads_of_ranks", Kind.OTHER, "dist.recv(grad", "rank 1 and rank 2 compute"),
        # A result that nothing uses, the last state, is no place at which forward passes part.
        ("states_padded", Kind.FACTOR, "loss(model(ids), tags)", "7/13 on rank 0"),
    ],
)
def test_a_fault(
    name: str, kind: Kind, place: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = found(name, "wrong", monkeypatch)
    first = report.findings[0]
    assert first.kind is kind, report
    assert place in str(first.place), report
    assert said in f"{first.detail} {first.explanation}", report


@pytest.mark.parametrize("name", ["taken_apply", "summed_twice"])
def test_a_right_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = found(name, "right", monkeypatch)
    assert report, report
