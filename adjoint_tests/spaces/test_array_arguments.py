"""Which arrays are taken, and as what: overlapping memory, subclasses that say more than numbers,
and numbers that a dtype does not hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

import linop
from linop import Partition, Region, Space, TensorSpace
from linop.backends.engine.arrays.overlap import overlaps_itself
from linop.errors import ArgumentError, DTypeError, ShapeError
from support.contracts.plans import raised, total

X = Space(Region("x", 3))
T = TensorSpace((3,), Partition((1,)))
KEEP = linop.identity(X)

# Memory that overlaps


@given(
    axes=st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), max_size=4),
    itemsize=st.sampled_from([1, 2, 3, 8]),
)
def test_overlaps_are_those_of_all_pairs_of_elements(
    axes: list[tuple[int, int]], itemsize: int
) -> None:
    shape, strides = tuple(n for n, _ in axes), tuple(s for _, s in axes)
    memory = np.zeros(2000, np.uint8)
    array = np.ndarray(shape, f"V{itemsize}", memory, 1000, strides)
    starts = sorted(
        sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, shape))
    )
    wanted = any(b - a < itemsize for a, b in itertools.pairwise(starts))
    assert overlaps_itself(array) is wanted


OVERLAPPING: dict[str, Callable[[], np.ndarray]] = {
    "stride 0": lambda: as_strided(np.zeros(1), (5,), (0,)),
    "half an element": lambda: as_strided(np.zeros(8), (5,), (4,)),
}


@pytest.mark.parametrize("how", OVERLAPPING)
@pytest.mark.parametrize("backend", ["threads", "reference"])
def test_out_that_overlaps_is_refused(backend: str, how: str) -> None:
    def main(here: Any) -> None:
        plan = total(2).compile(here)
        out = OVERLAPPING[how]()
        words = raised(ArgumentError, lambda: plan(np.ones(5), out=out))
        assert "elements of the array share memory with each other (shape (5,)" in words
        assert "np.empty((5,), 'float64')" in words

    linop.launch(main, 2, backend)


def test_columns_beside_each_other_do_not_overlap() -> None:
    both = np.zeros((3, 2))
    both[:, 0] = 1, 2, 3

    def main(here: Any) -> None:
        plan = (2 * KEEP).compile(here)
        for _ in range(3):
            plan(both[:, 0], out=both[:, 1])
        assert both[:, 1].tolist() == [2, 4, 6]

    linop.launch(main, 1)


# Subclasses

MASKED = np.ma.masked_array([1.0, 2.0, 3.0], [False, True, False])


class Quantity(np.ndarray):
    """Numbers of a unit."""


TAKERS: dict[str, Callable[[Any], Any]] = {
    "vector": X.vector,
    "unflatten": X.unflatten,
    "operator": KEEP,
    "scatter": T.scatter,
    "gather": lambda x: T.gather({T.regions[0].name: x}),
    "plan": lambda x: linop.launch(lambda b: KEEP.compile(b)(x), 1),
    "whole plan": KEEP.compile(linop.backends.get("threads")),
    "out": lambda x: linop.launch(lambda b: KEEP.compile(b)(np.ones(3), out=x), 1),
    "backend's vector": lambda x: linop.launch(lambda b: b.vector(X, x), 1),
    "diagonal": lambda x: linop.local_operators.diagonal(x, X),
    "matrix": lambda x: linop.local_operators.matrix(x.reshape(1, 3)),
    "local result": lambda x: linop.local(X, X, lambda _: x, lambda _: x)(np.ones(3)),
}


@pytest.mark.parametrize("where", TAKERS)
@pytest.mark.parametrize("x", [MASKED, np.ones(3).view(Quantity)], ids=["masked", "quantity"])
def test_arrays_that_say_more_than_numbers_are_refused(where: str, x: np.ndarray) -> None:
    mend = ".filled(value)" if x is MASKED else "np.asarray(x)"
    words = raised(ArgumentError, lambda: TAKERS[where](x))
    assert f"{type(x).__qualname__} given, numpy.ndarray expected" in words and mend in words


def test_arrays_of_a_file_are_arrays(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "x", np.float64, "w+", shape=3)
    mapped[:] = 1, 2, 3

    def main(here: Any) -> None:
        plan = (3 * KEEP).compile(here)
        for k in range(1, 4):
            assert type(plan(mapped)) is np.ndarray
            out = np.memmap(tmp_path / "y", np.float64, "w+", shape=3)
            assert plan(mapped, out=out) is out
            assert out.tolist() == [3, 6, 9], k

    linop.launch(main, 1)


def test_a_file_in_place(tmp_path: Path) -> None:
    def main(here: Any) -> None:
        space = Space([Region("a", 4)])
        plan = linop.copy(space, space["a"][:1], space["a"][3:]).compile(here)
        x = np.memmap(tmp_path / "x", np.float64, "w+", shape=4)
        for k in range(3):
            x[:] = np.arange(4) + k
            assert plan(x, out=x) is x
            assert x.tolist() == [k, 1 + k, 2 + k, k]

    linop.launch(main, 1)


# Numbers

HELD = [
    ("float64", [1, 2, 3]),
    ("float64", [1, 2**53, 3]),
    ("int8", [1, -128, 127]),
    ("float32", [0.1, np.inf, 2**24]),
    ("complex64", [1, 2.5, 1j]),
]
LOST = [
    ("float64", [1, 2**53 + 1, 3]),
    ("float64", [1, 2**63 - 1, 3]),
    ("int8", [1, 2, 128]),
    ("uint8", [1, 2, -1]),
    ("int64", [1, 2, 2**63]),
    ("int64", [1, 2, 2.5]),
    ("float32", [1, 2, 2**24 + 1]),
    ("float32", [1, 2, 1e300]),
    ("float64", [1, 2, 1j]),
]


@pytest.mark.parametrize(("dtype", "numbers"), HELD)
def test_sequences_of_numbers_are_converted(dtype: str, numbers: list[Any]) -> None:
    space = Space(Region("x", 3), dtype)
    T = TensorSpace((3,), Partition((1,)), dtype)
    wanted = np.array(numbers, dtype)
    for found in (
        space.vector(numbers)["x"],
        linop.identity(space)(numbers),
        T.gather(T.scatter(numbers)),
        linop.launch(lambda b: linop.identity(space).compile(b)(numbers), 1)[0],
        linop.local(space, space, lambda x: numbers, lambda x: x)(wanted),
    ):
        found = found["x"] if isinstance(found, linop.Vector) else found
        assert found.dtype == wanted.dtype
        assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize(("dtype", "numbers"), LOST)
def test_numbers_that_would_be_lost_are_refused(dtype: str, numbers: list[Any]) -> None:
    space = Space(Region("x", 3), dtype)
    T = TensorSpace((3,), Partition((1,)), dtype)
    one = np.ones(3, dtype)
    for take in (
        lambda: space.vector(numbers),
        lambda: linop.identity(space)(numbers),
        lambda: T.scatter(numbers),
        lambda: linop.launch(lambda b: linop.identity(space).compile(b)(numbers), 1),
        lambda: linop.local(space, space, lambda x: numbers, lambda x: x)(one),
    ):
        assert dtype in raised(DTypeError, take)


@pytest.mark.parametrize("where", [where for where in TAKERS if where not in ("matrix", "out")])
def test_sequences_of_different_lengths_are_refused(where: str) -> None:
    words = raised(ShapeError, lambda: TAKERS[where]([[1.0], [2.0, 3.0]]))
    assert "[[1.0], [2.0, 3.0]] given, sequences of equal lengths expected" in words


def test_arrays_are_not_converted_where_their_memory_is_kept() -> None:
    whole = np.arange(3)
    for take in (X.vector, KEEP, lambda x: linop.launch(lambda b: KEEP.compile(b)(x), 1)):
        assert "int64 given, float64 expected" in raised(DTypeError, lambda take=take: take(whole))
    assert T.gather(T.scatter(whole)).tolist() == [0, 1, 2]
    assert "does not hold" in raised(DTypeError, lambda: T.scatter(whole + 2**53))
