"""Generators of schedules by their own formulas, and the text of schedules; what torch's tables say
is in `test_torch_tables`."""

from __future__ import annotations

import re
from typing import Any

import pytest

from linop.errors import ArgumentError
from linop.schedules import (
    GENERATORS,
    Kind,
    Schedule,
    backward_first,
    check,
    interleaved,
    one_forward_one_backward,
    pipedream,
    pipedream_2bw,
    with_messages,
)


@pytest.mark.parametrize("p", range(1, 9))
def test_backward_first_is_1f1b(p: int) -> None:
    for m in range(1, 13):
        assert backward_first(p, m).workers == one_forward_one_backward(p, m).workers


def test_backward_first_without_bound_fills_the_wait_with_forwards() -> None:
    schedule = backward_first(4, 8, in_flight=[8] * 4)
    assert check(schedule).activations == {0: 7, 1: 5, 2: 3, 3: 1}


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("p", [2, 4])
def test_every_generator_passes_the_check_and_goes_through_text(name: str, p: int) -> None:
    schedule = GENERATORS[name](p, 2 * p)
    assert schedule.name == name
    whole = check(schedule).schedule
    assert whole == with_messages(schedule)
    for one in (schedule, whole):
        assert Schedule.from_csv(one.to_csv(), name) == one


def versions(schedule: Schedule) -> list[tuple[int, int, int, int]]:
    """Stage, micro-batch, version named, and number of updates before, of each forward."""
    found = []
    for row in schedule.workers:
        updates = 0
        for action in row:
            updates += action.kind == Kind.UPDATE
            if action.kind == Kind.FORWARD:
                found.append((action.stage, action.micro_batch, action.version, updates))
    return found


@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("m", [1, 2, 7])
def test_staleness_of_pipedream(p: int, m: int) -> None:
    """Forwards read the newest version, which is max(0, m − p + 1 + s)."""
    for stage, micro_batch, version, updates in versions(pipedream(p, m)):
        assert version == updates == max(0, micro_batch - p + 1 + stage)


@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("more", [0, 1, 4])
def test_staleness_of_2bw(p: int, more: int) -> None:
    """Batch t reads version t − 1 on all stages, of which two at most are kept."""
    m = p + more
    schedule = pipedream_2bw(p, m, batches=4)
    for _, micro_batch, version, updates in versions(schedule):
        assert version == max(0, micro_batch // m - 1)
        assert version in (updates - 1, updates)
    assert check(schedule, versions=2).schedule.micro_batches == 4 * m


def test_stages_of_interleaved() -> None:
    assert interleaved(6, 3, 2).placement == {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 2}


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("gpipe", (0, 2), "stages: at least 1 expected, given 0"),
        ("1f1b", (2, 0), "micro_batches: at least 1 expected, given 0"),
        ("interleaved-1f1b", (4, 3, 2), "2 micro-batches at a time, one for each worker: a mult"),
        ("interleaved-1f1b", (3, 4, 2), "stages: a multiple of chunks=2 expected, given 3"),
        ("interleaved-1f1b", (4, 4, 0), "chunks: at least 1 expected, given 0"),
        ("zb-h1", (2, -1), "micro_batches: at least 1 expected, given -1"),
        ("pipedream", (0, 1), "stages: at least 1 expected"),
        ("pipedream-2bw", (4, 3, 2), "at least one for each of the 4 stages, given 3"),
        ("pipedream-2bw", (2, 2, 0), "batches: at least 1 expected"),
        ("backward-first", (2, 2, [1]), "in_flight: 2 numbers expected, one a stage, given [1]"),
        ("backward-first", (2, 2, [1, 0]), "in_flight: at least 1 expected, given 0"),
    ],
)
def test_refused_arguments(name: str, arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(text)):
        GENERATORS[name](*arguments)


@pytest.mark.parametrize("cell", ["0X1", "F0", "(0F1;0X1)OVERLAP_F_B", "(0F1)B", "0F1;0B0"])
def test_refused_text(cell: str) -> None:
    with pytest.raises(ArgumentError, match="line 2: action: expected a stage"):
        Schedule.from_csv(f"0F0\n1F0,{cell}")
