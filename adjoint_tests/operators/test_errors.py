"""Errors of wrong use: their kinds, and their words.

Wrong arguments of plans are in `test_backends`; missing workers and other failures of programs in
`test_launch`; wrong plans in `test_verify`.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import linop
from linop import LinopError, Region, Space, errors
from linop.backends import Backend
from linop.backends.threads import backend as threads
from linop.errors import (
    ShapeError,
    SpaceError,
)
from support.operators.error_cases import AB, X, error_cases, make, v

BUILT_IN = {
    "SpaceError": ValueError,
    "RegionError": KeyError,
    "SubsetError": IndexError,
    "ShapeError": ValueError,
    "DTypeError": TypeError,
    "ArgumentError": TypeError,
    "AmbiguousError": ValueError,
    "PartitionError": ValueError,
    "UndecidableError": RuntimeError,
    "PlanError": RuntimeError,
    "BackendError": RuntimeError,
    "DeadlockError": RuntimeError,
    "MissingExtraError": ImportError,
}
"""The built-in error that each error of linop is, too."""


@pytest.mark.parametrize(
    ("expression", "error", "words"),
    error_cases(),
    ids=[expression for expression, *_ in error_cases()],
)
def test_a_mistake_is_told(expression: str, error: str, words: str) -> None:
    with pytest.raises(getattr(errors, error), match=re.escape(words)):
        make(expression)


def test_every_error_is_the_fitting_built_in() -> None:
    family = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, LinopError) and kind is not LinopError
    }
    assert family.keys() == BUILT_IN.keys()
    for name, kind in family.items():
        assert issubclass(kind, BUILT_IN[name])
        assert str(kind("the text\nof it")) == "the text\nof it"  # not its repr, as KeyError's


def test_spaces_that_differ_are_shown_side_by_side() -> None:
    other = Space([Region("a", (4, 3), (0, 2)), Region("c", 3), Region("b", (4, 3), 1)], np.float32)
    with pytest.raises(SpaceError) as caught:
        linop.identity(AB) @ linop.identity(other)
    assert str(caught.value).splitlines() == [
        "composition (I) @ (I): left domain, right codomain: the spaces differ",
        "  dtype float64                 ≠  dtype float32",
        "  'a' shape (4, 3) on worker 0  ≠  'a' shape (4, 3) on worker 0,2",
        "  (no 'c')                      ≠  'c' shape (3,) on worker 0",
    ]
    with pytest.raises(SpaceError, match=r"sum of operators, domains: the spaces differ\n .* ≠  "):
        linop.identity(AB) + linop.identity(other)


def test_many_differences_are_cut_short() -> None:
    many = Space([Region(f"r{k}", k) for k in range(100)])
    with pytest.raises(SpaceError) as caught:
        many.zeros() + v
    assert len(str(caught.value).splitlines()) == 13


@pytest.mark.parametrize(
    "expression",
    [
        "IC + 1",
        "1 + IC",
        "IC / IC",
        "IC * 'x'",
        "np.ones(3) * IC",
        "v * IC",
        "v + 'x'",
        "[1] * v",
        "v @ v",
    ],
)
def test_nonsense_arithmetic_is_a_type_error(expression: str) -> None:
    """As Python says it of operands that do not know each other."""
    with pytest.raises(TypeError):
        make(expression)


def test_errors_come_before_any_message(monkeypatch: pytest.MonkeyPatch) -> None:
    put, tags = threads.Group.put, []

    def recorded(group: Any, key: tuple[int, int, int], item: Any) -> None:
        tags.append(key[-1])
        put(group, key, item)

    monkeypatch.setattr(threads.Group, "put", recorded)

    def main(backend: Backend) -> None:
        plan = linop.shift(X, 1).compile(backend)
        tags.clear()
        with pytest.raises(ShapeError):
            plan(np.ones(7))

    linop.launch(main, workers=3)
    assert tags and all(tag < 0 for tag in tags)  # those that agree on calls, and none of a plan
