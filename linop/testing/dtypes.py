"""Checks of operators whose dtype SciPy guessed. Whole numbers are no evidence for an operator that
will be given floats, so these are checked in float64, and where they take complex numbers in
complex128, too; in the guessed dtype only if they take neither."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec

import numpy as np

from linop.backends.engine.base import BoundPlan
from linop.local_operators.scipy_operators import declared_dtype
from linop.operators.operator import LinearOperator
from linop.testing.report import Report
from linop.testing.tested_maps.foreign import in_dtype
from linop.testing.tested_maps.pairs import Pair
from linop.testing.tested_maps.tested_map import only_whole

Parameters = ParamSpec("Parameters")
Check = Callable[Parameters, Report]

_OPERATORS = ("op", "other", "inverse", "adjoint")
"""The parameters of checks that are operators."""

_FLOATS = np.dtype(np.float64), np.dtype(np.complex128)


def in_every_dtype(check: Check[Parameters]) -> Check[Parameters]:
    """The check, repeated in every dtype that an operator takes, if SciPy guessed its own. The
    report is the first that fails, or the first; its first line has the dtypes."""
    signature = inspect.signature(check)

    @wraps(check)
    def checked(*arguments: Parameters.args, **options: Parameters.kwargs) -> Report:
        bound = signature.bind(*arguments, **options)
        given = {k: bound.arguments[k] for k in _OPERATORS if bound.arguments.get(k) is not None}
        guesses = {name: op for name, op in given.items() if _guessed(op)}
        if not guesses:
            return check(*arguments, **options)
        reports: list[Report] = []
        dtypes = list(_dtypes(given, guesses))
        for dtype in dtypes:
            bound.arguments.update(_versions(given, guesses, dtype, dtypes))
            reports.append(check(*bound.args, **bound.kwargs))
        return next((report for report in reports if not report), reports[0])

    return checked


def _guessed(op: Any) -> bool:
    """True for an operator of SciPy's whose dtype is an integer one that SciPy guessed."""
    # Who has an operator of SciPy's has imported it: it takes a while.
    module = sys.modules.get("scipy.sparse.linalg")
    if module is None or not isinstance(op, module.LinearOperator) or op.dtype is None:
        return False
    return declared_dtype(op) is None


def _dtypes(given: Mapping[str, Any], guesses: Mapping[str, Any]) -> Iterator[np.dtype[Any]]:
    """The dtypes to check in: that of an operator among the given ones whose dtype is declared, if
    there is one."""
    declared = [_declared(op) for name, op in given.items() if name not in guesses]
    fixed = [dtype for dtype in declared if dtype is not None]
    if fixed:
        yield fixed[0]
        return
    taken = [dtype for dtype in _FLOATS if all(_takes(op, dtype) for op in guesses.values())]
    yield from taken or [np.dtype(op.dtype) for op in list(guesses.values())[:1]]


def _declared(op: Any) -> np.dtype[Any] | None:
    """The dtype of an operator that has one of its own; None for matrices of whole numbers, which
    are known for floats as well."""
    if isinstance(op, Pair):
        return op.dtypes[0]
    if isinstance(op, LinearOperator):
        return op.dtype
    if isinstance(op, BoundPlan):
        return op.domain.dtype
    if not hasattr(op, "dtype"):
        return None  # the check says that it is no operator
    whole = not hasattr(op, "matvec") and np.dtype(op.dtype).kind in "iu"
    return None if whole else declared_dtype(op)


def _versions(
    given: Mapping[str, Any],
    guesses: Mapping[str, Any],
    dtype: np.dtype[Any],
    dtypes: list[np.dtype[Any]],
) -> dict[str, Any]:
    """The operators in a dtype: those with a guessed one, and matrices of whole numbers."""
    made = {}
    for name, op in given.items():
        if name in guesses or (_declared(op) is None and hasattr(op, "dtype")):
            made[name] = replace(in_dtype(op, dtype), said=_said(dtypes))
    return made


def _said(dtypes: list[np.dtype[Any]]) -> str:
    if dtypes[0].kind in "iu":
        return only_whole(dtypes[0])
    return ", in " + " and ".join(map(str, dtypes))


def _takes(op: Any, dtype: np.dtype[Any]) -> bool:
    """True if an operator takes vectors of a dtype, and does not make complex ones real."""
    vector = np.linspace(0.5, 1.5, op.shape[1]).astype(dtype)
    if dtype.kind == "c":
        vector = vector * (1 - 2j)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", np.exceptions.ComplexWarning)
            result = np.asarray(op.matvec(vector))
    except (TypeError, ValueError, IndexError, np.exceptions.ComplexWarning):
        return False
    return dtype.kind != "c" or result.dtype.kind == "c"
