"""Pictures of simulated schedules: SVG, lines of text, and traces beside those of real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import linop
from linop import Partition, TensorSpace
from linop.errors import ArgumentError
from linop.schedules import (
    Schedule,
    gpipe,
    interleaved,
    one_forward_one_backward,
    pictures,
    simulate,
    zero_bubble_h1,
)

SVG = "{http://www.w3.org/2000/svg}"
F1B1 = simulate(one_forward_one_backward(2, 3), {"F": 1, "B": 2}, edges=0.5)


def boxes(text: str) -> dict[str, ElementTree.Element]:
    """Rectangles with a hint, by the action that it names."""
    found = {}
    for rect in ElementTree.fromstring(text).iter(f"{SVG}rect"):
        hint = rect.find(f"{SVG}title")
        if hint is not None and hint.text is not None:
            found[hint.text.split(":")[0]] = rect
    return found


def test_svg_has_a_box_for_each_action_that_takes_time(tmp_path: Path) -> None:
    text = F1B1.to_svg(tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_text(encoding="utf-8") == text == F1B1.to_svg()
    found = boxes(text)
    assert set(found) == {
        *(f"{s}{kind}{m}" for s in range(2) for kind in "FB" for m in range(3)),
        *(f"0SEND_F{m}" for m in range(3)),
        *(f"1SEND_B{m}" for m in range(3)),
    }
    widths = {name: float(rect.attrib["width"]) for name, rect in found.items()}
    assert widths["0B0"] == pytest.approx(2 * widths["0F0"], abs=0.02)
    assert widths["0SEND_F1"] == pytest.approx(widths["0F0"] / 2, abs=0.02)
    one, other = (float(found[name].attrib["x"]) for name in ("0F0", "0F1"))
    assert other == pytest.approx(one + widths["0F0"], abs=0.02)
    assert found["0F0"].attrib["y"] < found["1F0"].attrib["y"]
    colours = {name: rect.attrib["fill"] for name, rect in found.items()}
    assert colours["0F0"] == colours["1F2"] != colours["0B0"] != colours["0SEND_F0"]


def test_svg_has_names_numbers_times_and_a_legend() -> None:
    root = ElementTree.fromstring(F1B1.to_svg())
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert texts[0] is not None and texts[0].startswith("1f1b: 2 stages, 3 micro-batches, time ")
    for expected in ("worker 0", "worker 1", "0", "1", "2", "forward", "backward", "message"):
        assert expected in texts
    assert f"{float(F1B1.time):.4g}" in texts
    zero_bubble = simulate(zero_bubble_h1(2, 2)).to_svg()
    assert "gradient of input" in zero_bubble and "message" not in zero_bubble


def test_later_chunks_are_lighter() -> None:
    found = boxes(simulate(interleaved(4, 2, 2)).to_svg())
    assert "fill-opacity" not in found["0F0"].attrib
    assert found["2F0"].attrib["fill-opacity"] == "0.67"


def test_names_are_escaped() -> None:
    odd = Schedule(gpipe(1, 1).workers, "<a & b>")
    texts = [t.text for t in ElementTree.fromstring(simulate(odd).to_svg()).iter(f"{SVG}text")]
    assert texts[0] is not None and texts[0].startswith("<a & b>: ")


def test_large_pictures_stay_small() -> None:
    root = ElementTree.fromstring(simulate(one_forward_one_backward(2, 500)).to_svg())
    assert float(root.attrib["width"]) < 4200


def test_lines() -> None:
    found = simulate(one_forward_one_backward(2, 2))
    width = pictures.fitting(found, 1000)
    lines = ["".join(text for text, _, _ in row) for row in pictures.lines(found, width)]
    assert lines == ["F0F1····B0──··B1──", "··F0B0──F1B1──····"]
    narrow = ["".join(text for text, _, _ in row) for row in pictures.lines(found, 5)]
    assert {len(line) for line in narrow} == {5}


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    return [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == kind]


def test_trace_has_the_form_of_recorded_ones(tmp_path: Path) -> None:
    """Keys and types of every event are those of a trace that a backend wrote, and both lie in one
    file, each simulated worker directly below the real one."""
    X = TensorSpace((4,), Partition((2,)))
    real, both = tmp_path / "real.json", tmp_path / "both.json"

    def run(backend: linop.backends.Backend) -> None:
        plan = linop.shift(X, 1).compile(backend)
        with backend.trace(real):
            plan(np.arange(2.0))

    linop.launch(run, workers=2)
    F1B1.to_trace(both, beside=real, begun=2.0)
    recorded = events(real, "X")
    every = events(both, "X")
    assert every[: len(recorded)] == recorded
    simulated = every[len(recorded) :]
    shape = {key: type(value) for key, value in recorded[0].items()}
    assert all({key: type(value) for key, value in e.items()} == shape for e in simulated)
    of = {e["name"]: e for e in simulated}
    assert (of["0F1"]["ts"], of["0F1"]["dur"]) == (3e6, 1e6)
    assert of["0F1"]["args"] == {"stage": 0, "micro-batch": 1}
    assert (of["0F0"]["tid"], of["0SEND_F0"]["tid"]) == (0, 1)
    assert of["0F0"]["pid"] != of["1F0"]["pid"]
    assert not {e["pid"] for e in simulated} & {e["pid"] for e in recorded}
    about = events(both, "M")
    names = {e["pid"]: e["args"]["name"] for e in about if e["name"] == "process_name"}
    assert {"worker 0", "worker 0, simulated"} <= set(names.values())
    order = {e["pid"]: e["args"] for e in about if e["name"] == "process_sort_index"}
    assert [order[pid] for pid, name in names.items() if name.startswith("worker 1")] == [
        {"sort_index": 1}
    ] * 2


def test_files_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "file"
    for write in (F1B1.to_svg, F1B1.to_trace):
        with pytest.raises(ArgumentError, match="file: cannot be written: No such file"):
            write(missing)
    with pytest.raises(ArgumentError, match="file: cannot be read: No such file"):
        F1B1.to_trace(beside=missing)
    wrong = tmp_path / "wrong.json"
    wrong.write_text("[]")
    with pytest.raises(ArgumentError, match=r"wrong\.json: no trace; expected"):
        F1B1.to_trace(beside=wrong)
