"""Is the adjoint right? Checks of operators, yours and linop's, on any backend."""

from linop.testing.checks import (
    Report,
    assert_adjoint,
    assert_exact,
    check_adjoint,
    check_exact,
    dot_tolerance,
)

__all__ = [
    "Report",
    "assert_adjoint",
    "assert_exact",
    "check_adjoint",
    "check_exact",
    "dot_tolerance",
]
