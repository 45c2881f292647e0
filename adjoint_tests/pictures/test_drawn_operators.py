"""Pictures of operators: arrows are the entries of the transfer table, and the SVG is
well-formed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import linop
from linop import LinearOperator, Partition, Region, Space, TensorSpace
from linop.errors import ArgumentError
from linop.pictures.operators import turned
from linop.pictures.scene import MOST_REGIONS, Scene, scene_of, shown_workers
from linop.testing import strategies

SVG = "{http://www.w3.org/2000/svg}"
LINE = TensorSpace(12, Partition(4))
ODD = "<&>\"'\x00\x1b\u202e $x$"


def scene(op: LinearOperator) -> Scene:
    return scene_of(op.stages, op.stages.workers)


def pure(op: LinearOperator) -> None:
    """Keep operators of one movement whose regions are all drawn."""
    assume(op.stages.pure)
    spaces = (op.domain, op.codomain)
    assume(all(len(s.on(w)) <= MOST_REGIONS for s in spaces for w in op.stages.workers))


@given(strategies.operators(workers=4))
def test_arrows_are_the_entries_of_the_transfer_table(op: LinearOperator) -> None:
    """Each transfer has one arrow for each holder of its target, from a holder of its source: from
    itself, where it is one."""
    pure(op)
    movement = op.stages.movements[0]
    found: Counter[tuple[object, int]] = Counter()
    for arrow in scene(op).arrows:
        assert len(arrow.transfers) == arrow.count
        assert arrow.sender is not None and arrow.receiver is not None
        for transfer in arrow.transfers:
            assert arrow.sender in transfer.source.workers
            assert arrow.receiver in transfer.target.workers
            assert arrow.message == (arrow.receiver not in transfer.source.workers)
            assert arrow.source is not None and arrow.source.contains(transfer.source)
            assert arrow.target is not None and arrow.target.contains(transfer.target)
            found[transfer, arrow.receiver] += 1
    assert found == Counter((t, w) for t in movement for w in t.target.workers)


@given(strategies.operators(workers=4))
def test_arrows_that_add_are_those_whose_targets_overlap(op: LinearOperator) -> None:
    pure(op)
    movement = op.stages.movements[0]
    for arrow in scene(op).arrows:
        others = [
            t
            for t in movement
            if t not in arrow.transfers
            and any(t.target.overlaps(u.target) for u in arrow.transfers)
        ]
        inside = any(
            t is not u and t.target.overlaps(u.target)
            for t in arrow.transfers
            for u in arrow.transfers
        )
        assert arrow.adds == (bool(others) or inside)


@given(strategies.operators(workers=4))
def test_the_adjoint_has_the_transposed_arrows(op: LinearOperator) -> None:
    pure(op)
    assume(op.domain.inner_product is None and op.codomain.inner_product is None)
    assume(op.H.stages.pure)

    def entries(which: LinearOperator, back: bool) -> set[tuple[object, ...]]:
        every = (t for arrow in scene(which).arrows for t in arrow.transfers)
        return {
            (t.target, t.source, np.conj(t.coefficient))
            if back
            else (t.source, t.target, t.coefficient)
            for t in every
        }

    if op.dtype.kind != "c":
        assert entries(op.H, True) == entries(op, False)
    spaces = (op.domain, op.codomain)
    if not any(region.replicated for space in spaces for region in space):
        assert turned(scene(op), scene(op.H))


@given(strategies.operators(workers=4), st.booleans())
@example(linop.identity(Space([])), True)
@example(linop.zero(LINE, LINE), True)
@example(linop.halo_exchange(LINE, widths=1), False)
def test_pictures_are_well_formed(op: LinearOperator, adjoint: bool) -> None:
    picture = op.draw(adjoint=adjoint)
    root = ElementTree.fromstring(str(picture))
    assert root.tag == f"{SVG}svg"
    assert str(op.draw(adjoint=adjoint)) == str(picture)
    hints = [title.text or "" for path in root.iter(f"{SVG}path") for title in path]
    scenes = [scene(op), *([scene(op.H)] if adjoint else [])]
    assert len(hints) == sum(len(list(s.arrows)) for s in scenes)
    inline = ElementTree.fromstring(picture._repr_html_())
    assert inline.tag == "div"
    # A page's own ink: no style that would hold for all of it, and no paper.
    assert not list(inline.iter(f"{SVG}style"))
    for text in (op._repr_html_(), op.H._repr_html_()):
        assert ElementTree.fromstring(text).tag == "div"


def texts(picture: object) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(str(picture)).iter(f"{SVG}text")]


def test_a_halo_exchange_and_its_adjoint() -> None:
    op = linop.halo_exchange(LINE, widths=1)
    messages = [(a.sender, a.receiver) for a in scene(op).arrows if a.message]
    assert sorted(messages) == [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]
    assert not any(a.adds for a in scene(op).arrows)
    assert all(a.adds for a in scene(op.H).arrows if a.message)
    said = texts(op.draw())
    assert "the same arrows, turned round; 6 messages, 48 bytes" in said
    for expected in ("H", "H*", "worker 3", "x@1 [3:6]", "x@1 [2:7]", "domain", "codomain"):
        assert expected in said
    for kind in ("sent to another worker", "arrived from another worker"):
        assert kind in said
    assert "the same arrows" not in " ".join(texts(op.draw(adjoint=False)))


def test_an_adjoint_with_other_arrows_does_not_say_that_they_are_the_same() -> None:
    """A replicated region is read from the worker's own copy: forward nothing is sent, back an
    all-reduce."""
    V = TensorSpace(3, Partition(3), axes=(linop.REPLICATED,))
    op = linop.repartition(V, TensorSpace(3, Partition(3), axes=(linop.COPIES,)))
    assert not any(a.message for a in scene(op).arrows)
    assert sum(a.message for a in scene(op.H).arrows) == 6
    said = " ".join(texts(op.draw()))
    assert "no message" in said and "turned round" not in said


def test_local_maps_are_boxes_with_their_symbols() -> None:
    needed = linop.halo_exchange(LINE, 3)
    Y = TensorSpace(10, Partition(4), name="y")
    ends = zip(needed.codomain.regions, Y.regions, strict=True)
    C = linop.direct_sum(*(linop.local_operators.convolution([1.0, -2, 1], a, b) for a, b in ends))
    op = C @ needed
    said = texts(op.draw())
    symbols = {call.map.symbol for call in op.stages.calls}
    assert symbols and symbols <= set(said)
    assert "local map" in said
    # A halo exchange, the maps, and nothing else: identities between are not drawn.
    assert len(scene(op).levels) == 4
    assert len(scene(op.H).levels) == 4


def test_coefficients_are_written() -> None:
    assert "× 3" in texts((3 * linop.shift(LINE, 1)).draw())


def test_names_are_text_and_no_markup() -> None:
    a, b = Region(ODD, 3, 0), Region(f"{ODD}b", 3, 1)
    both = Space([a, b])
    move = linop.move(both, a, b)
    own = linop.local(Space(a), Space(a), lambda x: x, lambda y: y, name=ODD)
    T = TensorSpace((2, 4), Partition((1, 2)), name=ODD)
    shown = [move, own, linop.shift(T, 1, 1)]
    for op in shown:
        for text in (str(op.draw()), op._repr_html_()):
            assert "<&>" not in text
        assert any("<&>" in said for said in texts(op.draw()))
        ElementTree.fromstring(str(op.draw()))
    for text in (str(T.draw()), T._repr_html_(), both._repr_html_(), move.draw()._repr_html_()):
        assert "<&>" not in text
    assert any("<&>" in said for said in texts(T.draw()))
    assert any("<&>" in said for said in texts(linop.planning.timeline(move).draw()))


def many(workers: int) -> dict[str, Callable[[], LinearOperator]]:
    line = Partition(workers)
    split = TensorSpace(3 * workers, line)
    copied = TensorSpace(5, line, axes=(linop.COPIES,))
    plane = TensorSpace((3 * workers, 100), Partition((workers // 100, 100)))
    return {
        "halo_exchange": lambda: linop.halo_exchange(split, widths=1),
        "halo_exchange 2-D": lambda: linop.halo_exchange(plane, 3),
        "shift": lambda: linop.shift(split, 1),
        "all_reduce": lambda: linop.all_reduce(copied),
        "broadcast": lambda: linop.broadcast(TensorSpace(5, Partition(1)), line),
        "sum_reduce": lambda: linop.sum_reduce(copied, Partition(1)),
        "gather": lambda: linop.gather(split),
        "scatter": lambda: linop.scatter(TensorSpace(3 * workers, Partition(1)), line),
        "all_gather": lambda: linop.all_gather(split, into=linop.REPLICATED),
    }


@pytest.mark.parametrize("name", many(100))
def test_of_ten_thousand_workers_a_few_are_drawn(name: str) -> None:
    op = many(10_000)[name]()
    begun = time.perf_counter()
    picture, text = op.draw(), op._repr_html_()
    assert time.perf_counter() - begun < 20  # about a second, on an idle machine
    assert max(len(str(picture)), len(text)) < 300_000
    said = texts(picture)
    assert any("9,993 workers are not drawn" in one for one in said)
    assert "worker 9999" in said and "worker 7" not in said


def test_workers_are_chosen() -> None:
    op = linop.shift(TensorSpace(300, Partition(100)), 1)
    said = texts(op.draw(workers=[50, 51, 52]))
    assert [t for t in said if t.startswith("worker ")] == 2 * [
        "worker 50",
        "worker 51",
        "worker 52",
    ]
    assert any("97 workers are not drawn" in one for one in said)
    with pytest.raises(
        ArgumentError, match="worker 100 given; the operator is of 100 workers, 0 to"
    ):
        op.draw(workers=[100])
    with pytest.raises(ArgumentError, match="40 workers given, at most 32 fit"):
        op.draw(workers=range(40))
    assert shown_workers(range(8)) == tuple(range(8))


def test_many_transfers_regions_and_steps_are_abridged() -> None:
    rng = np.random.default_rng(1)
    choices = rng.integers(0, 40, (400, 1)).tolist()
    op = linop.dispatch(TensorSpace((400, 2), Partition((4, 1))), linop.Routing(choices, 40, 4))
    begun = time.perf_counter()
    assert len(str(op.draw())) < 300_000
    assert time.perf_counter() - begun < 20
    space = Space([Region(f"r{k}", 2, k % 2) for k in range(40)])
    said = texts(linop.identity(space).draw())
    assert "+16" in said
    assert any("16 more regions of worker 0" in one for one in said)
    step = linop.shift(LINE, 1)
    chain = linop.in_steps(*(step for _ in range(20)))
    said = texts(chain.draw())
    assert any("steps in the middle are not drawn" in one for one in said)
    assert "…" in " ".join(said)


def test_files(tmp_path: Path) -> None:
    picture = linop.shift(LINE, 1).draw()
    picture.save(tmp_path / "shift.svg")
    assert (tmp_path / "shift.svg").read_text(encoding="utf-8") == str(picture)
    assert picture._repr_svg_() == str(picture)
    assert repr(picture).startswith("<Picture of ")
    with pytest.raises(ArgumentError, match=r"ends in \.svg expected, given .*shift\.png"):
        picture.save(tmp_path / "shift.png")
    with pytest.raises(ArgumentError, match=r"shift\.svg: cannot be written: No such file"):
        picture.save(tmp_path / "missing" / "shift.svg")


def test_plans_show_their_operator_and_steps() -> None:
    op = linop.shift(LINE, 1)
    for name in ("reference", "threads"):
        text = op.compile(linop.backends.get(name))._repr_html_()
        ElementTree.fromstring(text)
        assert "steps" in text and "svg" in text and name in text

    def main(backend: linop.backends.Backend) -> str:
        return op.compile(backend)._repr_html_()

    text = linop.launch(main, 4, "threads")[1]
    assert "worker 1: x@1[3]" in text and "by messages" in text


def test_operators_too_large_say_so() -> None:
    X = TensorSpace(200_000, Partition(100_000))
    text = linop.shift(X, 1)._repr_html_()
    assert "No picture: more than 50,000 regions" in text
    S = linop.shift(LINE, 1)
    loop = linop.repeat(S, 3)
    assert "No picture: it has time loops" in loop._repr_html_()
