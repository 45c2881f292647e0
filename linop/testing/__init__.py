"""Is the adjoint right? Checks of operators, yours and linop's, on any backend."""

from importlib import import_module
from typing import Any

from linop.testing.checks import (
    Report,
    assert_adjoint,
    assert_exact,
    check_adjoint,
    check_exact,
    dot_tolerance,
)
from linop.testing.code import code

__all__ = [
    "Report",
    "assert_adjoint",
    "assert_exact",
    "check_adjoint",
    "check_exact",
    "code",
    "dot_tolerance",
    "strategies",
]


def __getattr__(name: str) -> Any:
    """What needs Hypothesis, when it is asked for."""
    if name == "strategies":
        return import_module("linop.testing.strategies")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
