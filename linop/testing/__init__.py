"""Tests of operators and their adjoints, linop's and others', on any backend: checks, Hypothesis
strategies, and tests on several workers (`spmd`)."""

from importlib import import_module
from typing import Any

from linop.testing.checks import (
    assert_adjoint,
    assert_dot_exact,
    assert_equal,
    assert_exact,
    assert_inverse,
    assert_linear,
    assert_self_adjoint,
    assert_unitary,
    check_adjoint,
    check_dot_exact,
    check_equal,
    check_exact,
    check_inverse,
    check_linear,
    check_self_adjoint,
    check_unitary,
)
from linop.testing.code import code
from linop.testing.parallel.check import assert_parallel, check_parallel
from linop.testing.parallel.findings import ParallelReport
from linop.testing.parallel.mpi import check_mpi
from linop.testing.report import Element, Report, Worst
from linop.testing.tested_maps.distributed import pylops_mpi_operator
from linop.testing.tested_maps.pairs import Pair, pair
from linop.testing.tested_maps.torch_functions import torch_function
from linop.testing.trials import dot_tolerance
from linop.testing.workers.outcome import FailedExampleError
from linop.testing.workers.spmd import spmd

__all__ = [
    "Element",
    "FailedExampleError",
    "Pair",
    "ParallelReport",
    "Report",
    "Worst",
    "assert_adjoint",
    "assert_dot_exact",
    "assert_equal",
    "assert_exact",
    "assert_inverse",
    "assert_linear",
    "assert_parallel",
    "assert_self_adjoint",
    "assert_unitary",
    "check_adjoint",
    "check_dot_exact",
    "check_equal",
    "check_exact",
    "check_inverse",
    "check_linear",
    "check_mpi",
    "check_parallel",
    "check_self_adjoint",
    "check_unitary",
    "code",
    "dot_tolerance",
    "pair",
    "pylops_mpi_operator",
    "spmd",
    "strategies",
    "torch_function",
]


def __getattr__(name: str) -> Any:
    """Lazy import of `linop.testing.strategies`, which needs Hypothesis."""
    if name == "strategies":
        return import_module("linop.testing.strategies")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
