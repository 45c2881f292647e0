"""Predicted timelines: they are the simulation, event by event, in the form of recorded traces."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import LinearOperator, Partition, TensorSpace
from linop.errors import ArgumentError
from linop.pictures import trace
from linop.planning import Link, Network, Placement, simulate, timeline
from linop.testing import strategies
from support.traces import rows_of

SVG = "{http://www.w3.org/2000/svg}"
SHIFT = linop.shift(TensorSpace(12, Partition(3)), 1)
SLOW = Network(latency=2.0, per_byte=0.5, per_byte_added=0.25, per_byte_copied=0.125)
TWO = Network(1.0, 0.5, between=Link(3.0, 1.0, 2.0))


@given(strategies.operators(workers=4), st.sampled_from([None, SLOW, TWO]), st.booleans())
def test_a_timeline_is_the_simulation(
    op: LinearOperator, network: Network | None, machines: bool
) -> None:
    placement = Placement([0, 1, 0, 1]) if machines else None
    found, expected = timeline(op, network, placement), simulate(op, network, placement)
    assert found.workers == tuple(expected.workers.tolist())
    assert found.time == pytest.approx(expected.time)
    spent = {"send": expected.sending, "wait": expected.waiting}
    spent |= {"copy": expected.copying, "add": expected.adding}
    for k, worker in enumerate(found.workers):
        row = [event for event in found.events if event.worker == worker]
        for kind, seconds in spent.items():
            own = [event for event in row if event.kind == kind]
            assert sum(event.seconds for event in own) == pytest.approx(seconds[k], abs=1e-12)
        ends = [event.begun + event.seconds for event in row]
        assert max(ends, default=0.0) == pytest.approx(expected.seconds[k], abs=1e-12)
        for event, end in zip(row[1:], ends, strict=False):
            assert event.begun == pytest.approx(end, abs=1e-12)
        sent = [event for event in row if event.kind == "send"]
        assert len(sent) == expected.messages_sent[k]
        assert sum(event.bytes or 0 for event in sent) == expected.bytes_sent[k]
        came = [event for event in row if event.kind == "wait"]
        assert sum(event.bytes or 0 for event in came) == expected.bytes_received[k]
    pairs = Counter((m.sender, m.receiver) for m in found.messages)
    sends = Counter((e.worker, e.peer) for e in found.events if e.kind == "send")
    assert pairs == sends


@given(strategies.operators(workers=4))
def test_traces_and_pictures_are_well_formed(op: LinearOperator) -> None:
    found = timeline(op)
    ElementTree.fromstring(str(found.draw()))
    ElementTree.fromstring(found._repr_html_())
    events = json.loads(found.to_trace())["traceEvents"]
    boxes = [e for e in events if e["ph"] == "X"]
    assert len(boxes) == len(found.events)
    for phase in "sf":
        ends = [e for e in events if e["ph"] == phase]
        assert len({e["id"] for e in ends}) == len(ends) == len(found.messages)
        for end in ends:  # inside a send, or a wait
            word = "send" if phase == "s" else "wait"
            assert any(
                b["name"].startswith(word)
                and b["pid"] == end["pid"]
                and b["ts"] - 1e-6 <= end["ts"] <= b["ts"] + b["dur"] + 1e-6
                for b in boxes
            )


def test_a_prediction_lies_below_the_recorded_trace(tmp_path: Path) -> None:
    real, both = tmp_path / "real.json", tmp_path / "both.json"

    def run(backend: linop.backends.Backend) -> None:
        plan = SHIFT.compile(backend)
        with backend.trace(real):
            plan(np.arange(4.0))

    linop.launch(run, workers=3)
    found = timeline(SHIFT)
    found.to_trace(both, beside=real, begun=1.0)
    rows = rows_of(both)
    assert set(rows) >= {f"worker {w}{p}" for w in range(3) for p in ("", ", predicted")}
    recorded = next(e for e in rows["worker 0"] if e["cat"] == "step")
    shape: dict[str, type[Any]] = {key: type(value) for key, value in recorded.items()}
    for worker in range(3):
        for event in rows[f"worker {worker}, predicted"]:
            assert {key: type(value) for key, value in event.items()} == shape
            assert event["ts"] >= 1e6
            assert event["args"]["operator"] == recorded["args"]["operator"]
    for path in (real, both):
        root = ElementTree.fromstring(str(trace(path)))
        said = [each.text for each in root.iter(f"{SVG}text")]
        assert "worker 2" in said
        assert any(t.text and "wait for messages" in t.text for t in root.iter(f"{SVG}title"))


def test_of_many_workers_some_have_events() -> None:
    X = TensorSpace(30_000, Partition(10_000))
    begun = time.perf_counter()
    found = timeline(linop.halo_exchange(X, widths=1))
    assert time.perf_counter() - begun < 20
    assert found.workers == (*range(63), 9999)
    assert found.hidden == 9936
    assert len(str(found.draw())) < 300_000
    said = [t.text for t in ElementTree.fromstring(str(found.draw())).iter(f"{SVG}text")]
    assert "9,936 more workers are not drawn." in said
    assert timeline(SHIFT, workers=[1]).workers == (1,)
    assert not timeline(SHIFT, workers=[1]).messages
    with pytest.raises(ArgumentError, match="worker 7 given; the operator is of 3 workers"):
        timeline(SHIFT, workers=[7])


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    with pytest.raises(ArgumentError, match="no trace; expected a file of"):
        trace(bad)
    with pytest.raises(ArgumentError, match="cannot be read"):
        timeline(SHIFT).to_trace(beside=tmp_path / "none.json")
    with pytest.raises(ArgumentError, match="cannot be written"):
        timeline(SHIFT).to_trace(tmp_path / "none" / "a.json")
