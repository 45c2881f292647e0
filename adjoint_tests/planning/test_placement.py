"""Workers on machines: machine files, traffic between machines, better orders of workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import LinearOperator, Partition, TensorSpace
from linop.errors import ArgumentError
from linop.planning import Placement, traffic_matrix
from linop.planning.prediction.rank_order import better_order, bytes_between


def halo(*grid: int) -> LinearOperator:
    return linop.halo_exchange(TensorSpace(tuple(8 * n for n in grid), Partition(grid)), 3)


def test_machines_are_numbers_or_names() -> None:
    one = Placement(["b", "a", "b", "c"])
    assert (one.names, one.machines.tolist()) == (("b", "a", "c"), [0, 1, 0, 2])
    assert one == Placement([5, 2, 5, 9]) == Placement(np.array([5, 2, 5, 9]))
    assert hash(one) == hash(Placement([5, 2, 5, 9]))
    assert one != Placement([5, 2, 5, 5])
    assert one.spans([0, 1])
    assert not one.spans([0, 2])
    assert not one.spans([])
    assert Placement.of_blocks(5, 2) == Placement([0, 0, 1, 1, 2])
    assert repr(Placement.of_blocks(3, 2)) == "Placement([0, 0, 1])"
    assert repr(Placement.of_blocks(100, 50)) == "Placement(100 workers on 2 machines)"


@pytest.mark.parametrize(
    ("text", "names", "machines"),
    [
        ("a slots=2\nb slots=1\n", ("a", "b"), [0, 0, 1]),
        ("a max_slots=4 slots = 2 # two\n\n# nobody\nb", ("a", "b"), [0, 0, 1]),
        ("a slots=1 max_slots=4\nb\na\n", ("a", "b"), [0, 1, 0]),
        ("n1:2\n  n2:3\n", ("n1", "n2"), [0, 0, 1, 1, 1]),
        ("10.0.0.1:1 binding=user:4\n10.0.0.2\n", ("10.0.0.1", "10.0.0.2"), [0, 1]),
        ("a slots=0\nb:1", ("b",), [0]),
    ],
)
def test_machine_files(
    text: str, names: tuple[str, ...], machines: list[int], tmp_path: Path
) -> None:
    path = tmp_path / "machines"
    path.write_text(text)
    found = Placement.read(path)
    assert (found.names, found.machines.tolist()) == (names, machines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\nb:two\n", r"line 2: expected 'host', 'host slots=2' or 'host:2'; given 'b:two'"),
        ("a slots=x\n", "line 1: expected"),
        (":3", "line 1: expected"),
        ("# none\n", "no host has a slot"),
    ],
)
def test_wrong_machine_files(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "machines"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=said):
        Placement.read(path)


def test_traffic_is_summed_by_machine() -> None:
    op, placement = halo(2, 3), Placement(["a", "a", "b", "b", "b", "c"])
    workers = traffic_matrix(op, placement)
    machines = workers.by_machine(placement)
    for whole, parts in ((machines.bytes, workers.bytes), (machines.messages, workers.messages)):
        for row, one in enumerate("abc"):
            for column, other in enumerate("abc"):
                block = parts.toarray()[np.ix_(*(
                    [w for w in range(6) if placement.names[placement.machines[w]] == name]
                    for name in (one, other)
                ))]  # fmt: skip
                assert whole.toarray()[row, column] == block.sum()
    head, *rows = str(machines).splitlines()
    assert head.split() == ["bytes", "from", "to", "a", "to", "b", "to", "c"]
    assert [row.split()[0] for row in rows] == ["a", "b", "c"]


def test_a_better_order_is_found() -> None:
    """Squares of a grid of 4×4 have half the neighbours elsewhere that its rows have."""
    op, rows = halo(4, 4), Placement.of_blocks(16, 4)
    squares = Placement([2 * (k // 8) + k % 4 // 2 for k in range(16)])
    found = better_order(op, rows)
    assert bytes_between(op, found) <= bytes_between(op, squares) < bytes_between(op, rows)
    assert better_order(op, found) is found
    alone = Placement([0] * 16)
    assert better_order(op, alone) is alone


@given(machines=st.lists(st.integers(0, 3), min_size=9, max_size=9))
def test_an_order_leaves_each_machine_its_workers(machines: list[int]) -> None:
    op, placement = halo(3, 3), Placement(machines)
    found = better_order(op, placement)
    assert sorted(found.names) == sorted(placement.names)
    names = [np.array(one.names)[one.machines] for one in (found, placement)]
    assert sorted(names[0]) == sorted(names[1])
    assert found is placement or bytes_between(op, found) < bytes_between(op, placement)


@pytest.mark.parametrize(
    ("text", "machines"),
    [
        ("\ufeffa slots=2\nb", ["a", "a", "b"]),
        ("a max-slots=4 slots=1\n", ["a"]),
        ("a slots=1 max-slots=4\n", ["a"]),
        ("[::1]:2\n", ["[::1]", "[::1]"]),
        ("a:2 slots=3\n", None),
        ("a slots=2 slots=3\n", None),
        ("a slots=999999999\n", None),
        ("a slots=99999999999999\n", None),
    ],
)
def test_unusual_machine_files(tmp_path: Path, text: str, machines: list[str] | None) -> None:
    file = tmp_path / "machines"
    file.write_text(text, encoding="utf-8")
    if machines is None:
        with pytest.raises(linop.errors.ArgumentError, match="line 1"):
            Placement.read(file)
    else:
        found = Placement.read(file)
        assert [found.names[k] for k in found.machines] == machines
