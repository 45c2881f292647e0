"""Numbers of examples that properties draw, and the seed of the draws.

A property draws as many examples as the profile says (`adjoint_tests/conftest.py`), on ranks a
fifth of them; one that names a number names a larger one. `too_few` holds every test to that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import settings

from linop.testing.workers.spmd import MARK

IN_PROCESS = min(25, settings().max_examples)
"""Examples of a property in one process, at least."""
SEED = os.environ.get("HYPOTHESIS_SEED")
"""Of all properties; None: Hypothesis chooses one for each."""

FEW = max(5, settings().max_examples // 5)
"""Examples of a property on ranks, at least."""
ON_RANKS = settings(max_examples=FEW)
"""Decorator of properties whose examples start or use ranks."""


def _is_property(test: Callable[..., Any]) -> bool:
    # hypothesis.is_hypothesis_test, which the lowest version that is allowed lacks.
    return bool(getattr(test, "is_hypothesis_test", False))


def seeded(test: Callable[..., Any]) -> None:
    """Give a property the `SEED`, if there is one; the function under a bound method has it. Other
    tests are left alone, since Hypothesis fails them if they have a seed."""
    if SEED is not None and _is_property(test):
        hypothesis.seed(SEED)(getattr(test, "__func__", test))


def too_few(test: Callable[..., Any], ranks: bool) -> str:
    """The complaint about a property that draws too few examples; empty if it draws enough.

    Args:
        ranks: its examples use ranks.
    """
    if not _is_property(test):
        return ""
    wanted = min(5, FEW) if ranks or hasattr(test, MARK) else IN_PROCESS
    named = getattr(test, "_hypothesis_internal_use_settings", None) or settings.default
    drawn = named.max_examples
    return "" if drawn >= wanted else f"draws {drawn} examples: at least {wanted} are wanted"
