"""Pictures of tensors in blocks, and of halos: which part of a block which worker sends."""

from __future__ import annotations

import time
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import Partition, TensorSpace
from linop.errors import ArgumentError
from linop.pictures import halos
from linop.pictures.halos import parts_of
from linop.testing import strategies

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: object) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(str(picture)).iter(f"{SVG}text")]


@given(strategies.tensors(workers=8))
def test_every_tensor_space_is_drawn(X: TensorSpace) -> None:
    picture = X.draw()
    root = ElementTree.fromstring(str(picture))
    hints = [t.text or "" for t in root.iter(f"{SVG}title")]
    if X.ndim < 3:
        drawn = {int(w) for h in hints for w in h.removeprefix("worker ").split(",")}
        assert drawn == set(X.partition.workers)
    assert ElementTree.fromstring(X._repr_html_()).tag == "div"


@pytest.mark.parametrize("shape", [(7,), (6, 5), (6, 5, 4)])
@pytest.mark.parametrize("kernel", [3, 2])
def test_parts_are_the_bulk_and_the_halos_of_the_geometry(
    shape: tuple[int, ...], kernel: int
) -> None:
    grid = tuple(2 for _ in shape)
    P = Partition(grid)
    op = linop.halo_exchange(TensorSpace(shape, P), kernel)
    Y: Any = op.codomain
    parts = parts_of(op.movement(), Y.workers)
    geometry = linop.halo_geometry(shape, P, kernel)
    for worker, dims in geometry.items():
        filled = np.zeros(Y.local_shape(worker), int)
        own = np.zeros(Y.local_shape(worker), bool)
        for part in parts[worker]:
            index = tuple(map(slice, part.start, part.stop))
            filled[index] += 1
            own[index] = part.sender == worker
        assert (filled == 1).all()
        bulk = tuple(
            slice(d.left_halo, n - d.right_halo) for d, n in zip(dims, own.shape, strict=True)
        )
        assert own[bulk].all()
        assert own.sum() == own[bulk].size


@given(st.data(), strategies.tensors(workers=8, roles=("split",), uneven=False))
def test_every_halo_exchange_is_drawn(data: Any, X: TensorSpace) -> None:
    widths = data.draw(st.integers(0, 3))
    op = linop.halo_exchange(X, widths=widths)
    for which in (op, op.H):
        ElementTree.fromstring(str(halos(which)))


def test_a_plane_of_workers() -> None:
    X = TensorSpace((8, 12), Partition((2, 3)))
    picture = halos(linop.halo_exchange(X, widths=1))
    said = texts(picture)
    assert "H: who sends what each worker gets" in said
    for worker in range(6):
        assert str(worker) in said
    assert "0:5, 0:5" in said and "3:8, 3:9" in said
    hints = [t.text for t in ElementTree.fromstring(str(picture)).iter(f"{SVG}title")]
    # Corners, too: worker 4 has eight parts from all five others.
    assert {f"from worker {w}" for w in range(6)} <= set(hints)
    for words in ("the worker has it", "another worker sends it", "the worker's block before"):
        assert any(text.startswith(words) for text in said)


@pytest.mark.parametrize("grid", [(10_000,), (100, 100), (22, 21, 21)])
def test_of_many_blocks_a_few_are_drawn(grid: tuple[int, ...]) -> None:
    X = TensorSpace(tuple(3 * n for n in grid), Partition(grid))
    begun = time.perf_counter()
    pictures = [str(X.draw()), X._repr_html_(), str(halos(linop.halo_exchange(X, widths=1)))]
    assert time.perf_counter() - begun < 20
    assert max(map(len, pictures)) < 200_000
    assert any("more parts are not drawn" in said for said in texts(pictures[0]))
    assert any("more places along dimension 0" in said for said in texts(pictures[2]))


def test_more_dimensions_than_three() -> None:
    X = TensorSpace((2, 3, 4, 5, 6), Partition((1, 2, 2, 1, 1)))
    for picture in (X.draw(), halos(linop.halo_exchange(X, widths=1))):
        assert any("is not drawn" in said for said in texts(picture))


def test_roles_of_grid_axes_are_said() -> None:
    X = TensorSpace(4, Partition((2, 3)), axes=(0, linop.COPIES))
    assert "Each block is there 3 times: independent copies." in texts(X.draw())
    X = TensorSpace(4, Partition((2, 3)), axes=(0, linop.REPLICATED))
    said = texts(X.draw())
    assert "Each block is held by 3 workers: identical copies, which count once." in said
    assert "0, 1, 2" in said


def test_what_is_no_halo_is_an_error() -> None:
    X = TensorSpace(4, Partition(1))
    A = linop.local(X, X, lambda x: x, lambda y: y)
    with pytest.raises(ArgumentError, match="given an operator with local operators"):
        halos(A)
    space = linop.Space(linop.Region("a", 3))
    with pytest.raises(ArgumentError, match="a codomain that is no TensorSpace"):
        halos(linop.identity(space))
