"""Spaces, partitions and vectors as text, and as the tables that notebooks show."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import COPIES, Partition, Region, Space, TensorSpace
from linop.testing.describing import space_of, spaces, tensor_of, tensors


def table(shown: Any) -> tuple[str, list[list[str]]]:
    """Caption and rows of what a notebook shows, which is well-formed and has no style; a tensor
    space has its picture below."""
    text = shown._repr_html_()
    root = ElementTree.fromstring(text)
    if isinstance(shown, TensorSpace):
        root = root[0]
    else:
        assert "style" not in re.sub("<t[dh]>.*?</t[dh]>|<caption>.*?</caption>", "", text)
        assert "color" not in text
    caption = root.find("caption")
    assert root.tag == "table"
    assert caption is not None
    rows = [[cell.text or "" for cell in row] for row in root.iter("tr")]
    assert len({len(row) for row in rows}) == 1
    return caption.text or "", rows


@given(spaces(4, ("float64", "int32", "complex64")))
def test_spaces_and_vectors(described: Any) -> None:
    space = space_of(described)
    caption, (head, *rows) = table(space)
    assert f"{space.size} element" in caption
    assert space.dtype.name in caption
    assert head == ["region", "shape", "workers"]
    assert [row[:2] for row in rows] == [[r.name, str(r.shape)] for r in space]
    v = space.integers(1)
    said, (_, *rows) = table(v)
    assert [row[0] for row in rows] == [r.name for r in space]
    for text in (said, repr(v)):
        assert f"{space.size} element" in text
        assert space.dtype.name in text
    for region in space:
        assert f"{region.name}{list(region.shape)} = " in repr(v)


@given(tensors(8))
def test_tensor_spaces(described: Any) -> None:
    X = tensor_of(described)
    caption, (_, *rows) = table(X)
    for said in (str(X.global_shape), X.dtype.name, str(X.partition.shape)):
        assert said in caption
        assert said in repr(X)
    for row, region in zip(rows, X.regions, strict=True):
        ranges = ", ".join(f"{s.start}:{s.stop}" for s in X.block(region))
        assert [row[0], row[1], row[3]] == [region.name, str(region.shape), ranges]


@given(st.lists(st.integers(1, 3), max_size=3))
def test_partitions(shape: list[int]) -> None:
    P = Partition(shape, range(100, 100 + int(np.prod(shape))))
    caption, (head, *rows) = table(P)
    assert f"{P.size} worker" in caption
    workers = [row[1:] if len(shape) > 1 else row for row in rows]
    assert [int(w) for row in workers for w in row] == list(P.workers)
    assert len(head) == len(rows[0])


def test_of_many_rows_a_few_are_shown() -> None:
    X = TensorSpace((100_000,), Partition((50_000,)))
    _, (_, *rows) = table(X)
    assert [row[0] for row in rows] == [*(f"x@{k}" for k in range(8)), "…", "x@49999"]
    assert not vars(X).get("regions")  # the regions of all workers were not made
    _, (head, *rows) = table(Partition((20, 30)))
    assert head == ["", *map(str, range(8)), "…", "29"]
    assert [row[0] for row in rows] == [*map(str, range(8)), "…", "19"]
    shared = TensorSpace((3,), Partition((40,)), axes=(linop.REPLICATED,))
    _, (_, row) = table(shared)
    assert row[2] == "0, 1, 2, 3, 4, 5, 6, 7, …, 39"
    v = TensorSpace((30, 400), Partition((20,))).zeros()
    assert len(repr(v)) < 2000
    assert repr(v).count("…") == 1


def test_names_are_text_and_no_markup() -> None:
    name = "<script>alert('&')</script>"
    space = Space(Region(name, 2, 3, "host"))
    for shown in (space, space.zeros()):
        assert "<script>" not in shown._repr_html_()
        assert table(shown)[1][1][0] == name
    assert table(space)[1][1][2] == "3:host"


def test_a_worker_shows_its_own_part() -> None:
    X = TensorSpace((4,), Partition((2,)), axes=(COPIES,))

    def main(backend: linop.backends.Worker) -> tuple[str, str]:
        v = backend.vector(X, np.full(4, float(backend.worker)))
        return repr(v), table(v)[0]

    text, caption = linop.launch(main, 2, "threads")[1]
    assert text == (
        "<Vector of 8 elements, dtype float64, 1 of 2 regions here: x@1[4] = [1. 1. 1. 1.]>"
    )
    assert "1 of 2 regions here" in caption


@pytest.mark.parametrize("name", ["reference", "threads"])
def test_operators_and_plans_show_shape_and_dtype(name: str) -> None:
    X = TensorSpace((6,), Partition((2,)), "float32")
    op = linop.all_gather(X)
    assert "12x6" in repr(op)
    assert "float32" in repr(op)
    plan = op.compile(linop.backends.get(name))
    assert repr(op) in repr(plan)
    assert name in repr(plan)
