"""`linop.testing.parallel`: what ranks do in their own memory, followed element by element, as
operators; the shadows of tensors follow what torch does to them."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop.testing.parallel.lifting.functions import function
from linop.testing.parallel.lifting.places import (
    applied,
    coefficient,
    count,
    exactly,
    largest,
    local,
    moves,
    place_of,
    space_of,
    sums_of_ranks,
)
from linop.testing.parallel.recording.records import Record

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from linop.testing.parallel.recording.shadows import Shadows

sizes_of_ranks = st.lists(st.lists(st.integers(0, 4), max_size=2), min_size=1, max_size=4)


@given(sizes_of_ranks, sizes_of_ranks, st.data())
def test_an_operator_has_the_entries_that_it_is_of(
    given: list[list[int]], made: list[list[int]], data: st.DataObject
) -> None:
    ends = [space_of(name, dict(enumerate(sizes))) for name, sizes in (("x", given), ("y", made))]
    shape = ends[1].size, ends[0].size
    coefficients = st.sampled_from([0, 0, 1, 1, -2, 1 / 3, 0.75])
    entries = data.draw(st.lists(coefficients, min_size=shape[0] * shape[1],
                                 max_size=shape[0] * shape[1]))  # fmt: skip
    wanted = np.array(entries, float).reshape(shape)
    rows, columns = wanted.nonzero()
    numbers, is_exact = exactly(wanted[rows, columns])
    op = local("L_k", *ends, rows, columns, numbers)
    assert is_exact and str(op) in ("L_k", "O")
    assert np.array_equal(of(op), wanted)
    assert np.array_equal(of(op.H), wanted.T)
    assert getattr(op, "body", op).equals(op)  # the memory operators that the name stands for
    _check_questions(op.movement(), wanted)
    for space in ends:
        each = [(r.workers[0], int(r.name[1]), e) for r in space.regions for e in range(r.size)]
        assert [place_of(space, k) for k in range(space.size)] == each


def _check_questions(made: linop.Movement, wanted: np.ndarray) -> None:
    ranks = [
        np.repeat([r.workers[0] for r in s.regions], [r.size for r in s.regions])
        for s in (made.codomain, made.domain)
    ]
    x = np.arange(1.0, wanted.shape[1] + 1)
    assert np.allclose(applied(made, x), wanted @ x)
    assert np.allclose(applied(made, x, magnitudes=True), abs(wanted) @ x)
    assert count(made) == np.count_nonzero(wanted)
    i, j = wanted.nonzero()
    assert moves(made) is bool((ranks[0][i] != ranks[1][j]).any())
    of_each = [len({ranks[1][b] for a, b in zip(i, j, strict=True) if a == row}) for row in set(i)]
    assert sums_of_ranks(made) is bool(of_each and min(of_each) > 1)
    row, column, size = largest(made)
    assert size == abs(wanted).max(initial=0)
    if size:
        first = np.argwhere(abs(wanted) == size)[0]
        assert [row, column] == first.tolist()
        assert float(coefficient(made, row, column)) == pytest.approx(wanted[row, column])


@pytest.mark.parametrize(
    ("value", "fraction"), [(1 / 3, True), (0.1, True), (1 / 4999, True), (3**-0.5, False)]
)
def test_factors_are_read_as_fractions(value: float, fraction: bool) -> None:
    (number,), is_exact = exactly(np.array([value]))
    assert is_exact is fraction and float(number) == pytest.approx(value, rel=1e-15)


def of(op: linop.LinearOperator) -> np.ndarray:
    return op.to_matrix().toarray()


# Shadows


class Seen(TorchDispatchMode):
    def __init__(self, shadows: Shadows) -> None:
        super().__init__()
        self.shadows = shadows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.shadows.operation(func, args, kwargs or {}, result)
        return result


def into_slices(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(2, *x.shape)
    y[1] = x
    y[0, 1:] += 2 * x[:-1]
    return y


def scaled_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[::2].mul_(-3)
    return y.sub_(x.flip(0), alpha=0.5)


def with_zeros(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:1] = 0
    y[:, 1].fill_(0.0)
    return y


LINEAR = {
    "views": lambda x: x.t().reshape(2, -1).unsqueeze(1).expand(2, 3, -1),
    "pieces": lambda x: torch.cat([*x.chunk(2)[::-1], x[1:2]], 0).contiguous(),
    "stack": lambda x: torch.stack([x, x.roll(1, 0)], -1),
    "rows": lambda x: x[torch.tensor([2, 0, 0])],
    "sums": lambda x: (x.sum(0) + x[1] * 3 - x[0] / 4).neg(),
    "mask": lambda x: x * torch.tensor([1.0, 0.0, 2.0, 0.5])[:, None],
    "pad": lambda x: torch.nn.functional.pad(x, (1, 2)),
    "slices": into_slices,
    "in place": scaled_in_place,
    "zeros": with_zeros,
}


@pytest.mark.parametrize("name", LINEAR)
def test_shadows_follow_linear_functions(name: str) -> None:
    x = torch.arange(12.0).reshape(4, 3) + 0.5
    shadows = Shadows(0, False, [x])
    with Seen(shadows):
        y = LINEAR[name](x)
    done = shadows.finish([y])
    assert not done.unknown
    ends = space_of("x", {0: [12]}), space_of("y", {0: [y.numel()]})
    record = Record(0, 0.0, [], [], [], {})
    made = function({0: record}, {0: done}, [[0]], [[0]], *ends)
    assert made.exact and not made.collectives
    found = of(made.operator)
    units = torch.eye(12, dtype=x.dtype).reshape(12, 4, 3)
    wanted = torch.stack([LINEAR[name](unit).reshape(-1) for unit in units], 1).numpy()
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("function", [torch.exp, torch.relu, lambda x: x * x])
def test_others_are_unknown(function: Any) -> None:
    x = torch.arange(3.0) + 1
    shadows = Shadows(0, False, [x])
    with Seen(shadows):
        y = function(x)
    done = shadows.finish([y])
    assert done.unknown and (done.made[0] == -1).all()
