"""Tables of torch's schedules, the oracle of the generators; text in both directions.

torch's classes make the orders of all ranks on one rank, over its process group that moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from linop.schedules import (
    Kind,
    Schedule,
    backward_first,
    check,
    gpipe,
    interleaved,
    one_forward_one_backward,
    with_messages,
    zero_bubble_h1,
)
from linop.schedules.actions import COMPUTE
from linop.schedules.schedule_errors import MissingActionError, ScheduleDeadlockError

if find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from torch.distributed.pipelining import schedules

from support.schedules.torch_tables import text, torch_schedule

WITHOUT_UPDATES = [kind for kind in Kind if kind != Kind.UPDATE]


def computations(schedule: Schedule) -> tuple[tuple[str, ...], ...]:
    """Texts of the computations of each worker."""
    return tuple(tuple(map(str, row)) for row in schedule.only(COMPUTE).workers)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_generators_give_torchs_tables(p: int, rounds: int) -> None:
    m = rounds * p
    with torch_schedule("ScheduleGPipe", p, m) as theirs:
        assert computations(gpipe(p, m)) == computations(
            Schedule.from_csv(text(theirs.pipeline_order))
        )
    for chunks in (1, 2, 3):
        with torch_schedule("ScheduleInterleaved1F1B", p, m, chunks) as theirs:
            assert computations(interleaved(p * chunks, m, chunks)) == computations(
                Schedule.from_csv(text(theirs.pipeline_order))
            )
    with torch_schedule("ScheduleInterleavedZeroBubble", p, m) as theirs:
        assert computations(zero_bubble_h1(p, m)) == computations(
            Schedule.from_csv(text(theirs.pipeline_order))
        )


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_1f1b_is_torchs_but_for_its_last_row(p: int, more: int) -> None:
    """torch 2.13 prints the last stage's forwards from micro-batch 1 on; it runs them from 0."""
    m = p + more
    with torch_schedule("Schedule1F1B", p, m) as schedule:
        theirs = Schedule.from_csv(text(schedule.pipeline_order))
    ours = computations(one_forward_one_backward(p, m))
    assert ours[:-1] == computations(theirs)[:-1]
    last = [a for a in theirs.workers[-1] if a.kind in COMPUTE]
    first = last[0].micro_batch
    mended = [f"{a.stage}{a.kind}{a.micro_batch - first * (a.kind == Kind.FORWARD)}" for a in last]
    assert list(ours[-1]) == mended
    if first:
        with pytest.raises(MissingActionError, match=f"no forward {p - 1}F0"):
            check(theirs.only(COMPUTE))


def test_torchs_tables_pass_the_check() -> None:
    for name, chunks in (
        ("ScheduleLoopedBFS", 2),
        ("ScheduleInterleaved1F1B", 2),
        ("ScheduleInterleavedZeroBubble", 2),
        ("ScheduleZBVZeroBubble", 2),
        ("ScheduleDualPipeV", 2),
    ):
        with torch_schedule(name, 4, 8, chunks) as theirs:
            simple = Schedule.from_csv(text(theirs.pipeline_order), name)
            whole = Schedule.from_csv(text(theirs.pipeline_order_with_comms), name)
        assert check(simple).schedule.micro_batches == 8
        assert check(whole).activations == check(simple).activations
        assert whole.only(COMPUTE) == simple.only(COMPUTE)


def test_overlapped_cells_are_flattened() -> None:
    with torch_schedule("ScheduleDualPipeV", 2, 4, 2) as theirs:
        table = text(theirs.pipeline_order)
    assert "OVERLAP_F_B" in table
    found = Schedule.from_csv(table)
    assert check(found).schedule.stages == 4
    assert Schedule.from_csv("(0F1;3B0)OVERLAP_F_B,").to_csv() == "0F1,3B0\n"


@contextmanager
def written(folder: Path, content: str) -> Iterator[str]:
    """A file with this text."""
    path = folder / "schedule.csv"
    path.write_text(content)
    yield str(path)


@pytest.mark.parametrize("make", [one_forward_one_backward, zero_bubble_h1, backward_first])
def test_text_goes_both_ways(make: Any, tmp_path: Path) -> None:
    """torch loads what we write of computations, alone or with messages, and we what it writes."""
    ours = make(4, 8).only(WITHOUT_UPDATES)
    with torch_schedule("ScheduleInterleaved1F1B", 4, 8) as theirs:
        with written(tmp_path, ours.to_csv()) as path:
            theirs._load_csv(path)
        assert computations(Schedule.from_csv(text(theirs.pipeline_order))) == computations(ours)
        theirs._dump_csv(str(tmp_path / "simple.csv"), format="compute_only")
        theirs._dump_csv(str(tmp_path / "whole.csv"), format="compute_comms")
        assert Schedule.from_csv((tmp_path / "simple.csv").read_text(), ours.name) == ours
        whole = Schedule.from_csv((tmp_path / "whole.csv").read_text())
        assert check(whole).schedule == whole
        with written(tmp_path, with_messages(ours).to_csv()) as path:
            theirs._load_csv(path, format="compute_comms")
        order = Schedule.from_csv(text(theirs.pipeline_order_with_comms), ours.name)
        assert order == with_messages(ours)


def test_torch_refuses_updates(tmp_path: Path) -> None:
    with (
        torch_schedule("ScheduleInterleaved1F1B", 2, 2) as theirs,
        written(tmp_path, one_forward_one_backward(2, 2).to_csv()) as path,
        pytest.raises(RuntimeError, match="Invalid action"),
    ):
        theirs._load_csv(path)


@pytest.mark.parametrize("p", [2, 4])
def test_torchs_late_receives_block_where_sends_wait(p: int) -> None:
    """pytorch #172668: torch's own order of messages passes with sends that wait; its option that
    receives late, which is said to be safe, has two neighbours that both send first."""
    if "defer_pp_recv" not in signature(schedules.ScheduleInterleaved1F1B).parameters:
        pytest.skip("this torch has no defer_pp_recv")
    for late in (False, True):
        with torch_schedule("ScheduleInterleaved1F1B", p, 2 * p, defer_pp_recv=late) as theirs:
            whole = Schedule.from_csv(text(theirs.pipeline_order_with_comms))
        check(whole)
        if not late:
            check(whole, sends="rendezvous")
            continue
        with pytest.raises(ScheduleDeadlockError) as error:
            check(whole, sends="rendezvous")
        assert [(worker, str(action)) for worker, action in error.value.cycle] == [
            (p - 2, f"{p - 2}SEND_F1"),
            (p - 1, f"{p - 1}SEND_B0"),
        ]
