"""Is the adjoint right? Checks of operators, yours and linop's, on any backend."""

from linop.testing.checks import (
    Report,
    assert_adjoint,
    assert_exact,
    check_adjoint,
    check_exact,
    dot_tolerance,
)
from linop.testing.outcome import FailedExampleError
from linop.testing.spmd import spmd

__all__ = [
    "FailedExampleError",
    "Report",
    "assert_adjoint",
    "assert_exact",
    "check_adjoint",
    "check_exact",
    "dot_tolerance",
    "spmd",
]
